"""Trackers (tensorboard, trackio, wandb): one of their runs for one of ours, whatever its stages.

Everything stays on this machine unless the user has a key or a server set up (`distributed.check_trackers`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from accelerate import Accelerator

from ..distributed import make_accelerator
from ..io import Record

PROJECT = "hybrid-distill"


@dataclass(frozen=True)
class TrackedRun:
    """The run of a tracker that a stage reports to; a resumed stage reports to the same one."""

    folder: Path
    """Folder of our run, where trackers write their files; `tensorboard --logdir` takes a folder of such folders."""
    name: str
    group: str = ""
    first_step: int = 0
    """Steps of the stages before this one."""
    config: Record = field(default_factory=dict)
    """Settings that trackers list beside the run."""

    @property
    def id(self) -> str:
        """Identifier of a run, the same for every stage and every start."""
        return hashlib.sha256(str(self.folder.resolve()).encode()).hexdigest()[:12]

    def start(self, accelerator: Accelerator) -> None:
        """Begin, or resume, the run in each tracker that the accelerator has."""
        if not accelerator.log_with:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        options = {"group": self.group or None, "config": dict(self.config), "resume": "allow"}
        # tensorboard would make of a config one more run, named by the time. trackio knows runs by name alone.
        kwargs = {
            "wandb": {**options, "name": self.name, "id": self.id, "dir": str(self.folder)},
            "trackio": {**options, "name": f"{self.name}-{self.id[:6]}"},
        }
        accelerator.init_trackers(PROJECT, init_kwargs=kwargs)

    def log(self, accelerator: Accelerator, kind: str, values: Mapping[str, object], step: int) -> None:
        """Log numbers of a stage, or of the evaluation, as ``KIND/name``; ``step`` counts from this stage's start."""
        accelerator.log({f"{kind}/{name}": value for name, value in values.items()}, step=self.first_step + step)


def log_figures(trackers: Sequence[str], tracked: TrackedRun, figures: Mapping[str, float]) -> None:
    """Add the evaluation's results to a run whose stages are over, one step later: wandb ignores a step it has."""
    accelerator = make_accelerator(trackers=trackers, logging_dir=tracked.folder)
    tracked.start(accelerator)
    tracked.log(accelerator, "evaluation", figures, 1)
    for tracker in accelerator.trackers:
        tracker.finish()
