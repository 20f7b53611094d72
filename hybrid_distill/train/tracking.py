"""Experiment trackers (tensorboard, trackio, wandb): all stages of a run report to one tracker run.

Everything stays on this machine unless the user has set up a key or a server (`distributed.check_trackers`).
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from accelerate import Accelerator

from ..distributed import make_accelerator
from ..io import Record
from ..validation import first_line

PROJECT = "hybrid-distill"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrackedRun:
    """Tracker run that a stage reports to; a resumed stage reports to the same one."""

    folder: Path
    """Folder of the run, where trackers write their files; `tensorboard --logdir` takes a folder of such folders."""
    name: str
    group: str = ""
    first_step: int = 0
    """Steps of the stages before this one."""
    config: Record = field(default_factory=dict)
    """Settings that trackers show with the run."""

    @property
    def id(self) -> str:
        """Identifier of the run, the same for every stage and every start."""
        return hashlib.sha256(str(self.folder.resolve()).encode()).hexdigest()[:12]

    def start(self, accelerator: Accelerator) -> None:
        """Begin, or resume, the run in each tracker that the accelerator has."""
        if not accelerator.log_with:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        options = {"group": self.group or None, "config": dict(self.config), "resume": "allow"}
        # tensorboard would log a config as an extra run, named by the time. trackio identifies runs only by name.
        kwargs = {
            "wandb": {**options, "name": self.name, "id": self.id, "dir": str(self.folder)},
            "trackio": {**options, "name": f"{self.name}-{self.id[:6]}"},
        }
        try:
            accelerator.init_trackers(PROJECT, init_kwargs=kwargs)
        except Exception as error:
            is_offline = os.environ.get("WANDB_MODE") in ("offline", "disabled")
            if "wandb" not in map(str, accelerator.log_with) or is_offline:
                raise
            import wandb

            # wandb.init needs its server, and a stage begins hours after the run was checked.
            log.warning(
                "wandb cannot begin a run (%s); its files stay in %s, `wandb sync` uploads them",
                first_line(error), self.folder / "wandb",
            )  # fmt: skip
            os.environ["WANDB_MODE"] = "offline"
            # Its service goes on holding the identifier of a run that could not begin.
            wandb.teardown()
            accelerator.init_trackers(PROJECT, init_kwargs=kwargs)

    def log(self, accelerator: Accelerator, kind: str, values: Mapping[str, object], step: int) -> None:
        """Log numbers of a stage, or of the evaluation, as ``KIND/name``; ``step`` counts from this stage's start."""
        accelerator.log({f"{kind}/{name}": value for name, value in values.items()}, step=self.first_step + step)


def log_figures(trackers: Sequence[str], tracked: TrackedRun, figures: Mapping[str, float]) -> None:
    """Log evaluation results after the last stage of a run, one step later: wandb ignores steps that it already has."""
    accelerator = make_accelerator(trackers=trackers, logging_dir=tracked.folder)
    tracked.start(accelerator)
    tracked.log(accelerator, "evaluation", figures, 1)
    for tracker in accelerator.trackers:
        tracker.finish()
