"""Samples of a model's weights, from which a fingerprint is computed."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

GOLDEN_RATIO = (1 + 5**0.5) / 2
ADAPTER_ATTRIBUTES = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")
"""Attributes of PEFT's layers that decide what their weights do."""


def sample_weights(model: nn.Module, n: int) -> Iterator[tuple[str, Tensor]]:
    """Yield a description of each weight, and at most about n of its elements; and which of PEFT's adapters are on."""
    for path, module in model.named_modules():
        if hasattr(module, "base_layer"):
            adapters = [getattr(module, name, None) for name in ADAPTER_ATTRIBUTES]
            yield f"{path} {adapters}", torch.empty(0)
        # Listed first: loading replaces the parameters.
        names = [name for name, _ in module.named_parameters(recurse=False)]
        with _in_memory(module):
            for name in names:
                weight = getattr(module, name)
                for part in _plain_parts(weight.detach()):
                    yield (
                        f"{path}.{name} {tuple(part.shape)} {part.dtype}",
                        spread_elements(part, n),
                    )


def spread_elements(tensor: Tensor, n: int) -> Tensor:
    """Return at most about n elements of a tensor, from evenly spread rows and columns.

    Both matter: a head is some rows of the query's weight and some columns of the output's. Columns follow the golden
    ratio, which leaves no gap of more than 3 in n of them.
    """
    if tensor.numel() <= n:
        return tensor.flatten()
    n_rows = tensor.shape[0]
    places = _spread_places(n_rows, tensor.numel() // n_rows, n)
    return tensor.flatten()[torch.tensor(places, device=tensor.device)]


@cache
def _spread_places(n_rows: int, n_columns: int, n: int) -> tuple[int, ...]:
    """Return the places of `spread_elements` in a flat tensor. Few shapes occur, in many layers and calls."""
    places = []
    for step in range(n):
        row = step * n_rows // n
        column = int(step * GOLDEN_RATIO % 1 * n_columns)
        places.append(row * n_columns + column)
    return tuple(places)


def _in_memory(module: nn.Module) -> AbstractContextManager[Any]:
    """Load a module's offloaded weights while the context is open."""
    is_offloaded = any(p.device.type == "meta" for p in module.parameters(recurse=False))
    if not is_offloaded:
        return nullcontext()
    # It has offloaded them, so it is there. Not an import statement: an export's code must not seem to need it.
    accelerate_utils: Any = importlib.import_module("accelerate.utils")
    return accelerate_utils.align_module_device(module, torch.device("cpu"))


def _plain_parts(weight: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors of a weight: a quantized one consists of several."""
    if not is_traceable_wrapper_subclass(weight):
        yield weight
        return
    names, _ = weight.__tensor_flatten__()
    for name in names:
        yield from _plain_parts(getattr(weight, name))
