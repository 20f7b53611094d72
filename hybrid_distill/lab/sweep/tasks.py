"""Tasks of a sweep: pieces of work for one process, each with a file that records how it ended.

Tasks may run in other processes and on other machines. A task without an outcome is running if
its folder is locked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from ...io import read_json, write_json
from ...locking import is_locked
from ...pipeline import RunPaths
from ...pipeline.folder import has_result
from ...train.config import StageConfig
from ...train.result import MANIFEST
from .grid import ALL, Cell
from .paths import SweepPaths

NEEDS_SCORES = ("top", "layers")
"""Selections that rank heads by their scores."""
TaskKind = Literal["teacher", "ranking", "alignment", "cell"]
"""Work of a task. ``teacher``: evaluate the teacher and, if cells need them, score its heads by ablation. ``ranking``:
score its heads for a window. ``alignment``: align all heads of a state size and window. ``cell``: make a student."""


class Outcome(NamedTuple):
    """State of a task: ``waiting``, ``running``, ``stopped``, ``done`` or ``failed``; and
    seconds of its last try."""

    state: str
    error: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Task:
    """Piece of work for one process: a cell, or work that several cells share."""

    name: str
    kind: TaskKind
    seed: int
    sweep: SweepPaths
    run: RunPaths
    """Run whose folder it writes."""
    outputs: Sequence[Path]
    """Files that exist once it is done."""
    d_state: int | None = None
    window: int = 0
    cell: Cell | None = None
    after: Sequence[str] = ()
    """Names of the tasks that must be done first."""
    ablates_heads: bool = False
    """True if a task of kind ``teacher`` also scores heads."""
    steps: int = 0
    """Training steps."""

    @property
    def folder(self) -> Path:
        """Folder of its run; locked while it is worked on."""
        return self.run.out

    @property
    def log_path(self) -> Path:
        """File for its output, if it runs in a separate process, and for its traceback, if it
        fails."""
        return self.sweep.log(self.name)

    @property
    def outcome_path(self) -> Path:
        """File with its outcome; without one, it may start again."""
        return self.sweep.outcome(self.name)

    def outcome(self) -> Outcome:
        """Return its state; a task whose results were deleted is waiting again."""
        if self.outcome_path.exists():
            outcome = Outcome(**read_json(self.outcome_path))
            # A user deletes results to have them computed again.
            if outcome.state == "failed" or all(path.exists() for path in self.outputs):
                return outcome
        if is_locked(self.folder):
            return Outcome("running")
        return Outcome("stopped" if has_result(self.folder) else "waiting")

    def end(self, error: str = "", seconds: float = 0.0) -> None:
        """Record that it is done, or why it failed."""
        outcome = Outcome("failed" if error else "done", error, round(seconds, 3))
        write_json(self.outcome_path, outcome._asdict())


def tasks_of(
    sweep: SweepPaths,
    cells: Sequence[Cell],
    *,
    share: bool,
    ranks_by_attribution: bool,
    own_steps: int,
    shared_stages: Sequence[StageConfig],
) -> dict[str, Task]:
    """Return tasks by name, each after those that it needs.

    ``share``: cells take their recurrent heads from an alignment of their state size and seed.
    ``ranks_by_attribution``: heads of a cell with a window are ranked for this window. ``own_steps`` are the
    training steps of a cell, ``shared_stages`` the stages of an alignment.
    """
    ablated_seeds = set()
    for cell in cells:
        if cell.selection in NEEDS_SCORES and not (ranks_by_attribution and cell.window):
            ablated_seeds.add(cell.seed)
    tasks: dict[str, Task] = {}
    for cell in cells:
        teacher = _teacher_task(sweep, cell.seed, ablates_heads=cell.seed in ablated_seeds)
        needed = [teacher]
        if cell.selection in NEEDS_SCORES and ranks_by_attribution and cell.window:
            needed.append(_ranking_task(sweep, cell))
        # A window alone has no recurrent heads to align.
        if cell.d_state and share:
            needed.append(_alignment_task(sweep, cell, cell.d_state, shared_stages, [teacher.name]))
        for task in needed:
            tasks.setdefault(task.name, task)
        names = [task.name for task in needed]
        tasks[cell.name] = _cell_task(sweep, cell, own_steps, names)
    return tasks


def _teacher_task(sweep: SweepPaths, seed: int, *, ablates_heads: bool) -> Task:
    run = sweep.of_seed(seed)
    outputs = [run.teacher_evaluation]
    if ablates_heads:
        outputs.append(run.scores)
    return Task(run.out.name, "teacher", seed, sweep, run, outputs, ablates_heads=ablates_heads)


def _ranking_task(sweep: SweepPaths, cell: Cell) -> Task:
    run = sweep.attribution(cell.window, cell.seed)
    return Task(
        run.out.name,
        "ranking",
        cell.seed,
        sweep,
        run,
        outputs=[run.scores],
        window=cell.window,
    )


def _alignment_task(
    sweep: SweepPaths,
    cell: Cell,
    d_state: int,
    stages: Sequence[StageConfig],
    after: Sequence[str],
) -> Task:
    run = sweep.alignment(d_state, cell.window, cell.seed)
    folders = run.aligned.stage_folders(stages)
    return Task(
        run.out.name,
        "alignment",
        cell.seed,
        sweep,
        run,
        outputs=[folder / MANIFEST for folder in folders],
        d_state=d_state,
        window=cell.window,
        after=after,
        steps=sum(stage.steps for stage in stages),
    )


def _cell_task(sweep: SweepPaths, cell: Cell, steps: int, after: Sequence[str]) -> Task:
    run = sweep.cell(cell)
    return Task(
        cell.name,
        "cell",
        cell.seed,
        sweep,
        run,
        outputs=[run.evaluation],
        d_state=cell.d_state,
        cell=cell,
        after=after,
        # A student that keeps all heads is the teacher, which needs no training.
        steps=0 if cell.selection == ALL else steps,
    )
