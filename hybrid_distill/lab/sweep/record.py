"""sweep.json: what a sweep's folder is for, and how far each of its tasks is.

The tasks say so themselves, each in a file of its own (`Outcome`), because they may run in other processes and on other
machines; sweep.json repeats it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...config import END_TO_END, RunConfig, differences, from_record, to_json
from ...io import write_json
from ...pipeline import MAY_CHANGE, Run, has_result
from ...provenance import versions
from .grid import ALL, Cell, Grid

FORMAT = "hybrid-distill/sweep/1"
FILE = "sweep.json"
NEEDS_SCORES = ("top", "layers")


@dataclass(frozen=True)
class Task:
    """A piece of work that one process carries out: a cell, or what several of them share."""

    name: str
    seed: int
    d_state: int | None = None
    cell: Cell | None = None
    after: tuple[str, ...] = ()
    """Names of the tasks that must be done before."""
    steps: int = 0
    """Of training."""


@dataclass(frozen=True)
class Outcome:
    """How a task stands: ``waiting``, ``running``, ``done``, ``failed`` or ``stopped``."""

    state: str = "waiting"
    error: str = ""
    seconds: float = 0.0
    """Spent on it, by all starts that came to an end."""
    began: str = ""
    host: str = ""


class Sweep:
    """A sweep's folder. Raises ValueError for one that holds no sweep.

    ``out`` becomes absolute, and with it the paths in the configs of cells: they are the same for every process.
    """

    def __init__(self, out: Path) -> None:
        self.out = out = out.resolve()
        try:
            self.record: dict[str, Any] = json.loads((out / FILE).read_text())
            if self.record["format"] != FORMAT:
                raise ValueError(f"its format is {self.record['format']!r}, expected {FORMAT!r}")
            self.base: RunConfig = replace(from_record(self.record["config"]), out=out)
            self.share: bool = self.record["share_alignment"]
            fields = [field.name for field in dataclasses.fields(Cell)]
            self.cells = [Cell(**{name: cell[name] for name in fields}) for cell in self.record["cells"]]
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{out} holds no sweep ({error}); name the --out of one.") from error

    @classmethod
    def open(cls, base: RunConfig, grid: Grid, cells: Sequence[Cell], *, share: bool) -> Sweep:
        """The sweep in ``base.out``, begun now or before; a sweep may grow, but not change.

        Raises ValueError naming what differs from the sweep that the folder holds.
        """
        out = base.out
        if share and not _own_stages(base, share):
            raise ValueError(
                f"the recipe's stages are {', '.join(base.stages)}; with a shared alignment nothing is left for the "
                "cells to do. Add distill, or give --no-share."
            )
        record = {
            "format": FORMAT,
            "grid": {name: list(values) for name, values in grid.axes().items()},
            "share_alignment": share,
            "config": to_json(base),
            "versions": versions(),
            "cells": [{"name": cell.name, **dataclasses.asdict(cell), "state": "waiting"} for cell in cells],
        }
        if (out / FILE).exists() and (before := cls(out)).has_result():
            _check_grows(before, record)
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / FILE, record)
        sweep = cls(out)
        sweep.save()
        return sweep

    @cached_property
    def teacher(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Loaded once by a process that carries out several tasks."""
        return Run(self.base).teacher_and_tokenizer

    @property
    def own_stages(self) -> tuple[Any, ...]:
        """The stages that every cell runs by itself."""
        return _own_stages(self.base, self.share)

    @cached_property
    def tasks(self) -> dict[str, Task]:
        """By name, each after those that it needs."""
        tasks: dict[str, Task] = {}
        before_cells = self._steps(stage for stage in self.base.stages if stage not in self.own_stages)
        for cell in self.cells:
            needed = [Task(f"s{cell.seed}", cell.seed)]
            if cell.d_state is not None and self.share:
                name = alignment_name(cell.seed, cell.d_state)
                needed.append(Task(name, cell.seed, cell.d_state, after=(needed[0].name,), steps=before_cells))
            for task in needed:
                tasks.setdefault(task.name, task)
            steps = 0 if cell.selection == ALL else self._steps(self.own_stages)
            tasks[cell.name] = Task(cell.name, cell.seed, cell.d_state, cell, tuple(t.name for t in needed), steps)
        return tasks

    def _steps(self, stages: Any) -> int:
        return sum(getattr(self.base, stage).steps for stage in stages)

    def folder(self, task: Task) -> Path:
        """The run directory that a task fills."""
        return self.out / ("shared" if task.cell is None else "cells") / task.name

    def needs_scores(self, seed: int) -> bool:
        """Whether a cell of this seed is planned by the scores of heads."""
        return any(cell.seed == seed and cell.selection in NEEDS_SCORES for cell in self.cells)

    def log_path(self, task: Task) -> Path:
        """What a task printed, where it had a process of its own; else its traceback, if it failed."""
        return self.out / "tasks" / f"{task.name}.log"

    def outcome(self, task: Task) -> Outcome:
        """How the task stands by its own account; one whose results were deleted is waiting again."""
        try:
            found = Outcome(**json.loads((self.out / "tasks" / f"{task.name}.json").read_text()))
        except FileNotFoundError:
            return Outcome()
        results = self._results(task)
        return found if found.state != "done" or all(path.exists() for path in results) else Outcome()

    def note(self, task: Task, outcome: Outcome) -> None:
        """Write down how a task stands."""
        (self.out / "tasks").mkdir(exist_ok=True)
        write_json(self.out / "tasks" / f"{task.name}.json", dataclasses.asdict(outcome))

    def _results(self, task: Task) -> list[Path]:
        folder = self.folder(task)
        if task.cell is not None:
            return [folder / "evaluation.json"]
        if task.d_state is not None:
            return [folder / "aligned" / "stages"]
        scores = [folder / "scores.json"] if self.needs_scores(task.seed) else []
        return [folder / "teacher" / "evaluation.json", *scores]

    def has_result(self) -> bool:
        """Whether a task has left anything that another sweep would lose."""
        return any(has_result(self.folder(task)) for task in self.tasks.values())

    def save(self) -> None:
        """Write sweep.json with the state of every cell."""
        for cell in self.record["cells"]:
            outcome = self.outcome(self.tasks[cell["name"]])
            cell["state"] = outcome.state
            cell.pop("error", None)
            if outcome.error:
                cell["error"] = outcome.error
        write_json(self.out / FILE, self.record)


