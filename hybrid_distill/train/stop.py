"""Signals that ask a stage to stop after the step at hand."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

# A terminal's Ctrl+C, what torchrun and SLURM send to end a job, and what SLURM can send before
# preemption.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
SAME_REQUEST_S = 5.0
"""Seconds within which several stop signals count as one."""


class Interrupted(Exception):
    """A stage was asked to stop (SIGINT, SIGTERM or SIGUSR1) and has saved its state or result."""

    def __init__(self, message: str, *, number: int | None = None) -> None:
        super().__init__(message)
        self.number = number
        """Signal that asked this process; None if another process of the launch was asked."""


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGUSR1 outside of training: it ends a program as Ctrl-C does."""


def is_ctrl_c(stop: Interrupted | KeyboardInterrupt) -> bool:
    """Check whether a user stopped the program from the keyboard, not a launcher or a cluster."""
    if isinstance(stop, Interrupted):
        return stop.number == signal.SIGINT
    return not isinstance(stop, Terminated)


@contextmanager
def stop_requests() -> Iterator[Callable[[], int | None]]:
    """Yield a function that returns which of `STOP_SIGNALS` arrived first; None before.

    A later repeat has its usual effect. A repeat within `SAME_REQUEST_S` does not: torchrun
    forwards signals that a terminal or SLURM sent to all anyway.
    """
    requested_at: float | None = None
    requested: int | None = None
    handlers: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def request(number: int, frame: FrameType | None) -> None:
        nonlocal requested_at, requested
        now = time.monotonic()
        if requested_at is None:
            requested_at = now
            requested = number
        elif now - requested_at > SAME_REQUEST_S:
            signal.signal(number, handlers[number])
            signal.raise_signal(number)

    # Python refuses signal handlers elsewhere.
    if threading.current_thread() is threading.main_thread():
        for number in STOP_SIGNALS:
            handlers[number] = signal.signal(number, request)
    try:
        yield lambda: requested
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
