"""Profiler trace of a few training steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import profile, schedule

PROFILED = range(3, 6)
"""Steps in a trace; earlier steps compile and allocate."""


@contextmanager
def profiler(path: Path | None) -> Iterator[Callable[[], None]]:
    """Yield a function to call after every step.

    It writes a trace of the steps in `PROFILED` to ``path``, if given. Open the file with
    chrome://tracing or ui.perfetto.dev.
    """
    if path is None:
        yield lambda: None
        return

    def write(running: profile) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        running.export_chrome_trace(str(path))

    # Steps count from 1 in `PROFILED`. The one before them warms the profiler up.
    steps = schedule(
        wait=PROFILED.start - 2,
        warmup=1,
        active=len(PROFILED),
        repeat=1,
    )
    with profile(schedule=steps, on_trace_ready=write, record_shapes=True) as running:
        yield running.step
