"""Signals that ask a stage to stop after the step at hand."""

from __future__ import annotations

import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

# A terminal's Ctrl+C, what torchrun and SLURM send to end a job, what SLURM can send before
# preemption, and the end of a session.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
SAME_REQUEST_S = 5.0
"""Seconds within which several stop signals count as one."""


class Interrupted(Exception):
    """A stage was asked to stop by one of `STOP_SIGNALS` and has saved its state or result."""

    def __init__(self, message: str, *, number: int | None = None) -> None:
        super().__init__(message)
        self.number = number
        """Signal that asked this process; None if another process of the launch was asked."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, SIGUSR1 or SIGHUP outside of training: it ends a program as Ctrl-C does."""


def is_ctrl_c(stop: Interrupted | KeyboardInterrupt) -> bool:
    """Check whether a user stopped the program from the keyboard, not a launcher or a cluster."""
    if isinstance(stop, Interrupted):
        return stop.number == signal.SIGINT
    return not isinstance(stop, Terminated)


def to_handle(numbers: Sequence[signal.Signals]) -> list[signal.Signals]:
    """Return the signals that a program may handle: not SIGHUP under ``nohup``, which ignores it."""
    handled = []
    for number in numbers:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            handled.append(number)
    return handled


def outlive_session() -> None:
    """Prepare for saving after SIGHUP: ignore repeats, and discard what would be printed."""
    # A shell passes SIGHUP on, and when it ends, the kernel sends another one.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):
        # Writing to a terminal that is gone is an error, and so is a pipe whose reader, such as `tee`, ended too.
        # A program may have been started without an output.
        with suppress(OSError):
            if not stat.S_ISREG(os.fstat(output).st_mode):
                os.dup2(nowhere, output)
    os.close(nowhere)


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
        if number == signal.SIGHUP:
            outlive_session()
        if requested_at is None:
            requested_at = now
            requested = number
        elif now - requested_at > SAME_REQUEST_S:
            signal.signal(number, handlers[number])
            signal.raise_signal(number)

    # Python refuses signal handlers elsewhere.
    if threading.current_thread() is threading.main_thread():
        for number in to_handle(STOP_SIGNALS):
            handlers[number] = signal.signal(number, request)
    try:
        yield lambda: requested
    finally:
        for number, handler in handlers.items():
            # After `outlive_session`, the kernel's SIGHUP is still to come.
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, handler)
