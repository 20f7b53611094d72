"""`hybrid-distill compare-scores`: agreement of two rankings of heads."""

from __future__ import annotations

from pathlib import Path

import tyro

from ..lab.analysis.rankings import compare_files


def command(a: tyro.conf.Positional[Path], b: tyro.conf.Positional[Path], /) -> None:
    """Compare two rankings of heads; one may be a published ranking.

    Args:
        a: A scores.json, or a published ranking (docs/scores.md).
        b: The ranking to compare it with.
    """
    print(compare_files(a, b))
