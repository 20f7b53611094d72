"""Students of a run: newly built, from an alignment of all heads, or from a finished stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from ..data import Batch, Rows
from ..io import Record
from ..kernels import Kernels
from ..model.modeling_hybrid import HybridForCausalLM
from ..plan import HeadPlan
from ..progress import Phase
from ..student.build import BuildReport, build_student, empty_student
from ..student.grafting import graft_recurrent_heads, load_recurrent_heads
from ..student.init import DEFAULT_INIT, Init
from ..teacher import fingerprint
from ..train.result import StageManifest, load_stage, stage_tensors
from .built import built_for, save_built
from .inputs import RunInputs
from .paths import run_of_stage

CALIBRATION_TOKENS = 2048


def build_and_save(
    inputs: RunInputs, plan: HeadPlan, aligned: Path | None, rows: Rows | None, requirements: Record
) -> HybridForCausalLM:
    """Build a student, its heads from a finished alignment or fitted to the run's first ``rows`` of text; save it.

    ``requirements`` are its `build_requirements`.
    """
    calibration = None
    if rows is not None:
        calibration = rows.batch(0, max(1, CALIBRATION_TOKENS // inputs.config.data.seq_len))
    with Phase("building the student"):
        if aligned is not None:
            student, report = student_from_alignment(inputs, plan, aligned)
        else:
            student, report = new_student(
                inputs,
                plan,
                inputs.config.student.init,
                calibration,
                kernels=inputs.config.student.kernels,
            )
        save_built(inputs.paths, student, report, requirements)
    return student


def build_requirements(inputs: RunInputs, plan: HeadPlan) -> Record:
    """Return everything that the built student depends on and that a folder's owner may replace."""
    student = dataclasses.asdict(inputs.config.student)
    # May change when a run resumes, which must still find the student that it began with.
    del student["kernels"]
    aligned = inputs.config.student.aligned
    if aligned is not None:
        manifest = StageManifest.read(aligned)
        student["aligned"] = manifest and manifest.weights
    return {
        "plan": dataclasses.asdict(plan),
        "teacher": fingerprint(inputs.teacher),
        "student": student,
        "seed": inputs.config.seed,
    }


def new_student(
    inputs: RunInputs,
    plan: HeadPlan,
    init: Init = DEFAULT_INIT,
    calibration: Batch | None = None,
    recurrent: Mapping[str, Tensor] | None = None,
    kernels: Kernels = "auto",
) -> tuple[HybridForCausalLM, BuildReport]:
    """Build the student that the config describes; ``recurrent`` are the weights of its recurrent heads, if known.

    The config's ``kernels`` are for training: they may be missing where a finished run is opened.
    """
    options = inputs.config.student
    student, report = build_student(
        inputs.teacher,
        plan,
        **options.head_options,
        init=init,
        calibration=calibration,
        recurrent=recurrent,
        seed=inputs.config.seed,
        kernels=kernels,
    )
    student.name_or_path = inputs.config.name
    return student, report


def student_from_alignment(
    inputs: RunInputs, plan: HeadPlan, stage: Path
) -> tuple[HybridForCausalLM, BuildReport]:
    """Build a student whose recurrent heads come from a finished alignment of all heads."""
    student, report = new_student(inputs, plan, kernels=inputs.config.student.kernels)
    graft_recurrent_heads(student, _donor(inputs, stage))
    return student, report


def student_of_stage(inputs: RunInputs, plan: HeadPlan, stage: Path) -> HybridForCausalLM:
    """Build a student and load the weights of a finished stage."""
    student, _ = new_student(inputs, plan)
    load_stage(stage, student)
    return student


def _donor(inputs: RunInputs, stage: Path) -> HybridForCausalLM:
    """Return a student without kept heads that holds the recurrent heads of a finished alignment, and no other
    weights: a second copy of a large model would not fit."""
    requirements = built_for(run_of_stage(stage))
    if requirements is not None and requirements["teacher"] != fingerprint(inputs.teacher):
        raise ValueError(
            f"student.aligned is {stage}, whose heads were aligned with another teacher; pass a stage of a run with "
            "this one."
        )
    options = inputs.config.student
    none_kept = HeadPlan.none(inputs.teacher)
    donor = empty_student(inputs.teacher, none_kept, **options.head_options)
    load_recurrent_heads(donor, stage_tensors(stage), str(stage))
    return donor
