"""AdamW over a stage's trainable parameters: its groups, its schedule, and its state as named tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from ..model.mixer import HybridMixer

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's state of a parameter, apart from ``step``."""

NO_DECAY = ("bias", "norm", "conv", "a_proj", ".D")
"""Substrings in the names of parameters without weight decay; vectors have none either."""


def wsd(step: int, steps: int, warmup: float, decay: float) -> float:
    """Return the warmup-stable-decay factor in (0, 1] of the learning rate at ``step`` of ``steps``, counted from 0.

    ``warmup`` and ``decay`` are fractions of ``steps``: a linear rise, and a linear fall that would reach 0 one step
    after the last (arXiv 2404.06395).
    """
    rising = math.ceil(warmup * steps)
    falling = math.ceil(decay * steps)
    return min(1.0, (step + 1) / max(rising, 1), (steps - step) / max(falling, 1))


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
    attention, recurrent, rest = lr_scale or (1.0, 1.0, 1.0)
    mixers = [part for part in module.modules() if isinstance(part, HybridMixer)]
    scales = {p: attention for mixer in mixers if mixer.attention for p in mixer.attention.parameters()}
    scales |= {p: recurrent for mixer in mixers if mixer.ssm for p in mixer.ssm.parameters()}
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for name, parameter in trainable(module).items():
        decays = parameter.ndim >= 2 and not any(part in name for part in NO_DECAY)
        groups.setdefault((decays, scales.get(parameter, rest)), []).append(parameter)
    fused = all(p.device.type in ("cpu", "cuda") for p in module.parameters())
    return AdamW(
        [
            {"params": parameters, "weight_decay": weight_decay if decays else 0.0, "lr_scale": scale}
            for (decays, scale), parameters in sorted(groups.items(), key=lambda group: group[0], reverse=True)
        ],
        lr=learning_rate,
        betas=betas,
        fused=fused,
    )


def set_learning_rate(optimizer: Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["lr_scale"]


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require a gradient, by name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def load_trainable_tensors(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Set the trainable parameters from a checkpoint of this run (`resume.check_same_run`)."""
    with torch.no_grad():
        for name, parameter in trainable(module).items():
            parameter.copy_(tensors[name])
