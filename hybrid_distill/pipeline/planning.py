"""The plan that a config describes."""

from __future__ import annotations

from transformers import PreTrainedModel

from ..config import PlanConfig, RunConfig
from ..plan import HeadPlan, check_same_shape
from ..scoring import HeadScores
from .inputs import RunInputs


def make_plan(options: PlanConfig, teacher: PreTrainedModel, scores: HeadScores | None) -> HeadPlan:
    """Make the plan that a config describes, for a teacher of this shape; ``top`` needs ``scores``."""
    if options.selection == "top":
        assert scores is not None
        return HeadPlan.top_k(scores, options.k, unit=options.unit)
    if options.selection == "random":
        return HeadPlan.random(teacher, options.k, options.seed, options.unit)
    if options.selection == "layers":
        return HeadPlan.layers(teacher, options.layers)
    if options.selection == "pairs":
        return HeadPlan.from_pairs(teacher, options.pairs)
    if options.selection == "all":
        return HeadPlan.all(teacher)
    if options.selection == "none":
        return HeadPlan.none(teacher)
    assert options.file is not None
    return HeadPlan.load(options.file)


def plan_before_ranking(
    inputs: RunInputs, teacher: PreTrainedModel, options: PlanConfig | None = None
) -> HeadPlan | None:
    """Make the plan for a teacher of this shape; None if its heads must be ranked first.

    ``options`` stand for the config's own. Raises ValueError for a plan that cannot be made.
    """
    options = options or inputs.config.plan
    if options.selection in ("top", "restoration", "random"):
        HeadPlan.check_k(teacher, options.k, "--plan.k", options.unit)
    if options.restores:
        return None
    scores = None
    if options.selection == "top":
        # Checked before a plan is made of them: their ties say nothing about another model.
        scores = scores_from_file(inputs.config, teacher)
        if scores is None:
            return None
    plan = make_plan(options, teacher, scores)
    plan.check_fits(teacher)
    return plan


def scores_from_file(config: RunConfig, teacher: PreTrainedModel) -> HeadScores | None:
    """Read ``scoring.file``; None without one. Raises ValueError for scores of a teacher of another shape."""
    path = config.scoring.file
    if path is None:
        return None
    scores = HeadScores.load(path)
    check_same_shape(scores, teacher, str(path))
    return scores


def placeholder_plan(teacher: PreTrainedModel, options: PlanConfig) -> HeadPlan:
    """Return a plan of the same size as one whose heads are not ranked yet: its units, evenly spread."""
    return HeadPlan.spread(teacher, options.k, options.unit)
