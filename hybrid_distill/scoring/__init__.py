"""Which heads does a model retrieve with? `score_heads` takes them out one at a time; `HeadScores` is what it finds."""

from .artefact import HeadScores, describe_run
from .exact import score_heads

__all__ = ["HeadScores", "describe_run", "score_heads"]
