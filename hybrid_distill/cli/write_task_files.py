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
    """Write a suite's questions, from the hub and generators, to a folder for evaluate-suite --data-dir.

    Takes the flags of evaluate-suite; --model provides the tokenizer for questions that need one.

    Args:
        folder: The folder to write to.
    """
    written, missing = write_questions(job, folder)
    print(written)
    if missing:
        raise ValueError(f"could not write files for {missing}")
