"""Choice of the strategy that a launch file asks for."""

from __future__ import annotations

import math
import os

from accelerate import Accelerator
from accelerate.utils import DistributedType

from ...distributed.launch import DEEPSPEED_REQUESTED, FSDP_REQUESTED, is_on, launched_world
from ..stage import Stage
from .strategy import Strategy, check_suits

ZERO_STAGE = "ACCELERATE_DEEPSPEED_ZERO_STAGE"
"""accelerate's variable for a launch file's ``zero_stage``."""


def is_deepspeed(accelerator: Accelerator) -> bool:
    return accelerator.distributed_type == DistributedType.DEEPSPEED


def is_fsdp2(accelerator: Accelerator) -> bool:
    """Check whether the launch file asks for FSDP2.

    accelerate itself does not know: it only connects the processes, as for DDP
    (`make_accelerator`).
    """
    return is_on(FSDP_REQUESTED) and accelerator.num_processes > 1


def check_launched(stage: Stage) -> None:
    """Raise ValueError for a stage that cannot train as the launch file says, before the processes are connected."""
    if is_on(DEEPSPEED_REQUESTED):
        check_suits(stage, "ZeRO")
        if os.environ.get(ZERO_STAGE) == "3":
            check_suits(stage, "ZeRO-3")
    elif is_on(FSDP_REQUESTED) and launched_world() > 1:
        check_suits(stage, "FSDP2")


def set_batch(accelerator: Accelerator, *, rows: int, micro_batch_size: int, clip: float) -> None:
    """Set how a process's ``rows`` of a step are split, and the largest norm of a gradient.

    DeepSpeed needs both before it prepares a model.
    """
    n_micro_batches = math.ceil(rows / micro_batch_size)
    accelerator.gradient_accumulation_steps = n_micro_batches
    plugin = accelerator.state.deepspeed_plugin
    if plugin:
        plugin.deepspeed_config.update(
            train_micro_batch_size_per_gpu=min(micro_batch_size, rows),
            gradient_accumulation_steps=n_micro_batches,
            gradient_clipping=clip,
        )


def distribute(stage: Stage, accelerator: Accelerator, teacher_sharding: str) -> Strategy:
    """Distribute the student as the launch file says, and the teacher by ``teacher_sharding``."""
    if teacher_sharding == "sharded" and stage.teachers and accelerator.num_processes > 1:
        from .fsdp2 import process_mesh, with_sharded_teacher

        stage = with_sharded_teacher(stage, process_mesh(accelerator))
    if is_deepspeed(accelerator):
        # DeepSpeed is optional, and takes seconds to import.
        from .zero import Zero

        return Zero(stage, accelerator)
    if is_fsdp2(accelerator):
        from .fsdp2 import Fsdp2

        return Fsdp2(stage, accelerator)
    return Strategy(stage, accelerator)
