"""How a command ends: one line and an exit status for what the user can fix, a traceback for a
bug."""

from __future__ import annotations

import atexit
import logging
import os
import select
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from ..distributed import (
    LaunchRefused,
    OtherProcessError,
    UnsharedFolder,
    WorldError,
    disconnect,
    is_launched_main,
    is_launched_with_others,
)
from ..locking import InUse
from ..train.stop import Interrupted, Terminated, is_ctrl_c, outlive_session, to_handle

IN_EVERY_PROCESS = (InUse, LaunchRefused, UnsharedFolder)
"""Errors that all processes of a launch raise together; the main one prints them."""
STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Signals by which a launcher, a cluster or the end of a session stops a process."""
CTRL_C = 128 + signal.SIGINT
"""Exit status after Ctrl-C, saved or not: with 0, a shell would go on with its next command."""
FINISHED = "HYBRID_DISTILL_FINISHED"
"""Variable that names a file to create when all work is finished; an interrupted run creates
none."""


class _Stderr(logging.Handler):
    """Handler that writes to the current sys.stderr: above a progress line, not through it."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


def exit_cleanly(action: Callable[[], object]) -> None:
    """Run ``action``; errors that the user can fix end in one line and exit status 2, a saved
    interruption in status 0, or 130 if it was Ctrl-C.

    If the variable ``HYBRID_DISTILL_FINISHED`` names a file, it is created only when all work is
    finished.
    """
    _open_missing_outputs()
    _show_only_own_messages()
    # As with Ctrl-C, what runs is saved first.
    for number in to_handle(STOPPING):
        signal.signal(number, _terminate)
    try:
        try:
            action()
        finally:
            # Here, and not at the interpreter's end, where a lost reader would print a traceback.
            sys.stdout.flush()
        _leave()
        if finished := os.environ.get(FINISHED):
            Path(finished).touch()
    except KeyboardInterrupt:
        print(
            "stopped; the same command continues from what was finished, or starts again.",
            file=sys.stderr,
        )
        sys.exit(CTRL_C)
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _stdout_has_no_reader():
            # Otherwise the interpreter flushes stdout once more at its end, and prints that this failed.
            _discard_stdout()
            sys.exit(128 + signal.SIGPIPE)
        status = _exit_status(error)
        if status is None:
            raise
        _report(error, status)
        if status:
            sys.exit(status)
        # The frames of the traceback hold the trained model, which `disconnect` needs freed.
        traceback.clear_frames(error.__traceback__)
        _leave()


def _open_missing_outputs() -> None:
    """Discard what would be printed to an output that the program was started without, as after ``>&-``."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            setattr(sys, name, os.fdopen(nowhere, "w", encoding="utf-8"))


def _terminate(number: int, frame: FrameType | None) -> None:
    if number == signal.SIGHUP:
        outlive_session()
    raise Terminated


def _leave() -> None:
    """Disconnect from the other processes, and ignore late signals while the interpreter ends."""
    disconnect()
    atexit.register(_ignore_stopping)


def _ignore_stopping() -> None:
    """Ignore late signals of a launcher: all work is done or saved.

    An ending interpreter restores their default, which would replace the exit status.
    """
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)


def _show_only_own_messages() -> None:
    """Set loggers and warnings: users need those of this package, not those of libraries."""
    logging.basicConfig(level=logging.ERROR, format="%(message)s", handlers=[_Stderr()])
    level = logging.INFO if is_launched_main() else logging.ERROR
    # The kernels warn of a loss that runs on torch.
    for package in ("hybrid_distill", "hybrid_kernels"):
        logging.getLogger(package).setLevel(level)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", module="hybrid_distill")


def _report(error: Exception, status: int) -> None:
    """Print an error on stderr, in one process of a launch if all of them have it."""
    raised_by_all = status == 0 or isinstance(error, IN_EVERY_PROCESS)
    if raised_by_all and not is_launched_main():
        return
    prefix = "" if isinstance(error, Interrupted) else "error: "
    print(f"{prefix}{error}", file=sys.stderr)


def _exit_status(error: Exception) -> int | None:
    """Return the exit status of an error; None for a bug."""
    if isinstance(error, Interrupted):
        # Not under a launcher, which takes any status but 0 for a failure of the process.
        if is_ctrl_c(error) and not is_launched_with_others():
            return CTRL_C
        return 0
    if isinstance(error, (ValueError, OSError, WorldError, OtherProcessError)):
        return 2
    # Imported late: both load torch, which a command that fails at once has not.
    from ..export import ExportError
    from ..train.loop import Diverged

    return 2 if isinstance(error, (ExportError, Diverged)) else None


def _stdout_has_no_reader() -> bool:
    """Check whether the reader of stdout is gone, as with `| head`."""
    poll = select.poll()
    poll.register(sys.stdout)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _discard_stdout() -> None:
    """Send what is still printed to stdout nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
