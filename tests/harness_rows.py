"""Made-up questions of an lm-eval task, in a task file that reads them instead of the hub."""

import json
from pathlib import Path
from typing import Any

FOLDERS = {"arc_easy": "arc"}


def write_task(folder: Path, name: str, n_rows: int) -> None:
    """Write NAME.yaml, which is lm-eval's own task but for its data set, and its questions.

    It has a tag, and is the only member of a group that reports nothing of its own.
    """
    import lm_eval.tasks

    definition = Path(lm_eval.tasks.__file__).parent / FOLDERS[name] / f"{name}.yaml"
    questions = folder / f"{name}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    questions.write_text("".join(f"{json.dumps(_row(number))}\n" for number in range(n_rows)))
    lines = [
        f"include: {definition}",
        "tag: made_up_tag",
        "dataset_path: json",
        "dataset_name: null",
        f"dataset_kwargs: {{data_files: {{test: {questions}}}}}",
        "training_split: null",
        "validation_split: null",
    ]
    (folder / f"{name}.yaml").write_text("\n".join(lines) + "\n")
    (folder / "group.yaml").write_text(f"group: made_up_group\ntask: [{name}]\n")


def _row(number: int) -> dict[str, Any]:
    choices = {
        "text": ["a stone", "a bird", "a cup", "a tree"],
        "label": ["A", "B", "C", "D"],
    }
    return {
        "question": f"What flies over thing {number}?",
        "choices": choices,
        "answerKey": "ABCD"[number % 4],
    }
