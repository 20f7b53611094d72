"""How far a sweep is: its cells in a table, steps done, time left."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from ...locking import is_locked
from ..report.tables import markdown_table
from .grid import Cell
from .record import Outcome, Sweep, Task
from .results import last_metrics
from .sharing import saving


def status(out: Path) -> str:
    """The state of a sweep that runs, was stopped or is over, as text. Raises ValueError where there is none."""
    sweep, alive = Sweep(out), is_locked(out)
    outcomes = {name: _as_it_is(sweep.outcome(task), alive) for name, task in sweep.tasks.items()}
    parts = [_table(sweep, outcomes), progress(sweep, outcomes), saved_line(sweep)]
    for state in ("running", "stopped", "failed"):
        found = [(task, outcomes[name]) for name, task in sweep.tasks.items() if outcomes[name].state == state]
        lines = [_line(sweep, task, outcome) for task, outcome in found]
        if lines:
            parts.append("\n".join([f"{state}:", *lines]))
    if not alive and any(outcome.state != "done" for outcome in outcomes.values()):
        parts.append("No sweep runs here; the command it was begun with goes on.")
    return "\n\n".join(part for part in parts if part)


def _as_it_is(outcome: Outcome, alive: bool) -> Outcome:
    """A task cannot run without its sweep: one that says so was killed. Of other machines, their word is taken."""
    here = outcome.host == socket.gethostname()
    return replace(outcome, state="stopped") if outcome.state == "running" and here and not alive else outcome


def _table(sweep: Sweep, outcomes: dict[str, Outcome]) -> str:
    """A row for each way to keep heads, a column for each state size, the seeds that are done in each place."""
    columns = sorted({cell.d_state for cell in sweep.cells if cell.d_state is not None})
    rows: dict[tuple[str, int], list[Cell]] = {}
    for cell in sweep.cells:
        rows.setdefault((cell.selection, cell.heads), []).append(cell)
    lines = [
        [
            f"{heads} heads" if selection == "none" else f"{heads} heads, {selection}",
            *(
                _place([outcomes[cell.name] for cell in cells if cell.d_state in (column, None)])
                for column in (columns or [None])
            ),
        ]
        for (selection, heads), cells in rows.items()
    ]
    headers = [f"state {column}" for column in columns] or ["any state"]
    return markdown_table(["seeds done", *headers], lines)


def _place(outcomes: Sequence[Outcome]) -> str:
    done, failed = (sum(outcome.state == state for outcome in outcomes) for state in ("done", "failed"))
    return f"{done} of {len(outcomes)}" + (f", {failed} failed" if failed else "") if outcomes else ""


def progress(sweep: Sweep, outcomes: dict[str, Outcome] | None = None, *, at_once: int | None = None) -> str:
    """Cells and steps done, and the time left, from what the steps that are done took.

    ``at_once`` tasks run at a time, by default as many as run now.
    """
    outcomes = outcomes or {name: sweep.outcome(task) for name, task in sweep.tasks.items()}
    cells = [outcomes[name] for name, task in sweep.tasks.items() if task.cell is not None]
    done = {name: _steps_done(sweep, task, outcomes[name]) for name, task in sweep.tasks.items()}
    total = sum(task.steps for task in sweep.tasks.values())
    states = {state: sum(outcome.state == state for outcome in cells) for state in ("done", "failed")}
    parts = [f"{states['done']} of {len(cells)} cells", f"{sum(done.values()):,} of {total:,} steps"]
    if states["failed"]:
        parts.insert(1, f"{states['failed']} failed")
    at_once = at_once or max(1, sum(outcome.state == "running" for outcome in outcomes.values()))
    if seconds := _seconds_left(sweep, outcomes, done):
        parts.append(f"about {duration(seconds / at_once)} left with {at_once} at a time")
    return ", ".join(parts)


def _seconds_left(sweep: Sweep, outcomes: dict[str, Outcome], done: dict[str, int]) -> float:
    """Of one process, from what a step of finished tasks took; 0 when nothing is left, or nothing to judge by."""

    def seconds_a_step(tasks: Iterable[Task]) -> float:
        finished = [task for task in tasks if outcomes[task.name].state == "done"]
        steps = sum(task.steps for task in finished)
        return sum(outcomes[task.name].seconds for task in finished) / steps if steps else 0.0

    every = list(sweep.tasks.values())
    overall, seconds = seconds_a_step(every), 0.0
    for is_cell in (False, True):
        tasks = [task for task in every if (task.cell is not None) == is_cell]
        unfinished = [task for task in tasks if outcomes[task.name].state not in ("done", "failed")]
        left = sum(task.steps - done[task.name] for task in unfinished)
        seconds += left * (seconds_a_step(tasks) or overall)
    return seconds


def _steps_done(sweep: Sweep, task: Task, outcome: Outcome) -> int:
    if outcome.state == "done":
        return task.steps
    folder = sweep.folder(task) / ("" if task.cell is not None else "aligned")
    last: Iterable[dict[str, int]] = (last_metrics(path) for path in folder.glob("stages/*/metrics.jsonl"))
    return sum(record.get("step", 0) for record in last)


def _line(sweep: Sweep, task: Task, outcome: Outcome) -> str:
    if outcome.state == "failed":
        return f"  {task.name}: {outcome.error}"
    where = f" on {outcome.host}, since {outcome.began}" if outcome.state == "running" else ""
    return f"  {task.name}: {_steps_done(sweep, task, outcome)} of {task.steps} steps{where}"


def saved_line(sweep: Sweep) -> str:
    """What sharing alignments spares."""
    found = saving(sweep)
    if not found["steps"]:
        return ""
    time = f", about {duration(found['seconds'])}" if found["seconds"] else ""
    return (
        f"Alignments: {found['alignments']} for {found['students']} students, which spares "
        f"{found['steps']:,} steps{time}."
    )


def duration(seconds: float) -> str:
    """In words: 42 s, 12 min, 3 h 20 min."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