def alignment_name(seed: int, d_state: int) -> str:
    """Of the task and folder of a shared alignment."""
    return f"n{d_state}-s{seed}"


def _own_stages(base: RunConfig, share: bool) -> tuple[Any, ...]:
    return tuple(stage for stage in base.stages if stage in END_TO_END or not share)


def _check_grows(before: Sweep, now: Mapping[str, Any]) -> None:
    """Raise ValueError unless ``now`` asks for all that the sweep before asked for, in the same way."""
    old, place = before.record, before.out
    unused = from_record(now["config"]).unused_stages
    changed = differences(old["config"], now["config"], {*MAY_CHANGE, *unused})
    if old["share_alignment"] != now["share_alignment"]:
        changed.append(f"share ({old['share_alignment']} there, {now['share_alignment']} here)")
    if changed:
        raise ValueError(f"{place} holds another sweep: {', '.join(changed)}; use those settings, or another --out.")
    asked = {cell["name"] for cell in now["cells"]}
    if all(cell.name in asked for cell in before.cells):
        return
    missing = [
        f"{name} {', '.join(str(v) for v in values if v not in now['grid'][name])}"
        for name, values in old["grid"].items()
        if set(values) - set(now["grid"][name])
    ]
    raise ValueError(
        f"{place} holds another sweep, with {' and '.join(missing)}; name these too to extend it, or use another --out."
    )
