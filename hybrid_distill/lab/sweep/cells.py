"""Perform one sweep task in this process: a cell as an ordinary run, or work that cells share.

One alignment of a student with no kept heads serves every plan. Its target is each head's own
output on the teacher's own inputs (``align.target`` "head"), so a trained head does not depend
on which other heads are kept, and a cell copies the heads that it needs. Only gradient clipping
by the global norm couples heads; benchmarks/sweep_sharing.py measures the effect.
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ...config import PlanConfig, RunConfig, StudentConfig
from ...distributed import alone_in, connect, on_main_process
from ...pipeline import RunInputs, last_stage
from ...pipeline.run import (
    align_all_heads,
    evaluate_teacher,
    prepare,
    restoration_plan,
    run_beside,
    score,
)
from ...scoring import HeadScores
from ...train.stop import Interrupted
from .folder import Sweep, with_student
from .grid import Cell
from .submission import PATIENCE
from .tasks import Task, TaskKind

GRACE = 10.0
"""Seconds that another process waits before it ends the launch, so that the main one can record
its own error."""


def perform(sweep: Sweep, task: Task) -> None:
    """Run a task and write its outcome; an error marks it as failed.

    Raises only what stops a sweep: KeyboardInterrupt, and Interrupted after saving. One of
    several processes also raises the error: their launcher then ends the others, which may be
    waiting for this one.
    """
    begun = time.monotonic()
    try:
        # A process of a stopped sweep may still be saving this task.
        with alone_in(task.folder, patience=PATIENCE):
            WORK[task.kind](sweep, task)
    except Interrupted:
        raise
    except Exception as error:
        _record_failure(task, error, seconds=time.monotonic() - begun)
        if connect().num_processes > 1:
            raise
        with task.log_path.open("a") as file:
            file.write(traceback.format_exc())
    else:
        on_main_process(lambda: task.end(seconds=time.monotonic() - begun))


def _record_failure(task: Task, error: Exception, seconds: float) -> None:
    if not connect().is_main_process:
        time.sleep(GRACE)
        return
    text = " ".join(str(error).split())
    if not isinstance(error, ValueError):
        text = f"{type(error).__name__}: {text}"
    task.end(text, seconds)


def _evaluate_teacher(sweep: Sweep, task: Task) -> None:
    run = teacher_run(sweep, task.seed)
    prepare(run)
    # Grids of random or restored heads need no scores.
    if task.ablates_heads:
        score(run)
    evaluate_teacher(run)


def _rank_for_window(sweep: Sweep, task: Task) -> None:
    seeded = _seeded(sweep, task.seed)
    windowed = with_student(seeded, seeded.student.d_state, task.window)
    run = RunInputs(replace(windowed, out=task.folder), sweep.teacher, sweep.pins)
    prepare(run)
    score(run)


def _align(sweep: Sweep, task: Task) -> None:
    assert task.d_state is not None, "an alignment has a state size"
    align_all_heads(_alignment_run(sweep, task.seed, task.d_state, task.window))


def _make_student(sweep: Sweep, task: Task) -> None:
    assert task.cell is not None, "a task of this kind has a cell"
    run_beside(teacher_run(sweep, task.seed), cell_config(sweep, task.cell))


WORK: dict[TaskKind, Callable[[Sweep, Task], None]] = {
    "teacher": _evaluate_teacher,
    "ranking": _rank_for_window,
    "alignment": _align,
    "cell": _make_student,
}


def teacher_run(sweep: Sweep, seed: int) -> RunInputs:
    """Return the run of a seed with the teacher's evaluation, and its heads' scores by ablation."""
    seeded = _seeded(sweep, seed)
    # By ablation, whatever the recipe says: these scores serve every window that is not ranked for itself.
    scoring = replace(seeded.scoring, method="ablation")
    config = _without_student(replace(seeded, scoring=scoring))
    return RunInputs(config, sweep.teacher, sweep.pins)


def cell_config(sweep: Sweep, cell: Cell) -> RunConfig:
    """Return the config of a cell's run, which reads the results of the tasks that it needs."""
    base = variant_config(
        _seeded(sweep, cell.seed),
        cell.name,
        sweep.paths.cell(cell).out,
        _plan(sweep, cell),
        sweep.scores_of(cell),
    )
    if cell.d_state is None:
        return _without_student(base)
    cell_run = with_student(base, cell.d_state, cell.window).resolved()
    # A window alone has no recurrent heads to share.
    if not sweep.share or not cell.d_state:
        return cell_run
    alignment = _alignment_run(sweep, cell.seed, cell.d_state, cell.window)
    aligned = last_stage(alignment.paths.aligned)
    student = replace(alignment.config.student, aligned=aligned)
    return replace(cell_run, student=student, stages=cell_run.student_stages)


