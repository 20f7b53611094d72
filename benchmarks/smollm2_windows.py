"""Students of SmolLM2-135M-Instruct with windows, states or both: the tables of docs/real_models.md.

    python benchmarks/smollm2_windows.py measure --teacher smollm2 --text text --out runs/windows
    python benchmarks/smollm2_windows.py train --teacher smollm2 --text text --out runs/windows --only NAME ...
    python benchmarks/smollm2_windows.py report --out runs/windows
    python benchmarks/smollm2_windows.py losses --out runs/windows

``--teacher`` is the folder that `hybrid-distill import-gguf` made, ``--text`` that of benchmarks/debian_text.py. Rows
called ``self`` also read ``TEXT/self``, conversations that the teacher wrote:

    hybrid-distill generate-data --model smollm2 --tokens 80K --form chat --dtype bfloat16 --batch-size 64 \\
        --shard-tokens 8192 --out text/self

Rows called ``more`` read ``TEXT/more``, the text of nineteen packages, the seven of ``TEXT`` among them:

    apt-get download cmake-doc ghc-doc git-doc linux-doc-6.1 nodejs-doc octave-doc postgresql-doc-15 \\
        python-django-doc python-sqlalchemy-doc rust-doc sqlite3-doc vim-doc
    python benchmarks/debian_text.py *.deb --most 4000000 --out text/more

``train`` trains one student after the other and resumes where it was stopped; ``measure`` measures the teacher, the
students without training and those whose training has ended, and skips what a measured.json holds; ``report`` writes
the record and prints the tables, ``losses`` the record of training losses by tokens. On a GPU, let several processes
work at the same time on rows of their own: a model this small leaves most of the device idle. Training a student on
3 million tokens takes some five hours of an idle core with bfloat16 instructions or two minutes of an H200, measuring
one ten minutes of a core. A CPU without such instructions trains and measures with ``--dtype float32``: each row says
in which dtype it was measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from by_seed import differences
from leaderboard import enter_measured, page
from records import RESULTS, ROOT, about, environment, read, write
from smollm2_measures import Measures, measure_one
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
)

from hybrid_distill.assets import atlas_path
from hybrid_distill.config import RunConfig
from hybrid_distill.data import DataConfig
from hybrid_distill.lab.reporting import text_table
from hybrid_distill.model import HybridForCausalLM
from hybrid_distill.pipeline import RunInputs, finished_run, trained_student
from hybrid_distill.plan import HeadPlan
from hybrid_distill.scoring import HeadScores
from hybrid_distill.student.build import build_student
from hybrid_distill.student.dtypes import settle
from hybrid_distill.train.config import Distill, TeacherConfig
from hybrid_distill.train.loop import train_stage
from hybrid_distill.train.stages import make_stage
from hybrid_distill.validation import number_of_tokens
from hybrid_distill.vocabulary import vocabulary_size

RECIPE = ROOT / "recipes" / "hybrid_smollm2_135m.py"
SCORES = {
    "ablation": atlas_path("smollm2-135m-instruct"),
    "attribution": atlas_path("smollm2-135m-instruct-window300"),
}
FAR = "far groups"
"""KV groups that see farthest: ranked by attribution, those of other rows by ablation."""
TEACHER = "teacher"
ALL = "all heads"
SINKS = 4
TOKENS_PER_STEP = 2048
MICRO_BATCH_TOKENS = 16_384
"""Tokens of a GPU's micro-batch, at most."""
LEARNING_RATE = 1e-4
STATE_RATE = 1e-3
"""Rate of recurrent heads, at least: ten times that of the other weights, more where theirs is small."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CHECKPOINT_EVERY = {"cpu": 25, "cuda": 1000}
"""Steps between checkpoints: a GPU takes 25 steps in the time that one is written."""
DTYPES = ("bfloat16", "float32")
LOSSES = RESULTS / "smollm2_losses.json"
LOGGED = ("loss", "tokens_per_s")
"""Fields of the metrics that the record of losses holds."""
LAST = "niah_multikey_2 at 2048"
SEEDS = (0, 1, 2)
OF_TEXT = ("kl", "agreement", "perplexity", "perplexity to 128", "perplexity to 2048")
"""Figures of held-out text that students of several seeds are compared by."""


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
    seq_len: int = 512
    """Tokens in a row of training."""
    step_tokens: int = TOKENS_PER_STEP
    """Tokens of an optimizer step."""
    learning_rate: float = LEARNING_RATE
    own_share: float = 0.0
    """Share of the tokens that are conversations and lookups written by the teacher; the others are Debian's text."""
    more_text: bool = False
    """True: the text is that of more packages."""
    seed: int = 0

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
        if self.seq_len != 512:
            parts.append(f"rows{self.seq_len}")
        if self.step_tokens != TOKENS_PER_STEP:
            parts.append(f"step{self.step_tokens}")
        if self.learning_rate != LEARNING_RATE:
            parts.append(f"rate{self.learning_rate:g}")
        if self.own_share:
            parts.append(f"self{self.own_share:g}")
        if self.more_text:
            parts.append("more")
        if self.seed:
            parts.append(f"seed{self.seed}")
        return "-".join(parts)

    @property
    def lr_scale(self) -> tuple[float, float, float]:
        """Multipliers of the rate for kept attention, recurrent heads and the rest."""
        return 1, max(10, STATE_RATE / self.learning_rate), 1

    @property
    def entry(self) -> dict[str, Any]:
        """Return how the student is made, for the leaderboard."""
        parts = [self.heads]
        if self.window:
            parts.append(f"window {self.window} + {SINKS}")
        if self.d_state:
            parts.append(f"state {self.d_state} ({self.recurrence})")
        n_tokens = number_of_tokens("tokens", self.tokens) if self.tokens else 0
        return {"tokens": n_tokens, "by": "hybrid-distill", "how": ", ".join(parts)}


