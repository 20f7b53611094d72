"""`hybrid-distill recommend`: a student of a sweep for a budget of memory."""

from __future__ import annotations

from pathlib import Path

import tyro

from ..lab.sweep.measured import RecommendJob, recommend


def command(path: tyro.conf.Positional[Path], /, job: tyro.conf.OmitArgPrefixes[RecommendJob]) -> None:
    """Pick the best student of a sweep under a budget of cache memory.

    Args:
        path: The folder of a sweep, which need not be finished.
    """
    print(recommend(path, job))
