"""Dispatcher of ``hybrid-distill COMMAND``: each command is a file in this folder, imported only when it runs.

The file has a function ``command``, whose parameters are the flags, or ``main``, which takes the raw words.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import logging
import os
import select
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from .. import progress
from ..distributed import (
    LaunchRefused,
    OtherProcessError,
    UnsharedFolder,
    WorldError,
    disconnect,
    is_launched_main,
)
from ..locking import InUse

if TYPE_CHECKING:
    from ..config import RunConfig

COMMANDS = {
    "Rank heads": ("score",),
    "Get a teacher and text": ("import-gguf", "prepare-data", "generate-data", "cache-logits"),
    "Make students": ("recipes", "run"),
    "Measure": ("evaluate", "report"),
    "Pass on": ("export", "verify"),
    "Choose": ("memory", "sweep"),
    "Look inside": ("analyze",),
}
NAMES = tuple(name for group in COMMANDS.values() for name in group)
QUIET = "--quiet"
IN_EVERY_PROCESS = (InUse, LaunchRefused, UnsharedFolder)
"""Errors that all processes of a launch raise together; the main one prints them."""
LOADING_S = 1.0
"""Seconds of loading libraries after which a line reports it."""
_report_loading = cache(lambda: print("loading torch and transformers ...", file=sys.stderr, flush=True))


def main(argv: Sequence[str] | None = None) -> None:
    """Run the program ``hybrid-distill``."""
    words = list(sys.argv[1:] if argv is None else argv)
    command = next((word for word in words if word != QUIET), None)
    if command in (None, "-h", "--help"):
        exit_cleanly(lambda: print(_help()))
        sys.exit(0 if command else 2)
    if command == "--version":
        print(f"hybrid-distill {sys.modules['hybrid_distill'].__version__}")
        return
    exit_cleanly(lambda: _dispatch(*_without_quiet(words)))


def run_recipe(default: RunConfig, argv: Sequence[str] | None = None, description: str | None = None) -> None:
    """Run a recipe's config, overridden by flags, from start to report; called by the ``main`` of a recipe.

    ``--teacher tiny`` runs the recipe on the embedded teacher and corpus, scaled down to their size.
    """
    from .run import run_with_flags

    words = list(sys.argv[1:] if argv is None else argv)
    _mute()
    exit_cleanly(lambda: run_with_flags(default, _without_quiet(["run", *words])[1:], sys.argv[0], description))


def _without_quiet(words: list[str]) -> list[str]:
    """Apply and remove --quiet, which all commands share."""
    if QUIET in words:
        progress.quiet = True
        logging.getLogger("hybrid_distill").setLevel(logging.WARNING)
        logging.getLogger("hybrid_kernels").setLevel(logging.WARNING)
    return [word for word in words if word != QUIET]


def _dispatch(name: str, *words: str) -> None:
    if name not in NAMES:
        meant = "".join(f"did you mean {near!r}? " for near in difflib.get_close_matches(name, NAMES, n=1))
        raise ValueError(f"{name!r} is not a command; {meant}`hybrid-distill --help` lists them.")
    with _loading():
        module = importlib.import_module(f".{name.replace('-', '_')}", __package__)
        from .parsing import parse
    prog = f"hybrid-distill {name}"
    run = partial(module.main, list(words)) if hasattr(module, "main") else parse(module.command, words, prog)
    if name != "recipes" and words[:1] not in (("-h",), ("--help",)):
        with _loading():  # commands import these late, so that their help is fast
            importlib.import_module("hybrid_distill.pipeline")
            _mute()
    run()


def _mute() -> None:
    """Disable transformers' progress bars, except those of downloads."""
    from huggingface_hub.utils import enable_progress_bars
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    if not progress.quiet:
        enable_progress_bars()


def _help() -> str:
    lines = ["usage: hybrid-distill COMMAND [FLAGS]     (COMMAND --help lists its flags; --version)"]
    lines.append("--quiet leaves out progress; results are JSON files, whose path is printed")
    for title, names in COMMANDS.items():
        lines += ["", f"{title}:", *(f"  {name:<18}{_summary(name)}" for name in names)]
    return "\n".join(lines)


def _summary(name: str) -> str:
    """Read the first line of a command's docstring without importing its file."""
    tree = ast.parse(Path(__file__).with_name(f"{name.replace('-', '_')}.py").read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in ("command", "main")]
    return (ast.get_docstring(functions[-1]) or "").partition("\n")[0].partition(";")[0].rstrip(".")


@contextmanager
def _loading() -> Iterator[None]:
    """Wrap slow library imports: report a long wait, mute warnings, and exit at once on Ctrl-C."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # keep SIGINT ignored where it is, as in the background
        signal.signal(signal.SIGINT, _end)
    report = threading.Timer(LOADING_S, _report_loading)
    report.daemon = True
    if is_launched_main() and "torch" not in sys.modules and not progress.quiet:
        report.start()
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        report.cancel()
        signal.signal(signal.SIGINT, before)


def _end(number: int, frame: FrameType | None) -> None:
    """Exit the process: an exception raised during an import could be swallowed or printed by a library."""
    os.write(2, b"stopped; nothing was started.\n")
    os._exit(128 + number)


class _Stderr(logging.Handler):
    """Handler that writes to the current sys.stderr: above a progress line, not through it."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


def exit_cleanly(action: Callable[[], object]) -> None:
    """Run ``action``; errors that the user can fix end in one line and exit status 2, a saved interruption in status 0.

    If the variable ``HYBRID_DISTILL_FINISHED`` names a file, it is created only when all work is finished.
    """
    logging.basicConfig(level=logging.ERROR, format="%(message)s", handlers=[_Stderr()])
    for package in ("hybrid_distill", "hybrid_kernels"):  # the latter warns of a loss that runs on torch
        logging.getLogger(package).setLevel(logging.INFO if is_launched_main() else logging.ERROR)
    if not sys.warnoptions:  # users need this package's warnings, not those of libraries
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", module="hybrid_distill")
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.default_int_handler)
    try:
        try:
            action()
        finally:
            sys.stdout.flush()
        disconnect()
        if finished := os.environ.get("HYBRID_DISTILL_FINISHED"):
            Path(finished).touch()
    except KeyboardInterrupt:
        print("stopped; the same command continues from what was finished, or starts again.", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _lost_its_reader():
            sys.exit(128 + signal.SIGPIPE)
        status = _exit_status(error)
        if status is None:
            raise
        if is_launched_main() or not (status == 0 or isinstance(error, IN_EVERY_PROCESS)):
            print(f"error: {error}" if status else error, file=sys.stderr)
        if status:
            sys.exit(status)
        traceback.clear_frames(error.__traceback__)  # its frames hold the trained model; see `disconnect`
        disconnect()


def _lost_its_reader() -> bool:
    """Return whether the reader of stdout is gone, as with `| head`; if so, discard further output."""
    poll = select.poll()
    poll.register(sys.stdout)
    lost = any(event & select.POLLERR for _, event in poll.poll(0))
    if lost:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return lost


def _exit_status(error: Exception) -> int | None:
    """Return the exit status of an error; None for a bug."""
    if isinstance(error, (ValueError, OSError, WorldError, OtherProcessError)):
        return 2
    from ..export import ExportError
    from ..train.loop import Diverged
    from ..train.stop import Interrupted

    return 0 if isinstance(error, Interrupted) else 2 if isinstance(error, (ExportError, Diverged)) else None
