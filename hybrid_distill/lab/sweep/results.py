"""results.csv: one row a cell, with all that was measured. docs/sweeps.md explains the columns."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from ...evaluation.evaluate import EvalResult
from ...io import replacing
from ...plan import HeadPlan
from .grid import ALL
from .record import Sweep, Task

FILE = "results.csv"
FIRST = ("cell", "state", "selection", "heads", "d_state", "seed", "layers_with_heads", "kv_heads")
LAST = ("steps", "tokens", "train_seconds", "dir", "error")
TEACHER = "teacher"
BEHIND = ("n_examples", "n_knowledge", "knowledge_chance", "n_text_tokens")


def write_results(sweep: Sweep) -> Path:
    """Write the table anew, whole or not at all: the teacher for each seed, then every cell, finished or not."""
    rows = [*_teacher_rows(sweep), *(_row(sweep, task) for task in sweep.tasks.values() if task.cell is not None)]
    figures = dict.fromkeys(name for row in rows for name in row if name not in FIRST + LAST)
    path = sweep.out / FILE
    with replacing(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*FIRST, *figures, *LAST], restval="")
        writer.writeheader()
        writer.writerows(rows)
    return path


def _teacher_rows(sweep: Sweep) -> list[dict[str, Any]]:
    rows = []
    for seed in dict.fromkeys(cell.seed for cell in sweep.cells):
        folder = sweep.out / "shared" / f"s{seed}"
        path = folder / "teacher" / "evaluation.json"
        if path.exists():
            name = {"cell": f"{TEACHER}-s{seed}", "state": "done", "selection": TEACHER, "seed": seed}
            rows.append({**name, **_figures(path), "dir": folder.relative_to(sweep.out).as_posix()})
    return rows


def _row(sweep: Sweep, task: Task) -> dict[str, Any]:
    cell, outcome, folder = task.cell, sweep.outcome(task), sweep.folder(task)
    assert cell is not None
    row: dict[str, Any] = {
        "cell": cell.name,
        "state": outcome.state,
        "selection": cell.selection,
        "heads": cell.heads,
        "d_state": "" if cell.selection == ALL else cell.d_state,
        "seed": cell.seed,
        "dir": folder.relative_to(sweep.out).as_posix(),
        "error": outcome.error,
    }
    if outcome.state != "done":
        return row
    plan = HeadPlan.load(folder / "plan.json")
    row |= {"layers_with_heads": len({head.layer for head in plan.kept}), "kv_heads": plan.n_stored_kv_heads}
    return {**row, **_figures(folder / "evaluation.json"), **_spent(folder)}


def _figures(path: Path) -> dict[str, Any]:
    """Of an evaluation, with what stands behind them: questions, tokens, and what guessing gives."""
    result = EvalResult.load(path)
    behind = {name: getattr(result, name) for name in BEHIND}
    return {**result.figures(), **{name: value for name, value in behind.items() if value is not None}}


def _spent(folder: Path) -> dict[str, Any]:
    """Of the run's own stages together."""
    last = [last_metrics(path) for path in sorted((folder / "stages").glob("*/metrics.jsonl"))]
    names = {"steps": "step", "tokens": "tokens", "train_seconds": "seconds"}
    return {name: round(sum(record.get(key, 0) for record in last), 3) for name, key in names.items()}


def last_metrics(path: Path) -> dict[str, Any]:
    """The last whole line of a metrics.jsonl; empty when there is none yet."""
    for line in reversed(path.read_text().splitlines()):
        try:
            return json.loads(line)
        except ValueError:  # torn by a kill
            continue
    return {}
