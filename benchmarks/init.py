"""How recurrent heads should start: alignment error and retrieval by optimizer step, for each way to start.

    python benchmarks/init.py            # writes benchmarks/results/init.json
    python benchmarks/init.py --small    # few steps

First a student without attention heads is aligned to the teacher, layer by layer, with the teacher's own inputs. The
figure is the normalized squared error of the heads' outputs on text that is not trained on, mean over layers: 0 is the
teacher, 1 is as good as heads that are silent. Then a student that keeps the best heads takes over those recurrent
heads and is distilled end to end; the figure is the share of questions about dictionaries of 8 pairs that it answers by
generation.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from records import RESULTS, about, cpu_time, parser_of, write
from training import trained
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hybrid_distill.data import Batch, DataConfig, open_rows
from hybrid_distill.model import HybridForCausalLM
from hybrid_distill.plan import HeadPlan
from hybrid_distill.probes.answering import answer_generation
from hybrid_distill.probes.kv_retrieval import KVRetrieval
from hybrid_distill.scoring import score_heads
from hybrid_distill.student.build import build_student
from hybrid_distill.student.grafting import graft_recurrent_heads
from hybrid_distill.student.init import INITS, Init
from hybrid_distill.teacher import fingerprint, load_teacher
from hybrid_distill.train.align import LayerAlignment
from hybrid_distill.train.config import Align, Distill
from hybrid_distill.train.end_to_end import EndToEnd

SEEDS = (0, 1)
N_PAIRS = 8
ROW = 256
D_STATE = 16
HELD_OUT = DataConfig(sources=("tiny:held_out",), seq_len=ROW, seed=12345)
Curve = dict[int, float]
"""A figure by optimizer step."""


class Settings(NamedTuple):
    """Steps, questions and rates, as the record names them."""

    kept: int = 6
    align_steps: int = 100
    align_every: int = 20
    distill_steps: int = 50
    distill_every: int = 25
    questions: int = 64
    batch_size: int = 4
    align_rate: float = 3e-3
    rate: float = 5e-4


SMALL = Settings(align_steps=2, align_every=1, distill_steps=2, distill_every=1, questions=4)


class Teacher(NamedTuple):
    """The teacher that students are made from, and the heads that they keep."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    plan: HeadPlan


class Trial:
    """One way to start, with the text of one seed."""

    def __init__(self, teacher: Teacher, init: Init, seed: int, settings: Settings) -> None:
        self.teacher = teacher
        self.init: Init = init
        self.seed = seed
        self.settings = settings
        data = DataConfig(sources=("tiny",), seq_len=ROW, seed=seed)
        self.rows = open_rows(data, teacher.tokenizer)

    def batches(self, step: int) -> list[Batch]:
        return [self.rows.batch(step, self.settings.batch_size)]

    def run(self) -> dict[str, Any]:
        """Align a student without kept heads, then distill the one with them; return both curves."""
        aligned, seconds = cpu_time(self.start)
        result = {
            "init": self.init,
            "seed": self.seed,
            "nmse": self.align(aligned),
            "retrieval": self.distill(aligned),
            "build_cpu_seconds": round(seconds, 2),
        }
        print(json.dumps(result), flush=True)
        return result

    def start(self) -> HybridForCausalLM:
        student, _ = build_student(
            self.teacher.model,
            HeadPlan.none(self.teacher.model),
            d_state=D_STATE,
            init=self.init,
            calibration=self.rows.batch(0, 8),
            seed=self.seed,
        )
        return student

    def align(self, student: HybridForCausalLM) -> Curve:
        teacher = self.teacher.model
        held_out = open_rows(HELD_OUT, self.teacher.tokenizer).batch(0, 16)
        # Trained on what the recipes train on, measured on what compares layers of any size.
        stage = LayerAlignment(student, teacher, Align(target="head", loss="l2"))
        measured = LayerAlignment(student, teacher, Align(target="head", loss="nmse"))
        steps = self.settings.align_steps
        done = trained(stage, self.batches, steps, self.settings.align_rate)
        return curve(done, steps, self.settings.align_every, lambda: nmse(measured, held_out))

    def distill(self, aligned: HybridForCausalLM) -> Curve:
        teacher, tokenizer, plan = self.teacher
        student, _ = build_student(teacher, plan, d_state=D_STATE)
        graft_recurrent_heads(student, aligned)
        examples = KVRetrieval(N_PAIRS, seed=1).examples(self.settings.questions)

        def retrieval() -> float:
            return answer_generation(student, tokenizer, examples).double().mean().item()

        stage = EndToEnd(student, teacher, Distill())
        steps = self.settings.distill_steps
        done = trained(stage, self.batches, steps, self.settings.rate)
        return curve(done, steps, self.settings.distill_every, retrieval)


def nmse(stage: LayerAlignment, batch: Batch) -> float:
    """Return the mean over layers, without touching gradients."""
    with torch.no_grad():
        loss = stage(batch)
    return round(float(loss.total) / len(loss.per_layer), 4)


def curve(done: Iterator[int], steps: int, every: int, measure: Callable[[], float]) -> Curve:
    return {step: measure() for step in done if step % every == 0 or step == steps}


def steps_to(points: Mapping[int, float], goal: float, sign: int) -> float | None:
    """Return the steps after which a curve first reaches ``goal``, read between its points.

    ``sign`` is -1 for a curve that falls.
    """
    ordered = sorted(points.items())
    if sign * ordered[0][1] >= sign * goal:
        return 0.0
    for (first, low), (second, high) in pairwise(ordered):
        if sign * high >= sign * goal:
            return round(first + (second - first) * (goal - low) / (high - low), 1)
    return None


def add_steps_to_random(results: list[dict[str, Any]]) -> None:
    """Add to each result the steps to the last values of a random start of the same seed."""
    ends = {result["seed"]: result for result in results if result["init"] == "random"}
    for result in results:
        for name, sign in (("nmse", -1), ("retrieval", 1)):
            *_, goal = ends[result["seed"]][name].values()
            result[f"steps_to_{name}_of_random"] = steps_to(result[name], goal, sign)


def main() -> None:
    """Try every start with every seed, print and write what came out."""
    parser = parser_of(__doc__, RESULTS / "init.json")
    parser.add_argument("--small", action="store_true", help="few steps")
    options = parser.parse_args()
    settings = SMALL if options.small else Settings()
    torch.set_num_threads(1)
    model, tokenizer = load_teacher("tiny")
    scores = score_heads(model, tokenizer, KVRetrieval(16, 0), n_examples=settings.questions)
    teacher = Teacher(model, tokenizer, HeadPlan.top_k(scores, settings.kept))
    results = []
    for seed in SEEDS:
        for init in INITS:
            results.append(Trial(teacher, init, seed, settings).run())
    add_steps_to_random(results)
    what = "alignment error of recurrent heads and generated retrieval of a distilled student"
    record = {
        **about(f"{what}, by optimizer step"),
        "teacher": "tiny",
        "fingerprint": fingerprint(model),
        "kept": [list(heads) for heads in teacher.plan.kept],
        "settings": {"seeds": SEEDS, "d_state": D_STATE, **settings._asdict()},
        "row": ROW,
        "pairs": N_PAIRS,
        "results": results,
    }
    write(options.out, record)


if __name__ == "__main__":
    main()
