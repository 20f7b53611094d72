"""`hybrid-distill sweep-status`: progress of a sweep."""

from __future__ import annotations

from pathlib import Path

import tyro

from ..lab.sweep.results import status


def command(out: tyro.conf.Positional[Path], /) -> None:
    """Show the progress of a sweep: cells and steps done, time left, failures.

    Args:
        out: The folder of the sweep, which may still be running, also on another machine.
    """
    print(status(out))
