"""`hybrid-distill sweep`: a grid of students."""

from __future__ import annotations

import sys

import tyro

from ..lab.sweep.flags import SweepJob
from ..lab.sweep.job import SweepFailed, dry_run, run_sweep
from ..lab.sweep.paths import SweepPaths
from ..lab.sweep.report import pareto_front, write_sweep_report
from ..lab.sweep.status import status
from ..locking import InUse
from .recipes import load_recipe


def command(job: tyro.conf.OmitArgPrefixes[SweepJob] = SweepJob()) -> None:  # noqa: B008
    """Run a grid of students: heads kept x selection x state size x seed; results in
    OUT/results.csv.

    Every cell is a run, and cells share alignments. The same command again resumes where it was
    stopped; while the sweep runs, here or elsewhere, it prints the state. At the end it prints
    the state and the Pareto front: the best students by memory. Exits with status 1 if cells
    have failed.
    """
    if job.dry_run:
        print(dry_run(job, load_recipe(job.recipe)))
        return
    failed: SweepFailed | None = None
    try:
        run_sweep(job, load_recipe(job.recipe))
    except SweepFailed as error:
        # The cells that have finished still make a report.
        failed = error
    except InUse:
        # Something else than a sweep may be at work there.
        if SweepPaths(job.out).record.is_file():
            print(status(job.out))
        raise
    print(pareto_front(job.out))
    print(f"report: {write_sweep_report(job.out)}")
    if failed is not None:
        print(f"error: {failed}", file=sys.stderr)
        sys.exit(1)
