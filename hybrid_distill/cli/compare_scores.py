"""`hybrid-distill compare-scores`: how far two rankings agree."""

from __future__ import annotations

from pathlib import Path

import tyro

from ..lab.analysis.rankings import compare_files


def command(a: tyro.conf.Positional[Path], b: tyro.conf.Positional[Path], /) -> None:
    """Compare two rankings of heads; one may be a published ranking.

    Args:
        a: A scores.json, or a published ranking (docs/scores.md).
        b: Another one.
    """
    print(compare_files(a, b))
