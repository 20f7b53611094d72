"""Random noise that backbones add in training mode: dropout, and noise on a router's inputs."""

from __future__ import annotations

from torch import nn

ROUTER_NOISE = ("jitter_noise", "input_jitter_noise")
"""Attributes of mixtures of experts (Mixtral, MiniMax, PhiMoE): width of the noise on a router's inputs."""


def remove_noise(student: nn.Module) -> None:
    """Set the probabilities of dropout and the widths of router noise to 0; the config keeps them.

    A student is distilled from what its teacher computes without noise. Noise would also depend on the micro-batch
    size and on the number of processes, on which the updates must not depend.
    """
    for module in student.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            is_noise = "dropout" in name or name in ROUTER_NOISE
            if is_noise and isinstance(value, float):
                setattr(module, name, 0.0)
