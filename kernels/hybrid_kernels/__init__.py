"""Triton kernels: the recurrence of SSM heads, its convolution, its decoding step, the distillation
loss.

`ssd.ssd`, `conv.causal_conv`, `step.ssd_step` and `loss.distillation_loss` are what callers use;
`ssd_launch.ssd_forward` and `ssd_backward` are the two passes. `delta_rule.delta_rule` calls
flash-linear-attention's kernels, which pass the same test before their first use. Import the
modules: this file imports none of them, because all but the loss need triton. They import torch and
triton only, never hybrid_distill. Their parent folder has no ``__init__.py`` on purpose: a package
named ``kernels`` would shadow the Hugging Face library of that name."""

from __future__ import annotations

import functools

__all__ = ["OLDEST_TRITON", "unusable"]

OLDEST_TRITON = (3, 5)


@functools.cache
def unusable() -> str | None:
    """Return why the installed triton cannot run the kernels, in one line; None if it can."""
    try:
        import triton
    except ImportError:
        return "triton is not installed; pip install 'hybrid-distill[cuda]'"
    major, minor = triton.__version__.split(".")[:2]
    if (int(major), int(minor)) >= OLDEST_TRITON:
        return None
    return (
        f"triton is {triton.__version__}; before 3.5 it refuses the backward or aborts the "
        "process: "
        "install torch 2.9 or newer, which brings it"
    )
