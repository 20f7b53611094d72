"""One task of a sweep, carried out in this process: a cell as an ordinary run, or what cells share."""

from __future__ import annotations

import datetime
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import replace

from ...config import PlanConfig, RunConfig
from ...distributed import alone_in, connect, on_main_process
from ...pipeline import run_beside
from ...scoring import HeadScores
from ...train.loop import Interrupted
from .grid import ALL, Cell
from .record import Outcome, Sweep, Task
from .sharing import aligned_stage, alignment_run, seed_run, seeded

PATIENCE = 120.0
"""Seconds to wait for a process that still saves the same task, left over by a sweep that was stopped."""


def perform(sweep: Sweep, task: Task) -> Outcome:
    """Carry a task out, note how it ended, and say so. What it raises is noted as its failure.

    Raises only what stops a sweep: KeyboardInterrupt, and Interrupted after saving.
    """
    before, clock = sweep.outcome(task), time.monotonic()
    began = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")

    def note(state: str, error: str = "") -> Outcome:
        spent = before.seconds + time.monotonic() - clock
        outcome = Outcome(state, error, round(spent, 3), began, socket.gethostname())
        on_main_process(lambda: sweep.note(task, outcome))
        return outcome

    note("running")
    try:
        with alone_in(sweep.folder(task), patience=PATIENCE):
            _work(sweep, task)()
    except (Interrupted, KeyboardInterrupt):
        note("stopped")
        raise
    except Exception as error:
        if connect().is_main_process:
            _append_traceback(sweep, task)
        return note("failed", _one_line(error))
    return note("done")


def _work(sweep: Sweep, task: Task) -> Callable[[], object]:
    if task.cell is not None:
        cell = task.cell
        return lambda: run_beside(seed_run(sweep, cell.seed), cell_config(sweep, cell))
    if task.d_state is not None:
        run = alignment_run(sweep, task.seed, task.d_state)
        return lambda: run.aligned
    return lambda: _shared_measurements(sweep, task.seed)


def _shared_measurements(sweep: Sweep, seed: int) -> None:
    run = seed_run(sweep, seed)
    run.prepare()
    if sweep.needs_scores(seed):
        run.scores()
    run.evaluate_teacher()


def cell_config(sweep: Sweep, cell: Cell) -> RunConfig:
    """The config of a cell's run. Asks for the tasks that the cell comes after."""
    base = seeded(sweep, cell.seed)
    base = replace(
        base,
        name=cell.name,
        out=sweep.out / "cells" / cell.name,
        plan=_plan(sweep, cell),
        scoring=replace(base.scoring, file=base.out / "scores.json"),
    )
    if cell.d_state is None:
        return base
    if not sweep.share:
        return replace(base, student=replace(base.student, d_state=cell.d_state))
    aligned = aligned_stage(sweep, cell.seed, cell.d_state)
    return replace(
        base,
        student=replace(base.student, d_state=cell.d_state, aligned=aligned),
        stages=sweep.own_stages,
    )


def _plan(sweep: Sweep, cell: Cell) -> PlanConfig:
    if cell.selection in ("none", ALL):
        return PlanConfig("none" if cell.heads == 0 else "all", k=cell.heads)
    if cell.selection == "random":
        return PlanConfig("random", k=cell.heads, seed=cell.seed)
    if cell.selection == "layers":
        scores = HeadScores.load(seeded(sweep, cell.seed).out / "scores.json")
        return PlanConfig("layers", k=cell.heads, layers=best_layers(scores, cell.heads // scores.n_heads))
    if cell.selection == "restoration" and sweep.share:
        assert cell.d_state is not None
        run = alignment_run(sweep, cell.seed, cell.d_state)
        run.restoration_plan(cell.heads)
        return PlanConfig("file", k=cell.heads, file=run.restoration_path(cell.heads))
    return PlanConfig("top" if cell.selection == "top" else "restoration", k=cell.heads)


def best_layers(scores: HeadScores, n: int) -> tuple[int, ...]:
    """The ``n`` layers whose heads lose most accuracy together, equal ones by log-probability, in ascending order."""
    value = [table.nan_to_num(0.0).sum(1).tolist() for table in (scores.value_LH(), scores.logprob_drop_LH)]
    order = sorted(range(scores.n_layers), key=lambda layer: (-value[0][layer], -value[1][layer], layer))
    return tuple(sorted(order[:n]))


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"


def _append_traceback(sweep: Sweep, task: Task) -> None:
    with sweep.log_path(task).open("a") as file:
        file.write(traceback.format_exc())
