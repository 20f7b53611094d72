"""`hybrid-distill evaluate`: the student of a finished run and its teacher, on the package's own probes."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import tyro

from ..distributed import alone_in, is_launched_main, own_device
from ..kernels import Kernels
from ..limits import Count
from ..progress import finish


def command(
    run_dir: tyro.conf.Positional[Path],
    /,
    n_examples: Count | None = None,
    form: str | None = None,
    again: bool = False,
    kernels: Kernels | None = None,
) -> None:
    """Measure the student of a finished run and its teacher; writes RUN_DIR/evaluation.json.

    Prints earlier results, if there are any, unless you pass --again. `hybrid-distill report RUN_DIR` then rebuilds
    the report. To measure any model on lm-eval tasks, use `hybrid-distill evaluate-suite --model`.

    Args:
        run_dir: The folder of a run.
        n_examples: Questions per dictionary size, instead of the run's number; implies --again.
        form: Prompt form, instead of the run's: plain, shots=1 or chat; implies --again.
        again: Measure again and replace the earlier results.
        kernels: Implementation of the student's recurrent heads, instead of the run's.
    """
    from torch import nn

    from ..evaluation.evaluate import EvalResult
    from ..kernels import check_kernels
    from ..pipeline import Run, finished_run

    if (run_dir / "gate").is_dir():
        raise ValueError(f"{run_dir} is an export, not a run; pass it to evaluate-suite --model {run_dir}.")
    this, path = finished_run(run_dir), run_dir / "evaluation.json"
    if n_examples is not None or form is not None:
        config = this.config
        evaluation = replace(config.evaluation, n_examples=n_examples or config.evaluation.n_examples)
        scoring = replace(config.scoring, form=form or config.scoring.form)
        this, again = Run(replace(config, evaluation=evaluation, scoring=scoring)), True
        this.check_evaluation()
    if kernels is not None:
        this = Run(replace(this.config, student=replace(this.config.student, kernels=kernels)))
    check_kernels(this.config.student.kernels, own_device())
    if path.exists() and not again:
        result = EvalResult.load(path)
        if is_launched_main():
            date = result.provenance.get("date", "at an unknown time")
            print(f"{path} was measured before ({date}); pass --again to measure again.", file=sys.stderr)
    else:
        with alone_in(run_dir):
            student, _ = this.trained_student()
            nn.Module.to(student, own_device())
            result = this.evaluate(student, again=again)
    if is_launched_main():
        finish(json.dumps(result.to_dict(), indent=2), **result.to_dict())
