"""DeepSpeed ZeRO: gathers whole tensors from their shards, and loads them back.

Every process must call each of these functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ...distributed import build_whole_models
from ..optimizer import MOMENTS, trainable
from ..stage import Stage
from ..weights import ShardedTensors
from .strategy import Strategy, check_suits, placeholder

USED_OUTSIDE = ("x_proj", "b_proj", "c_proj", "a_proj")
"""Linears of the recurrent heads whose weights their parent reads, instead of calling them."""


class Zero(Strategy):
    """Shards of optimizer states (ZeRO-1), of gradients too (ZeRO-2), of weights too (ZeRO-3)."""

    # accelerate steps the engine in each backward pass (accelerate#2951).
    steps_in_backward = True
    may_copy = False

    def __init__(self, stage: Stage, accelerator: Accelerator) -> None:
        check_suits(stage, "ZeRO")
        super().__init__(stage, accelerator)
        # Both below look for ZeRO-3's mark, which parameters have only from `prepare` on.
        _register_outside_use(stage)
        if any(map(_is_zero_3, stage.parameters())):
            check_suits(stage, "ZeRO-3")

    @property
    def _engine(self) -> Any:
        """DeepSpeed's own optimizer, inside accelerate's wrapper."""
        return self.optimizer.optimizer

    @property
    def _adamw(self) -> Any:
        """AdamW over this process's flat partitions, inside DeepSpeed's optimizer."""
        return self._engine.optimizer

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield as `Strategy.tensors` does, gathering the tensors one by one."""
        from deepspeed.utils import safe_get_full_optimizer_state

        for name, weight in self._weights():
            yield f"weights/{name}", weight
        _link_states(self._engine)
        step = self._steps_done()
        if step is None:
            return
        for name, parameter in trainable(self.stage).items():
            yield f"optimizer/step/{name}", torch.tensor(step)
            for key in MOMENTS:
                moment = safe_get_full_optimizer_state(parameter, key)
                yield f"optimizer/{key}/{name}", _gathered(moment)

    def _steps_done(self) -> float | None:
        """Return AdamW's count of steps; None before its first."""
        for state in self._adamw.state.values():
            if "step" in state:
                return float(state["step"])
        return None

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        from deepspeed.utils import safe_get_full_fp32_param

        for name, parameter in trainable(self.stage).items():
            yield name, _gathered(safe_get_full_fp32_param(parameter))

    def load_optimizer(self, tensors: ShardedTensors) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state

        if not len(tensors):
            return
        # DeepSpeed makes the state in its first step (DeepSpeed#5104); a resumed run needs it before.
        some_step = next(name for name in tensors if name.startswith("step/"))
        for partition in _flat_partitions(self._engine):
            state = self._adamw.state[partition]
            for key in MOMENTS:
                state[key] = torch.zeros_like(partition)
            state["step"] = tensors[some_step].clone().to(partition.device)
        _link_states(self._engine)
        for name, parameter in trainable(self.stage).items():
            for key in MOMENTS:
                moment = tensors[f"{key}/{name}"].to(parameter.device)
                if _is_zero_3(parameter):
                    _set_part(parameter, moment, key)
                else:
                    safe_set_full_optimizer_state(parameter, moment, key)

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Return the gradient norm; DeepSpeed has already clipped, as `set_batch` told it to."""
        norm = self._accelerator.clip_grad_norm_(trainable(self.stage).values(), max_norm)
        # None before the first step.
        if norm is None:
            norm = 0.0
        return torch.as_tensor(norm, device=self._accelerator.device)

    def unshard(self) -> bool:
        """Take the stage back from DeepSpeed, with new, whole parameters.

        Those that were trained are float32.
        """
        is_main = self._accelerator.is_main_process
        whole: dict[str, Tensor] = {}
        for name, weight in self._weights():
            if is_main:
                whole[name] = weight.cpu()
            else:
                whole[name] = placeholder(weight)
        # Gathered before the engine goes: afterwards nothing can put the shards together.
        whole |= self._frozen(trained=whole)
        self.model.destroy()
        # What is built after this stage must be whole too.
        build_whole_models()
        self._replace_parameters(whole)
        return is_main

    def _frozen(self, trained: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy the stage's other parameters, whole, to the CPU."""
        from deepspeed import zero

        frozen: dict[str, Tensor] = {}
        for name, parameter in self.stage.named_parameters():
            if name in trained:
                continue
            with zero.GatheredParameters([parameter], enabled=_is_zero_3(parameter)):
                # A copy: at the end of the block, ZeRO-3 frees what it has gathered.
                frozen[name] = parameter.detach().cpu().clone()
        return frozen

    def _replace_parameters(self, whole: dict[str, Tensor]) -> None:
        """Give the stage new parameters; those that are tied stay tied."""
        fresh: dict[int, nn.Parameter] = {}
        for name, parameter in self.stage.named_parameters():
            values = whole[name].to(self.model.device)
            fresh[id(parameter)] = nn.Parameter(values, parameter.requires_grad)
        for module in self.stage.modules():
            # A plain dictionary: ZeRO-3 leaves its own kind behind, which gathers parameters on
            # access.
            replaced: dict[str, nn.Parameter | None] = {}
            for name, parameter in module._parameters.items():
                if parameter is None:
                    replaced[name] = None
                else:
                    replaced[name] = fresh[id(parameter)]
            module._parameters = replaced


