"""Students of SmolLM2-135M-Instruct with windows, states or both: the tables of docs/real_models.md.

    python benchmarks/smollm2_windows.py measure --teacher smollm2 --text text --out runs/windows
    python benchmarks/smollm2_windows.py train --teacher smollm2 --text text --out runs/windows --only NAME ...
    python benchmarks/smollm2_windows.py report --out runs/windows

``--teacher`` is the folder that `hybrid-distill import-gguf` made, ``--text`` that of benchmarks/debian_text.py.
``train`` trains one student after the other and resumes where it was stopped; ``measure`` measures the teacher, the
students without training and those whose training has ended, and skips what a measured.json holds; ``report`` writes
the record and prints the tables. Each process has one thread. Training a student on 3 million tokens takes some four
hours of an idle core with bfloat16 instructions, measuring one ten minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from records import RESULTS, ROOT, about, environment, read, write
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hybrid_distill.assets import atlas_path, general_facts_path
from hybrid_distill.evaluation.evaluate import model_cache_bytes
from hybrid_distill.evaluation.measure import agreement
from hybrid_distill.lab.reporting import text_table
from hybrid_distill.model.mixer import silence
from hybrid_distill.pipeline import finished_run, trained_student
from hybrid_distill.plan import HeadPlan
from hybrid_distill.probes import Example
from hybrid_distill.probes.answering import answer_choices, answer_generation
from hybrid_distill.probes.knowledge import Knowledge
from hybrid_distill.probes.kv_retrieval import KVRetrieval
from hybrid_distill.probes.plain_text import text_batches
from hybrid_distill.probes.prompt_formats import with_prompt_format
from hybrid_distill.probes.registry import make_probe
from hybrid_distill.scoring import HeadScores
from hybrid_distill.student.build import build_student

RECIPE = ROOT / "recipes" / "hybrid_smollm2_135m.py"
SCORES = atlas_path("smollm2-135m-instruct")
TEACHER = "teacher"
N_EXAMPLES = 64
N_NEEDLES = 32
SIZES = (4, 8, 16)
NEEDLES = ("niah_single_1", "niah_multikey_2")
LENGTHS = (512, 1024, 2048)
BANDS = (128, 512, 2048)
"""Ends of the bands of positions whose perplexity is measured."""
PIECE = 9000
"""Characters of a held-out text: enough for 2,048 tokens."""
N_FILLER = 1000
SINKS = 4


@dataclass(frozen=True)
class Student:
    """One row of the tables: which heads stay attention, what the others become, and what they train on."""

    heads: str
    window: int = 0
    d_state: int = 0
    recurrence: str = "discrete"
    tokens: str = ""
    """Training tokens; empty for a student without training."""
    align_share: float = 0.1
    data: str = "text"

    @property
    def name(self) -> str:
        """Name of the row and of its folder."""
        parts = [self.heads.replace(" ", "-"), f"window{self.window}"]
        if self.d_state:
            parts.append(f"{self.recurrence}{self.d_state}")
        if self.tokens:
            parts.append(self.tokens)
        if self.align_share != 0.1:
            parts.append(f"align{self.align_share:g}")
        return "-".join(parts)


PLANS = {
    "no head": "--plan.selection none --plan.k 0",
    "top 14": "--plan.k 14",
    "top 27": "--plan.k 27",
    "14 random": "--plan.selection random --plan.k 14 --plan.seed 1",
    **{f"{k} groups": f"--plan.unit kv-group --plan.k {k}" for k in (5, 7, 8, 9, 12, 14, 39)},
}


def plan_of(heads: str, scores: HeadScores) -> HeadPlan:
    """Return the plan that the flags of `PLANS` make."""
    kind, _, rest = heads.partition(" ")
    if heads == "no head":
        return HeadPlan.none(scores)
    if kind == "top":
        return HeadPlan.top_k(scores, int(rest))
    if rest == "groups":
        return HeadPlan.top_k(scores, int(kind), unit="kv-group")
    return HeadPlan.random(scores, int(kind), seed=1)


UNTRAINED = [
    Student(heads, window)
    for window in (16, 44, 128)
    for heads in ("no head", "top 14", "12 groups", "top 27", "14 random")
]
UNTRAINED.append(Student("39 groups", 44))
# The same cache in few groups and long windows, or in many and short ones: 17 % of the teacher's, then 10 %.
UNTRAINED += [Student("9 groups", 300), Student("14 groups", 60)]
UNTRAINED += [Student("5 groups", 188), Student("7 groups", 92), Student("8 groups", 44)]
# Equal constant bytes: 44 + 4 positions, a state of 16, or 20 + 4 positions and a state of 8.
TRAINED = [
    Student("12 groups", window=44, tokens="3M"),
    Student("12 groups", window=20, d_state=8, tokens="3M"),
    Student("12 groups", d_state=16, tokens="3M"),
    Student("12 groups", window=20, d_state=8, recurrence="gdn", tokens="3M"),
    Student("top 14", window=44, tokens="3M"),
    Student("top 14", window=20, d_state=8, tokens="3M"),
    Student("top 14", d_state=16, tokens="3M"),
    Student("12 groups", window=20, d_state=8, tokens="3M", align_share=0.9),
    Student("12 groups", d_state=16, tokens="3M", align_share=0.9),
]
STUDENTS = {student.name: student for student in [*UNTRAINED, *TRAINED]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", choices=["train", "measure", "report"])
    parser.add_argument("--teacher", default="smollm2", help="folder of SmolLM2-135M-Instruct")
    parser.add_argument(
        "--text", type=Path, default=Path("text"), help="folder of train.jsonl and held_out.jsonl"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/windows"), help="folder of the runs")
    parser.add_argument(
        "--only", nargs="+", choices=[TEACHER, *STUDENTS], metavar="NAME", help="rows to work on"
    )
    options = parser.parse_args()
    names = options.only or [TEACHER, *STUDENTS]
    if options.work == "report":
        report(options.out)
    elif options.work == "train":
        for name in names:
            if name in STUDENTS and STUDENTS[name].tokens:
                train(options, STUDENTS[name])
    else:
        torch.set_num_threads(1)
        measure_all(options, names)


def train(options: argparse.Namespace, student: Student) -> None:
    """Train one student, or go on where it was stopped."""
    flags = f"""
        --teacher {options.teacher} --teacher.dtype bfloat16
        --scoring.file {SCORES} --scoring.prompt-format plain
        --data.sources {options.text / "train.jsonl"} --data.no-chat --data.seq-len 512
        {PLANS[student.heads]}
        --student.window {student.window} --student.sinks {SINKS if student.window else 0}
        --student.d-state {student.d_state} --student.recurrence {student.recurrence}
        --tokens {student.tokens} --align-share {student.align_share}
        --align.target head --align.batch-size 4 --align.micro-batch-size 2
        --distill.batch-size 4 --distill.micro-batch-size 2
        --distill.learning-rate 1e-4 --distill.lr-scale 1 10 1
        --out {options.out / student.name}
        """.split()
    # The run's own evaluation is kept short: `measure_all` replaces it.
    flags += ["--evaluation.n-pairs", "4", "--evaluation.n-examples", "1", "--no-export"]
    flags += ["--evaluation.n-texts", "0"]
    if not student.d_state:
        flags += ["--stages", "distill"]
    alone = environment(ROOT, OMP_WAIT_POLICY="passive", ACCELERATE_USE_CPU="true")
    subprocess.run([sys.executable, str(RECIPE), *flags], check=True, env=alone)


Measure = Callable[[PreTrainedModel], Any]


class Measures:
    """Questions and texts of all rows, and what a model makes of each."""

    def __init__(
        self, teacher: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, held_out: Path
    ) -> None:
        self.teacher = teacher
        self.tokenizer = tokenizer
        pages = [json.loads(line)["text"] for line in held_out.read_text().splitlines()]
        self.texts = list(_pieces(pages))
        ids = tokenizer(pages[-1])["input_ids"][:N_FILLER]
        self.filler = str(tokenizer.decode(ids, skip_special_tokens=True))
        self.knowledge = Knowledge(general_facts_path()).examples()

    def all(self) -> dict[str, Measure]:
        """Return every measure by its name in measured.json."""
        measures: dict[str, Measure] = {"text": self.text}
        measures["knowledge"] = lambda model: self.by_choice(model, self.knowledge)
        far = [
            replace(question, prompt=f"{self.filler}\n\n{question.prompt}")
            for question in self.knowledge[:64]
        ]
        measures["knowledge after filler"] = lambda model: self.by_choice(model, far, batch_size=4)
        for size in SIZES:
            examples = KVRetrieval(size, seed=1).examples(N_EXAMPLES)
            measures[f"{size} pairs"] = self._choice(examples)
            measures[f"{size} pairs, generated"] = self._generation(examples)
            chat = with_prompt_format(KVRetrieval(size, seed=1), "chat", self.tokenizer).examples(
                N_EXAMPLES
            )
            measures[f"{size} pairs, chat"] = self._generation(chat)
            measures[f"{size} pairs before filler"] = self._choice(
                [self._apart(e) for e in examples], batch_size=4
            )
        for task in NEEDLES:
            for length in LENGTHS:
                probe = make_probe(task, n_tokens=length, seed=1, tokenizer=self.tokenizer)
                n_examples = N_NEEDLES if length <= 1024 else N_NEEDLES // 2
                measures[f"{task} at {length}"] = self._choice(
                    probe.examples(n_examples), batch_size=4
                )
        return measures

    def _apart(self, example: Example) -> Example:
        """Return the question with filler between its dictionary and its last line."""
        dictionary, _, question = example.prompt.rpartition("\n")
        return replace(example, prompt=f"{dictionary}\n\n{self.filler}\n\n{question}")

    def _choice(self, examples: list[Example], batch_size: int = 16) -> Measure:
        return lambda model: self.by_choice(model, examples, batch_size)

    def _generation(self, examples: list[Example]) -> Measure:
        return lambda model: (
            answer_generation(model, self.tokenizer, examples, batch_size=16).double().mean().item()
        )

    def by_choice(
        self, model: PreTrainedModel, examples: list[Example], batch_size: int = 16
    ) -> float:
        return answer_choices(model, self.tokenizer, examples, batch_size=batch_size).accuracy

    @torch.no_grad()
    def text(self, model: PreTrainedModel) -> dict[str, Any]:
        """Return perplexity by position, and over all positions agreement with the teacher and KL to it."""
        counts = dict.fromkeys(BANDS, 0)
        losses = dict.fromkeys(BANDS, 0.0)
        n_same = 0.0
        divergence = 0.0
        for batch in text_batches(
            model, self.tokenizer, self.texts, max_tokens=max(BANDS), batch_size=1
        ):
            logits = batch.logits(model)
            same, kl = agreement(logits, batch.logits(self.teacher))
            n_same += same.sum().item()
            divergence += kl.sum().item()
            loss_T = batch.token_losses(logits)[0].double()
            first = 0
            for last in BANDS:
                losses[last] += loss_T[first:last].sum().item()
                counts[last] += len(loss_T[first:last])
                first = last
        total = sum(counts.values())
        by_position = {
            f"perplexity to {last}": math.exp(losses[last] / counts[last]) for last in BANDS
        }
        return {
            **by_position,
            "perplexity": math.exp(sum(losses.values()) / total),
            "agreement": n_same / total,
            "kl": divergence / total,
            "tokens": total,
        }


def _pieces(pages: list[str]) -> Iterator[str]:
    for page in pages:
        for start in range(0, len(page) - PIECE, PIECE):
            yield page[start : start + PIECE]


def measure_all(options: argparse.Namespace, names: list[str]) -> None:
    """Measure every named row that can be, one after the other."""
    tokenizer = AutoTokenizer.from_pretrained(options.teacher)
    teacher = AutoModelForCausalLM.from_pretrained(options.teacher, dtype=torch.bfloat16).eval()
    measures = Measures(teacher, tokenizer, options.text / "held_out.jsonl")
    scores = HeadScores.load(SCORES)
    for name in names:
        folder = options.out / name
        model: PreTrainedModel = teacher
        if name in STUDENTS:
            student = STUDENTS[name]
            if not student.tokens:
                plan = plan_of(student.heads, scores)
                shape = {"d_state": 0, "window": student.window, "sinks": SINKS}
                model, _ = build_student(teacher, plan, **shape)
            elif not (folder / "evaluation.json").exists():
                print(f"{name}: not trained yet")
                continue
            else:
                model, _ = trained_student(finished_run(folder))
                torch.nn.Module.to(model, torch.bfloat16)
        folder.mkdir(parents=True, exist_ok=True)
        measure_one(model.eval(), measures, folder / "measured.json")


def measure_one(model: PreTrainedModel, measures: Measures, path: Path) -> None:
    """Write what a model's measured.json lacks, each figure as soon as it is known."""
    record = read(path)
    record["cache"] = model_cache_bytes(model)["cache_bytes"][4096]
    for name, measure in measures.all().items():
        if name not in record:
            record[name] = measure(model)
            write(path, record)
            print(f"{path.parent.name}: {name}: {record[name]}", flush=True)
    mixers = getattr(model, "mixers_with", None)
    for part in ("recurrence", "window"):
        name = f"text without {part}"
        if mixers is not None and mixers(part) and name not in record:
            with silence(mixers(part), part):
                record[name] = measures.text(model)
            write(path, record)


def report(out: Path) -> None:
    """Write the record of all measured rows and print them as a table."""
    rows = {}
    for name in [TEACHER, *STUDENTS]:
        record = read(out / name / "measured.json")
        if record:
            rows[name] = record
    write(
        RESULTS / "smollm2_windows.json",
        {"rows": rows, **about("students of SmolLM2 with windows", threads=1)},
    )
    table = pd.json_normalize(list(rows.values())).set_index(pd.Index(rows, name="row"))
    print(text_table(table.T.round(3).reset_index()))


if __name__ == "__main__":
    main()
