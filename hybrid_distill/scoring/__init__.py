"""Which heads does a model retrieve with? `score_heads` takes them out one at a time; `HeadScores` is what it finds."""

from .artefact import HeadScores, describe_run
from .exact import score_heads
from .uncertainty import bootstrap_interval, split_half, tie_warning

__all__ = ["HeadScores", "bootstrap_interval", "describe_run", "score_heads", "split_half", "tie_warning"]
