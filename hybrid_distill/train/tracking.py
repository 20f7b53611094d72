"""Experiment trackers (tensorboard, trackio, wandb): all stages of a run report to one tracker run.

Everything stays on this machine unless the user has set up a key or a server (`check_trackers`).
"""

from __future__ import annotations

import importlib.util
import logging
import netrc
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ..distributed import from_main, make_accelerator
from ..io import Record, write_text
from ..validation import first_line

if TYPE_CHECKING:
    from accelerate import Accelerator

PROJECT = "hybrid-distill"
TRACKERS = ("tensorboard", "trackio", "wandb")
RUN_ID = "tracker-id.txt"
"""File in a run's folder with the identifier of its run in trackers."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrackedRun:
    """Tracker run that a stage reports to; a resumed stage reports to the same one."""

    folder: Path
    """Folder of the run, where trackers write their files; `tensorboard --logdir` takes a folder of
    such folders."""
    name: str
    group: str = ""
    first_step: int = 0
    """Steps of the stages before this one."""
    config: Record = field(default_factory=dict)
    """Settings that trackers show with the run."""

    @property
    def id(self) -> str:
        """Identifier of the run, the same for every stage and every start; drawn and saved on first use."""
        file = self.folder / RUN_ID
        if not file.exists():
            # Not a hash of the path: a new run in an old folder would resume the old run, and wandb ignores
            # all steps up to its last one.
            write_text(file, secrets.token_hex(6))
        return file.read_text()

    def accelerator(self, trackers: Sequence[str]) -> Accelerator:
        """Make an accelerator that logs to these trackers.

        Raises as `check_trackers` and `make_accelerator` do.
        """
        check_trackers(trackers)
        return make_accelerator(trackers=trackers, logging_dir=self.folder)

    def start(self, accelerator: Accelerator) -> None:
        """Begin, or resume, the run in each tracker that the accelerator has."""
        if not accelerator.log_with:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        # One process draws the identifier.
        options = from_main(self._options)
        try:
            accelerator.init_trackers(PROJECT, init_kwargs=options)
        except Exception as error:
            is_offline = os.environ.get("WANDB_MODE") in ("offline", "disabled")
            if "wandb" not in map(str, accelerator.log_with) or is_offline:
                raise
            # wandb.init needs its server, and a stage begins hours after the run was checked.
            log.warning(
                "wandb cannot begin a run (%s); its files stay in %s, `wandb sync` uploads them",
                first_line(error),
                self.folder / "wandb",
            )
            _go_offline()
            accelerator.init_trackers(PROJECT, init_kwargs=options)

    def _options(self) -> dict[str, dict[str, Any]]:
        """Return the arguments of each tracker's init.

        tensorboard has none: it would log a config as an extra run, named by the time.
        """
        common = {"group": self.group or None, "config": dict(self.config), "resume": "allow"}
        wandb = {**common, "name": self.name, "id": self.id, "dir": str(self.folder)}
        # trackio identifies runs only by name.
        trackio = {**common, "name": f"{self.name}-{self.id[:6]}"}
        return {"wandb": wandb, "trackio": trackio}

    def log(
        self, accelerator: Accelerator, kind: str, values: Mapping[str, object], step: int
    ) -> None:
        """Log numbers of a stage, or of the evaluation, as ``KIND/name``.

        ``step`` counts from this stage's start.
        """
        # One tracker run has the steps of all stages: wandb refuses steps that go back.
        named = {f"{kind}/{name}": value for name, value in values.items()}
        accelerator.log(named, step=self.first_step + step)


def log_figures(trackers: Sequence[str], tracked: TrackedRun, figures: Mapping[str, float]) -> None:
    """Log evaluation results after the last stage of a run, and after earlier evaluations."""
    accelerator = tracked.accelerator(trackers)
    tracked.start(accelerator)
    step = 1
    for tracker in accelerator.trackers:
        # wandb ignores steps that it already has: those of the last stage, and of an earlier evaluation.
        if tracker.name == "wandb":
            step = max(step, tracker.tracker.step - tracked.first_step)
    tracked.log(accelerator, "evaluation", figures, step)
    finish_trackers(accelerator)


def finish_trackers(accelerator: Accelerator) -> None:
    """Write what trackers hold.

    Unlike `Accelerator.end_training`, leave the process group to the next stage.
    """
    for tracker in accelerator.trackers:
        tracker.finish()


def check_trackers(trackers: Sequence[str]) -> None:
    """Raise ValueError for a tracker that is unknown or not installed.

    Without a key, switch wandb to offline mode.
    """
    for name in trackers:
        if name not in TRACKERS:
            raise ValueError(f"tracker {name!r} is unknown; pass one of {', '.join(TRACKERS)}.")
        if importlib.util.find_spec(name) is None:
            raise ValueError(
                f"tracker {name!r} is not installed; run `pip install {name}`, or leave it out: "
                "`--trackers` without a name writes metrics.jsonl alone."
            )
    if "wandb" in trackers and not _has_wandb_key():
        # Without a key, wandb.init asks for one on a terminal, and raises UsageError anywhere else.
        os.environ.setdefault("WANDB_MODE", "offline")


def _has_wandb_key() -> bool:
    """Check whether the environment or `wandb login` provides a key for the server in use."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    server = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).netloc
    try:
        return netrc.netrc().authenticators(server) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _go_offline() -> None:
    """Make the next wandb run write files instead of calling its server."""
    import wandb

    os.environ["WANDB_MODE"] = "offline"
    # wandb's service goes on holding the identifier of a run that could not begin.
    wandb.teardown()
