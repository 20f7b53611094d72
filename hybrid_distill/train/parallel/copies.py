"""bfloat16 copies of trained matrices, which forward and backward read in place of the float32 ones.

Autocast casts every matrix in every micro-batch, and every gradient to float32 before it is added.
The copies are cast once per step, and their gradients are added as they are: the same bits, for 10
bytes per weight and micro-batch in place of 24.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..stage import Stage


class _Copied(torch.autograd.Function):
    """Identity from a float32 weight to its copy."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, copy: Tensor, adds: bool) -> Tensor:
        ctx.weight = weight
        ctx.adds = adds
        return copy.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None]:
        weight = ctx.weight
        (gradient,) = gradients
        if weight.grad is None or not ctx.adds:
            return gradient.to(weight.dtype), None, None
        # Autograd would cast first, and add the result: 18 bytes in place of 10.
        weight.grad.add_(gradient)
        return None, None, None


class Bf16Copies:
    """Copies of the trained matrices that autocast would cast: those of linears within layers.

    Embeddings, norms and whatever else computes in float32 keep their weights.
    """

    def __init__(self, stage: Stage) -> None:
        self._weights: dict[nn.Linear, nn.Parameter] = {}
        self._copies: list[Tensor] = []
        for part in stage.parts():
            for module in part.modules():
                # Subclasses may read their weight in float32.
                if type(module) is not nn.Linear:
                    continue
                weight = module.weight
                assert isinstance(weight, nn.Parameter)
                if weight.requires_grad and weight.dtype == torch.float32:
                    self._weights[module] = weight

    def n_weights(self) -> int:
        """Count the copied weights."""
        return sum(weight.numel() for weight in self._weights.values())

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the weights, which have changed."""
        weights = list(self._weights.values())
        if not self._copies:
            self._copies = [torch.empty_like(weight, dtype=torch.bfloat16) for weight in weights]
        for copy, weight in zip(self._copies, weights, strict=True):
            copy.copy_(weight)

    @contextmanager
    def in_place(self, adds: bool) -> Iterator[None]:
        """Put the copies in the place of the weights.

        With ``adds``, the backward adds to gradients that are there by itself; without, autograd
        does, and whoever listens to it (DDP) hears of each gradient.
        """
        for (module, weight), copy in zip(self._weights.items(), self._copies, strict=True):
            module._parameters["weight"] = _Copied.apply(weight, copy, adds)
        try:
            yield
        finally:
            for module, weight in self._weights.items():
                module._parameters["weight"] = weight
