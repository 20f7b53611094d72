"""Folder of a sweep: sweep.json defines the sweep, and one file per task records its outcome.

Tasks may run in other processes and on other machines. A task without an outcome is running if its folder is locked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...config import RunConfig, from_record, to_json
from ...data import Pins, read_pins
from ...io import Record, differences, read_json, refused, write_json
from ...locking import is_locked
from ...pipeline import RunInputs, RunPaths
from ...pipeline.folder import has_result, settings
from ...provenance import versions
from ...train.config import StageConfig
from ...tunable import fixed_fields
from .grid import ALL, Cell, Grid

FORMAT = "hybrid-distill/sweep/1"
FILE = "sweep.json"
NEEDS_SCORES = ("top", "layers")


class Outcome(NamedTuple):
    """State of a task: ``waiting``, ``running``, ``stopped``, ``done`` or ``failed``; and seconds of its last try."""

    state: str
    error: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Task:
    """Piece of work for one process: a cell, or work that several cells share."""

    name: str
    seed: int
    folder: Path
    """Run directory that it fills."""
    leaves: Sequence[Path]
    """Files that exist when it is done."""
    d_state: int | None = None
    cell: Cell | None = None
    after: Sequence[str] = ()
    """Names of the tasks that must be done first."""
    steps: int = 0
    """Training steps."""

    @property
    def log_path(self) -> Path:
        """File for its output, if it runs in a separate process, and for its traceback, if it fails."""
        return self.outcome_path.with_suffix(".log")

    @property
    def outcome_path(self) -> Path:
        """File with its outcome; without one, it may start again."""
        return self.folder.parents[1] / "tasks" / f"{self.name}.json"

    def outcome(self) -> Outcome:
        """Return its state; a task whose results were deleted is waiting again."""
        if self.outcome_path.exists():
            found = Outcome(**read_json(self.outcome_path))
            if found.state == "failed" or all(path.exists() for path in self.leaves):
                return found
        return Outcome("running" if is_locked(self.folder) else "stopped" if has_result(self.folder) else "waiting")

    def end(self, error: str = "", seconds: float = 0.0) -> None:
        """Record that it is done, or why it failed."""
        outcome = Outcome("failed" if error else "done", error, round(seconds, 3))
        write_json(self.outcome_path, outcome._asdict())


class Sweep:
    """Folder of a sweep. Raises ValueError for a folder without one."""

    def __init__(self, out: Path) -> None:
        self.out, path = out, out / FILE
        if not path.is_file():
            raise ValueError(f"{out} is not the folder of a sweep: it has no {FILE}. Pass the --out of a sweep.")
        with refused(f"{path} cannot be read", "pass the --out of a sweep"):
            self.record = read_json(path)
            if self.record["format"] != FORMAT:
                raise ValueError(f"its format is {self.record['format']!r}, expected {FORMAT!r}")
            self.base: RunConfig = replace(from_record(self.record["config"]), out=out)
            self.share: bool = self.record["share_alignment"]
            fields = ("selection", "heads", "d_state", "seed")
            self.cells = [Cell(*(cell[name] for name in fields)) for cell in self.record["cells"]]

    @classmethod
    def open(cls, base: RunConfig, grid: Grid, cells: Sequence[Cell], *, share: bool, command: str = "") -> Sweep:
        """Start or resume the sweep in ``base.out``; a sweep may grow, but not change.

        Raises ValueError naming the differences from the sweep that the folder holds.
        """
        if share and not (base.head_stages and base.student_stages):
            raise ValueError(
                f"the recipe's stages are {', '.join(base.stage_names) or 'none'}; with a shared alignment there must "
                "be one to share, and more for the cells to do. List an Align() and a Distill(), or pass --no-share."
            )
        record = {
            "format": FORMAT,
            "grid": {name: list(values) for name, values in asdict(grid).items()},
            "share_alignment": share,
            "command": command,
            "config": to_json(base),
            "versions": versions(),
            "cells": [{"name": cell.name, **asdict(cell)} for cell in cells],
        }
        if (base.out / FILE).exists():
            cls(base.out)._check_grows(base, record)
        (base.out / "tasks").mkdir(parents=True, exist_ok=True)
        write_json(base.out / FILE, record)
        return cls(base.out)

    def _check_grows(self, base: RunConfig, now: Record) -> None:
        """Raise ValueError unless ``now`` has all existing cells and the same settings, or nothing has run yet."""
        if not any(has_result(task.folder) for task in self.tasks.values()):
            return
        changed = differences(_settings(self.base, self.record), _settings(base, now))
        gone = {cell.name for cell in self.cells} - {cell["name"] for cell in now["cells"]}
        if changed or gone:
            shown = ", ".join(changed or ["with " + ", ".join(sorted(gone)[:5])])
            raise ValueError(
                f"{self.out} holds another sweep: {shown}; use those settings and a grid with all its values to "
                "continue or extend it, or another --out."
            )

    @cached_property
    def teacher(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Teacher and tokenizer, loaded once by a process that runs several tasks."""
        return RunInputs(self.base).teacher_and_tokenizer

    @cached_property
    def pins(self) -> Pins:
        """Commits of the sources on the hub, which the command that started the sweep has asked for."""
        return read_pins(RunPaths(self.out).sources)

    @property
    def own_stages(self) -> tuple[StageConfig, ...]:
        """Stages that every cell runs by itself."""
        return self.base.student_stages if self.share else self.base.stages

    @cached_property
    def tasks(self) -> dict[str, Task]:
        """Tasks by name, each after those that it needs."""
        tasks: dict[str, Task] = {}
        own_steps = sum(stage.steps for stage in self.own_stages)
        shared_steps = sum(stage.steps for stage in self.base.stages) - own_steps
        ranked = {cell.seed for cell in self.cells if cell.selection in NEEDS_SCORES}
        for cell in self.cells:
            name = f"s{cell.seed}"
            folder, after = self.out / "shared" / name, [name]
            leaves = [RunPaths(folder).teacher_evaluation]
            if cell.seed in ranked:
                leaves.append(RunPaths(folder).scores)
            tasks.setdefault(name, Task(name, cell.seed, folder, leaves))
            if cell.d_state is not None and self.share:
                name = f"n{cell.d_state}-s{cell.seed}"
                folder = self.out / "shared" / name
                leaves = [RunPaths(folder).aligned.stages]
                tasks.setdefault(name, Task(name, cell.seed, folder, leaves, cell.d_state, None, after, shared_steps))
                after = [*after, name]
            folder, own = self.out / "cells" / cell.name, 0 if cell.selection == ALL else own_steps
            leaves = [RunPaths(folder).evaluation]
            tasks[cell.name] = Task(cell.name, cell.seed, folder, leaves, cell.d_state, cell, after, own)
        return tasks


def _settings(base: RunConfig, record: Record) -> Record:
    """Return all settings of a sweep that may not change when it goes on, its evaluation included."""
    return {
        "share": record["share_alignment"],
        "evaluation": fixed_fields(base.evaluation),
        **settings(base, base.stage_names),
    }
