"""Training time of a run's stages, estimated from one second of training on random weights and tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import torch
from transformers import AutoModelForCausalLM

from ...config import RunConfig
from ...data import Batch, on_device
from ...distributed import own_device
from ...plan import HeadPlan
from ...student.build import build_student
from ...teacher import DTYPES, load_config
from ...train.config import Distill
from ...train.stage import Stage
from ...train.stages import make_stage

LARGEST = 1e9
"""Parameters of the largest teacher that a dry run builds."""


def training_time(config: RunConfig, plan: HeadPlan, n_parameters: int) -> str:
    """Train each stage for part of a second on this machine; return the estimated times, one line per stage.

    Empty for runs without stages or on several GPUs, for students that keep all heads, and for teachers too large for
    a dry run.
    """
    if not config.stages or config.gpus > 1 or n_parameters > LARGEST or plan.keeps_all:
        return ""
    device = own_device()
    lines, whole = [], 0.0
    for name, steps, seconds in _seconds_of_steps(config, plan, device):
        whole += steps * seconds
        lines.append(f"  {name}: {steps:,} steps of {seconds:,.1f} s, {duration(steps * seconds)}")
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    heading = (
        f"Time of training, from a second measured now on this machine ({device.type}{threads}): "
    )
    besides = "scoring and evaluation"
    if config.control:
        besides += ", and the control, which takes as long as the stages that train whole models"
    return "\n".join([f"{heading}{duration(whole)}, besides {besides}", *lines])


def _seconds_of_steps(
    config: RunConfig, plan: HeadPlan, device: torch.device
) -> Iterator[tuple[str, int, float]]:
    """Yield (stage, steps, seconds per step)."""
    shape = load_config(config.teacher.path, config.teacher.revision)
    attention = {"attn_implementation": own} if (own := config.teacher.attn_implementation) else {}
    with torch.random.fork_rng():
        teacher = AutoModelForCausalLM.from_config(
            shape, dtype=DTYPES[config.teacher.dtype], **attention
        )
        for options in config.stages:
            if isinstance(options, Distill):
                options = replace(options, teacher_logits=None)
            student, _ = build_student(
                teacher,
                # Random weights do not match the teacher that the plan names.
                replace(plan, teacher=""),
                **config.student.head_options,
                init="random",
                kernels=config.student.kernels,
            )
            stage = make_stage(options, student.train(), teacher)
            stage.place(device)
            ids_BL = torch.randint(
                3, teacher.config.vocab_size, (1, config.data_of(options).seq_len)
            )
            row: Batch = {
                "input_ids": ids_BL,
                "seq_idx": torch.zeros_like(ids_BL),
                "mask": ids_BL >= 0,
            }
            seconds = _seconds_of(stage, on_device(row, device), 1.0 / len(config.stages))
            yield options.name, options.steps, seconds * options.batch_size


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


def duration(seconds: float) -> str:
    """Format a time: 42 s, 12 min, 3 h 20 min."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60:,} h {minutes % 60} min"
