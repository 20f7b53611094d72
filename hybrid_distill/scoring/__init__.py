"""Scores for the heads that a model retrieves with."""

from .ablation import score_heads
from .attribution import attribute_heads
from .head_scores import HeadScores, describe_run

__all__ = ["HeadScores", "attribute_heads", "describe_run", "score_heads"]
