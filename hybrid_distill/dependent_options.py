"""Options that a run reads only beside another one: without it, they would change nothing."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TypeVar

from .config import RunConfig
from .train.config import Distill

T = TypeVar("T")

READERS: dict[str, tuple[Callable[[RunConfig], bool], str]] = {
    "align_share": (lambda run: run.tokens is not None, "--tokens"),
    "context": (lambda run: run.cache is not None, "--cache"),
    "show_config": (lambda run: run.dry_run, "--dry-run"),
    "plan.layers": (lambda run: run.plan.selection == "layers", "--plan.selection layers"),
    "plan.pairs": (lambda run: run.plan.selection == "pairs", "--plan.selection pairs"),
    "plan.file": (lambda run: run.plan.selection == "file", "--plan.selection file"),
    "scoring.distance": (lambda run: run.attributes, "--scoring.method attribution"),
    "scoring.other_weights": (lambda run: run.scoring.file is not None, "--scoring.file"),
}
"""Condition under which each option is read, and the flag that makes it true."""


def check_read(run: RunConfig, default: RunConfig) -> None:
    """Raise ValueError for an option that flags have changed although nothing in ``run`` reads it.

    ``default`` is the run before the flags: a recipe may set what only a flag makes it read.
    """
    for name, (is_read, reader) in READERS.items():
        option = attrgetter(name)
        if not is_read(run):
            _check_unchanged(name, option(run), option(default), reader)
    for stage in run.student_stages:
        before = default.stage(stage.name)
        assert isinstance(before, Distill)
        if stage.kind != "jsd":
            _check_unchanged(
                f"{stage.name}.beta", stage.beta, before.beta, f"--{stage.name}.kind jsd"
            )


def _check_unchanged(name: str, value: T, default: T, reader: str) -> None:
    if value == default:
        return
    flag = name.replace("_", "-")
    raise ValueError(
        f"{name} is {value!r}, which is read only with {reader}; pass that too, or leave --{flag} out."
    )
