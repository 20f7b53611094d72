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

from ..model.document_kernels import compile_static
from .meter import PEAK_FLOPS, peak_flops
from .stage import Stage

log = logging.getLogger(__name__)

WORTH_COMPILING = 600.0
"""Seconds that a stage's remaining products must take for ``auto`` to compile.

Counted savings are a quarter of a step (docs/performance.md, "A training step"): two to three minutes
of a stage of this length. Compiling takes one to three. The products are counted at the speed of
bfloat16 in any precision, because the savings are bytes, and float32 does not make them fewer.
"""
USUAL_MFU = 0.4
"""Share of a GPU's peak that the products of a stage reach."""


@contextmanager
def compiled_layers(stage: Stage, device: torch.device, flops: float) -> Iterator[None]:
    """Compile the decoder layers of a stage while the context is open, if its config asks for it.

    ``flops`` are those of the matrix products that this process has yet to run in the stage: at
    ``auto``, a GPU compiles if they take long enough (`WORTH_COMPILING`).
    """
    layers = _chosen_layers(stage, device, flops)
    if not layers:
        yield
        return
    config: Any = torch._dynamo.config
    # At ``auto``, a layer that the compiler fails on runs as it is, after a warning.
    settings = config.patch(suppress_errors=stage.config.compile == "auto")
    with settings, ExitStack() as undo:
        for module in (*layers, stage):
            name = _compiled_method(module)
            if name is not None:
                setattr(module, name, compile_static(getattr(module, name)))
                undo.callback(delattr, module, name)
        yield


def start_backward_thread(device: torch.device) -> None:
    """Start the thread of a GPU's backward passes with as many CPU threads as this one has.

    Programs are compiled for one number. The loader's thread that pins memory sets it to 1 for all threads that start
    later; gradient checkpointing, which runs layers again in the backward, would compile each program twice.
    """
    if device.type == "cuda":
        torch.set_num_threads(torch.get_num_threads())
        weight = torch.ones((), device=device, requires_grad=True)
        (2 * weight).backward()


def _chosen_layers(stage: Stage, device: torch.device, flops: float) -> list[nn.Module]:
    """Return the layers to compile; log how many, or why none are."""
    name = stage.config.name
    choice = stage.config.compile
    if choice == "off" or (choice == "auto" and device.type != "cuda"):
        return []
    layers = stage.whole_layers()
    if not layers:
        if choice == "on":
            log.info("%s: compile: off, this stage does not run whole layers of one shape", name)
        return []
    unsharded = [layer for layer in layers if not _is_sharded(layer)]
    if not unsharded:
        log.info("%s: compile: off, all layers are sharded and gather weights in between", name)
        return []
    if choice == "auto" and not _is_worth_it(name, flops, device):
        return []
    others = ""
    n_sharded = len(layers) - len(unsharded)
    if n_sharded:
        others = f" ({n_sharded} others are sharded and gather weights in between)"
    log.info("%s: compile: %d decoder layers%s", name, len(unsharded), others)
    return unsharded


def _is_worth_it(name: str, flops: float, device: torch.device) -> bool:
    """Check if a stage's products take long enough; log if not. An unknown GPU counts as an H100."""
    peak = peak_flops(device)
    if not peak:
        peak = PEAK_FLOPS["H100"]
    seconds = flops / (USUAL_MFU * peak)
    if seconds >= WORTH_COMPILING:
        return True
    log.info(
        "%s: compile: off, its products take about %.0f s; --%s.compile on compiles anyway",
        name,
        seconds,
        name,
    )
    return False


def _compiled_method(module: nn.Module) -> str | None:
    """Return the name of the method to compile: a layer's forward, or a stage's ``compare`` if it has one."""
    if isinstance(module, Stage):
        # An alignment's loss is as many passes over a layer's output as its norms.
        return "compare" if hasattr(module, "compare") else None
    # A student's layer sets attributes around its backbone's forward.
    return "backbone_forward" if hasattr(module, "backbone_forward") else "forward"


def _is_sharded(layer: nn.Module) -> bool:
    """Check for weights of FSDP2 or ZeRO-3, whose hooks inside of a layer gather them."""
    return any(isinstance(p, DTensor) or hasattr(p, "ds_id") for p in layer.parameters())
