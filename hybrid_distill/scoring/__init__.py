"""Scores for the heads that a model retrieves with.

An `Example` is one question. A prompt is all consecutive examples about one text; ablation measures
it as one row, and ``n_examples`` of `score_heads` counts prompts. Attribution and restoration ask
each question by itself: their ``n_examples`` counts questions.
"""

from .ablation import score_heads
from .attribution import attribute_heads
from .head_scores import HeadScores, describe_run

__all__ = ["HeadScores", "attribute_heads", "describe_run", "score_heads"]
