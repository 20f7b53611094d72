"""`hybrid-distill evaluate --write-task-files`: the questions of a suite as files, for machines without a network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ...io import write_text
from .files import find_split, write_rows
from .running import first_line, quiet
from .suites import ProbeTask, StockTask
from .tasks import TEST, Part, Questions, stock_tasks


def write_task_files(
    folder: Path,
    tasks: Sequence[StockTask | ProbeTask],
    questions: Questions,
    tokenizer: PreTrainedTokenizerBase | None,
) -> tuple[list[str], dict[str, str]]:
    """(a line for each file written, why there is none by task). Files that are there stay as they are.

    ``tokenizer`` is what the length of niah's haystacks is counted in; without one, niah is not written.
    """
    written, failed = [], {}
    for task in tasks:
        try:
            for part in questions.parts(task):
                with quiet():
                    written += _write_part(folder, part, questions, tokenizer)
        except Exception as error:  # of the hub and of its libraries, there are many kinds
            failed[task.name] = first_line(error)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "README.md", "\n".join(_readme(tasks, questions)) + "\n")
    return written, failed


def _write_part(
    folder: Path, part: Part, questions: Questions, tokenizer: PreTrainedTokenizerBase | None
) -> Iterator[str]:
    absent = [split for split in part.splits if not find_split(folder / part.folder, split)]
    rows = _rows(part, questions, tokenizer) if absent else {}
    for split in absent:
        path = folder / part.folder / f"{split}.jsonl"
        yield f"{path}: {write_rows(path, rows[split]):,} questions"


def _rows(part: Part, questions: Questions, tokenizer: PreTrainedTokenizerBase | None) -> Any:
    """The rows of each split."""
    if isinstance(part.task, ProbeTask):
        return {TEST: questions.probe_rows(part.task)}
    if part.task.name == "niah":
        if tokenizer is None:
            raise ValueError("the length of its haystacks is counted in a model's tokens; name the model with --model.")
        return {TEST: questions.niah_rows(part.name, tokenizer)}
    return stock_tasks(part.task).load(part.name, {}).dataset


def _readme(tasks: Sequence[StockTask | ProbeTask], questions: Questions) -> Iterator[str]:
    """What the files are called and what a row holds."""
    yield "# Questions for `hybrid-distill evaluate --data-dir`\n"
    yield "One folder a task (and a part of it), one file a split: JSON lines, or parquet. A row has these fields:\n"
    for task in tasks:
        parts = questions.parts(task)
        files = ", ".join(f"`{parts[0].folder}/{split}.jsonl`" for split in parts[0].splits)
        others = f" and {len(parts) - 1} folders like it" if len(parts) > 1 else ""
        if isinstance(task, StockTask):
            yield f"- {task.name}: {files}{others}: {', '.join(task.fields)} ({task.hub})"
        else:
            fields = "text" if task.probe == "text" else "prompt, answer, choices, gold (the answer's place, from 0)"
            yield f"- {task.name}: {files}: {fields} (written by our generator)"
