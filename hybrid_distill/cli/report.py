"""`hybrid-distill report`: rebuild the report of a run or a sweep."""

from __future__ import annotations

from pathlib import Path

import tyro

from ..lab.reporting.run import write_report
from ..lab.sweep.measured import CONTEXT
from ..lab.sweep.paths import SweepPaths
from ..lab.sweep.report import write_sweep_report
from ..validation import Count


def command(
    path: tyro.conf.Positional[Path], /, context: Count | None = None, to: Path | None = None
) -> None:
    """Rebuild PATH/report.md from the results in the folder of a run or a sweep.

    Args:
        path: The folder. A sweep may be unfinished.
        context: Context length, in tokens, at which a sweep's report compares memory; by default 4,096.
        to: The folder for a sweep's report.md, figures, report.html and results.csv, instead of PATH.
    """
    if SweepPaths(path).table.is_file():
        print(f"report: {write_sweep_report(path, context=context or CONTEXT, to=to)}")
        return
    for flag, value in {"--to": to, "--context": context}.items():
        if value is not None:
            raise ValueError(
                f"{flag} is for the report of a sweep, and {path} has no results.csv; leave it out."
            )
    print(f"report: {write_report(path)}")
