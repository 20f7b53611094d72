"""Shares of SmolLM2's accuracy beyond guessing that its students keep, task by task, with intervals.

    python benchmarks/smollm2_kept.py --teacher smollm2 --text text --out runs/windows --only teacher NAME ...

The named rows of smollm2_windows.py answer the same questions. The table says what each keeps, (s - g) / (t - g) for
accuracies s of the student, t of the teacher and g of guessing. All seeds of a student share a line. The 95 % intervals
are a bootstrap over the questions, paired with the teacher's answers. "Before filler" puts 1,000 tokens of other text
between a dictionary and its question; keys are `niah_multikey_2`. Answered tasks are skipped. A row takes some ten
minutes of a core. Figures of held-out text are those of smollm2_windows.py, mean and standard deviation over the seeds.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import pandas as pd
import torch
from records import RESULTS, about, read, write
from scipy.stats import bootstrap
from smollm2_measures import SIZES, Measures, missing_figures
from smollm2_windows import DTYPES, STUDENTS, TEACHER, model_of
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hybrid_distill.lab.reporting import text_table
from hybrid_distill.lab.reporting.document import with_error
from hybrid_distill.probes import Example
from hybrid_distill.probes.answering import answer_choices
from hybrid_distill.probes.kv_retrieval import KVRetrieval

SEED = 2
"""Seed of the questions; the students were not chosen by these."""
NEAR, FAR, KEYS = 256, 128, 64
"""Dictionaries of each size nearby and before filler, and needles among keys of each length."""
FAR_SIZES = (4, 8)
KEY_LENGTHS = (512, 1024)
BATCH_SIZE = 4
ANSWERS = "kept.json"
"""File of a row: for each task a digit for each question, 1 if right."""
TEXT_FIGURES = {"perplexity": 2, "kl": 4, "agreement": 3}
"""Figures of held-out text, and their digits."""
RECORD = RESULTS / "smollm2_kept.json"

Questions = dict[str, list[Example]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--teacher", default="smollm2", help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--text", type=Path, default=Path("text"), help="folder of held_out.jsonl")
    parser.add_argument("--out", type=Path, default=Path("runs/windows"), help="folder of the runs")
    parser.add_argument(
        "--only", nargs="+", choices=[TEACHER, *STUDENTS], metavar="NAME", default=[]
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bfloat16", help="dtype that rows answer in"
    )
    parser.add_argument("--threads", type=int, default=1, help="threads of the process")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.teacher)
    teacher = AutoModelForCausalLM.from_pretrained(options.teacher, dtype=options.dtype).eval()
    measures = Measures(teacher, tokenizer, options.text / "held_out.jsonl")
    questions = make_questions(measures)
    for name in options.only:
        model = model_of(name, options.out, teacher)
        if model is None:
            print(f"{name}: not trained yet")
        else:
            ask(model, tokenizer, questions, options.out / name / ANSWERS)
    answers = {path.parent.name: read(path) for path in sorted(options.out.glob(f"*/{ANSWERS}"))}
    seeds = seeds_by_student(answers)
    kept = {}
    for student, names in seeds.items():
        kept[student] = {
            "seeds": str(len(names)),
            **text_figures([read(options.out / name / "measured.json") for name in names]),
            **kept_of_tasks([answers[TEACHER], *(answers[name] for name in names)], questions),
        }
    write(RECORD, {"answers": answers, "kept": kept, **about("what students keep", threads=1)})
    print(text_table(pd.DataFrame(kept).T.rename_axis("student").reset_index()))


def make_questions(measures: Measures) -> Questions:
    questions = {"knowledge": measures.knowledge}
    for size in SIZES:
        questions[f"{size} pairs"] = KVRetrieval(size, seed=SEED).examples(NEAR)
    for size in FAR_SIZES:
        near = questions[f"{size} pairs"][:FAR]
        questions[f"{size} pairs before filler"] = [measures.apart(example) for example in near]
    for length in KEY_LENGTHS:
        questions[f"keys at {length}"] = measures.needles("niah_multikey_2", length, KEYS, SEED)
    return questions


def ask(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: Questions,
    path: Path,
) -> None:
    """Write the answers that a row's file lacks, each task's as soon as they are known."""
    path.parent.mkdir(parents=True, exist_ok=True)
    asked = {task: partial(answers_to, examples, tokenizer) for task, examples in questions.items()}
    for task, digits in missing_figures(model, asked, read(path), path):
        print(f"{path.parent.name}: {task}: {right_answers(digits).mean():.3f}", flush=True)


def answers_to(
    examples: list[Example], tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel
) -> str:
    """Answer by choice; return a digit for each question, 1 if right."""
    result = answer_choices(model, tokenizer, examples, batch_size=BATCH_SIZE)
    return "".join(str(int(right)) for right in result.correct_E)


def seeds_by_student(names: Iterable[str]) -> dict[str, list[str]]:
    """Return rows by their student: all orders of the text that it was trained on."""
    seeds: dict[str, list[str]] = {}
    for name in names:
        if name != TEACHER:
            seeds.setdefault(replace(STUDENTS[name], seed=0).name, []).append(name)
    return seeds


def text_figures(measured: list[dict[str, Any]]) -> dict[str, str]:
    """Return perplexity, KL and agreement of held-out text, over the seeds that were measured."""
    texts = [record["text"] for record in measured if "text" in record]
    figures = {}
    for name, digits in TEXT_FIGURES.items():
        values = [text[name] for text in texts]
        spread = stdev(values) if len(values) > 1 else None
        figures[name] = with_error(mean(values), spread, digits)
    return figures


def kept_of_tasks(rows: list[dict[str, str]], questions: Questions) -> dict[str, str]:
    """Return what is kept of every task that all rows have answered, the teacher's first, in %."""
    kept = {}
    for task, examples in questions.items():
        if not all(task in row for row in rows):
            continue
        teacher, *students = [right_answers(row[task]) for row in rows]
        guessing = float(np.mean([1 / len(example.choices) for example in examples]))
        kept[task] = kept_share(np.mean(students, axis=0), teacher, guessing)
    return kept


def right_answers(digits: str) -> np.ndarray:
    return np.array([int(digit) for digit in digits])


def kept_share(student: np.ndarray, teacher: np.ndarray, guessing: float) -> str:
    """Return (s - guessing) / (t - guessing) and its 95 % interval over the questions, in %."""

    def share(own: np.ndarray, best: np.ndarray, axis: int = -1) -> np.ndarray:
        return 100 * (own.mean(axis) - guessing) / (best.mean(axis) - guessing)

    result = bootstrap(
        (student, teacher),
        share,
        paired=True,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    low, high = result.confidence_interval
    return f"{share(student, teacher):.0f} ({low:.0f} to {high:.0f})"


if __name__ == "__main__":
    main()
