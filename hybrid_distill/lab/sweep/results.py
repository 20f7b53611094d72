"""results.csv, one row a cell with all that was measured (docs/sweeps.md has the columns), and the state of a sweep."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import pandas as pd

from ...evaluation.evaluate import EvalResult
from ...io import Record, replacing
from ...locking import is_locked
from ...plan import HeadPlan
from ..reporting import markdown_table
from .grid import ALL
from .record import Outcome, Sweep, Task

FILE = "results.csv"
FIRST = ("cell", "state", "selection", "heads", "d_state", "seed", "layers_with_heads", "kv_heads")
LAST = ("steps", "tokens", "train_seconds", "dir", "error")
TEACHER = "teacher"
BEHIND = ("n_examples", "n_knowledge", "knowledge_chance", "n_text_tokens")


def write_results(sweep: Sweep) -> Path:
    """Write the table anew, whole or not at all: the teacher for each seed, then every cell, finished or not."""
    rows = [*_teacher_rows(sweep), *(_row(sweep, task) for task in sweep.tasks.values() if task.cell is not None)]
    figures = dict.fromkeys(name for row in rows for name in row if name not in FIRST + LAST)
    with replacing(sweep.out / FILE) as temporary:
        # As objects: a column of whole numbers stays one where a cell has none.
        pd.DataFrame(rows, columns=[*FIRST, *figures, *LAST], dtype=object).to_csv(temporary, index=False)
    return sweep.out / FILE


def _teacher_rows(sweep: Sweep) -> Iterable[Record]:
    for seed in dict.fromkeys(cell.seed for cell in sweep.cells):
        folder = sweep.out / "shared" / f"s{seed}"
        path = folder / "teacher" / "evaluation.json"
        if path.exists():
            name = {"cell": f"{TEACHER}-s{seed}", "state": "done", "selection": TEACHER, "seed": seed}
            yield {**name, **_figures(path), "dir": folder.relative_to(sweep.out).as_posix()}


def _row(sweep: Sweep, task: Task) -> Record:
    cell, outcome, folder = task.cell, sweep.outcome(task), sweep.folder(task)
    assert cell is not None
    row: Record = {
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
    last = [_last_metrics(path) for path in sorted((folder / "stages").glob("*/metrics.jsonl"))]
    spent = {"steps": "step", "tokens": "tokens", "train_seconds": "seconds"}
    row |= {name: round(sum(record.get(key, 0) for record in last), 3) for name, key in spent.items()}
    return row | _figures(folder / "evaluation.json")


def _figures(path: Path) -> dict[str, float]:
    """Read an evaluation and what stands behind it: questions, tokens, and what guessing gives."""
    result = EvalResult.load(path)
    behind = {name: getattr(result, name) for name in BEHIND}
    return {**result.figures(), **{name: value for name, value in behind.items() if value is not None}}


def _last_metrics(path: Path) -> Record:
    """Read the last whole line of a metrics.jsonl; empty when there is none yet."""
    for line in reversed(path.read_text().splitlines()):
        try:
            return json.loads(line)
        except ValueError:  # torn by a kill
            continue
    return {}


def status(out: Path) -> str:
    """Describe a sweep that runs, was stopped or is over. Raises ValueError where there is none."""
    sweep = Sweep(out)
    outcomes = sweep.outcomes()
    saved = sweep.saving()
    parts = [markdown_table(_seeds_done(sweep, outcomes)), progress(sweep, outcomes)]
    if saved["steps"]:
        served = f"{saved['alignments']} for {saved['students']} students"
        parts.append(f"Alignments: {served}, which spares {saved['steps']:,} steps.")
    for state in ("running", "stopped", "failed"):
        lines = [
            f"  {name}: {outcome.error or f'{_steps_done(sweep, task, outcome)} of {task.steps} steps'}"
            for name, task in sweep.tasks.items()
            if (outcome := outcomes[name]).state == state
        ]
        parts += ["\n".join([f"{state}:", *lines])] if lines else []
    if not is_locked(sweep.out) and any(outcome.state != "done" for outcome in outcomes.values()):
        parts.append("No sweep runs here; the command that began it continues it.")
    return "\n\n".join(parts)


def _seeds_done(sweep: Sweep, outcomes: Mapping[str, Outcome]) -> pd.DataFrame:
    """Count the finished seeds: a row for each way to keep heads, a column for each state size."""
    sizes = sorted({cell.d_state for cell in sweep.cells if cell.d_state is not None})
    rows: dict[str, dict[str, list[str]]] = {}
    for cell in sweep.cells:
        row = rows.setdefault(f"{cell.heads} heads" + (f", {cell.selection}" if cell.selection != "none" else ""), {})
        for size in [cell.d_state] if cell.d_state is not None else sizes or ["of any size"]:
            row.setdefault(f"state {size}", []).append(outcomes[cell.name].state)

    def count(states: list[str]) -> str:
        failed = states.count("failed")
        return f"{states.count('done')} of {len(states)}" + (f", {failed} failed" if failed else "")

    counted = [{"seeds done": way} | {size: count(states) for size, states in row.items()} for way, row in rows.items()]
    return pd.DataFrame(counted).fillna("")


def progress(sweep: Sweep, outcomes: Mapping[str, Outcome] | None = None, *, at_once: int | None = None) -> str:
    """Describe cells and steps done, and the time left, from what the tasks that are done took.

    ``at_once`` tasks run at a time, by default as many as run now.
    """
    outcomes = outcomes or sweep.outcomes()
    tasks = pd.DataFrame(
        [
            (task.cell is not None, task.steps, _steps_done(sweep, task, outcomes[name]), *outcomes[name])
            for name, task in sweep.tasks.items()
        ],
        columns=["is_cell", "steps", "steps_done", "state", "error", "seconds"],
    )
    states = tasks[tasks.is_cell].state.value_counts()
    parts = [f"{states.get('done', 0)} of {states.sum()} cells"]
    parts += [f"{states['failed']} failed"] if "failed" in states else []
    parts.append(f"{tasks.steps_done.sum():,} of {tasks.steps.sum():,} steps")
    done, left = tasks[tasks.state == "done"], tasks[~tasks.state.isin(["done", "failed"])]
    at_once = at_once or max(1, (tasks.state == "running").sum())
    if len(left) and done.steps.sum():
        seconds = (left.steps - left.steps_done).sum() * done.seconds.sum() / done.steps.sum()
        parts.append(f"about {duration(seconds / at_once)} left with {at_once} at a time")
    return ", ".join(parts)


def _steps_done(sweep: Sweep, task: Task, outcome: Outcome) -> int:
    if outcome.state == "done":
        return task.steps
    folder = sweep.folder(task) / ("" if task.cell is not None else "aligned")
    return sum(_last_metrics(path).get("step", 0) for path in folder.glob("stages/*/metrics.jsonl"))


def duration(seconds: float) -> str:
    """Format a time: 42 s, 12 min, 3 h 20 min."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
