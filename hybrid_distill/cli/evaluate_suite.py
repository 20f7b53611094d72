"""`hybrid-distill evaluate-suite`: any model on tasks of lm-eval."""

from __future__ import annotations

import tyro

from ..distributed import is_launched_main
from ..lab.suites.job import SuiteJob
from ..lab.suites.running import evaluate_suite


def command(job: tyro.conf.OmitArgPrefixes[SuiteJob]) -> None:
    """Measure any model on tasks of lm-eval: the papers' suite, or tasks by name.

    Runs the tasks one by one and keeps each as it is finished (docs/evaluation.md), for example
    `hybrid-distill evaluate-suite --model PATH --suite paper --teacher PATH --data-dir questions/`.
    `accelerate launch -m hybrid_distill evaluate-suite ...` shares the questions between processes.
    """
    tables, path, failed = evaluate_suite(job)
    if is_launched_main():
        print(f"{tables}\n\ntable: {path}")
        if failed:
            raise ValueError(f"{len(failed)} without a figure: {path} says why; call again to retry.")
