"""`hybrid-distill sweep-status`: how far a sweep is."""

from __future__ import annotations

from pathlib import Path

import tyro

from ..lab.sweep.results import status


def command(out: tyro.conf.Positional[Path], /) -> None:
    """Print how far a sweep is: cells and steps done, time left, what failed.

    Args:
        out: The folder of the sweep, which may be running, on any machine that sees the folder.
    """
    print(status(out))
