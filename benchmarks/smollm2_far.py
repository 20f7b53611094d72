"""Dictionaries that stand far back, asked of many more than smollm2_windows.py has time for.

    python benchmarks/smollm2_far.py --teacher smollm2 --text text --out runs/windows --only teacher NAME ...

The named rows of smollm2_windows.py answer the same questions: dictionaries of 4 and 8 pairs before 1,000 tokens of
other text. The table says what each keeps of the teacher's accuracy beyond guessing, with 95 % intervals over the
questions (paired bootstrap: student and teacher answer the same ones). An answered row is not asked again. 256
dictionaries of each size take some ten minutes of a core.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from records import RESULTS, about, read, write
from scipy.stats import bootstrap
from smollm2_measures import Measures
from smollm2_windows import STUDENTS, TEACHER, model_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybrid_distill.lab.reporting import text_table
from hybrid_distill.probes import Example
from hybrid_distill.probes.answering import answer_choices
from hybrid_distill.probes.kv_retrieval import KVRetrieval

SIZES = (4, 8)
SEED = 2
BATCH_SIZE = 4
RECORD = RESULTS / "smollm2_far.json"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--teacher", default="smollm2", help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--text", type=Path, default=Path("text"), help="folder of held_out.jsonl")
    parser.add_argument("--out", type=Path, default=Path("runs/windows"), help="folder of the runs")
    parser.add_argument("--examples", type=int, default=256, help="dictionaries of each size")
    parser.add_argument(
        "--only", nargs="+", choices=[TEACHER, *STUDENTS], metavar="NAME", required=True
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    answers = read(RECORD).get("answers", {})
    ask_all(options, answers)
    record = {"answers": answers, "kept": kept_by_row(answers), "n_examples": options.examples}
    write(RECORD, {**record, **about("dictionaries before 1,000 tokens of filler", threads=1)})
    print(text_table(pd.DataFrame(record["kept"]).T.rename_axis("row").reset_index()))


def ask_all(options: argparse.Namespace, answers: dict[str, Any]) -> None:
    """Add what the named rows answer: a digit for each question, 1 if right."""
    tokenizer = AutoTokenizer.from_pretrained(options.teacher)
    teacher = AutoModelForCausalLM.from_pretrained(options.teacher, dtype=torch.bfloat16).eval()
    measures = Measures(teacher, tokenizer, options.text / "held_out.jsonl")
    questions = far_questions(measures, options.examples)
    for name in options.only:
        if name in answers:
            continue
        model = model_of(name, options.out, teacher)
        if model is None:
            print(f"{name}: not trained yet")
            continue
        answers[name] = {}
        for size, examples in questions.items():
            answered = answer_choices(model, tokenizer, examples, batch_size=BATCH_SIZE)
            digits = answered.correct_E.int().tolist()
            answers[name][size] = "".join(map(str, digits))
            print(f"{name}, {size} pairs: {answered.accuracy:.3f}", flush=True)


def far_questions(measures: Measures, n_examples: int) -> dict[str, list[Example]]:
    questions = {}
    for size in SIZES:
        near = KVRetrieval(size, seed=SEED).examples(n_examples)
        questions[str(size)] = [measures.apart(example) for example in near]
    return questions


def kept_by_row(answers: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Return each row's accuracy and what it keeps of the teacher's, in %."""
    rows = {}
    for name, by_size in answers.items():
        row = {}
        for size in map(str, SIZES):
            right = right_answers(by_size[size])
            row[f"{size} pairs"] = f"{100 * right.mean():.1f}"
            if name != TEACHER:
                kept = kept_share(right, right_answers(answers[TEACHER][size]), 1 / int(size))
                row[f"{size} pairs, kept"] = kept
        rows[name] = row
    return rows


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
