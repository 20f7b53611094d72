"""`hybrid-distill evaluate --suite`: any model on tasks of lm-eval."""

from __future__ import annotations

from typing import Any

from ..distributed import alone_in, is_launched_main, on_main_process, own_device
from ..io import Record, check_out
from ..kernels import use_kernels
from ..lab.suite import load_tasks, run_suite
from ..lab.suite_job import RESULTS, SuiteJob
from ..lab.suite_results import render, write_results
from ..teacher import load_on_own_device, read_teacher
from ..teacher.location import locate


def evaluate_suite(job: SuiteJob) -> None:
    """Measure a model on the tasks of a suite, its teacher too if there is one; write and print the results."""
    if job.suite is None:
        raise ValueError("there is nothing to evaluate; pass RUN_DIR, or --suite and --model.")
    if job.model is None:
        raise ValueError(f"--suite {job.suite} has no model to measure; pass --model.")
    check_out(job.cache, "--cache")
    if job.teacher is not None:
        # Now, not after the model's answers.
        _check_can_load(job.teacher, "--teacher", job.trust_remote_code)
    tasks = load_tasks(job)
    with alone_in(job.folder):
        results = _measure(job, job.model, "--model", tasks)
        teacher_results = None
        if job.teacher is not None:
            teacher_results = _measure(job, job.teacher, "--teacher", tasks)
        # Only the main process has results.
        on_main_process(lambda: write_results(job.folder, results, teacher_results))
    if is_launched_main():
        print(f"{render(results, teacher_results)}\n\nresults: {job.folder / RESULTS}")


def _check_can_load(path: str, flag: str, trust_remote_code: bool) -> None:
    """Raise ValueError for a model that is not there, or whose config or tokenizer cannot be read without its own
    code."""
    if trust_remote_code:
        locate(path, flag)
    else:
        read_teacher(path, flag=flag)


def _measure(job: SuiteJob, path: str, flag: str, tasks: dict[str, list[Any]]) -> Record:
    """Load the model that ``flag`` names, and measure it; its memory is free when this returns."""
    model, tokenizer = load_on_own_device(
        path,
        dtype=job.dtype,
        trust_remote_code=job.trust_remote_code,
        allow_bin=job.allow_bin,
        flag=flag,
    )
    # A teacher has no recurrent heads: `use_kernels` would refuse --kernels for it.
    if flag == "--model":
        use_kernels(model, job.kernels or "auto", own_device())
    return run_suite(model, tokenizer, job, tasks)
