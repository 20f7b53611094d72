"""results.csv, one row per cell with all its figures (docs/sweeps.md lists the columns), and the state of a sweep."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pandas as pd

from ...evaluation.evaluate import EvalResult
from ...io import Record, replacing
from ...locking import is_locked
from ...pipeline import RunPaths
from ...plan import HeadPlan
from ..memory.timing import duration
from ..reporting import markdown_table
from ..reporting.record import all_figures, metrics
from .folder import Outcome, Sweep
from .grid import ALL, Cell

FILE = "results.csv"
FIRST = ("cell", "state", "selection", "heads", "d_state", "seed", "layers_with_heads", "kv_heads")
LAST = ("steps", "tokens", "train_seconds", "dir", "error")
TEACHER = "teacher"
BEHIND = ("n_examples", "n_knowledge", "knowledge_chance", "n_text_tokens")


def write_results(sweep: Sweep) -> Path:
    """Rewrite the table atomically: the teacher for each seed, then every cell, finished or not."""
    rows = []
    for task in sweep.tasks.values():
        folder = {"dir": task.folder.relative_to(sweep.out).as_posix()}
        if task.cell is not None:
            rows.append(_row(task.cell, task.folder, task.outcome()) | folder)
        elif task.d_state is None and (path := RunPaths(task.folder).teacher_evaluation).exists():
            name = {"cell": f"{TEACHER}-{task.name}", "state": "done", "selection": TEACHER, "seed": task.seed}
            rows.append(name | _figures(path) | folder)
    rows.sort(key=lambda row: row["selection"] != TEACHER)
    figures = dict.fromkeys(name for row in rows for name in row if name not in FIRST + LAST)
    with replacing(sweep.out / FILE) as temporary:
        # As objects: whole numbers stay whole even if a cell of their column is empty.
        pd.DataFrame(rows, columns=[*FIRST, *figures, *LAST], dtype=object).to_csv(temporary, index=False)
    return sweep.out / FILE


def _row(cell: Cell, folder: Path, outcome: Outcome) -> Record:
    row: Record = {"cell": cell.name, **asdict(cell), "state": outcome.state, "error": outcome.error}
    if outcome.state != "done":
        return row
    plan = HeadPlan.load(RunPaths(folder).plan)
    row |= {"layers_with_heads": len({head.layer for head in plan.kept}), "kv_heads": plan.n_stored_kv_heads}
    last = [records[-1] for path in sorted(folder.glob("stages/*/metrics.jsonl")) if (records := metrics(path))]
    spent = {"steps": "step", "tokens": "tokens", "train_seconds": "seconds"}
    row |= {name: round(sum(record.get(key, 0) for record in last), 3) for name, key in spent.items()}
    return row | _figures(RunPaths(folder).evaluation)


def _figures(path: Path) -> Record:
    """Read an evaluation, its numbers of questions and tokens, and the accuracy of guessing."""
    result = EvalResult.load(path)
    behind = {name: getattr(result, name) for name in BEHIND}
    return {**all_figures(result), **{name: value for name, value in behind.items() if value is not None}}


def _tasks(sweep: Sweep) -> pd.DataFrame:
    """Return a row per task: its progress, and the student that it makes."""
    rows = []
    for name, task in sweep.tasks.items():
        outcome, steps = task.outcome(), task.steps
        if outcome.state != "done":
            found = (metrics(path) for path in task.folder.rglob("stages/*/metrics.jsonl"))
            steps = sum(records[-1].get("step", 0) for records in found if records)
        student, state = "", ""
        if task.cell is not None:
            student = " ".join(dict.fromkeys(filter(None, (str(task.cell.heads), "heads,", task.cell.selection))))
            state = "any state" if task.cell.selection == ALL else f"state {task.cell.d_state}"
        rows.append((name, student, state, task.steps, steps, *outcome))
    return pd.DataFrame(rows, columns=["task", "student", "size", "steps", "steps_done", "state", "error", "seconds"])


def status(out: Path) -> str:
    """Describe a sweep that is running, stopped or finished. Raises ValueError if there is none."""
    sweep = Sweep(out)
    tasks = _tasks(sweep)
    cells = tasks[tasks.student != ""]

    def count(states: pd.Series) -> str:
        failed = (states == "failed").sum()
        return f"{(states == 'done').sum()} of {len(states)}" + (f", {failed} failed" if failed else "")

    counted = cells.groupby(["student", "size"], sort=False).state.agg(count).unstack(fill_value="")
    parts = [markdown_table(counted.rename_axis("seeds done").reset_index()), progress(sweep, tasks)]
    for state, found in tasks[tasks.state.isin(["running", "stopped", "failed"])].groupby("state"):
        lines = (f"  {t.task}: {t.error or f'{t.steps_done} of {t.steps} steps'}" for t in found.itertuples())
        parts.append("\n".join([f"{state}:", *lines]))
    if not is_locked(sweep.out) and (tasks.state != "done").any():
        parts.append("No sweep is running; run the same command again to resume it.")
    return "\n\n".join(parts)


def progress(sweep: Sweep, tasks: pd.DataFrame | None = None, *, at_once: int | None = None) -> str:
    """Describe cells and steps done, and the time left, estimated from the finished tasks.

    ``at_once`` tasks run in parallel, by default as many as are running now.
    """
    tasks = _tasks(sweep) if tasks is None else tasks
    states = tasks[tasks.student != ""].state
    parts = [f"{(states == 'done').sum()} of {len(states)} cells"]
    parts += [f"{failed} failed"] if (failed := (states == "failed").sum()) else []
    parts.append(f"{tasks.steps_done.sum():,} of {tasks.steps.sum():,} steps")
    done, left = tasks[tasks.state == "done"], tasks[~tasks.state.isin(["done", "failed"])]
    at_once = at_once or max(1, (tasks.state == "running").sum())
    if len(left) and done.steps.sum():
        seconds = (left.steps - left.steps_done).sum() * done.seconds.sum() / done.steps.sum()
        parts.append(f"about {duration(seconds / at_once)} left with {at_once} at a time")
    return ", ".join(parts)
