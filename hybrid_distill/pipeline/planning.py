"""The plan that a config describes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from transformers import PreTrainedModel

from ..config import PlanConfig
from ..plan import HeadPlan, Unit, check_same_shape
from ..scoring import HeadScores
from ..teacher import fingerprint
from .inputs import RunInputs


def make_plan(
    options: PlanConfig,
    teacher: PreTrainedModel,
    scores: Callable[[], HeadScores],
    *,
    by_shape: bool = False,
) -> HeadPlan:
    """Make the plan that a config describes; ``scores`` is called only for ``top``. ``by_shape`` reads no weights."""
    if options.selection == "top":
        return HeadPlan.top_k(scores(), options.k, unit=options.unit)
    if options.selection == "file":
        if options.file is None:
            raise ValueError("plan.selection is 'file' without a file; name it with --plan.file.")
        return HeadPlan.load(options.file)
    makers: dict[str, Callable[[], HeadPlan]] = {
        "random": lambda: HeadPlan.random(teacher, options.k, options.seed),
        "layers": lambda: HeadPlan.layers(teacher, options.layers),
        "all": lambda: HeadPlan.all(teacher),
        "none": lambda: HeadPlan.none(teacher),
        "pairs": lambda: HeadPlan.from_pairs(teacher, options.pairs),
    }
    plan = makers[options.selection]()
    if by_shape:
        return plan
    return replace(plan, teacher=fingerprint(teacher))


def known_plan(
    inputs: RunInputs, teacher: PreTrainedModel, options: PlanConfig | None = None
) -> HeadPlan | None:
    """Make the plan for a teacher of this shape; None if its heads must be ranked first.

    ``options`` stand for the config's own. Raises ValueError for a plan that cannot be made.
    """
    options = options or inputs.config.plan
    scores = inputs.config.scoring.file
    if options.selection in ("top", "restoration", "random"):
        HeadPlan.check_k(teacher, options.k, "--plan.k", _unit_of(options))
    if options.restores or (options.selection == "top" and scores is None):
        return None
    plan = make_plan(
        options, teacher, partial(_scores_for, teacher, scores or Path()), by_shape=True
    )
    plan.check_fits(teacher)
    return plan


def _scores_for(teacher: PreTrainedModel, path: Path) -> HeadScores:
    """Load scores and check that they rank the heads of a teacher of this shape."""
    scores = HeadScores.load(path)
    # Before a plan is made of them: its ties say nothing about another model.
    check_same_shape(scores, teacher, str(path))
    return scores


def unranked_plan(teacher: PreTrainedModel, options: PlanConfig) -> HeadPlan:
    """Return a plan of the same size as one whose heads are not ranked yet: its units, evenly spread."""
    return HeadPlan.spread(teacher, options.k, _unit_of(options))


def _unit_of(options: PlanConfig) -> Unit:
    """Return what ``k`` counts: only ``top`` keeps other units than heads."""
    return options.unit if options.selection == "top" else "head"
