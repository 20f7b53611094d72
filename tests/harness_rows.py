"""Made-up rows of each of the paper's tasks, in the layout of ``--data-dir``, and a model that knows their answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_distill.lab.suites.job import STOCK, SuiteJob

if TYPE_CHECKING:
    from hybrid_distill.lab.suites.tasks import Part


def _lettered(question: str, number: int) -> dict[str, Any]:
    texts = ["a stone", "a bird", "a cup", "a tree"]
    choices = {"text": texts, "label": ["A", "B", "C", "D"]}
    return {"question": question, "choices": choices, "answerKey": "ABCD"[number % 4]}


def row(task: str, number: int) -> dict[str, Any]:
    """Row ``number`` of a task, with what the data set on the hub has and lm-eval reads."""
    subject = f"thing {number}"
    match task:
        case "arc_easy" | "arc_challenge":
            return {"id": str(number), **_lettered(f"What flies over {subject}?", number)}
        case "openbookqa":
            lettered = _lettered("", number)
            del lettered["question"]
            return {"id": str(number), "question_stem": f"Over {subject} flies", **lettered}
        case "piqa":
            return {"goal": f"Open {subject}.", "sol1": "Pull the lid.", "sol2": "Drink the sun.", "label": number % 2}
        case "winogrande":
            sentence = f"The cup missed {subject} because _ was small."
            return {"sentence": sentence, "option1": "the cup", "option2": subject, "answer": str(1 + number % 2)}
        case "hellaswag":
            endings = ["sings [title] a song.", "eats a wall.", "is the moon.", "forgets to be."]
            about = {"activity_label": "Music", "ctx_a": f"A man holds {subject}.", "ctx_b": "he"}
            return {"ind": number, **about, "ctx": "", "endings": endings, "label": str(number % 4)}
        case "lambada_openai":
            return {"text": f"She took {subject} home and opened the door"}
        case "mmlu":
            question = {"question": f"What is {subject}?", "subject": "things"}
            return {**question, "choices": ["w", "x", "y", "z"], "answer": number % 4}
        case "gsm8k":
            return {"question": f"How much is {number} and 1?", "answer": f"One more than {number}.\n#### {number + 1}"}
        case "swde":
            return {"key": "name", "value": f"Film{number}", "text": f"title Film{number}\nname:"}
        case "bbh":
            return {"input": f"Is {number} a number?", "target": "Yes" if number % 2 else "No"}
    raise AssertionError(task)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def write_all(folder: Path, n: int, tasks: tuple[str, ...] = tuple(task.name for task in STOCK)) -> list[Part]:
    """Files of stock tasks, ``n`` rows for each split of each part."""
    from hybrid_distill.lab.suites.tasks import parts_of

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
        return [self._likelihood(request) for request in requests]

    def _likelihood(self, request: Any) -> tuple[float, bool]:
        likely = self._knows(request) == (request.idx == _gold(request.doc))
        # As long as the text, for lm-eval's acc_norm divides by that.
        return (-0.1 if likely else -9.0) * len(request.args[1]), likely

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
        return f" {doc['answers'][0]}."
    if "target" in doc:
        return f"It is plain. So the answer is {doc['target']}."
    return f" {doc['value']}" if "value" in doc else f" {doc['answer']}"
