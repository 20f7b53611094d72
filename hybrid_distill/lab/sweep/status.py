"""Describe the state of a sweep: students and steps done, time left, failures."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from ...locking import is_locked
from ...progress import duration
from ..reporting import markdown_table
from ..reporting.record import metrics
from .folder import Sweep
from .grid import ALL, Cell
from .tasks import Outcome, Task

SHOWN = ("failed", "running", "stopped")
"""States whose tasks are listed one by one."""


def status(out: Path) -> str:
    """Describe a sweep that is running, stopped or finished. Raises ValueError if there is none."""
    sweep = Sweep(out)
    tasks = _tasks(sweep)
    cells = tasks[tasks.student != ""]
    counts = cells.groupby(["student", "size"], sort=False).state.agg(_count)
    by_size = counts.unstack(fill_value="").rename_axis("seeds done").reset_index()
    blocks = [markdown_table(by_size), progress(sweep, tasks)]
    for state in SHOWN:
        lines = []
        for task in tasks[tasks.state == state].itertuples():
            progress_text = f"{task.steps_done} of {task.steps} steps"
            lines.append(f"  {task.task}: {task.error or progress_text}")
        if lines:
            blocks.append("\n".join([f"{state}:", *lines]))
    if not is_locked(sweep.out) and (tasks.state != "done").any():
        blocks.append("No sweep is running; run the same command again to resume it.")
    return "\n\n".join(blocks)


def progress(sweep: Sweep, tasks: pd.DataFrame | None = None, *, at_once: int | None = None) -> str:
    """Describe cells and steps done, and the time left, estimated from the finished tasks.

    ``at_once`` tasks run in parallel, by default as many as are running now.
    """
    if tasks is None:
        tasks = _tasks(sweep)
    states = tasks[tasks.student != ""].state
    parts = [f"{(states == 'done').sum()} of {len(states)} cells"]
    n_failed = (states == "failed").sum()
    if n_failed:
        parts.append(f"{n_failed} failed")
    parts.append(f"{tasks.steps_done.sum():,} of {tasks.steps.sum():,} steps")
    done = tasks[tasks.state == "done"]
    remaining = tasks[~tasks.state.isin(["done", "failed"])]
    if len(remaining) and done.steps.sum():
        if at_once is None:
            at_once = max(1, (tasks.state == "running").sum())
        steps = (remaining.steps - remaining.steps_done).sum()
        seconds = steps * done.seconds.sum() / done.steps.sum()
        parts.append(f"about {duration(seconds / at_once)} left with {at_once} at a time")
    return ", ".join(parts)


def _tasks(sweep: Sweep) -> pd.DataFrame:
    """Return a row per task: its progress, and the student that it makes (empty for shared work)."""
    rows = []
    for task in sweep.tasks.values():
        outcome = task.outcome()
        cell = task.cell
        rows.append(
            {
                "task": task.name,
                "student": "" if cell is None else f"{cell.heads} heads, {cell.selection}",
                "size": "" if cell is None else _size(cell),
                "steps": task.steps,
                "steps_done": _steps_done(task, outcome),
                **outcome._asdict(),
            }
        )
    return pd.DataFrame(rows)


def _size(cell: Cell) -> str:
    if cell.selection == ALL:
        return "any state"
    window = f", window {cell.window}" if cell.window else ""
    return f"state {cell.d_state}{window}"


def _steps_done(task: Task, outcome: Outcome) -> int:
    if outcome.state == "done":
        return task.steps
    steps = 0
    # An alignment trains in a run of its own, inside the task's.
    for path in [*task.run.metrics(), *task.run.aligned.metrics()]:
        lines = metrics(path)
        if lines:
            steps += lines[-1].get("step", 0)
    return steps


def _count(states: pd.Series) -> str:
    n_failed = (states == "failed").sum()
    counted = f"{(states == 'done').sum()} of {len(states)}"
    return f"{counted}, {n_failed} failed" if n_failed else counted
