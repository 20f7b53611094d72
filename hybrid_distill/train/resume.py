"""Resuming a stage: identity of a run, and the states of random generators."""

from __future__ import annotations

from pathlib import Path

import torch

from ..io import Record, differences
from .checkpoint import Checkpoints
from .metrics import METRICS
from .result import MANIFEST, WEIGHTS
from .tracking import RUN_ID


class StageParentError(ValueError):
    """A stage's student, or the content of its folder, does not come from the expected parent."""


def check_same_run(ours: Record, stored: Record, path: Path) -> None:
    """Raise StageParentError or ValueError unless ``stored`` is the identity of this run.

    ``stored`` was read from ``path``.
    """
    if stored["parent"] != ours["parent"]:
        raise StageParentError(
            f"{path} started from the weights {stored['parent'][:16]}, but the student has "
            f"{ours['parent'][:16]}; load those weights, or start over with --resume never."
        )
    changed = [name for name in ("data", "seed") if stored[name] != ours[name]]
    changed += differences(stored["config"], ours["config"])
    if changed:
        raise ValueError(
            f"{path} holds a run with other settings: {', '.join(changed)}; use those settings, "
            "another --out, or begin again with --resume never."
        )


def clear(out: Path, checkpoints: Checkpoints) -> None:
    """Remove the files of an earlier start of the stage."""
    checkpoints.clear()
    for name in (MANIFEST, WEIGHTS, METRICS, RUN_ID):
        (out / name).unlink(missing_ok=True)


def rng_state() -> Record:
    """Return the states of torch's generators, the CPU's and the current GPU's, as JSON."""
    states = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {name: state.numpy().tobytes().hex() for name, state in states.items()}


def set_rng_state(record: Record) -> None:
    """Restore a state that `rng_state` returned."""
    torch.set_rng_state(_state_of(record["torch"]))
    if "cuda" in record and torch.cuda.is_available():
        torch.cuda.set_rng_state(_state_of(record["cuda"]))


def _state_of(text: str) -> torch.Tensor:
    # A bytearray: torch warns of tensors over memory that it must not write to.
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