PLANS = {
    "no head": "--plan.selection none --plan.k 0",
    "top 14": "--plan.unit head --plan.k 14",
    "top 27": "--plan.unit head --plan.k 27",
    "14 random": "--plan.selection random --plan.unit head --plan.k 14 --plan.seed 1",
    **{f"{k} groups": f"--plan.unit kv-group --plan.k {k}" for k in (5, 7, 8, 9, 12, 14, 39)},
    **{f"{k} {FAR}": f"--plan.unit kv-group --plan.k {k}" for k in (3, 4, 5, 6, 7, 9)},
}


def scores_of(heads: str) -> Path:
    """Return the file of scores that these heads are the first of."""
    return SCORES["attribution" if heads.endswith(FAR) else "ablation"]


def plan_of(heads: str) -> HeadPlan:
    """Return the plan that the flags of `PLANS` make."""
    scores = HeadScores.load(scores_of(heads))
    kind, _, rest = heads.partition(" ")
    if heads == "no head":
        return HeadPlan.none(scores)
    if kind == "top":
        return HeadPlan.top_k(scores, int(rest))
    if rest in ("groups", FAR):
        return HeadPlan.top_k(scores, int(kind), unit="kv-group")
    return HeadPlan.random(scores, int(kind), seed=1)


UNTRAINED: list[Student] = []
for window in (16, 44, 128):
    for heads in ("no head", "top 14", "12 groups", "top 27", "14 random"):
        UNTRAINED.append(Student(heads, window))
UNTRAINED.append(Student("39 groups", 44))
# The same cache in few groups and long windows, or in many and short ones: 17 % of the teacher's, then 10 %.
UNTRAINED += [Student("9 groups", 300), Student("14 groups", 60)]
UNTRAINED += [Student("5 groups", 188), Student("7 groups", 92), Student("8 groups", 44)]
UNTRAINED += [Student(f"9 {FAR}", 300), Student(f"7 {FAR}", 390), Student(f"6 {FAR}", 440)]
UNTRAINED += [Student(f"5 {FAR}", 188), Student(f"4 {FAR}", 232), Student(f"3 {FAR}", 280)]
# Equal constant bytes: 44 + 4 positions, a state of 16, or 20 + 4 positions and a state of 8.
EQUAL_BYTES = [
    Student("12 groups", window=44),
    Student("12 groups", window=20, d_state=8),
    Student("12 groups", d_state=16),
    Student("12 groups", window=20, d_state=8, recurrence="gdn"),
    Student("top 14", window=44),
    Student("top 14", window=20, d_state=8),
    Student("top 14", d_state=16),
    Student("12 groups", window=20, d_state=8, align_share=0.9),
    Student("12 groups", d_state=16, align_share=0.9),
]
TRAINED: list[Student] = []
for tokens in ("0.3M", "3M"):
    TRAINED += [replace(student, tokens=tokens) for student in EQUAL_BYTES]
