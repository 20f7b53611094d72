"""Which heads does a model retrieve with? `score_heads` takes them out one at a time; `HeadScores` is what it finds."""

from .comparison import compare_rankings, comparison_table
from .exact import score_heads
from .greedy import greedy_ablation
from .head_scores import HeadScores, describe_run
from .importers import load_ranking
from .uncertainty import bootstrap_interval, split_half, tie_warning

__all__ = [
    "HeadScores",
    "bootstrap_interval",
    "compare_rankings",
    "comparison_table",
    "describe_run",
    "greedy_ablation",
    "load_ranking",
    "score_heads",
    "split_half",
    "tie_warning",
]
