"""Dispatcher of ``hybrid-distill COMMAND``: each command is a file in this folder, imported only
when it runs.

The file has a function ``command``, whose parameters are the flags, or ``main``, which takes the
raw words.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import logging
import sys
from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from .. import progress
from ..distributed import LaunchRefused, is_launched_with_others
from .exits import exit_cleanly
from .slow_imports import loading, mute_progress_bars

if TYPE_CHECKING:
    from ..config import RunConfig

COMMANDS = {
    "Rank heads": ("score",),
    "Get a teacher and text": ("import-gguf", "prepare-data", "generate-data", "cache-logits"),
    "Make students": ("recipes", "run"),
    "Measure": ("evaluate", "report"),
    "Export": ("export", "verify"),
    "Compare budgets": ("memory", "sweep"),
    "Look inside": ("analyze",),
}
NAMES = tuple(chain.from_iterable(COMMANDS.values()))
IN_ONE_PROCESS = (
    "import-gguf",
    "prepare-data",
    "generate-data",
    "report",
    "export",
    "verify",
    "analyze",
)
"""Commands that several processes cannot share: each would do all of the work, or find the folder in use."""
HELP = ("-h", "--help")
QUIET = "--quiet"
USAGE = """\
usage: hybrid-distill COMMAND [FLAGS]     (COMMAND --help lists its flags; --version)
--quiet leaves out progress; results are JSON files, whose path is printed"""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the program ``hybrid-distill``."""
    words = list(sys.argv[1:] if argv is None else argv)
    command = next((word for word in words if word != QUIET), None)
    if command is None or command in HELP:
        exit_cleanly(lambda: print(_help()))
        sys.exit(2 if command is None else 0)
    if command == "--version":
        print(f"hybrid-distill {sys.modules['hybrid_distill'].__version__}")
        return
    exit_cleanly(lambda: _dispatch(*_without_quiet(words)))


def run_recipe(
    default: RunConfig, argv: Sequence[str] | None = None, description: str | None = None
) -> None:
    """Run a recipe's config, overridden by flags, from start to report; called by the ``main`` of a
    recipe.

    ``--teacher tiny`` runs the recipe on the embedded teacher and corpus, scaled down to their
    size.
    """
    from .run import run_with_flags

    flags = list(sys.argv[1:] if argv is None else argv)
    mute_progress_bars()
    exit_cleanly(lambda: run_with_flags(default, _without_quiet(flags), sys.argv[0], description))


def _without_quiet(words: list[str]) -> list[str]:
    """Apply and remove --quiet, which all commands share."""
    if QUIET in words:
        progress.quiet = True
        for package in ("hybrid_distill", "hybrid_kernels"):
            logging.getLogger(package).setLevel(logging.WARNING)
    return [word for word in words if word != QUIET]


def _dispatch(name: str, *words: str) -> None:
    if name not in NAMES:
        similar = difflib.get_close_matches(name, NAMES, n=1)
        question = f"did you mean {similar[0]!r}? " if similar else ""
        raise ValueError(
            f"{name!r} is not a command; {question}`hybrid-distill --help` lists them."
        )
    if name in IN_ONE_PROCESS and is_launched_with_others():
        raise LaunchRefused(
            f"{name} runs in one process, and a launcher has started several; run `hybrid-distill "
            f"{name} ...` without it."
        )
    with loading():
        # One command only: importing all of them would load torch for a bad flag or --help.
        module = importlib.import_module(f".{_file_name(name)}", __package__)
        from ..flags import parse
    # Flags first: bad ones are refused before torch is loaded.
    if hasattr(module, "main"):
        run = partial(module.main, list(words))
    else:
        run = parse(module.command, words, f"hybrid-distill {name}")
    asks_for_help = bool(words) and words[0] in HELP
    if name != "recipes" and not asks_for_help:
        # Commands import these late, so that their help is fast.
        with loading():
            importlib.import_module("hybrid_distill.pipeline")
            mute_progress_bars()
    run()


def _file_name(command: str) -> str:
    return command.replace("-", "_")


def _help() -> str:
    lines = [USAGE]
    for title, names in COMMANDS.items():
        lines += ["", f"{title}:"]
        for name in names:
            lines.append(f"  {name:<18}{_summary(name)}")
    return "\n".join(lines)


def _summary(name: str) -> str:
    """Read the first sentence of a command's docstring without importing its file."""
    path = Path(__file__).with_name(f"{_file_name(name)}.py")
    docstring = ""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name in ("command", "main"):
            docstring = ast.get_docstring(node) or ""
    first_paragraph, _, _ = docstring.partition("\n\n")
    summary, _, _ = first_paragraph.partition(";")
    return " ".join(summary.split()).rstrip(".")
