"""Finished runs, read from their folders."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ..config import from_json
from ..io import Record
from ..model.modeling_hybrid import HybridForCausalLM
from ..plan import HeadPlan
from ..student.dtypes import settle
from ..train.result import StageManifest
from .building import new_student, student_of_stage
from .built import load_built
from .folder import as_moved
from .inputs import RunInputs
from .paths import RunPaths, run_of_stage


def finished_run(folder: Path) -> RunInputs:
    """Open the run in a folder for reading; nothing in it starts over, even if its config has ``resume`` "never".

    The folder may have been moved since. Raises ValueError for any other folder.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; pass the folder of a finished run.")
    config = as_moved(from_json(RunPaths(folder).config), folder)
    return RunInputs(dataclasses.replace(config, resume="auto", out=folder))


def last_stage(paths: RunPaths) -> Path:
    """Return the folder of a run's last stage. Raises ValueError, naming the first one that is not finished, if any."""
    # By the config, not by what is there: an earlier run of other stages may have left its own.
    stages = finished_run(paths.out).stages
    folders = paths.stage_folders(stages)
    for stage, folder in zip(stages, folders):
        # What an earlier stage left would pass for the student: its figures would stay when the run resumes.
        if StageManifest.read(folder) is None:
            raise ValueError(
                f"{paths.out} does not hold the result of {stage.name} yet; run it to its end first."
            )
    return folders[-1]


def trained_student(inputs: RunInputs) -> tuple[HybridForCausalLM, HeadPlan]:
    """Load the student of a finished run: from its last stage, or as it was built if no stage trains it.

    It runs on kernels of this machine (``auto``), which need not have those that trained it; `use_kernels` selects
    others. Raises ValueError if the run is not finished, naming any runs inside this folder: a sweep is easily
    mistaken for one of its runs.
    """
    paths = inputs.paths
    if not paths.plan.exists():
        below = [str(plan.parent) for plan in sorted(paths.out.glob(f"*/{paths.plan.name}"))]
        if below:
            raise ValueError(f"{paths.out} contains several runs; pass one of {', '.join(below)}.")
        raise ValueError(f"{paths.out} does not hold a plan of heads yet; run it to its end first.")
    plan = HeadPlan.load(paths.plan)
    if plan.keeps_all and not inputs.config.is_control:
        student, _ = new_student(inputs, plan)
        return student, plan
    if inputs.stages:
        student = student_of_stage(inputs, plan, last_stage(paths))
    elif paths.build.exists():
        student, _ = new_student(inputs, plan, recurrent=load_built(paths))
    else:
        raise ValueError(f"{paths.out} does not hold a student yet; run it to its end first.")
    return settle(student), plan


def training_record(inputs: RunInputs, last: Path | None = None) -> list[Record]:
    """List steps and tokens of each finished stage, first those that aligned the heads in another run, if any.

    Ends with the stage in the folder ``last``.
    """
    record = _alignment_record(inputs)
    for stage, folder in zip(inputs.stages, inputs.paths.stage_folders(inputs.stages)):
        if StageManifest.read(folder):
            n_tokens = stage.rows_read * inputs.config.data_of(stage).seq_len
            record.append({"name": stage.name, "steps": stage.steps, "tokens": n_tokens})
        if last is not None and folder.resolve() == last.resolve():
            break
    return record


def _alignment_record(inputs: RunInputs) -> list[Record]:
    """List the stages of the run that aligned this student's heads; none if this run did."""
    last = inputs.config.student.aligned
    if inputs.config.plan.restores:
        alignment = inputs.paths.aligned
        last = None
    elif last is not None:
        alignment = run_of_stage(last)
    else:
        return []
    if not alignment.config.is_file():
        return []
    # Stages after the one that gave its heads did not train this student.
    return training_record(finished_run(alignment.out), last=last)
