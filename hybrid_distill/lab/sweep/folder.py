"""The folder of a sweep: sweep.json says what it is for, a file for each task how it ended.

Tasks may run in other processes and on other machines. A task that has not ended runs while its folder is locked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...config import RunConfig, StageName, differences, from_record, to_json
from ...io import Record, read_json, write_json
from ...locking import is_locked
from ...pipeline import Run
from ...pipeline.folder import MAY_CHANGE, has_result
from ...provenance import versions
from .grid import ALL, Cell, Grid

FORMAT = "hybrid-distill/sweep/1"
FILE = "sweep.json"
NEEDS_SCORES = ("top", "layers")


class Outcome(NamedTuple):
    """State of a task: ``waiting``, ``running``, ``stopped``, ``done`` or ``failed``; how long its last start took."""

    state: str
    error: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Task:
    """A piece of work for one process: a cell, or what several cells share."""

    name: str
    seed: int
    folder: Path
    """Run directory that it fills."""
    leaves: tuple[Path, ...]
    """Files that are there when it is done."""
    d_state: int | None = None
    cell: Cell | None = None
    after: tuple[str, ...] = ()
    """Names of the tasks that must be done before."""
    steps: int = 0
    """Training steps."""

    @property
    def log_path(self) -> Path:
        """File for what it prints, if it has a process of its own, and for its traceback, if it fails."""
        return self.outcome_path.with_suffix(".log")

    @property
    def outcome_path(self) -> Path:
        """File that says how it ended; without one it may begin again."""
        return self.folder.parents[1] / "tasks" / f"{self.name}.json"

    def outcome(self) -> Outcome:
        """Return its state; one whose results were deleted is waiting again."""
        if self.outcome_path.exists():
            found = Outcome(**read_json(self.outcome_path))
            if found.state == "failed" or all(path.exists() for path in self.leaves):
                return found
        return Outcome("running" if is_locked(self.folder) else "stopped" if has_result(self.folder) else "waiting")

    def end(self, error: str = "", seconds: float = 0.0) -> None:
        """Write that it is done, or why it failed."""
        outcome = Outcome("failed" if error else "done", error, round(seconds, 3))
        write_json(self.outcome_path, outcome._asdict())


class Sweep:
    """A sweep's folder. Raises ValueError for a folder without one.

    ``out`` becomes absolute, and with it the paths in the configs of cells: they are the same for every process.
    """

    def __init__(self, out: Path) -> None:
        self.out = out.resolve()
        if not (out / FILE).is_file():
            raise ValueError(f"{out} is not the folder of a sweep: it has no {FILE}. Pass the --out of a sweep.")
        try:
            self.record = read_json(out / FILE)
            if self.record["format"] != FORMAT:
                raise ValueError(f"its format is {self.record['format']!r}, expected {FORMAT!r}")
            self.base: RunConfig = replace(from_record(self.record["config"]), out=self.out)
            self.share: bool = self.record["share_alignment"]
            fields = [field.name for field in dataclasses.fields(Cell)]
            self.cells = [Cell(**{name: cell[name] for name in fields}) for cell in self.record["cells"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{out / FILE} cannot be read ({error}). Pass the --out of a sweep.") from error

    @classmethod
    def open(cls, base: RunConfig, grid: Grid, cells: Sequence[Cell], *, share: bool, command: str = "") -> Sweep:
        """Begin the sweep in ``base.out``, or continue it; a sweep may grow, but not change.

        Raises ValueError naming what differs from the sweep that the folder holds.
        """
        if share and not any(stage.is_per_plan for stage in base.stage_configs):
            raise ValueError(
                f"the recipe's stages are {', '.join(base.stages)}; with a shared alignment nothing is left for the "
                "cells to do. Add distill, or pass --no-share."
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
            before = cls(base.out)
            if any(has_result(task.folder) for task in before.tasks.values()):
                _check_grows(before, record)
        (base.out / "tasks").mkdir(parents=True, exist_ok=True)
        write_json(base.out / FILE, record)
        sweep = cls(base.out)
        write_json(base.out / FILE, {**record, "saving": sweep.saving()})
        return sweep

    @cached_property
    def teacher(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Teacher and tokenizer, loaded once by a process that carries out several tasks."""
        return Run(self.base).teacher_and_tokenizer

    @property
    def own_stages(self) -> tuple[StageName, ...]:
        """Stages that every cell runs by itself."""
        stages = zip(self.base.stages, self.base.stage_configs)
        return tuple(name for name, stage in stages if stage.is_per_plan or not self.share)

    @cached_property
    def tasks(self) -> dict[str, Task]:
        """Tasks by name, each after those that it needs."""
        tasks: dict[str, Task] = {}
        steps = {name: stage.steps for name, stage in zip(self.base.stages, self.base.stage_configs)}
        own_steps = sum(steps[name] for name in self.own_stages)
        for cell in self.cells:
            seed, shared = f"s{cell.seed}", self.out / "shared"
            ranked = any(other.seed == cell.seed and other.selection in NEEDS_SCORES for other in self.cells)
            measured = ("teacher/evaluation.json", *(["scores.json"] if ranked else []))
            tasks.setdefault(
                seed, Task(seed, cell.seed, shared / seed, tuple(shared / seed / name for name in measured))
            )
            after = (seed,)
            if cell.d_state is not None and self.share:
                name = f"n{cell.d_state}-s{cell.seed}"
                leaves, shared_steps = (shared / name / "aligned" / "stages",), sum(steps.values()) - own_steps
                tasks.setdefault(
                    name, Task(name, cell.seed, shared / name, leaves, cell.d_state, None, after, shared_steps)
                )
                after += (name,)
            folder, own = self.out / "cells" / cell.name, 0 if cell.selection == ALL else own_steps
            leaves = (folder / "evaluation.json",)
            tasks[cell.name] = Task(cell.name, cell.seed, folder, leaves, cell.d_state, cell, after, own)
        return tasks

    def saving(self) -> dict[str, int]:
        """Count alignments, the students that they serve, and the steps that those would have spent on their own."""
        trained = [task for task in self.tasks.values() if task.d_state is not None]
        steps = [task.steps for task in trained if task.cell is None]
        served = len(trained) - len(steps)
        return {"alignments": len(steps), "students": served, "steps": sum(steps[:1]) * (served - len(steps))}


def _check_grows(before: Sweep, now: Record) -> None:
    """Raise ValueError unless ``now`` asks for all that the sweep before asked for, in the same way."""
    old, place = before.record, before.out
    unused = from_record(now["config"]).unused_stages
    changed = differences(old["config"], now["config"], {*MAY_CHANGE, *unused})
    if old["share_alignment"] != now["share_alignment"]:
        changed.append(f"share ({old['share_alignment']} there, {now['share_alignment']} here)")
    if changed:
        raise ValueError(f"{place} holds another sweep: {', '.join(changed)}; use those settings, or another --out.")
    if missing := {cell.name for cell in before.cells} - {cell["name"] for cell in now["cells"]}:
        raise ValueError(
            f"{place} holds another sweep, with {', '.join(sorted(missing)[:5])}; pass a grid with these too to extend "
            "it, or use another --out."
        )
