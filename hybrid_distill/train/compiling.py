"""Compilation of decoder layers while a stage trains.

Without it, a GPU reads and writes the hidden states for every norm, activation, residual and cast: a
third of a step of a 1B model (docs/performance.md, "A training step").
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .stage import Stage

log = logging.getLogger(__name__)

RECOMPILE_LIMIT = 256
"""Programs of one function: layers that keep other heads need their own. With dynamo's default of 8,
the other layers would run uncompiled."""


@contextmanager
def compiled_layers(stage: Stage, device: torch.device) -> Iterator[None]:
    """Compile the decoder layers of a stage while the context is open, if its config asks for it.

    Logs how many are compiled, and why others are not.
    """
    choice = stage.config.compile
    if choice == "off" or (choice == "auto" and device.type != "cuda"):
        yield
        return
    layers = stage.whole_layers()
    whole = [layer for layer in layers if not _is_sharded(layer)]
    reason = ""
    if not layers:
        reason = " (they are compared in parts, or read rows of many lengths)"
    elif len(whole) < len(layers):
        reason = f" ({len(layers) - len(whole)} others are sharded and gather weights in between)"
    log.info("%s: compile: %d decoder layers%s", stage.config.name, len(whole), reason)
    # At ``auto``, a layer that the compiler fails on runs as it is, after a warning.
    settings: Any = torch._dynamo.config.patch(
        recompile_limit=RECOMPILE_LIMIT, suppress_errors=choice == "auto"
    )
    with settings, ExitStack() as undo:
        for module in (*whole, stage):
            name = _compiled_method(module)
            if name is not None and whole:
                # Rows do not change their length: symbolic shapes would only make slower kernels.
                setattr(module, name, torch.compile(getattr(module, name), dynamic=False))
                undo.callback(delattr, module, name)
        yield


def _compiled_method(module: nn.Module) -> str | None:
    """Name what is compiled of a layer or a stage."""
    if not isinstance(module, Stage):
        # A student's layer sets attributes around its backbone's forward.
        return "backbone_forward" if hasattr(module, "backbone_forward") else "forward"
    # An alignment's loss is as many passes over a layer's output as its norms.
    return "compare" if hasattr(module, "compare") else None


def _is_sharded(layer: nn.Module) -> bool:
    """Check for weights of FSDP2 or ZeRO-3, whose hooks inside of a layer gather them."""
    return any(isinstance(p, DTensor) or hasattr(p, "ds_id") for p in layer.parameters())
