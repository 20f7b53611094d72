"""Scores for the heads that a model retrieves with."""

from .exact import score_heads
from .head_scores import HeadScores, describe_run

__all__ = ["HeadScores", "describe_run", "score_heads"]
