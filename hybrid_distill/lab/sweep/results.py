"""results.csv of a sweep: one row per cell with all its figures (docs/sweeps.md lists the
columns)."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pandas as pd

from ...evaluation.evaluate import EvalResult
from ...io import Record, replacing
from ...pipeline import RunPaths
from ...plan import HeadPlan
from ..reporting.record import all_figures, metrics
from .folder import Sweep
from .grid import Cell
from .tasks import Outcome

FIRST = (
    "cell",
    "state",
    "selection",
    "heads",
    "d_state",
    "window",
    "seed",
    "layers_with_heads",
    "kv_heads",
)
LAST = ("steps", "tokens", "train_seconds", "dir", "error")
TEACHER = "teacher"
SAMPLE_SIZES = ("n_examples", "n_knowledge", "knowledge_chance", "n_text_tokens")
COUNTERS = {"steps": "step", "tokens": "tokens", "train_seconds": "seconds"}
"""Columns that sum what the last line of each stage's metrics counts."""


def write_results(sweep: Sweep) -> Path:
    """Rewrite the table atomically: the teacher for each seed, then every cell, finished or not."""
    teachers: list[Record] = []
    students: list[Record] = []
    for task in sweep.tasks.values():
        place = {"dir": task.folder.relative_to(sweep.out).as_posix()}
        if task.cell is not None:
            students.append(_row(task.cell, task.run, task.outcome()) | place)
        elif task.kind == "teacher" and task.run.teacher_evaluation.exists():
            teachers.append(_row_of_teacher(task.name, task.seed, task.run) | place)
    rows = teachers + students
    # A dict, not a set: it keeps their order.
    figures: dict[str, None] = {}
    for row in rows:
        for name in row:
            if name not in FIRST + LAST:
                figures[name] = None
    path = sweep.paths.table
    with replacing(path) as temporary:
        # As objects: whole numbers stay whole even if a cell of their column is empty.
        table = pd.DataFrame(rows, columns=[*FIRST, *figures, *LAST], dtype=object)
        table.to_csv(temporary, index=False)
    return path


def _row_of_teacher(name: str, seed: int, run: RunPaths) -> Record:
    return {
        "cell": f"{TEACHER}-{name}",
        "state": "done",
        "selection": TEACHER,
        "seed": seed,
        **_figures(run.teacher_evaluation),
    }


def _row(cell: Cell, run: RunPaths, outcome: Outcome) -> Record:
    row: Record = {
        "cell": cell.name,
        **asdict(cell),
        "state": outcome.state,
        "error": outcome.error,
    }
    if outcome.state != "done":
        return row
    plan = HeadPlan.load(run.plan)
    row["layers_with_heads"] = len({head.layer for head in plan.kept})
    row["kv_heads"] = plan.n_stored_kv_heads
    last_lines = []
    for path in run.metrics():
        last_lines += metrics(path)[-1:]
    for column, counter in COUNTERS.items():
        total = sum(line.get(counter, 0) for line in last_lines)
        row[column] = round(total, 3)
    return row | _figures(run.evaluation)


def _figures(path: Path) -> Record:
    """Read an evaluation, its numbers of questions and tokens, and the accuracy of guessing."""
    result = EvalResult.load(path)
    figures: Record = dict(all_figures(result))
    for name in SAMPLE_SIZES:
        value = getattr(result, name)
        if value is not None:
            figures[name] = value
    return figures
