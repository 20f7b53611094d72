"""Made-up rows of each of the paper's tasks, in the layout of ``--data-dir``, and a model that knows their answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hybrid_distill.lab.suites.job import STOCK, SuiteJob
from hybrid_distill.lab.suites.tasks import Part, parts_of


def row(task: str, n: int) -> dict[str, Any]:
    """Row ``n`` of a task, with what the data set on the hub has and lm-eval reads."""
    lettered = {
        "choices": {"text": ["a stone", "a bird", "a cup", "a tree"], "label": ["A", "B", "C", "D"]},
        "answerKey": "ABCD"[n % 4],
    }
    endings = ["sings [title] a song.", "eats a wall.", "is the moon.", "forgets to be."]
    music = {"activity_label": "Music", "ctx_a": f"A man holds thing {n}.", "ctx_b": "he", "ctx": ""}
    missed = {
        "sentence": f"The cup missed thing {n} because _ was small.",
        "option1": "the cup",
        "option2": f"thing {n}",
    }
    rows: dict[str, dict[str, Any]] = {
        "arc_easy": {"question": f"What flies over thing {n}?", **lettered},
        "openbookqa": {"question_stem": f"Over thing {n} flies", **lettered},
        "piqa": {"goal": f"Open thing {n}.", "sol1": "Pull the lid.", "sol2": "Drink the sun.", "label": n % 2},
        "winogrande": {**missed, "answer": str(1 + n % 2)},
        "hellaswag": {"ind": n, **music, "endings": endings, "label": str(n % 4)},
        "lambada_openai": {"text": f"She took thing {n} home and opened the door"},
        "mmlu": {"question": f"What is thing {n}?", "subject": "", "choices": ["w", "x", "y", "z"], "answer": n % 4},
        "gsm8k": {"question": f"How much is {n} and 1?", "answer": f"One more than {n}.\n#### {n + 1}"},
        "swde": {"key": "name", "value": f"Film{n}", "text": f"title Film{n}\nname:"},
        "bbh": {"input": f"Is {n} a number?", "target": "Yes" if n % 2 else "No"},
    }
    return rows["arc_easy" if task == "arc_challenge" else task]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def write_all(folder: Path, n: int, tasks: tuple[str, ...] = tuple(task.name for task in STOCK)) -> list[Part]:
    """Files of stock tasks, ``n`` rows for each split of each part."""
    parts = [part for task in STOCK if task.name in tasks for part in parts_of(task, SuiteJob())]
    for part in parts:
        for split in part.splits:
            n_rows = max(n, part.n_shots + 1) if split == "train" else n
            rows = [row(part.task.name, i) for i in range(n_rows)]
            write_rows(folder / part.folder / f"{split}.jsonl", rows)
    return parts


class KnowsHalf:
    """In the place of a model: answers questions with an even number rightly, all others wrongly.

    A right answer is likely, and is generated in the form that each task asks for.
    """

    rank, world_size, max_length, max_gen_toks = 0, 1, 10_000, 256
    tok_encode = staticmethod(str.split)

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        likely = [self._knows(request) == (request.idx == _gold(request.doc)) for request in requests]
        # As long as the text, for lm-eval's acc_norm divides by that.
        return [((-0.1 if right else -9.0) * len(r.args[1]), right) for r, right in zip(requests, likely)]

    def _knows(self, request: Any) -> bool:
        return request.doc_id % 2 == 0

    def generate_until(self, requests: list[Any]) -> list[str]:
        return [_text(request.doc) if self._knows(request) else "I cannot say." for request in requests]


def _gold(doc: dict[str, Any]) -> int:
    """The place of the right choice; 0 for what has but one."""
    if "answerKey" in doc:
        return "ABCD".index(doc["answerKey"])
    if "option1" in doc:
        return int(doc["answer"]) - 1
    return int(next((doc[key] for key in ("label", "gold", "answer") if key in doc), 0))


def _text(doc: dict[str, Any]) -> str:
    """A right answer as text."""
    if "answers" in doc:
        return f" {' and '.join(doc['answers'])}."
    if "target" in doc:
        return f"It is plain. So the answer is {doc['target']}."
    return f" {doc['value']}" if "value" in doc else f" {doc['answer']}"
