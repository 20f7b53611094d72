"""The folder of a sweep: sweep.json says what it is for, a file for each task how it ended.

Tasks may run in other processes and on other machines, so each writes its own `Outcome`; sweep.json repeats it. A task
that has not ended runs while its folder is locked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class Task:
    """A piece of work for one process: a cell, or what several cells share."""

    name: str
    seed: int
    d_state: int | None = None
    cell: Cell | None = None
    after: tuple[str, ...] = ()
    """Names of the tasks that must be done before."""
    steps: int = 0
    """Training steps."""


class Outcome(NamedTuple):
    """State of a task: ``waiting``, ``running``, ``stopped``, ``done`` or ``failed``; how long its last start took."""

    state: str
    error: str = ""
    seconds: float = 0.0


class Sweep:
    """A sweep's folder. Raises ValueError for a folder without one.

    ``out`` becomes absolute, and with it the paths in the configs of cells: they are the same for every process.
    """

    def __init__(self, out: Path) -> None:
        self.out = out = out.resolve()
        try:
            self.record = read_json(out / FILE)
            if self.record["format"] != FORMAT:
                raise ValueError(f"its format is {self.record['format']!r}, expected {FORMAT!r}")
            self.base: RunConfig = replace(from_record(self.record["config"]), out=out)
            self.share: bool = self.record["share_alignment"]
            fields = [field.name for field in dataclasses.fields(Cell)]
            self.cells = [Cell(**{name: cell[name] for name in fields}) for cell in self.record["cells"]]
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{out} holds no sweep ({error}); pass the --out of one.") from error

    @classmethod
    def open(cls, base: RunConfig, grid: Grid, cells: Sequence[Cell], *, share: bool) -> Sweep:
        """Begin the sweep in ``base.out``, or continue it; a sweep may grow, but not change.

        Raises ValueError naming what differs from the sweep that the folder holds.
        """
        out = base.out
        if share and not any(stage.is_per_plan for stage in base.stage_configs):
            raise ValueError(
                f"the recipe's stages are {', '.join(base.stages)}; with a shared alignment nothing is left for the "
                "cells to do. Add distill, or pass --no-share."
            )
        record = {
            "format": FORMAT,
            "grid": grid.axes(),
            "share_alignment": share,
            "config": to_json(base),
            "versions": versions(),
            "cells": [{"name": cell.name, **dataclasses.asdict(cell), "state": "waiting"} for cell in cells],
        }
        if (out / FILE).exists() and (before := cls(out)).has_result():
            _check_grows(before, record)
        (out / "tasks").mkdir(parents=True, exist_ok=True)
        write_json(out / FILE, record)
        sweep = cls(out)
        sweep.save()
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
        shared_steps = sum(steps.values()) - own_steps
        for cell in self.cells:
            needed = [Task(f"s{cell.seed}", cell.seed)]
            if cell.d_state is not None and self.share:
                name = f"n{cell.d_state}-s{cell.seed}"
                needed.append(Task(name, cell.seed, cell.d_state, after=(needed[0].name,), steps=shared_steps))
            for task in needed:
                tasks.setdefault(task.name, task)
            after, own = tuple(task.name for task in needed), 0 if cell.selection == ALL else own_steps
            tasks[cell.name] = Task(cell.name, cell.seed, cell.d_state, cell, after, own)
        return tasks

    def folder(self, task: Task) -> Path:
        """Return the run directory that a task fills."""
        return self.out / ("shared" if task.cell is None else "cells") / task.name

    def needs_scores(self, seed: int) -> bool:
        """Return whether a cell of this seed is planned by the scores of heads."""
        return any(cell.seed == seed and cell.selection in NEEDS_SCORES for cell in self.cells)

    def log_path(self, task: Task) -> Path:
        """Return where a task prints to, if it has a process of its own, and its traceback goes, if it fails."""
        return self.out / "tasks" / f"{task.name}.log"

    def outcome_path(self, task: Task) -> Path:
        """Return the file that says how a task ended."""
        return self.out / "tasks" / f"{task.name}.json"

    def outcome(self, task: Task) -> Outcome:
        """Return the state of a task; one whose results were deleted is waiting again."""
        folder, path = self.folder(task), self.outcome_path(task)
        if path.exists():
            found = read_json(path)
            has_results = all(path.exists() for path in self.results(task))
            if found["state"] == "failed" or (found["state"] == "done" and has_results):
                return Outcome(found["state"], found["error"], found["seconds"])
        return Outcome("running" if is_locked(folder) else "stopped" if has_result(folder) else "waiting")

    def outcomes(self) -> dict[str, Outcome]:
        """Return the state of every task, by name."""
        return {name: self.outcome(task) for name, task in self.tasks.items()}

    def end(self, task: Task, error: str = "", seconds: float = 0.0) -> None:
        """Write that a task is done, or why it failed."""
        outcome = Outcome("failed" if error else "done", error, round(seconds, 3))
        write_json(self.outcome_path(task), outcome._asdict())

    def forget(self, task: Task) -> None:
        """Let a task begin again; what its folder holds is kept."""
        self.outcome_path(task).unlink(missing_ok=True)

    def results(self, task: Task) -> list[Path]:
        """Return what a finished task has left."""
        folder = self.folder(task)
        if task.cell is not None:
            return [folder / "evaluation.json"]
        if task.d_state is not None:
            return [folder / "aligned" / "stages"]
        scores = [folder / "scores.json"] if self.needs_scores(task.seed) else []
        return [folder / "teacher" / "evaluation.json", *scores]

    def has_result(self) -> bool:
        """Return whether a task has left anything that another sweep would lose."""
        return any(has_result(self.folder(task)) for task in self.tasks.values())

    def saving(self) -> dict[str, int]:
        """Count alignments, the students that they serve, and the steps that those would have spent on their own."""
        trained = [task for task in self.tasks.values() if task.d_state is not None]
        steps = [task.steps for task in trained if task.cell is None]
        served = len(trained) - len(steps)
        return {"alignments": len(steps), "students": served, "steps": sum(steps[:1]) * (served - len(steps))}

    def save(self) -> None:
        """Write sweep.json with the state of every cell."""
        for cell in self.record["cells"]:
            cell.pop("error", None)
            cell["state"], error, _ = self.outcome(self.tasks[cell["name"]])
            cell |= {"error": error} if error else {}
        write_json(self.out / FILE, self.record)


def _check_grows(before: Sweep, now: Record) -> None:
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
        f"{name} {', '.join(str(value) for value in values if value not in now['grid'][name])}"
        for name, values in old["grid"].items()
        if set(values) - set(now["grid"][name])
    ]
    raise ValueError(
        f"{place} holds another sweep, with {' and '.join(missing)}; pass these too to extend it, or use another --out."
    )
