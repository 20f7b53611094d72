"""Options that a run reads only beside another one: without it, they would change nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import fields
from operator import attrgetter
from typing import TypeVar

from .config import RunConfig
from .train.config import Distill, StageConfig

T = TypeVar("T")


def _counts_units(run: RunConfig) -> bool:
    """Check whether the plan keeps ``k`` units. A cache sets them beside any selection."""
    return run.plan.selection in ("top", "restoration", "random") or run.cache is not None


def _counts_or_is_none(run: RunConfig) -> bool:
    """Check whether ``plan.k`` is read, or is the 0 that selection "none" implies."""
    return _counts_units(run) or (run.plan.selection == "none" and run.plan.k == 0)


def _scores(run: RunConfig) -> bool:
    """Check whether the run ranks heads itself."""
    return run.scoring.file is None


COUNTED = "with --plan.selection top, restoration or random"
UNSCORED = "without --scoring.file"
CONDITIONS: dict[str, tuple[Callable[[RunConfig], bool], str]] = {
    "align_share": (lambda run: run.tokens is not None, "with --tokens"),
    "context": (lambda run: run.cache is not None, "with --cache"),
    "show_config": (lambda run: run.dry_run, "with --dry-run"),
    "plan.k": (_counts_or_is_none, COUNTED),
    "plan.unit": (_counts_units, COUNTED),
    "plan.seed": (lambda run: run.plan.selection == "random", "with --plan.selection random"),
    "plan.layers": (lambda run: run.plan.selection == "layers", "with --plan.selection layers"),
    "plan.pairs": (lambda run: run.plan.selection == "pairs", "with --plan.selection pairs"),
    "plan.file": (lambda run: run.plan.selection == "file", "with --plan.selection file"),
    "scoring.method": (_scores, UNSCORED),
    "scoring.n_pairs": (attrgetter("probes_heads"), UNSCORED),
    "scoring.n_queries": (attrgetter("probes_heads"), UNSCORED),
    "scoring.n_examples": (_scores, UNSCORED),
    "scoring.batch_size": (_scores, UNSCORED),
    "scoring.n_control_texts": (_scores, UNSCORED),
    "scoring.min_accuracy": (_scores, UNSCORED),
    "scoring.restoration_examples": (
        lambda run: run.plan.restores,
        "with --plan.selection restoration",
    ),
    "scoring.distance": (lambda run: run.ranks_by_attribution, "with --scoring.method attribution"),
    "scoring.other_weights": (lambda run: run.scoring.file is not None, "with --scoring.file"),
}
"""Condition under which each option is read, as a check of the run and as flags."""


def check_read(run: RunConfig, default: RunConfig, unchecked: Collection[str] = ()) -> None:
    """Raise ValueError for an option that flags have changed although nothing in ``run`` reads it.

    ``default`` is the run before the flags: a recipe may set an option that has an effect only with a later flag.
    Options and stages in ``unchecked`` may be read by runs that are made of this one.
    """
    for name, (is_met, condition) in CONDITIONS.items():
        option = attrgetter(name)
        if name not in unchecked and not is_met(run):
            _check_unchanged(name, option(run), option(default), condition)
    for stage in run.stages:
        if stage.name in default.stage_names:
            _check_stage(run, stage, default.stage(stage.name), unchecked)


def _check_stage(
    run: RunConfig, stage: StageConfig, default: StageConfig, unchecked: Collection[str]
) -> None:
    """Raise ValueError for a changed option of a stage that nothing reads."""
    if run.is_idle(stage) and stage.name not in unchecked:
        condition = "with recurrent heads (--student.d-state)"
        if run.is_control:
            condition = "without --control"
        check_same_stage(stage, default, condition)
    if run.tokens is not None and len(_sharing_tokens(run, stage)) == 1:
        _check_unchanged(f"{stage.name}.steps", stage.steps, default.steps, "without --tokens")
    if isinstance(stage, Distill) and isinstance(default, Distill) and stage.kind != "jsd":
        condition = f"with --{stage.name}.kind jsd"
        _check_unchanged(f"{stage.name}.beta", stage.beta, default.beta, condition)


def _sharing_tokens(run: RunConfig, stage: StageConfig) -> list[StageConfig]:
    """List the stages that share a part of ``--tokens`` with this one, in proportion to their own steps."""
    sharing = []
    for other in run.stages:
        if other.is_alignment == stage.is_alignment and not run.is_idle(other):
            sharing.append(other)
    return sharing


def check_same_stage(stage: StageConfig, default: StageConfig, condition: str) -> None:
    """Raise ValueError for the first option in which a stage that does not run differs from its default."""
    for field in fields(stage):
        value = getattr(stage, field.name)
        _check_unchanged(
            f"{stage.name}.{field.name}", value, getattr(default, field.name), condition
        )


def _check_unchanged(name: str, value: T, default: T, condition: str) -> None:
    if value == default:
        return
    flag = name.replace("_", "-")
    raise ValueError(
        f"{name} is {value!r}, which has an effect only {condition}; run {condition}, or leave out --{flag}."
    )