# Other orders of the text for the two that answer whether a state is worth its bytes.
WHOLE_WINDOW, WITH_STATE = (replace(student, tokens="0.3M") for student in EQUAL_BYTES[:2])
for seed in SEEDS[1:]:
    TRAINED += [replace(student, seed=seed) for student in (WHOLE_WINDOW, WITH_STATE)]
# Rows longer than the window: what is lost beyond it can be learned there alone.
for heads, window in (
    ("9 groups", 300),
    ("5 groups", 188),
    (f"9 {FAR}", 300),
    (f"6 {FAR}", 440),
    (f"5 {FAR}", 188),
):
    for tokens in ("0.3M", "1M", "3M"):
        TRAINED.append(Student(heads, window, tokens=tokens, seq_len=2048))
# What students that have lost little learn at a smaller rate, and whether a state is worth its bytes beside far groups.
NEAR: list[Student] = []
for heads, window, d_state in (
    (f"9 {FAR}", 300, 0),
    (f"7 {FAR}", 390, 0),
    (f"6 {FAR}", 440, 0),
    (f"5 {FAR}", 188, 0),
    (f"5 {FAR}", 140, 16),
    (f"4 {FAR}", 232, 0),
    (f"3 {FAR}", 280, 0),
):
    NEAR.append(Student(heads, window, d_state, seq_len=2048, learning_rate=2e-5))
for tokens in ("0.1M", "0.3M", "1M", "3M"):
    for seed in SEEDS:
        TRAINED += [replace(student, tokens=tokens, seed=seed) for student in NEAR]
# The better data of two: text alone, and half of it what the teacher wrote.
for heads, window, seq_len in (("9 groups", 300, 2048), ("12 groups", 44, 512)):
    TRAINED.append(Student(heads, window, tokens="0.3M", seq_len=seq_len, own_share=0.5))
# On a GPU: a step of eight times as many tokens, at twice the rate.
ON_GPU = [
    *EQUAL_BYTES[:4],
    Student("9 groups", 300, seq_len=2048),
    Student("5 groups", 188, seq_len=2048),
]
LARGE_STEP = {"step_tokens": 16_384, "learning_rate": 2e-4}
for seed in SEEDS:
    TRAINED += [replace(student, tokens="3M", seed=seed, **LARGE_STEP) for student in ON_GPU]
for rate in (1e-4, 4e-4):
    faster = {**LARGE_STEP, "learning_rate": rate}
    TRAINED += [replace(student, tokens="3M", **faster) for student in ON_GPU]
TRAINED += [replace(student, tokens="30M", **LARGE_STEP) for student in ON_GPU]
# There, too: students that have lost little, at twice their rate, on more text.
NEAR_ON_GPU = [
    replace(student, step_tokens=16_384, learning_rate=4e-5, more_text=True) for student in NEAR
]
for tokens in ("3M", "30M"):
    for seed in SEEDS:
        TRAINED += [replace(student, tokens=tokens, seed=seed) for student in NEAR_ON_GPU]
# The teacher itself, at the two rates.
for seq_len, rate in ((512, LEARNING_RATE), (2048, 2e-5)):
    for tokens in ("0.1M", "0.3M"):
        TRAINED.append(Student(ALL, tokens=tokens, seq_len=seq_len, learning_rate=rate))
