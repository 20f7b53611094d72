"""Which heads does a model retrieve with? `score_heads` ablates them one at a time and returns `HeadScores`."""

from .comparison import compare_files, compare_rankings, comparison_table, load_ranking
from .exact import greedy_ablation, score_heads
from .head_scores import HeadScores, describe_run

__all__ = [
    "HeadScores",
    "compare_files",
    "compare_rankings",
    "comparison_table",
    "describe_run",
    "greedy_ablation",
    "load_ranking",
    "score_heads",
]
