"""`hybrid-distill write-task-files`: the questions of a suite as files, for machines without a network."""

from __future__ import annotations

from pathlib import Path

import tyro

from ..lab.suites.job import SuiteJob
from ..lab.suites.running import write_questions


def command(
    folder: tyro.conf.Positional[Path],
    /,
    job: tyro.conf.OmitArgPrefixes[SuiteJob] = SuiteJob(),  # noqa: B008
) -> None:
    """Write the questions of a suite into a folder that evaluate-suite --data-dir takes, from the hub and generators.

    Takes the flags of evaluate-suite; --model lends its tokenizer to the questions that need one.

    Args:
        folder: The folder to write to.
    """
    written, missing = write_questions(job, folder)
    print(written)
    if missing:
        raise ValueError(f"no files of {missing}")
