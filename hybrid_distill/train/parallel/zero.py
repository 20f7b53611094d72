"""DeepSpeed ZeRO: whole tensors out of a training that keeps a part of them in each process, and back in.

Every process must call each of these functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ...distributed import build_whole_models
from ..checkpoint import Content, Divided
from ..config import StageConfig
from ..optimizer import trainable
from ..stages import Stage
from .strategy import Strategy, stage_adamw

MOMENTS = ("exp_avg", "exp_avg_sq")


class Zero(Strategy):
    """Optimiser states and gradients divided (ZeRO-1, ZeRO-2), weights too (ZeRO-3)."""

    def __init__(self, stage: Stage, config: StageConfig, accelerator: Accelerator) -> None:
        if config.on_divergence == "skip":
            raise ValueError(
                f"{config.name}.on_divergence is 'skip', but DeepSpeed steps before the gradient can be looked at; "
                "use 'stop', or DDP or FSDP2."
            )
        self.stage, self._accelerator = stage, accelerator
        stage.place(accelerator.device)
        self.model, self.optimizer = accelerator.prepare(stage, stage_adamw(stage, config))
        prepare_outside_use(stage)
        if is_divided(stage) and not stage.divisible:
            raise ValueError(f"{config.name} cannot run under ZeRO-3; use ZeRO-2 or DDP for this stage.")

    def weights(self) -> Content:
        return whole_trainable(self.stage)

    def optimizer_tensors(self) -> Content:
        return whole_optimizer(self.stage, self.optimizer)

    def load_optimizer(self, tensors: Mapping[str, Tensor]) -> None:
        load_optimizer(self.stage, self.optimizer, tensors)

    def clip_gradients(self, max_norm: float) -> float:
        """DeepSpeed was told the norm by `set_batch`, and has clipped."""
        norm = self._accelerator.clip_grad_norm_(trainable(self.stage).values(), max_norm)
        return 0.0 if norm is None else float(norm)

    def give_back(self) -> None:
        release(self.stage, self.model)


def whole_trainable(module: nn.Module) -> dict[str, Divided]:
    """Trainable parameters, in float32."""
    from deepspeed.utils import safe_get_full_fp32_param

    parameters = trainable(module).items()
    return {name: Divided(_shape(p), partial(_got, safe_get_full_fp32_param, p)) for name, p in parameters}


def whole_optimizer(module: nn.Module, optimizer: Any) -> Content:
    """The same tensors as `optimizer_tensors`."""
    from deepspeed.utils import safe_get_full_optimizer_state

    _link_states(optimizer)
    step = next(state["step"] for state in optimizer.optimizer.optimizer.state.values() if "step" in state)
    tensors: dict[str, Tensor | Divided] = {}
    for name, parameter in trainable(module).items():
        tensors[f"step/{name}"] = torch.tensor(float(step))
        for key in MOMENTS:
            whole = partial(_got, safe_get_full_optimizer_state, parameter, key)
            tensors[f"{key}/{name}"] = Divided(_shape(parameter), whole)
    return tensors


def load_optimizer(module: nn.Module, optimizer: Any, tensors: Mapping[str, Tensor]) -> None:
    """Give every process its part of the tensors of `whole_optimizer`."""
    from deepspeed.utils import safe_set_full_optimizer_state

    step = tensors[next(name for name in tensors if name.startswith("step/"))]
    for flat in _flat_partitions(optimizer.optimizer):
        state = optimizer.optimizer.optimizer.state[flat]
        state |= {key: torch.zeros_like(flat) for key in MOMENTS}
        state["step"] = step.clone().to(flat.device)
    _link_states(optimizer)
    for name, parameter in trainable(module).items():
        for key in MOMENTS:
            value = tensors[f"{key}/{name}"].to(parameter.device)
            if hasattr(parameter, "ds_id"):
                _set_part(parameter, value, key)
            else:
                safe_set_full_optimizer_state(parameter, value, key)


def prepare_outside_use(module: nn.Module) -> None:
    """Tell ZeRO-3 which parameters a module uses without calling the submodule that owns them."""
    from deepspeed import zero

    for part in module.modules():
        projection = getattr(part, "a_proj", None)
        if isinstance(projection, nn.Linear) and hasattr(projection.weight, "ds_id"):
            zero.register_external_parameter(part, projection.weight)
            zero.register_external_parameter(part, projection.bias)


def is_divided(module: nn.Module) -> bool:
    """Whether the weights themselves are divided among the processes (ZeRO-3)."""
    return any(hasattr(parameter, "ds_id") for parameter in module.parameters())


def release(module: nn.Module, engine: Any) -> None:
    """Take a module back from DeepSpeed: new parameters, whole and in float32 where they were trained."""
    from deepspeed import zero

    whole = {name: tensor.whole().cpu() for name, tensor in whole_trainable(module).items()}
    for name, parameter in module.named_parameters():
        if name not in whole:
            with zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
                whole[name] = parameter.detach().cpu().clone()
    engine.destroy()
    build_whole_models()
    fresh: dict[int, nn.Parameter] = {}
    for name, parameter in module.named_parameters():
        fresh[id(parameter)] = nn.Parameter(whole[name].to(engine.device), parameter.requires_grad)
    for part in module.modules():
        # ZeRO-3 left a dictionary of its own behind.
        part._parameters = {key: None if p is None else fresh[id(p)] for key, p in part._parameters.items()}


def _flat_partitions(engine: Any) -> list[Tensor]:
    """This process's float32 parameters, one flat tensor for each group of the optimiser."""
    if hasattr(engine, "fp32_partitioned_groups_flat"):
        return engine.fp32_partitioned_groups_flat
    return engine.single_partition_of_fp32_groups


def _link_states(optimizer: Any) -> None:
    """Let parameters find their optimiser state; by itself ZeRO-2 does it for the first group only."""
    from deepspeed.utils import lazy_init_hp_params_optimizer_state

    engine = optimizer.optimizer
    if hasattr(engine, "fp32_partitioned_groups_flat"):
        return
    for parameters, flat in zip(engine.bit16_groups, engine.single_partition_of_fp32_groups):
        lazy_init_hp_params_optimizer_state(parameters, flat, engine.optimizer.state)


def _set_part(parameter: Any, value: Tensor, key: str) -> None:
    """ZeRO-3 cuts a flattened parameter into equal parts, the last one padded."""
    from deepspeed.utils import safe_get_local_optimizer_state

    part = safe_get_local_optimizer_state(parameter, key)
    rank = torch.distributed.get_rank()
    mine = value.flatten()[rank * part.numel() : (rank + 1) * part.numel()]
    part[: mine.numel()].copy_(mine)


def _shape(parameter: Any) -> tuple[int, ...]:
    """Of the whole parameter; ZeRO-3 leaves none of it in place."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _got(getter: Callable[..., Tensor | None], *args: Any) -> Tensor:
    tensor = getter(*args)
    if tensor is None:
        raise RuntimeError(
            "DeepSpeed holds no float32 copy of a trainable parameter; use ZeRO stage 1, 2 or 3."
        )
    return tensor.detach()
