"""Training time of a run's stages, estimated from some rows of training on random weights and tokens."""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from ...config import RunConfig
from ...data import Batch, on_device
from ...distributed import own_device
from ...model.document_kernels import compiling_for
from ...plan import HeadPlan
from ...progress import Phase, duration
from ...student.build import build_student
from ...teacher import DTYPES, load_config
from ...train.config import Distill, StageConfig
from ...train.stage import Stage
from ...train.stages import make_stage

LARGEST = 1e9
"""Parameters of the largest teacher that a dry run builds."""


def training_time(config: RunConfig, plan: HeadPlan, n_parameters: int) -> str:
    """Train each stage for part of a second, or two rows, on this machine; return the estimated times, line by line.

    Empty for runs without stages or on several GPUs, for students that keep all heads, and for teachers too large for
    a dry run.
    """
    if not config.stages or config.gpus > 1 or n_parameters > LARGEST or plan.keeps_all:
        return ""
    device = own_device()
    stage_lines = []
    total_seconds = 0.0
    # The caller's own random numbers stay as they are.
    with torch.random.fork_rng(), Phase("training a few rows, to estimate times"):
        teacher = _random_teacher(config)
        for stage_config in config.stages:
            stage = _random_stage(config, stage_config, plan, teacher)
            stage.place(device)
            row = on_device(_random_row(config, stage_config, teacher), device)
            length = row["input_ids"].shape[1]
            with compiling_for(stage.compiled_length(length)):
                seconds_of_row = _seconds_of(stage, row, 1.0 / len(config.stages))
            seconds_of_step = seconds_of_row * stage_config.batch_size
            steps = stage_config.steps
            seconds = steps * seconds_of_step
            total_seconds += seconds
            stage_lines.append(
                f"  {stage_config.name}: {steps:,} steps of {seconds_of_step:,.1f} s, {duration(seconds)}"
            )
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    heading = (
        f"Time of training, from rows trained just now on this machine ({device.type}{threads}): "
    )
    besides = "scoring and evaluation"
    if config.control:
        besides += ", and the control, which takes as long as the stages that train whole models"
    first_line = f"{heading}{duration(total_seconds)}, besides {besides}"
    return "\n".join([first_line, *stage_lines])


def _random_teacher(config: RunConfig) -> PreTrainedModel:
    options = {}
    # Without the option, transformers chooses.
    if config.teacher.attn_implementation is not None:
        options["attn_implementation"] = config.teacher.attn_implementation
    teacher_config = load_config(config.teacher.path, config.teacher.revision)
    dtype = DTYPES[config.teacher.dtype]
    return AutoModelForCausalLM.from_config(teacher_config, dtype=dtype, **options)


def _random_stage(
    config: RunConfig, stage_config: StageConfig, plan: HeadPlan, teacher: PreTrainedModel
) -> Stage:
    """Make a stage with a student of its own; cached logits are not read."""
    if isinstance(stage_config, Distill):
        stage_config = replace(stage_config, teacher_logits=None)
    student, _ = build_student(
        teacher,
        # Random weights do not match the teacher that the plan names.
        replace(plan, teacher=""),
        **config.student.head_options,
        init="random",
        kernels=config.student.kernels,
    )
    return make_stage(stage_config, student.train(), teacher)


def _random_row(config: RunConfig, stage_config: StageConfig, teacher: PreTrainedModel) -> Batch:
    seq_len = config.data_of(stage_config).seq_len
    ids_BL = torch.randint(3, teacher.config.vocab_size, (1, seq_len))
    return {
        "input_ids": ids_BL,
        "seq_idx": torch.zeros_like(ids_BL),
        "mask": ids_BL >= 0,
    }


def _seconds_of(stage: Stage, row: Batch, at_least: float) -> float:
    """Return the mean seconds of a row's forward and backward, after one pass to warm up.

    Each pass has its own seed, which decides if the student of the on-policy stage generates the row first.
    """

    def train(seed: int) -> None:
        for part in stage.micro_batches(row, 1, [seed]):
            loss = stage(part, stage.totals(part)).total
            loss.backward()
            # Waits for the GPU, which otherwise computes on behind the clock.
            loss.item()

    train(0)
    began = time.perf_counter()
    n = 0
    while not n or time.perf_counter() - began < at_least:
        n += 1
        train(n)
    return (time.perf_counter() - began) / n
