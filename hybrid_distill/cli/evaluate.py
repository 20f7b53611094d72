"""`hybrid-distill evaluate`: a run on the package's own probes, or any model on lm-eval tasks."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import tyro

from ..lab.suite_job import SuiteJob
from ..validation import Count


def command(
    run_dir: tyro.conf.Positional[Path | None] = None,
    /,
    job: tyro.conf.OmitArgPrefixes[SuiteJob] = SuiteJob(),  # noqa: B008
    n_examples: Count | None = None,
    prompt_format: str | None = None,
    speed: bool = False,
) -> None:
    """Measure a finished run with the package's own probes, or any model on lm-eval tasks.

    `hybrid-distill evaluate RUN_DIR` measures the student of a run and its teacher; writes
    RUN_DIR/evaluation.json. Prints earlier results, if there are any, unless you pass --again.
    `hybrid-distill report RUN_DIR` then rebuilds the report.

    `hybrid-distill evaluate --suite paper --model PATH --teacher PATH` measures any model on tasks
    of lm-eval (docs/evaluation.md). `accelerate launch -m hybrid_distill evaluate ...` splits their
    questions between processes.

    Args:
        run_dir: The folder of a run.
        n_examples: Questions per dictionary size, instead of the run's; implies --again. The next
            start of the run measures again with its own.
        prompt_format: Prompt format, instead of the run's: plain, shots=1 or chat; implies --again.
            The next start of the run measures again in its own.
        speed: Measure speed and memory of the run's student and teacher instead, at contexts of 2,048,
            8,192 and 32,768 tokens, except those beyond the model's context or estimated to take over
            five minutes; writes RUN_DIR/speed.json.
    """
    _check_flags(run_dir, job, n_examples, prompt_format, speed)
    # Imported here: they load torch, which flags and --help do without.
    if run_dir is None:
        from .evaluate_suite import evaluate_suite

        evaluate_suite(job)
        return
    from .evaluate_run import measure_run, time_run

    if speed:
        time_run(run_dir, job.kernels)
    else:
        measure_run(run_dir, n_examples, prompt_format, job.kernels, job.again)


def _check_flags(
    run_dir: Path | None,
    job: SuiteJob,
    n_examples: int | None,
    prompt_format: str | None,
    speed: bool,
) -> None:
    """Raise ValueError for flags that do not go together."""
    has_questions = n_examples is not None or prompt_format is not None
    if speed and run_dir is None:
        raise ValueError("--speed needs RUN_DIR; pass the folder of a run.")
    if speed and has_questions:
        raise ValueError(
            "--n-examples and --prompt-format are for questions, which --speed does not ask; pass one or the other."
        )
    if run_dir is not None:
        _check_run_flags(run_dir, job)
    elif has_questions:
        raise ValueError(
            "--n-examples and --prompt-format need RUN_DIR; with --suite, pass --limit instead."
        )


def _check_run_flags(run_dir: Path, job: SuiteJob) -> None:
    """Raise ValueError for an export, and for flags of a suite next to a run."""
    if (run_dir / "gate").is_dir():
        raise ValueError(
            f"{run_dir} is an export, not a run; pass --suite paper --model {run_dir}."
        )
    # These two flags are for both; any other that is set belongs to a suite.
    default = SuiteJob(again=job.again, kernels=job.kernels)
    for field in fields(job):
        if getattr(job, field.name) != getattr(default, field.name):
            flag = f"--{field.name.replace('_', '-')}"
            raise ValueError(
                f"{flag} is for --suite, which does not measure a run; pass {run_dir} without it, "
                "or leave out RUN_DIR."
            )