STUDENTS = {student.name: student for student in [*UNTRAINED, *TRAINED]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", choices=["train", "measure", "report", "losses"])
    parser.add_argument("--teacher", default="smollm2", help="folder of SmolLM2-135M-Instruct")
    parser.add_argument(
        "--text", type=Path, default=Path("text"), help="folder of train.jsonl and held_out.jsonl"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/windows"), help="folder of the runs")
    # On a GPU these runs are shorter than what compiling takes.
    default = "on" if DEVICE == "cpu" else "off"
    parser.add_argument("--compile", choices=["on", "off"], default=default, help="decoder layers")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="bfloat16",
        help="dtype that rows are trained and measured in",
    )
    parser.add_argument("--threads", type=int, default=1, help="threads of the process")
    parser.add_argument(
        "--only", nargs="+", choices=[TEACHER, *STUDENTS], metavar="NAME", help="rows to work on"
    )
    options = parser.parse_args()
    names = options.only or [TEACHER, *STUDENTS]
    if options.work == "report":
        report(options.out)
    elif options.work == "losses":
        losses(options.out)
    elif options.work == "train":
        for name in names:
            student = STUDENTS.get(name)
            if student is None or not student.tokens:
                continue
            if student.heads == ALL:
                train_control(options, student)
            else:
                train(options, student)
    else:
        torch.set_num_threads(options.threads)
        measure_all(options, names)


def train(options: argparse.Namespace, student: Student) -> None:
    """Train one student, or go on where it was stopped."""
    n_rows = student.step_tokens // student.seq_len
    micro_batch = n_rows if DEVICE == "cpu" else min(n_rows, MICRO_BATCH_TOKENS // student.seq_len)
    text = options.text / "more" if student.more_text else options.text
    sources = f"--data.sources {text / 'train.jsonl'}"
    if student.own_share:
        shares = f"{1 - student.own_share} {student.own_share}"
        sources += f" {options.text / 'self'} --data.weights {shares}"
    flags = f"""
        --teacher {options.teacher} --teacher.dtype {options.dtype}
        --scoring.file {scores_of(student.heads)} --scoring.prompt-format plain
        {sources} --data.no-chat --data.seq-len {student.seq_len}
        {PLANS[student.heads]}
        --student.window {student.window} --student.sinks {SINKS if student.window else 0}
        --student.d-state {student.d_state} --student.recurrence {student.recurrence}
        --tokens {student.tokens} --align-share {student.align_share}
        --align.target head --align.batch-size {n_rows} --align.micro-batch-size {micro_batch}
        --distill.batch-size {n_rows} --distill.micro-batch-size {micro_batch}
        --distill.learning-rate {student.learning_rate} --distill.lr-scale {" ".join(map(str, student.lr_scale))}
        --distill.compile {options.compile} --distill.checkpoint-every {CHECKPOINT_EVERY[DEVICE]}
        --seed {student.seed} --data.seed {student.seed}
        --out {options.out / student.name}
        """.split()
    # The run's own evaluation is kept short: `measure_all` replaces it.
    flags += ["--evaluation.n-pairs", "4", "--evaluation.n-examples", "1", "--no-export"]
    flags += ["--evaluation.n-texts", "0"]
    if not student.d_state:
        flags += ["--stages", "distill"]
    threads = str(options.threads)
    alone = environment(ROOT, OMP_WAIT_POLICY="passive", OMP_NUM_THREADS=threads)
    if DEVICE == "cpu":
        alone["ACCELERATE_USE_CPU"] = "true"
    subprocess.run([sys.executable, str(RECIPE), *flags], check=True, env=alone)


def train_control(options: argparse.Namespace, student: Student) -> None:
    """Put the teacher through the students' distillation: what the recipe itself costs.

    A run refuses to train a student that keeps every head, since only rounding separates it from its teacher.
    """
    source = str(options.text / "train.jsonl")
    data = DataConfig(sources=(source,), chat=False, seq_len=student.seq_len)
    n_rows = student.step_tokens // student.seq_len
    stage = Distill(
        steps=number_of_tokens("tokens", student.tokens) // student.step_tokens,
        batch_size=n_rows,
        micro_batch_size=n_rows,
        learning_rate=student.learning_rate,
        lr_scale=student.lr_scale,
        precision="auto",
        compile=options.compile,
        checkpoint_every=25,
    )
    teacher = TeacherConfig(path=options.teacher, dtype=options.dtype)
    out = options.out / student.name
    config = RunConfig(out=out, teacher=teacher, data=data, stages=(stage,))
    inputs = RunInputs(config)
    plan = HeadPlan.all(inputs.teacher)
    model, _ = build_student(inputs.teacher, plan, d_state=16)
    vocab_size = vocabulary_size(inputs.tokenizer)
    training = make_stage(stage, model, inputs.teacher, vocab_size=vocab_size)
    train_stage(training, inputs.rows(stage), out / "stage")
    settle(model, inputs.teacher.dtype).save_pretrained(out / "trained")


def measure_all(options: argparse.Namespace, names: list[str]) -> None:
    """Measure every named row that can be, one after the other."""
    tokenizer = AutoTokenizer.from_pretrained(options.teacher)
    teacher = AutoModelForCausalLM.from_pretrained(options.teacher, dtype=options.dtype).eval()
    torch.nn.Module.to(teacher, DEVICE)
    measures = Measures(teacher, tokenizer, options.text / "held_out.jsonl")
    for name in names:
        model = model_of(name, options.out, teacher)
        if model is None:
            print(f"{name}: not trained yet")
            continue
        folder = options.out / name
        folder.mkdir(parents=True, exist_ok=True)
        measure_one(model, measures, folder / "measured.json")


def model_of(name: str, out: Path, teacher: PreTrainedModel) -> PreTrainedModel | None:
    """Return a row's model, in the teacher's dtype on the device. None if its training has not ended."""
    folder = out / name
    model: PreTrainedModel = teacher
    if name in STUDENTS:
        student = STUDENTS[name]
        if not student.tokens:
            plan = plan_of(student.heads)
            model, _ = build_student(teacher, plan, d_state=0, window=student.window, sinks=SINKS)
        elif (folder / "trained").exists():
            model = HybridForCausalLM.from_pretrained(folder / "trained", dtype=teacher.dtype)
        elif not (folder / "evaluation.json").exists():
            return None
        else:
            trained, _ = trained_student(finished_run(folder))
            model = settle(trained, teacher.dtype)
    torch.nn.Module.to(model, DEVICE)
    return model.eval()


def report(out: Path) -> None:
    """Write the record of all measured rows and print them as a table."""
    rows = {}
    for name in [TEACHER, *STUDENTS]:
        record = read(out / name / "measured.json")
        if record:
            rows[name] = record
    adds = added_by_state(rows)
    print(pd.DataFrame(adds).to_string())
    write(
        RESULTS / "smollm2_windows.json",
        {
            "rows": rows,
            f"{WITH_STATE.name} less {WHOLE_WINDOW.name}, same seed": adds,
            **about("students of SmolLM2 with windows", threads=1),
        },
    )
    table = pd.json_normalize(list(rows.values())).set_index(pd.Index(rows, name="row"))
    print(text_table(table.T.round(3).reset_index()))
    for name, record in rows.items():
        # The last figure of a row: others are still being measured.
        if LAST not in record:
            continue
        if name == TEACHER:
            entry = {"tokens": 0, "by": "", "how": ""}
        else:
            entry = STUDENTS[name].entry
        enter_measured(name, record, entry)
    page()


def added_by_state(rows: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Return what half a window and a state add to the whole window, over the seeds that both have."""
    measured = []
    for student in (WHOLE_WINDOW, WITH_STATE):
        for seed in SEEDS:
            record = rows.get(replace(student, seed=seed).name)
            if record:
                figures = {name: record["text"][name] for name in OF_TEXT}
                measured.append({"student": student.name, "seed": seed, **figures})
    students = pd.DataFrame(measured)
    return differences(students, "student", WHOLE_WINDOW.name, figures=OF_TEXT)


def losses(out: Path) -> None:
    """Write the end-to-end losses of all students by the tokens trained on until then, alignment included."""
    record = read(LOSSES)
    for name, student in STUDENTS.items():
        n_tokens = 0
        row = []
        for path in sorted((out / name).glob("stages/*/metrics.jsonl")):
            metrics = [json.loads(line) for line in path.read_text().splitlines()]
            if path.parent.name.endswith("distill"):
                for step in metrics:
                    figures = {"tokens": n_tokens + step["step"] * student.step_tokens}
                    row.append(figures | {key: round(step[key], 4) for key in LOGGED})
            else:
                n_tokens += metrics[-1]["step"] * student.step_tokens
        if row:
            record[name] = row
            print(f"{name}: {row[-1]['loss']:.4f} after {row[-1]['tokens']:,} tokens")
    write(LOSSES, record, indent=0)


if __name__ == "__main__":
    main()
