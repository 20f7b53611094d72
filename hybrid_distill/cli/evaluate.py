"""`hybrid-distill evaluate`: a run on the package's own probes, or any model on lm-eval tasks."""

from __future__ import annotations

import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from ..distributed import alone_in, is_launched_main, on_main_process, own_device
from ..lab.suite_job import RESULTS, SuiteJob
from ..validation import Count

if TYPE_CHECKING:
    from ..io import Record


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
        n_examples: Questions per dictionary size, instead of the run's; implies --again.
        prompt_format: Prompt format, instead of the run's: plain, shots=1 or chat; implies --again.
        speed: Measure speed and memory of the run's student and teacher instead, at contexts of 2,048,
            8,192 and 32,768 tokens as far as they reach and as a length takes at most five minutes;
            writes RUN_DIR/speed.json.
    """
    if speed and run_dir is None:
        raise ValueError("--speed needs RUN_DIR; pass the folder of a run.")
    if speed and not (n_examples is None and prompt_format is None):
        raise ValueError(
            "--n-examples and --prompt-format are for questions, which --speed does not ask; pass one or the other."
        )
    if run_dir is not None and speed:
        _check_run_flags(run_dir, job)
        _measure_speed(run_dir, job)
    elif run_dir is not None:
        _check_run_flags(run_dir, job)
        _evaluate_run(run_dir, n_examples, prompt_format, job)
    else:
        if n_examples is not None or prompt_format is not None:
            raise ValueError(
                "--n-examples and --prompt-format need RUN_DIR; with --suite, pass --limit instead."
            )
        _evaluate_suite(job)


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


def _evaluate_run(
    run_dir: Path, n_examples: int | None, prompt_format: str | None, job: SuiteJob
) -> None:
    from torch import nn

    from ..evaluation.evaluate import EvalResult
    from ..kernels import check_kernels
    from ..pipeline import RunInputs, finished_run, trained_student
    from ..pipeline.checks import check_evaluation
    from ..pipeline.run import evaluate_run

    inputs = finished_run(run_dir)
    path = inputs.paths.evaluation
    again = job.again
    if n_examples is not None or prompt_format is not None:
        config = inputs.config
        evaluation = replace(
            config.evaluation, n_examples=n_examples or config.evaluation.n_examples
        )
        scoring = replace(
            config.scoring, prompt_format=prompt_format or config.scoring.prompt_format
        )
        inputs = RunInputs(replace(config, evaluation=evaluation, scoring=scoring))
        again = True
        check_evaluation(inputs)
    if job.kernels is not None:
        student = replace(inputs.config.student, kernels=job.kernels)
        inputs = RunInputs(replace(inputs.config, student=student))
    check_kernels(inputs.config.student.kernels, own_device())
    if path.exists() and not again:
        result = EvalResult.load(path)
        if is_launched_main():
            date = result.provenance.get("date", "at an unknown time")
            print(
                f"{path} was measured before ({date}); pass --again to measure again.",
                file=sys.stderr,
            )
    else:
        with alone_in(run_dir):
            student, _ = trained_student(inputs)
            nn.Module.to(student, own_device())
            result = evaluate_run(inputs, student, again=again)
    if is_launched_main():
        print(f"results: {path}")


def _measure_speed(run_dir: Path, job: SuiteJob) -> None:
    """Time the teacher of a run, then its student; write and print the figures."""
    import pandas as pd
    from torch import nn

    from ..evaluation.speed import measure_speed
    from ..io import write_json
    from ..kernels import use_kernels
    from ..lab.reporting import text_table
    from ..lab.reporting.speed import speed_table
    from ..pipeline import finished_run, trained_student
    from ..scoring import describe_run

    inputs = finished_run(run_dir)
    student, _ = trained_student(inputs)
    models = {"teacher": inputs.teacher, "student": student}
    device = own_device()
    rows = []
    with alone_in(run_dir):
        for name, model in models.items():
            nn.Module.to(model, device, inputs.teacher.dtype)
            if name == "student":
                use_kernels(model, job.kernels or inputs.config.student.kernels, device)
            for figures in measure_speed(model):
                rows.append({"model": name, **vars(figures)})
                print(f"{name}: {figures.length:,} tokens", file=sys.stderr)
        record = {"rows": rows, "measured": describe_run(student)}
        on_main_process(lambda: write_json(inputs.paths.speed, record))
    if is_launched_main():
        print(text_table(speed_table(pd.DataFrame(rows))))
        print(f"results: {inputs.paths.speed}")


def _evaluate_suite(job: SuiteJob) -> None:
    if job.suite is None:
        raise ValueError("there is nothing to evaluate; pass RUN_DIR, or --suite and --model.")
    if job.model is None:
        raise ValueError(f"--suite {job.suite} has no model to measure; pass --model.")
    from ..lab.suite import load_tasks
    from ..lab.suite_results import render, write_results

    tasks = load_tasks(job)
    with alone_in(job.folder):
        results = _measure(job, job.model, "--model", tasks)
        teacher = None
        if job.teacher is not None:
            teacher = _measure(job, job.teacher, "--teacher", tasks)
        # Only the main process has results.
        on_main_process(lambda: write_results(job.folder, results, teacher))
    if is_launched_main():
        print(f"{render(results, teacher)}\n\nresults: {job.folder / RESULTS}")


def _measure(job: SuiteJob, name: str, flag: str, tasks: dict[str, list[Any]]) -> Record:
    from ..kernels import use_kernels
    from ..lab.suite import run_suite
    from ..teacher import load_on_own_device

    options = {"trust_remote_code": job.trust_remote_code, "allow_bin": job.allow_bin, "flag": flag}
    model, tokenizer = load_on_own_device(name, dtype=job.dtype, **options)
    if flag == "--model":
        use_kernels(model, job.kernels or "auto", own_device())
    return run_suite(model, tokenizer, job, tasks)
