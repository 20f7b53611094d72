"""How recurrent heads should start: alignment loss and generated retrieval by optimizer step, for each way to start.

    python benchmarks/init.py                 # writes benchmarks/results/init.json

First a student without attention heads is aligned to the teacher, layer by layer, with the teacher's own inputs. The
figure is the normalized squared error of the heads' outputs on text that is not trained on, mean over layers: 0 is the
teacher, 1 is as good as heads that are silent. Then a student that keeps the best heads takes over those recurrent
heads and is distilled end to end; the figure is the share of questions about dictionaries of 8 pairs that it answers by
generation.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from records import RESULTS, about, cpu_time, parser_of, write
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hybrid_distill.data import Batch, DataConfig, open_rows
from hybrid_distill.plan import HeadPlan
from hybrid_distill.probes.answering import answer_generation
from hybrid_distill.probes.kv_retrieval import KVRetrieval
from hybrid_distill.scoring import HeadScores, score_heads
from hybrid_distill.student.build import build_student, graft_recurrent_heads
from hybrid_distill.student.init import INITS
from hybrid_distill.teacher import fingerprint, load_teacher
from hybrid_distill.train.align import LayerAlignment
from hybrid_distill.train.config import Align, Distill
from hybrid_distill.train.end_to_end import EndToEnd
from hybrid_distill.train.optimizer import make_adamw, set_learning_rate, wsd
from hybrid_distill.train.stage import Stage

HELD_OUT_SEED, PROBE_SEED = 12345, 1
N_PAIRS = 8


def nmse(stage: LayerAlignment, batch: Batch) -> float:
    """Mean over layers, without touching gradients."""
    with torch.no_grad():
        loss = stage(batch)
    return round(float(loss.total) / len(loss.per_layer), 4)


def trained(
    stage: Stage, batches: Callable[[int], Sequence[Batch]], steps: int, rate: float
) -> Iterator[int]:
    """Train on the mean loss of each step's batches; yield the number of steps done, from 0."""
    optimizer = make_adamw(stage, learning_rate=rate, betas=(0.9, 0.95), weight_decay=0.1)
    yield 0
    for step in range(steps):
        set_learning_rate(optimizer, rate * wsd(step, steps, 0.1, 0.5))
        micro_batches = batches(step)
        for batch in micro_batches:
            (stage(batch).total / len(micro_batches)).backward()
        torch.nn.utils.clip_grad_norm_([p for p in stage.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield step + 1


def curve(
    done: Iterator[int], steps: int, every: int, measure: Callable[[], float]
) -> dict[int, float]:
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


class Student(NamedTuple):
    """The teacher that students are made from, and the heads that they keep."""

    teacher: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    plan: HeadPlan


def try_init(makes: Student, init: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Align a student without kept heads, then distill the one with them; return both curves."""
    teacher, tokenizer, plan = makes
    rows = open_rows(DataConfig(sources=("tiny",), seq_len=256, seed=seed), tokenizer)
    held_out = open_rows(
        DataConfig(sources=("tiny:held_out",), seq_len=256, seed=HELD_OUT_SEED), tokenizer
    )
    start: dict[str, Any] = {"init": init, "calibration": rows.batch(0, 8), "seed": seed}

    def batches(step: int) -> list[Batch]:
        return [rows.batch(step, options.batch_size)]

    (aligned, _), seconds = cpu_time(
        lambda: build_student(teacher, HeadPlan.none(teacher), d_state=options.d_state, **start)
    )
    measured_stage = LayerAlignment(aligned, teacher, Align(target="head", loss="nmse"))
    measured_batch = held_out.batch(0, 16)
    stage = LayerAlignment(aligned, teacher, Align(target="head", loss="l2"))
    done = trained(stage, batches, options.align_steps, options.align_rate)
    errors = curve(
        done, options.align_steps, options.align_every, lambda: nmse(measured_stage, measured_batch)
    )

    student, _ = build_student(teacher, plan, d_state=options.d_state)
    graft_recurrent_heads(student, aligned)
    examples = KVRetrieval(N_PAIRS, PROBE_SEED).examples(options.questions)

    def retrieval() -> float:
        return answer_generation(student, tokenizer, examples).double().mean().item()

    done = trained(
        EndToEnd(student, teacher, Distill()), batches, options.distill_steps, options.rate
    )
    answered = curve(done, options.distill_steps, options.distill_every, retrieval)
    result = {
        "init": init,
        "seed": seed,
        "nmse": errors,
        "retrieval": answered,
        "build_cpu_seconds": round(seconds, 2),
    }
    print(json.dumps(result), flush=True)
    return result


def add_steps_to_random(results: list[dict[str, Any]]) -> None:
    """Add to each result the steps to the last values of a random start of the same seed."""
    ends = {result["seed"]: result for result in results if result["init"] == "random"}
    if not ends:
        return
    for result in results:
        for name, sign in (("nmse", -1), ("retrieval", 1)):
            goal = list(ends[result["seed"]][name].values())[-1]
            result[f"steps_to_{name}_of_random"] = steps_to(result[name], goal, sign)


def main() -> None:
    """Try every start with every seed, print and write what came out."""
    parser = parser_of(__doc__, RESULTS / "init.json")
    parser.add_argument("--teacher", default="tiny")
    parser.add_argument("--inits", nargs="+", default=list(INITS), choices=list(INITS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument(
        "--scores", type=Path, help="scores.json; without it heads are scored first"
    )
    parser.add_argument("--kept", type=int, default=6)
    parser.add_argument("--align-steps", type=int, default=100)
    parser.add_argument("--align-every", type=int, default=20)
    parser.add_argument("--distill-steps", type=int, default=50)
    parser.add_argument("--distill-every", type=int, default=25)
    parser.add_argument("--questions", type=int, default=64)
    parser.add_argument("--d-state", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--align-rate", type=float, default=3e-3)
    parser.add_argument("--rate", type=float, default=5e-4)
    options = parser.parse_args()
    torch.set_num_threads(1)

    teacher, tokenizer = load_teacher(options.teacher)
    if options.scores:
        scores = HeadScores.load(options.scores)
    else:
        scores = score_heads(teacher, tokenizer, KVRetrieval(16, 0), n_examples=options.questions)
    plan = HeadPlan.top_k(scores, options.kept)
    results = []
    for seed in options.seeds:
        for init in options.inits:
            results.append(try_init(Student(teacher, tokenizer, plan), init, seed, options))
    add_steps_to_random(results)
    not_settings = ("out", "scores", "teacher")
    record = {
        **about(
            "alignment error of recurrent heads and generated retrieval of a distilled student, by optimizer step"
        ),
        "teacher": options.teacher,
        "fingerprint": fingerprint(teacher),
        "kept": [list(heads) for heads in plan.kept],
        "settings": {
            name: value for name, value in vars(options).items() if name not in not_settings
        },
        "row": 256,
        "pairs": N_PAIRS,
        "results": results,
    }
    write(options.out, record)


if __name__ == "__main__":
    main()