def _is_zero_3(parameter: Tensor) -> bool:
    """Check whether ZeRO-3 has sharded a parameter."""
    return hasattr(parameter, "ds_id")


def _register_outside_use(stage: nn.Module) -> None:
    """Tell ZeRO-3 which parameters a module uses without calling the submodule that owns them.

    ZeRO-3 gathers a weight around the calls of its owner. Elsewhere it is empty, or worse,
    broadcasts (DeepSpeed#930).
    """
    from deepspeed import zero

    for module in stage.modules():
        for name in USED_OUTSIDE:
            projection = getattr(module, name, None)
            if not isinstance(projection, nn.Linear) or not _is_zero_3(projection.weight):
                continue
            zero.register_external_parameter(module, projection.weight)
            if projection.bias is not None:
                zero.register_external_parameter(module, projection.bias)


def _flat_partitions(engine: Any) -> list[Tensor]:
    """Return this process's float32 parameters, one flat tensor per parameter group."""
    # ZeRO-3's name, and that of ZeRO-1 and ZeRO-2. Neither is public.
    if hasattr(engine, "fp32_partitioned_groups_flat"):
        return engine.fp32_partitioned_groups_flat
    return engine.single_partition_of_fp32_groups


def _link_states(engine: Any) -> None:
    """Link parameters to their optimizer state.

    ZeRO-2 itself does so after the first group's first step, when the other groups have no state
    yet.
    """
    from deepspeed.utils import lazy_init_hp_params_optimizer_state

    if hasattr(engine, "fp32_partitioned_groups_flat"):
        # ZeRO-3 looks its states up by name.
        return
    for parameters, partition in zip(engine.bit16_groups, engine.single_partition_of_fp32_groups):
        lazy_init_hp_params_optimizer_state(parameters, partition, engine.optimizer.state)


def _set_part(parameter: Tensor, moment: Tensor, key: str) -> None:
    """Set a moment under ZeRO-3.

    ZeRO-3 splits a flattened parameter into equal parts, with padding in the last one.
    `safe_set_full_optimizer_state` cuts a value into such parts without the padding, and fails at
    its end.
    """
    from deepspeed.utils import safe_get_local_optimizer_state

    part = safe_get_local_optimizer_state(parameter, key)
    begin = torch.distributed.get_rank() * part.numel()
    own_values = moment.flatten()[begin : begin + part.numel()]
    part[: own_values.numel()].copy_(own_values)


def _gathered(tensor: Tensor | None) -> Tensor:
    """Detach what DeepSpeed has gathered."""
    if tensor is None:
        raise RuntimeError(
            "DeepSpeed holds no float32 copy of a trainable parameter; use ZeRO stage 1, 2 or 3."
        )
    return tensor.detach()
