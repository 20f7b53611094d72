"""What cells have in common, made once: scores and the teacher's evaluation for each seed, alignments.

One alignment of a student without any kept head serves every plan. Its target is each head's own output with the
teacher's own inputs (``align.target`` "head"), so what a head becomes does not depend on which other heads are kept:
a cell takes over the heads that it needs. Only clipping by the norm of all gradients ties heads together;
benchmarks/sweep_sharing.py measures how much that matters.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ...config import RunConfig
from ...data import DataConfig
from ...pipeline import Run
from .record import Sweep, alignment_name


def seed_run(sweep: Sweep, seed: int) -> Run:
    """The run that holds what depends on the seed alone: scores.json and teacher/evaluation.json."""
    return Run(seeded(sweep, seed), sweep.teacher)


def alignment_run(sweep: Sweep, seed: int, d_state: int) -> Run:
    """The run below which ``aligned`` is trained, and plans by restoration are made."""
    config = seeded(sweep, seed)
    scores = config.out / "scores.json"
    return Run(
        replace(
            config,
            name=f"shared-{alignment_name(seed, d_state)}",
            out=sweep.out / "shared" / alignment_name(seed, d_state),
            student=replace(config.student, d_state=d_state),
            scoring=replace(config.scoring, file=scores),
        ),
        sweep.teacher,
    )


def aligned_stage(sweep: Sweep, seed: int, d_state: int) -> Path:
    """The folder with the recurrent heads that cells take over. Raises ValueError before it is finished."""
    config = alignment_run(sweep, seed, d_state).config
    return Run(replace(config, out=config.out / "aligned")).last_stage()


def seeded(sweep: Sweep, seed: int) -> RunConfig:
    """The recipe with another seed: of what is drawn in training, of the prompts and of the order of the data."""
    base = sweep.base

    def reordered(data: DataConfig) -> DataConfig:
        return replace(data, seed=data.seed + seed - base.seed)

    return replace(
        base,
        name=f"shared-s{seed}",
        out=sweep.out / "shared" / f"s{seed}",
        seed=seed,
        data=reordered(base.data),
        post=replace(base.post, data=reordered(base.post.data)),
        group=sweep.out.name,
        export=False,
    )


def saving(sweep: Sweep) -> dict[str, float]:
    """Alignments run, students that they served, and what those would have spent on alignments of their own."""
    alignments = [task for task in sweep.tasks.values() if task.cell is None and task.d_state is not None]
    served = [task for task in sweep.tasks.values() if task.cell is not None and task.d_state is not None]
    if not alignments:
        return {"alignments": 0, "students": 0, "steps": 0, "seconds": 0.0}
    seconds = [outcome.seconds for task in alignments if (outcome := sweep.outcome(task)).state == "done"]
    spared = len(served) - len(alignments)
    return {
        "alignments": len(alignments),
        "students": len(served),
        "steps": spared * alignments[0].steps,
        "seconds": spared * sum(seconds) / len(seconds) if seconds else 0.0,
    }
