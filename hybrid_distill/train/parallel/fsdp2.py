"""FSDP2, torch's `fully_shard`, for the student (`Fsdp2`) and the teacher.

`with_sharded_teacher` shards the teacher's weights under any strategy for the student. torch cannot
undo `fully_shard`, so a copy of the stage is sharded: its modules, not the storage of its weights.
The given stage keeps its own frozen weights in place, and gets the trained ones at the end.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import cast

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from ...distributed import rank_and_world
from ...model.layout import decoder_of
from ...model.recurrent_heads import SSMHeads
from ...teacher import decoder_blocks
from ..optimizer import trainable
from ..stage import Stage
from .strategy import Strategy, check_suits, placeholder, stage_adamw, whole_tensor

IN_BF16 = MixedPrecisionPolicy(
    torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
)
"""Weights are gathered in bfloat16; gradients are summed in float32, and hidden states keep their
dtype."""
GATHERED_IN_BF16 = ("forward", "heads")
"""Entries that call each module of a layer: one that is sharded by itself is gathered only when it
is called."""


class Fsdp2(Strategy):
    """FSDP2: every process holds a shard of each parameter; a layer is gathered while it runs."""

    def __init__(self, stage: Stage, accelerator: Accelerator) -> None:
        check_suits(stage, "FSDP2")
        # Without super(): accelerate, which is connected as for DDP, would wrap the stage in it.
        self._whole = stage
        self._accelerator = accelerator
        self.stage = sharded_stage(stage, process_mesh(accelerator))
        self.model = self.stage
        self._root: FSDPModule = cast(FSDPModule, self.stage)
        if accelerator.gradient_accumulation_steps > 1:
            stay_gathered(self._root)
        # The shards hold the trained weights now; whole ones would take their memory once more.
        for parameter in trainable(stage).values():
            parameter.data = placeholder(parameter)
        for teacher in self.stage.teachers:
            nn.Module.to(teacher, accelerator.device)
        self.optimizer = accelerator.prepare(stage_adamw(self.stage))

    @contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        """Open the context of one micro-batch's passes."""
        # accelerate's context would exchange gradients in each: it sets this only on modules that
        # it has sharded itself (accelerate#3762).
        begin_micro_batch(self._root, is_last)
        with super().micro_batch(is_last):
            yield

    def unshard(self) -> bool:
        rank, _ = rank_and_world()
        is_main = rank == 0
        targets = trainable(self._whole)
        for name, parameter in trainable(self.stage).items():
            # A collective: every process must gather, also those that drop the result.
            whole = whole_tensor(parameter)
            if is_main:
                targets[name].data = whole.cpu()
        # Frees the shards before the whole stage moves back to the device.
        del self.model, self.stage, self.optimizer, self._root
        self._whole.place(self._accelerator.device)
        return is_main


def stay_gathered(root: FSDPModule) -> None:
    """Gather layers once a step, not twice in every micro-batch.

    A single micro-batch does better without: its layers give their memory back between forward and
    backward.
    """
    root.set_reshard_after_forward(False)


def begin_micro_batch(root: FSDPModule, is_last: bool) -> None:
    """Exchange gradients, and release layers, in the last micro-batch of a step alone.

    Until then, gradients add up in this process, whole.
    """
    root.set_requires_gradient_sync(is_last)
    root.set_reshard_after_backward(is_last)
    root.set_is_last_backward(is_last)


def process_mesh(accelerator: Accelerator) -> DeviceMesh:
    return init_device_mesh(accelerator.device.type, (accelerator.num_processes,))


def sharded_stage(stage: Stage, mesh: DeviceMesh) -> Stage:
    """Copy a stage with the student's weights sharded; ``stage`` and the teacher stay unchanged."""
    of_teachers: set[nn.Parameter] = set()
    for teacher in stage.teachers:
        of_teachers |= set(teacher.parameters())
    owned = set(stage.student.parameters()) - of_teachers
    copied = _copied(stage, owned=owned, shared=stage.teachers)
    for part in copied.parts():
        _shard_part(part, mesh, copied)
    # The rest: embeddings and what else lies outside of the layers.
    fully_shard(copied, mesh=mesh)
    return copied


