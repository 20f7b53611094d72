"""Distribution of a stage over processes: the only interface that the training loop knows.

Under every strategy, a process writes the same share of a checkpoint: its rows of each float32
tensor, split as in FSDP2, under the parameter names. So a run can resume with another number of
processes or another strategy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from ...distributed import rank_and_world
from ..optimizer import MOMENTS, make_adamw, trainable
from ..stage import Stage
from ..weights import ShardedTensors
from .copies import Bf16Copies


def check_suits(stage: Stage, kind: str) -> None:
    """Raise ValueError for a stage that cannot train under a kind of strategy: ``ZeRO``, ``ZeRO-3`` or ``FSDP2``."""
    name = stage.config.name
    if kind == "ZeRO" and stage.config.on_divergence == "skip":
        raise ValueError(
            f"{name}.on_divergence is 'skip', but DeepSpeed steps before the gradient can be looked at; use 'stop', or "
            "DDP or FSDP2."
        )
    if kind in ("ZeRO-3", "FSDP2") and not stage.shardable:
        raise ValueError(f"{name} cannot run under {kind}; use ZeRO-2 or DDP for this stage.")


class Strategy:
    """Stage on its device, ready to train: in one process, or under DDP.

    Every process holds everything. Every process must call each method, in the same order.
    """

    stage: Stage
    """Stage that trains: the given one, or a copy."""
    steps_in_backward = False
    """True if the optimizer steps at the end of the backward pass, before its gradient can be
    looked at."""
    may_copy = True
    """False if the strategy itself keeps or gathers the weights that a micro-batch reads."""
    copies: Bf16Copies | None = None
    """bfloat16 copies of trained weights."""
    model: Any
    """Module to call with a batch: ``stage``, or a wrapper around it."""
    optimizer: Any
    """accelerate's wrapper around the optimizer, whose ``optimizer`` is the real one."""

    def __init__(self, stage: Stage, accelerator: Accelerator) -> None:
        self.stage = stage
        self._accelerator = accelerator
        # accelerate moves the registered modules only, and a stage does not register its teacher.
        stage.place(accelerator.device)
        self.model, self.optimizer = accelerator.prepare(stage, stage_adamw(stage))
        if self.may_copy and stage.bf16:
            self.copies = Bf16Copies(stage)

    def begin_step(self) -> None:
        """Prepare for the micro-batches of a step: the weights have changed."""
        if self.copies is not None:
            self.copies.refresh()

    @contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        """Open the context of one micro-batch's passes.

        Processes exchange gradients in the ``is_last`` of a step.
        """
        with ExitStack() as contexts:
            # accelerate counts the calls, and so knows the last one itself.
            contexts.enter_context(self._accelerator.accumulate(self.model))
            if self.copies is not None:
                exchanges = is_last and self._accelerator.num_processes > 1
                contexts.enter_context(self.copies.in_place(adds=not exchanges))
            yield

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the trained parameters, in float32, and AdamW's state.

        Names are ``weights/NAME`` and ``optimizer/KEY/NAME``.
        """
        state = self.optimizer.optimizer.state
        for name, parameter in trainable(self.stage).items():
            yield f"weights/{name}", parameter.detach()
            for key, tensor in state.get(parameter, {}).items():
                yield f"optimizer/{key}/{name}", tensor

    def shares(self) -> dict[str, Tensor]:
        """Copy this process's rows of `tensors` to the CPU; the first process gets the scalars."""
        shares: dict[str, Tensor] = {}
        for name, tensor in self.tensors():
            rows = own_rows(tensor)
            if rows is not None:
                shares[name] = rows
        return shares

    def load_optimizer(self, tensors: ShardedTensors) -> None:
        """Load the optimizer state that `tensors` yielded.

        Weights are loaded into a stage before it is distributed.
        """
        # The optimizer had not stepped yet: every step so far was empty or skipped.
        if not len(tensors):
            return
        for name, parameter in trainable(self.stage).items():
            # A fused AdamW counts its steps on the parameter's device.
            step = tensors[f"step/{name}"].to(parameter.device, copy=True)
            state = self.optimizer.optimizer.state[parameter]
            state["step"] = step
            for key in MOMENTS:
                state[key] = _read_like(parameter, tensors, f"{key}/{name}")

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale the gradients to a norm of at most ``max_norm``.

        Return their norm before that, over all processes, on the device.
        """
        norm = torch.nn.utils.clip_grad_norm_(trainable(self.stage).values(), max_norm)
        # Under FSDP2 it is a DTensor, whose parts are not summed yet.
        return whole_tensor(norm)

    def unshard(self) -> bool:
        """End the training: put the whole trained parameters into the given stage.

        Return whether this process has them. The main process always does. The others have
        placeholders instead, and read the file that the main process writes, so that a machine
        holds it in memory once.
        """
        return True


def stage_adamw(stage: Stage) -> AdamW:
    """Make the optimizer of a stage's config, for its current parameters."""
    config = stage.config
    return make_adamw(
        stage,
        learning_rate=config.learning_rate,
        betas=config.betas,
        weight_decay=config.weight_decay,
        lr_scale=config.lr_multipliers,
    )


def whole_tensor(tensor: Tensor) -> Tensor:
    """Gather a tensor that may be sharded, detached."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    return tensor


def placeholder(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape that takes the memory of one element."""
    return torch.empty(1, dtype=tensor.dtype).expand(tensor.shape)


def own_rows(tensor: Tensor) -> Tensor | None:
    """Copy this process's rows of a whole or sharded tensor to the CPU.

    None for a scalar, except on rank 0.
    """
    rank, _ = rank_and_world()
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    elif tensor.ndim:
        begin, end = row_bounds(len(tensor))
        tensor = tensor[begin:end]
    elif rank:
        return None
    # A copy on a CPU too: training continues while it is written.
    return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)


def row_bounds(n_rows: int) -> tuple[int, int]:
    """Return where this process's rows begin and end.

    All processes have equally many, except for the last ones. FSDP2 splits parameters in the same
    way, so that its shards can be read and written as they are.
    """
    rank, world = rank_and_world()
    per_process = math.ceil(n_rows / world)
    begin = min(rank * per_process, n_rows)
    end = min(begin + per_process, n_rows)
    return begin, end


def _read_like(parameter: Tensor, tensors: ShardedTensors, name: str) -> Tensor:
    """Read a tensor in the layout of ``parameter``: whole, or only this process's rows."""
    if not isinstance(parameter, DTensor):
        return tensors[name].to(parameter.device, copy=True)
    begin, end = row_bounds(len(parameter))
    rows = tensors.rows(name, begin, end).to(parameter.device)
    return DTensor.from_local(
        rows,
        parameter.device_mesh,
        parameter.placements,
        # Without them, torch assumes that all processes have equally many rows.
        shape=parameter.shape,
        stride=parameter.stride(),
    )
