"""Stopping and resuming a stage: stop signals, random generators, and whether a checkpoint belongs to the same run."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch

from ..io import Record, differences, write_text
from . import checkpoint
from .checkpoint import Checkpoints

METRICS = "metrics.jsonl"
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # the last is SLURM's, before preemption
SAME_REQUEST_S = 5.0
"""Seconds within which several stop signals count as one."""


class Interrupted(Exception):
    """A stage was asked to stop (SIGINT, SIGTERM or SIGUSR1) and has saved its state, or its result."""


class StageParentError(ValueError):
    """A stage's student, or the content of its folder, does not come from the expected parent."""


@contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether one of `STOP_SIGNALS` arrived; a later repeat has its usual effect.

    A repeat within `SAME_REQUEST_S` does not: torchrun forwards signals that a terminal or SLURM sent to all anyway.
    """
    requested: float | None = None
    before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def request(number: int, frame: FrameType | None) -> None:
        nonlocal requested
        now = time.monotonic()
        if requested is None:
            requested = now
        elif now - requested > SAME_REQUEST_S:
            signal.signal(number, before[number])
            signal.raise_signal(number)

    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, request) for number in STOP_SIGNALS}
    try:
        yield lambda: requested is not None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def check_same_run(ours: Record, found: Record, place: Path) -> None:
    """Raise StageParentError or ValueError unless ``found``, read from ``place``, is the identity of this run."""
    if found["parent"] != ours["parent"]:
        raise StageParentError(
            f"{place} started from the weights {found['parent'][:16]}, but the student has "
            f"{ours['parent'][:16]}; load those weights, or start over with --resume never."
        )
    changed = [name for name in ("data", "seed") if found[name] != ours[name]]
    if changed := changed + differences(found["config"], ours["config"]):
        raise ValueError(
            f"{place} holds a run with other settings: {', '.join(changed)}; use those settings, another "
            "--out, or begin again with --resume never."
        )


def clear(out: Path, checkpoints: Checkpoints) -> None:
    """Remove the files of an earlier start of the stage."""
    checkpoints.clear()
    for name in (checkpoint.MANIFEST, checkpoint.WEIGHTS, METRICS):
        (out / name).unlink(missing_ok=True)


def cut_metrics(path: Path, step: int) -> None:
    """Drop the lines of steps that will be run again, and an incomplete last line."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError):
            continue
    write_text(path, "".join(kept))


def rng_state() -> Record:
    """Return the states of torch's generators, the CPU's and the current GPU's, as JSON."""
    states = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {name: state.numpy().tobytes().hex() for name, state in states.items()}


def set_rng_state(state: Record) -> None:
    """Restore a state that `rng_state` returned."""
    states = {name: torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8) for name, text in state.items()}
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
