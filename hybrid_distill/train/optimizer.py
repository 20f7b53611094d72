"""AdamW over a stage's trainable parameters: its groups, its schedule, and its state as named tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from ..model.mixer import HybridMixer

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's state of a parameter, apart from ``step``."""

# Mamba-2 leaves its step bias, decays and D out too.
NO_DECAY = ("bias", "norm", "conv", "a_proj", ".D")
"""Substrings in the names of parameters without weight decay; vectors have none either."""


def wsd(step: int, steps: int, warmup: float, decay: float) -> float:
    """Return the warmup-stable-decay factor in (0, 1] of the learning rate at ``step`` of ``steps``, counted from 0.

    ``warmup`` and ``decay`` are fractions of ``steps``: a linear rise, and a linear fall that would reach 0 one step
    after the last (arXiv 2404.06395).
    """
    # Rounded before: 0.07 * 100 is a little above 7.
    rising = math.ceil(round(warmup * steps, 6))
    falling = math.ceil(round(decay * steps, 6))
    rise = (step + 1) / max(rising, 1)
    fall = (steps - step) / max(falling, 1)
    return min(1.0, rise, fall)


def make_adamw(
    module: nn.Module,
    *,
    learning_rate: float,
    betas: tuple[float, float],
    weight_decay: float,
    lr_scale: Sequence[float] | None = None,
) -> AdamW:
    """Make AdamW with weight decay on matrices only: not on vectors, convolutions or the projection of the SSM decay.

    ``lr_scale`` holds learning rate multipliers for kept attention, recurrent heads and the rest.
    """
    if lr_scale is None:
        lr_scale = (1.0, 1.0, 1.0)
    scales = learning_rate_scales(module, *lr_scale)
    members: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for name, parameter in trainable(module).items():
        decays = _decays(name, parameter)
        group = (decays, scales[parameter])
        members.setdefault(group, []).append(parameter)

    groups: list[dict[str, Any]] = []
    # Sorted, so that the order of the groups does not depend on that of the parameters.
    for decays, scale in sorted(members, reverse=True):
        decay = 0.0
        if decays:
            decay = weight_decay
        groups.append(
            {
                "params": members[decays, scale],
                "weight_decay": decay,
                "lr_scale": scale,
            }
        )

    # AdamW raises if it has no fused kernel for a parameter's device.
    devices = {parameter.device.type for parameter in module.parameters()}
    fused = devices <= {"cpu", "cuda"}
    return AdamW(
        groups,
        lr=learning_rate,
        betas=betas,
        fused=fused,
    )


def learning_rate_scales(
    module: nn.Module,
    attention: float,
    recurrent: float,
    rest: float,
) -> dict[nn.Parameter, float]:
    """Return each parameter's learning rate multiplier."""
    scales = dict.fromkeys(module.parameters(), rest)
    for part in module.modules():
        if not isinstance(part, HybridMixer):
            continue
        if part.attention:
            scales |= dict.fromkeys(part.attention.parameters(), attention)
        if part.ssm:
            scales |= dict.fromkeys(part.ssm.parameters(), recurrent)
    return scales


def _decays(name: str, parameter: nn.Parameter) -> bool:
    if parameter.ndim < 2:
        return False
    return not any(part in name for part in NO_DECAY)


def set_learning_rate(optimizer: Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["lr_scale"]


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require a gradient, by name."""
    parameters = module.named_parameters()
    return {name: parameter for name, parameter in parameters if parameter.requires_grad}


def load_trainable_tensors(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Set the trainable parameters from a checkpoint of this run (`resume.check_same_run`)."""
    with torch.no_grad():
        for name, parameter in trainable(module).items():
            parameter.copy_(tensors[name])