def variant_config(
    shared: RunConfig, name: str, out: Path, plan: PlanConfig, scores: Path
) -> RunConfig:
    """Return the config of a run that takes its scores from another run and keeps other heads."""
    scoring = replace(shared.scoring, method="auto", file=scores)
    return replace(shared, name=name, out=out, plan=plan, scoring=scoring)


def restored_plan(inputs: RunInputs, k: int) -> PlanConfig:
    """Choose heads by what they restore to the aligned student without attention; computed once."""
    restoration_plan(inputs, k)
    return PlanConfig("file", k=k, file=inputs.paths.restoration_plan(k))


def _alignment_run(sweep: Sweep, seed: int, d_state: int, window: int) -> RunInputs:
    """Return the run in whose folder the alignment is trained and restoration plans are made."""
    seeded = _seeded(sweep, seed)
    out = sweep.paths.alignment(d_state, window, seed).out
    scores = sweep.paths.of_seed(seed).scores
    config = variant_config(seeded, f"shared-{out.name}", out, seeded.plan, scores)
    return RunInputs(with_student(config, d_state, window), sweep.teacher, sweep.pins)


def _seeded(sweep: Sweep, seed: int) -> RunConfig:
    """Return the recipe with another seed, for draws in training, prompts and the order of the data."""
    base = sweep.base
    # Shifted, not set: the seeds of data and stages keep their differences from the run's.
    shift = seed - base.seed
    stages = []
    for stage in base.stages:
        if stage.data is not None:
            stage = replace(stage, data=replace(stage.data, seed=stage.data.seed + shift))
        stages.append(stage)
    out = sweep.paths.of_seed(seed).out
    return replace(
        base,
        name=f"shared-{out.name}",
        out=out,
        seed=seed,
        data=replace(base.data, seed=base.data.seed + shift),
        stages=tuple(stages),
        evaluation=sweep.evaluation,
        group=sweep.out.name,
        export=False,
    )


def _without_student(config: RunConfig) -> RunConfig:
    """Reset the options of the student, which a run that replaces no head ignores.

    Otherwise the cell of the teacher would have other settings in a grid that has grown.
    """
    return replace(config, student=StudentConfig())


def _plan(sweep: Sweep, cell: Cell) -> PlanConfig:
    if cell.selection == "layers":
        scores = HeadScores.load(sweep.scores_of(cell))
        layers = best_layers(scores, cell.heads // scores.n_heads)
        return PlanConfig("layers", k=cell.heads, layers=layers)
    if cell.selection == "restoration" and sweep.share and cell.d_state:
        run = _alignment_run(sweep, cell.seed, cell.d_state, cell.window)
        # Cells that start together would write its files at the same time.
        with alone_in(run.paths.out, patience=math.inf):
            align_all_heads(run)
        return restored_plan(run, cell.heads)
    seed = cell.seed if cell.selection == "random" else 0
    return PlanConfig(cell.selection, k=cell.heads, seed=seed)


def best_layers(scores: HeadScores, n: int) -> tuple[int, ...]:
    """Return, ascending, the ``n`` layers with the largest sums of drops in accuracy, ties by log-probability."""
    # A head that was not scored counts as no drop.
    accuracy_L = scores.value_LH().nan_to_num(0.0).sum(1).tolist()
    logprob_L = scores.logprob_drop_LH.nan_to_num(0.0).sum(1).tolist()

    def best_first(layer: int) -> tuple[float, float, int]:
        return -accuracy_L[layer], -logprob_L[layer], layer

    ranking = sorted(range(scores.n_layers), key=best_first)
    return tuple(sorted(ranking[:n]))
