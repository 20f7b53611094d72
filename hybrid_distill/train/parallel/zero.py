"""DeepSpeed ZeRO: gathering whole tensors from training that shards them over processes, and loading them back.

Every process must call each of these functions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ...distributed import build_whole_models
from ..checkpoint import ShardedTensors
from ..optimizer import MOMENTS, trainable
from ..stage import Stage
from .strategy import Strategy, placeholder


class Zero(Strategy):
    """DeepSpeed ZeRO: shards optimizer states (ZeRO-1), gradients too (ZeRO-2), and weights too (ZeRO-3)."""

    steps_in_backward = True

    def __init__(self, stage: Stage, accelerator: Accelerator) -> None:
        if stage.config.on_divergence == "skip":
            raise ValueError(
                f"{stage.config.name}.on_divergence is 'skip', but DeepSpeed steps before the gradient can be looked "
                "at; use 'stop', or DDP or FSDP2."
            )
        super().__init__(stage, accelerator)
        _register_outside_use(stage)
        if any(hasattr(parameter, "ds_id") for parameter in stage.parameters()) and not stage.shardable:
            raise ValueError(f"{stage.config.name} cannot run under ZeRO-3; use ZeRO-2 or DDP for this stage.")

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield as `Strategy.tensors` does, gathering the tensors one by one."""
        from deepspeed.utils import safe_get_full_optimizer_state

        for name, weight in self._weights():
            yield f"weights/{name}", weight
        _link_states(self.optimizer)
        states = self.optimizer.optimizer.optimizer.state.values()
        step = next((state["step"] for state in states if "step" in state), None)
        if step is None:  # as in `Strategy.load_optimizer`
            return
        for name, parameter in trainable(self.stage).items():
            yield f"optimizer/step/{name}", torch.tensor(float(step))
            for key in MOMENTS:
                yield f"optimizer/{key}/{name}", _got(safe_get_full_optimizer_state(parameter, key))

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        from deepspeed.utils import safe_get_full_fp32_param

        for name, parameter in trainable(self.stage).items():
            yield name, _got(safe_get_full_fp32_param(parameter))

    def load_optimizer(self, tensors: ShardedTensors) -> None:
        if not len(tensors):
            return
        from deepspeed.utils import safe_set_full_optimizer_state

        step = tensors[next(name for name in tensors if name.startswith("step/"))]
        for flat in _flat_partitions(self.optimizer.optimizer):
            state = self.optimizer.optimizer.optimizer.state[flat]
            state |= {key: torch.zeros_like(flat) for key in MOMENTS}
            state["step"] = step.clone().to(flat.device)
        _link_states(self.optimizer)
        for name, parameter in trainable(self.stage).items():
            for key in MOMENTS:
                value = tensors[f"{key}/{name}"].to(parameter.device)
                if hasattr(parameter, "ds_id"):
                    _set_part(parameter, value, key)
                else:
                    safe_set_full_optimizer_state(parameter, value, key)

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Return the gradient norm; DeepSpeed has already clipped to the maximum that `set_batch` passed to it."""
        norm = self._accelerator.clip_grad_norm_(trainable(self.stage).values(), max_norm)
        return torch.as_tensor(0.0 if norm is None else norm, device=self._accelerator.device)

    def unshard(self) -> bool:
        """Take the stage back from DeepSpeed: with new, whole parameters, in float32 if they were trained."""
        from deepspeed import zero

        keep = Tensor.cpu if self._accelerator.is_main_process else placeholder
        whole = {name: keep(tensor) for name, tensor in self._weights()}
        for name, parameter in self.stage.named_parameters():
            if name not in whole:
                with zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
                    whole[name] = parameter.detach().cpu().clone()
        self.model.destroy()
        build_whole_models()
        fresh: dict[int, nn.Parameter] = {}
        for name, parameter in self.stage.named_parameters():
            fresh[id(parameter)] = nn.Parameter(whole[name].to(self.model.device), parameter.requires_grad)
        for part in self.stage.modules():
            # ZeRO-3 leaves its own kind of dictionary behind.
            part._parameters = {key: None if p is None else fresh[id(p)] for key, p in part._parameters.items()}
        return self._accelerator.is_main_process


def _register_outside_use(module: nn.Module) -> None:
    """Tell ZeRO-3 which parameters a module uses without calling the submodule that owns them."""
    from deepspeed import zero

    for part, name in itertools.product(module.modules(), ("x_proj", "b_proj", "c_proj", "a_proj")):
        projection = getattr(part, name, None)
        if isinstance(projection, nn.Linear) and hasattr(projection.weight, "ds_id"):
            zero.register_external_parameter(part, projection.weight)
            if projection.bias is not None:
                zero.register_external_parameter(part, projection.bias)


def _flat_partitions(engine: Any) -> list[Tensor]:
    """Return this process's float32 parameters, one flat tensor per parameter group of the optimizer."""
    return getattr(engine, "fp32_partitioned_groups_flat", None) or engine.single_partition_of_fp32_groups


def _link_states(optimizer: Any) -> None:
    """Link parameters to their optimizer state; ZeRO-2 itself does so only for the first group."""
    from deepspeed.utils import lazy_init_hp_params_optimizer_state

    engine = optimizer.optimizer
    if hasattr(engine, "fp32_partitioned_groups_flat"):
        return
    for parameters, flat in zip(engine.bit16_groups, engine.single_partition_of_fp32_groups):
        lazy_init_hp_params_optimizer_state(parameters, flat, engine.optimizer.state)


def _set_part(parameter: Tensor, value: Tensor, key: str) -> None:
    """Set a moment under ZeRO-3, which splits a flattened parameter into equal parts, with padding in the last one."""
    from deepspeed.utils import safe_get_local_optimizer_state

    part = safe_get_local_optimizer_state(parameter, key)
    rank = torch.distributed.get_rank()
    mine = value.flatten()[rank * part.numel() : (rank + 1) * part.numel()]
    part[: mine.numel()].copy_(mine)


def _got(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise RuntimeError("DeepSpeed holds no float32 copy of a trainable parameter; use ZeRO stage 1, 2 or 3.")
    return tensor.detach()
