"""`hybrid-distill evaluate RUN_DIR`: figures and speed of a finished run."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
from torch import nn

from ..distributed import alone_in, is_launched_main, on_main_process, own_device
from ..evaluation.evaluate import EvalResult
from ..evaluation.speed import measure_speed
from ..io import write_json
from ..kernels import Kernels, check_kernels, use_kernels
from ..lab.reporting import text_table
from ..lab.reporting.speed import speed_table
from ..pipeline import RunInputs, finished_run, trained_student
from ..pipeline.checks import check_evaluation
from ..pipeline.folder import other_questions
from ..pipeline.run import evaluate_run
from ..scoring import describe_run


def measure_run(
    run_dir: Path,
    n_examples: int | None,
    prompt_format: str | None,
    kernels: Kernels | None,
    again: bool,
) -> None:
    """Measure a run's student and teacher; keep earlier results to the same questions unless ``again``."""
    inputs = finished_run(run_dir)
    if n_examples is not None or prompt_format is not None:
        inputs = _with_questions(inputs, n_examples, prompt_format)
        check_evaluation(inputs)
        again = True
    # Answers to other questions than the run's are not its figures.
    again = again or bool(other_questions(inputs.config))
    if kernels is not None:
        student = replace(inputs.config.student, kernels=kernels)
        inputs = RunInputs(replace(inputs.config, student=student))
    check_kernels(inputs.config.student.kernels, own_device())
    if again or not inputs.paths.evaluation.exists():
        with alone_in(run_dir):
            student, _ = trained_student(inputs)
            nn.Module.to(student, own_device())
            use_kernels(student, inputs.config.student.kernels, own_device())
            evaluate_run(inputs, student, again=again)
    else:
        _report_earlier(inputs.paths.evaluation)
    if is_launched_main():
        print(f"results: {inputs.paths.evaluation}")


def _with_questions(
    inputs: RunInputs, n_examples: int | None, prompt_format: str | None
) -> RunInputs:
    """Return a run whose evaluation asks other questions; None stands for the run's own."""
    config = inputs.config
    evaluation = replace(config.evaluation, n_examples=n_examples or config.evaluation.n_examples)
    scoring = replace(config.scoring, prompt_format=prompt_format or config.scoring.prompt_format)
    return RunInputs(replace(config, evaluation=evaluation, scoring=scoring))


def _report_earlier(path: Path) -> None:
    """Print when a run was measured. Raises ValueError for a damaged file."""
    date = EvalResult.load(path).provenance.get("date", "at an unknown time")
    if is_launched_main():
        print(
            f"{path} was measured before ({date}); pass --again to measure again.", file=sys.stderr
        )


def time_run(run_dir: Path, kernels: Kernels | None) -> None:
    """Time the teacher of a run, then its student; write and print the figures."""
    inputs = finished_run(run_dir)
    student, _ = trained_student(inputs)
    device = own_device()
    rows = []
    with alone_in(run_dir):
        for name, model in {"teacher": inputs.teacher, "student": student}.items():
            nn.Module.to(model, device)
            if model is student:
                use_kernels(model, kernels or inputs.config.student.kernels, device)
            for figures in measure_speed(model):
                rows.append({"model": name, **vars(figures)})
                if is_launched_main():
                    print(f"{name}: {figures.length:,} tokens", file=sys.stderr)
        record = {"rows": rows, "measured": describe_run(student)}
        on_main_process(lambda: write_json(inputs.paths.speed, record))
    if is_launched_main():
        print(text_table(speed_table(pd.DataFrame(rows))))
        print(f"results: {inputs.paths.speed}")