def _shard_part(part: nn.Module, mesh: DeviceMesh, stage: Stage) -> None:
    """Shard one layer of a stage, from the inside outward.

    `fully_shard` leaves out what is sharded already.
    """
    policy = MixedPrecisionPolicy()
    if _gathers_in_bf16(stage):
        policy = IN_BF16
        for module in _kept_in_float32(part):
            fully_shard(module, mesh=mesh)
    fully_shard(part, mesh=mesh, mp_policy=policy)
    # FSDP2 gathers around `forward` alone, unless it is told of another method.
    if stage.entry != "forward":
        register_fsdp_forward_method(part, stage.entry)


def gathered_in_bf16(stage: Stage) -> set[nn.Parameter]:
    """Return the parameters of a stage that FSDP2 would gather in bfloat16."""
    parameters: set[nn.Parameter] = set()
    if not _gathers_in_bf16(stage):
        return parameters
    for part in stage.parts():
        parameters |= set(part.parameters())
        for module in _kept_in_float32(part):
            parameters -= set(module.parameters())
    return parameters


def _gathers_in_bf16(stage: Stage) -> bool:
    return stage.bf16 and stage.entry in GATHERED_IN_BF16


def _kept_in_float32(part: nn.Module) -> list[nn.Module]:
    """List the modules of a layer that autocast does not compute in bfloat16.

    These are all with parameters but plain linears. The recurrent heads are one of them, as a
    whole: their decays, convolutions and biases need float32. The rest, the large matrices, may
    travel in bfloat16: autocast would round them in the same way after the transfer.
    """
    if type(part) is nn.Linear:
        return []
    has_own_parameters = next(part.parameters(recurse=False), None) is not None
    if has_own_parameters or isinstance(part, SSMHeads):
        return [part]
    kept: list[nn.Module] = []
    for child in part.children():
        kept += _kept_in_float32(child)
    return kept


def with_sharded_teacher(stage: Stage, mesh: DeviceMesh) -> Stage:
    """Copy a stage, with the same student and a teacher whose decoder layers are sharded.

    A layer is gathered while it runs; embeddings are whole in every process. The teacher that
    ``stage`` holds moves to the CPU, including the weights that it shares with the student, none of
    which the stage runs. Raises ValueError for a stage that does run them.
    """
    if not stage.teacher_shardable:
        raise ValueError(
            "this stage runs the teacher's own weights in the student, so the teacher cannot be "
            "sharded; use target 'mixer' or 'head', or --teacher-sharding replicated."
        )
    nn.Module.to(stage.teacher, "cpu")
    copied = _copied(stage, owned=stage.teacher.parameters(), shared=[stage.student])
    copied.teacher_is_sharded = True
    inside: set[nn.Parameter] = set()
    for _, block in decoder_blocks(copied.teacher):
        fully_shard(block, mesh=mesh)
        inside |= set(block.parameters())
    # Embeddings stay whole: a sharded head would rule out the fused loss (`EndToEnd.is_fused`).
    outside = set(copied.teacher.parameters()) - inside
    fully_shard(decoder_of(copied.teacher), mesh=mesh, ignored_params=outside)
    return copied


def _copied(stage: Stage, *, owned: Iterable[nn.Parameter], shared: Iterable[nn.Module]) -> Stage:
    """Deep-copy the stage, except for the ``shared`` modules.

    ``owned`` become new parameters with the same storage.
    """
    # What deepcopy finds in its memo, it takes instead of a copy.
    memo: dict[int, object] = {}
    for model in shared:
        for module in model.modules():
            memo[id(module)] = module
        for parameter in model.parameters():
            memo[id(parameter)] = parameter
    for parameter in owned:
        # `fully_shard` replaces a module's parameters; the originals stay in the given stage.
        memo[id(parameter)] = nn.Parameter(parameter.detach(), parameter.requires_grad)
    return copy.deepcopy(stage, memo)
