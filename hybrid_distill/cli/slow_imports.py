"""Slow imports of libraries: reported when they take long, without their warnings, and ended by
Ctrl-C at once."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType

from .. import progress
from ..distributed import is_launched_main

NOTICE = "loading torch and transformers ..."
REPORT_AFTER_S = 1.0
"""Seconds of loading libraries after which a line reports it."""


@contextmanager
def loading() -> Iterator[None]:
    """Wrap slow library imports: report a long wait, mute warnings, and exit at once on Ctrl-C."""
    handler = signal.getsignal(signal.SIGINT)
    # Where SIGINT is ignored, as in the background, it stays so.
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit_process)
    report = threading.Timer(REPORT_AFTER_S, _report_once)
    report.daemon = True
    if is_launched_main() and "torch" not in sys.modules and not progress.quiet:
        report.start()
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        report.cancel()
        signal.signal(signal.SIGINT, handler)


@cache
def _report_once() -> None:
    print(NOTICE, file=sys.stderr, flush=True)


def _exit_process(number: int, frame: FrameType | None) -> None:
    """Exit the process: an exception raised during an import could be swallowed or printed by a
    library."""
    os.write(2, b"stopped; nothing was started.\n")
    os._exit(128 + number)


def mute_progress_bars() -> None:
    """Disable transformers' progress bars, except those of downloads."""
    from huggingface_hub.utils import enable_progress_bars
    from transformers.utils.logging import disable_progress_bar

    # It disables the hub's bars too.
    disable_progress_bar()
    if not progress.quiet:
        enable_progress_bars()
