"""Spread a stage over the processes that train it. The loop knows this interface alone.

Whatever the strategy, a process writes the same share of a checkpoint: its rows of every float32 tensor, cut as FSDP2
cuts them, under the parameters' names. So a run can resume with another number of processes or another strategy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from ...distributed import rank_and_world
from ..checkpoint import ShardedTensors
from ..optimizer import MOMENTS, make_adamw, trainable
from ..stage import Stage


class Strategy:
    """A stage on its device and ready to train: on one process, or with DDP, where every process holds everything.

    Every process must call each method, in the same order.
    """

    stage: Stage
    """The stage as it trains: the given one, or a copy."""
    model: Any
    """Module that takes a batch: ``stage``, or a wrapper around it."""
    optimizer: Any

    def __init__(self, stage: Stage, accelerator: Accelerator) -> None:
        self.stage, self._accelerator = stage, accelerator
        stage.place(accelerator.device)
        self.model, self.optimizer = accelerator.prepare(stage, stage_adamw(stage))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the trained parameters, in float32, as ``weights/NAME`` and AdamW's state as ``optimizer/KEY/NAME``."""
        state = self.optimizer.optimizer.state
        for name, parameter in trainable(self.stage).items():
            yield f"weights/{name}", parameter.detach()
            for key, tensor in state[parameter].items():
                yield f"optimizer/{key}/{name}", tensor

    def shares(self) -> dict[str, Tensor]:
        """Copy this process's rows of `tensors` to the CPU; the first process has what has no rows."""
        shares = {name: own_rows(tensor) for name, tensor in self.tensors()}
        return {name: share for name, share in shares.items() if share is not None}

    def load_optimizer(self, tensors: ShardedTensors) -> None:
        """Load what `tensors` yielded of the optimizer; weights are loaded into a stage before it is spread."""
        state = self.optimizer.optimizer.state
        for name, parameter in trainable(self.stage).items():
            state[parameter]["step"] = tensors[f"step/{name}"].to(parameter.device, copy=True)  # fused: counted there
            for key in MOMENTS:
                state[parameter][key] = _read_like(parameter, tensors, f"{key}/{name}")

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale the gradients to a norm of at most ``max_norm``; returns their norm before, over all processes,
        on the device."""
        return whole_tensor(torch.nn.utils.clip_grad_norm_(trainable(self.stage).values(), max_norm))

    def unshard(self) -> bool:
        """End the training: leave the trained parameters, whole, in the given stage; returns whether this process has
        them, as the main one always does.

        The others have placeholders in their place, and read the file that the main process writes: a machine's
        memory then holds it once.
        """
        return True


def _read_like(parameter: Tensor, tensors: ShardedTensors, name: str) -> Tensor:
    """Read a tensor as the parameter lies in this process: whole, or this process's rows."""
    if not isinstance(parameter, DTensor):
        return tensors[name].to(parameter.device, copy=True)
    rows = tensors.rows(name, *row_bounds(len(parameter))).to(parameter.device)
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(rows, parameter.device_mesh, parameter.placements, shape=shape, stride=stride)


def whole_tensor(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def placeholder(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape in the memory of one element."""
    return torch.empty(1, dtype=tensor.dtype).expand(tensor.shape)


def own_rows(tensor: Tensor) -> Tensor | None:
    """Copy this process's rows of a tensor, whole or sharded, to the CPU; None where it has no rows and others do."""
    rank, _ = rank_and_world()
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    elif tensor.ndim:
        begin, end = row_bounds(len(tensor))
        tensor = tensor[begin:end]
    elif rank:
        return None
    return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)


def row_bounds(n_rows: int) -> tuple[int, int]:
    """Return where this process's rows begin and end: all have as many, but for the last ones."""
    rank, world = rank_and_world()
    each = -(-n_rows // world)
    return min(rank * each, n_rows), min((rank + 1) * each, n_rows)


def stage_adamw(stage: Stage) -> AdamW:
    """Make the optimizer of a stage's config, for the parameters as they are now."""
    config = stage.config
    return make_adamw(
        stage,
        learning_rate=config.learning_rate,
        betas=config.betas,
        weight_decay=config.weight_decay,
        lr_scale=getattr(config, "lr_scale", None),
    )
