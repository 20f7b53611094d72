"""Folder of a sweep: sweep.json defines the sweep, and one file per task records its outcome."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...config import EvaluationConfig, PlanConfig, RunConfig, from_record, to_json
from ...data import Pins, read_pins
from ...io import Record, check_out, differences, read_json, refused, write_json
from ...pipeline import RunInputs, RunPaths
from ...pipeline.folder import has_result, settings
from ...pipeline.run import alignment_of_all_heads
from ...provenance import versions
from ...train.config import StageConfig
from ...tunable import fixed_fields
from .grid import Cell, Grid
from .paths import SweepPaths
from .tasks import Task, tasks_of

FORMAT = "hybrid-distill/sweep/1"


@dataclass(frozen=True)
class Definition:
    """Sweep that the command requests, in the folder ``base.out``."""

    base: RunConfig
    """Run that the recipe describes; cells change its student."""
    grid: Grid
    cells: Sequence[Cell]
    share: bool
    """True if cells of a state size and seed share one alignment of all heads."""
    command: str = ""
    """Recipe and changes that the sweep was started with, for its report."""

    def check(self) -> None:
        """Raise ValueError if the sweep cannot run, or if its folder holds another one.

        A sweep in the folder may grow, but not change.
        """
        out = self.base.out
        check_out(out)
        is_aligned = any(cell.d_state for cell in self.cells)
        has_both = self.base.head_stages and self.base.student_stages
        if self.share and is_aligned and not has_both:
            raise ValueError(
                f"the recipe's stages are {', '.join(self.base.stage_names) or 'none'}, but a shared alignment needs a "
                "stage that aligns heads and one that trains students; list an Align() and a Distill(), or pass "
                "--no-share."
            )
        self._check_cells()
        if SweepPaths(out).record.exists():
            Sweep(out).check_grows(self)
        elif RunPaths(out).config.exists():
            raise ValueError(
                f"{out} holds a run, a model or an export, not a sweep; pass another --out."
            )

    def _check_cells(self) -> None:
        """Raise ValueError if the recipe's stages cannot align the heads of a cell; a cell would say so only after the
        teacher is measured and its heads are ranked."""
        # As cells do, which take their scores from another run.
        base = replace(self.base, scoring=replace(self.base.scoring, method="auto"))
        for cell in self.cells:
            if not cell.d_state:
                continue
            run = with_student(base, cell.d_state, cell.window)
            if self.share or cell.selection == "restoration":
                alignment_of_all_heads(run, run.out)
            if cell.selection == "restoration":
                replace(run, plan=PlanConfig("restoration", k=cell.heads))

    def record(self) -> Record:
        """Convert to JSON values, for sweep.json."""
        return {
            "format": FORMAT,
            "grid": {name: list(values) for name, values in asdict(self.grid).items()},
            "share_alignment": self.share,
            "command": self.command,
            "config": to_json(self.base),
            "versions": versions(),
            "cells": [{"name": cell.name, **asdict(cell)} for cell in self.cells],
        }


class Sweep:
    """Folder of a sweep. Raises ValueError for a folder without one."""

    def __init__(self, out: Path) -> None:
        # Cells name files of the sweep in their settings: another spelling of the folder must not change them.
        out = out.resolve()
        self.out = out
        self.paths = SweepPaths(out)
        path = self.paths.record
        if not path.is_file():
            raise ValueError(
                f"{out} is not the folder of a sweep: it has no {path.name}. Pass the --out of a sweep."
            )
        with refused(f"{path} cannot be read", "pass the --out of a sweep"):
            self.record = read_json(path)
            if self.record["format"] != FORMAT:
                raise ValueError(f"its format is {self.record['format']!r}, expected {FORMAT!r}")
            # The folder may have moved since.
            self.base: RunConfig = replace(from_record(self.record["config"]), out=out)
            self.share: bool = self.record["share_alignment"]
            self.cells: list[Cell] = []
            for cell in self.record["cells"]:
                axes = {field.name: cell[field.name] for field in fields(Cell)}
                self.cells.append(Cell(**axes))

    @classmethod
    def open(cls, definition: Definition) -> Sweep:
        """Start a sweep in its folder, or resume it there. Raises ValueError as `Definition.check` does."""
        definition.check()
        out = definition.base.out
        paths = SweepPaths(out)
        paths.tasks.mkdir(parents=True, exist_ok=True)
        write_json(paths.record, definition.record())
        # Read back: jobs in other processes work from the same file.
        sweep = cls(out)
        if max(sweep.record["grid"]["window"]):
            sweep._delete_obsolete_evaluations()
        return sweep

    def _delete_obsolete_evaluations(self) -> None:
        """Delete evaluations of the teacher from before the grid had windows: they lack the far questions."""
        distance = RunInputs(self._widest_run).evaluation_distance
        for task in self.tasks.values():
            evaluation = task.run.teacher_evaluation
            if task.kind != "teacher" or not evaluation.exists():
                continue
            if read_json(evaluation).get("distance") != distance:
                evaluation.unlink()

    def check_grows(self, definition: Definition) -> None:
        """Raise ValueError, naming the differences, unless a definition continues this sweep.

        It does if it has all cells, the same settings and the same far questions, or if nothing has run yet.
        """
        if not any(has_result(task.folder) for task in self.tasks.values()):
            return
        changed = differences(
            _settings(self.base, self.share), _settings(definition.base, definition.share)
        )
        wanted = {cell.name for cell in definition.cells}
        missing = sorted(cell.name for cell in self.cells if cell.name not in wanted)
        if missing and not changed:
            changed = [f"this grid lacks its cells {', '.join(missing[:5])}"]
        if changed:
            raise ValueError(
                f"{self.out} holds another sweep: {', '.join(changed)}; to continue or extend it, pass its settings "
                "and all values of its grid, or pass another --out."
            )
        self._check_distance(definition)

    def _check_distance(self, definition: Definition) -> None:
        """Raise ValueError if a wider window would move the far questions, which finished cells have answered."""
        wider = widest(definition.base, definition.grid.d_state, definition.grid.window)
        if wider.student.window == self._widest_run.student.window:
            return
        # Without the teacher's weights, for this is also a dry run's check.
        before = RunInputs(self._widest_run).evaluation_distance
        after = RunInputs(wider).evaluation_distance
        # Cells without windows were asked none.
        if before not in (0, after):
            raise ValueError(
                f"--window {wider.student.window} would move the far questions from {before} to {after} words, but "
                f"finished cells in {self.out} have answered them at {before}; pass another --out. To add windows "
                f"later, start that sweep with --set evaluation.distance={after}."
            )

    @cached_property
    def teacher(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Teacher and tokenizer, loaded once by a process that runs several tasks."""
        return RunInputs(self.base).teacher_and_tokenizer

    @cached_property
    def evaluation(self) -> EvaluationConfig:
        """Evaluation of every cell: one distance for all far dictionaries, beyond the largest window of the grid."""
        inputs = RunInputs(self._widest_run, self.teacher)
        return replace(self.base.evaluation, distance=inputs.evaluation_distance)

    @cached_property
    def pins(self) -> Pins:
        """Commits of the sources on the hub, as resolved by the command that started the sweep."""
        return read_pins(self.paths.sources)

    @cached_property
    def _widest_run(self) -> RunConfig:
        """Run of the cell with the largest state and window: it has every stage that any cell has."""
        grid = self.record["grid"]
        return widest(self.base, grid["d_state"], grid["window"]).resolved()

    @property
    def own_stages(self) -> tuple[StageConfig, ...]:
        """Stages that every cell runs by itself."""
        return self._widest_run.student_stages if self.share else self._widest_run.stages

    @property
    def ranks_by_attribution(self) -> bool:
        """True if heads of cells with a window are ranked by attribution, for that window."""
        window = max(self.record["grid"]["window"])
        if not window or self.base.scoring.file is not None:
            return False
        return with_student(self.base, self.base.student.d_state, window).ranks_by_attribution

    def scores_of(self, cell: Cell) -> Path:
        """Return the file of scores that rank the heads of a cell."""
        if self.ranks_by_attribution and cell.window:
            return self.paths.attribution(cell.window, cell.seed).scores
        return self.paths.of_seed(cell.seed).scores

    @cached_property
    def tasks(self) -> dict[str, Task]:
        """Tasks by name, each after those that it needs."""
        return tasks_of(
            self.paths,
            self.cells,
            share=self.share,
            ranks_by_attribution=self.ranks_by_attribution,
            own_steps=sum(stage.steps for stage in self.own_stages),
            shared_stages=self._widest_run.head_stages,
        )


def with_student(run: RunConfig, d_state: int, window: int) -> RunConfig:
    """Return a run whose student has another state and window; without a window, it has no sinks."""
    sinks = min(run.student.sinks, window)
    student = replace(run.student, d_state=d_state, window=window, sinks=sinks)
    return replace(run, student=student)


def widest(base: RunConfig, d_state: Sequence[int], window: Sequence[int]) -> RunConfig:
    """Return the run of the cell with the largest state and window of a grid."""
    return with_student(base, max(d_state), max(window))


def _settings(base: RunConfig, share: bool) -> Record:
    """Return all settings of a sweep, its evaluation included, that may not change when it resumes."""
    run_settings = settings(base, base.stage_names)
    # The grid's, which may grow.
    del run_settings["student"]["window"]
    return {"share": share, "evaluation": fixed_fields(base.evaluation), **run_settings}
