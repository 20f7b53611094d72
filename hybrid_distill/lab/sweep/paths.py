"""Files of a sweep: the only place that knows their names. Those of its runs are in `RunPaths`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...pipeline import RunPaths
from .grid import Cell


@dataclass(frozen=True)
class SweepPaths:
    """Files in the folder of a sweep, whether they exist or not."""

    out: Path

    @property
    def record(self) -> Path:
        """Definition of the sweep."""
        return self.out / "sweep.json"

    @property
    def table(self) -> Path:
        """Figures of every cell, one row each."""
        return self.out / "results.csv"

    @property
    def sources(self) -> Path:
        """Commits of the data sources on the hub, which all cells read."""
        return RunPaths(self.out).sources

    @property
    def tasks(self) -> Path:
        """Folder of the tasks' outcomes and logs."""
        return self.out / "tasks"

    def outcome(self, task: str) -> Path:
        """Return the file with a task's outcome."""
        return self.tasks / f"{task}.json"

    def log(self, task: str) -> Path:
        """Return the file for a task's output and traceback."""
        return self.tasks / f"{task}.log"

    @property
    def jobs(self) -> Path:
        """Folder for submitit's files."""
        return self.out / "jobs"

    def cell(self, cell: Cell) -> RunPaths:
        """Return the run of a cell."""
        return RunPaths(self.out / "cells" / cell.name)

    def of_seed(self, seed: int) -> RunPaths:
        """Return the run that holds the teacher's evaluation, and the scores of its heads by ablation."""
        return RunPaths(self.out / "shared" / f"s{seed}")

    def attribution(self, window: int, seed: int) -> RunPaths:
        """Return the run that holds the scores of heads by what windows of this size take from them."""
        return RunPaths(self.out / "shared" / f"w{window}-s{seed}")

    def alignment(self, d_state: int, window: int, seed: int) -> RunPaths:
        """Return the run whose ``aligned`` holds an alignment of all heads, which serves every
        plan."""
        name = f"n{d_state}-w{window}-s{seed}" if window else f"n{d_state}-s{seed}"
        return RunPaths(self.out / "shared" / name)
