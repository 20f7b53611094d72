"""Choice of what computes the distillation loss: torch, or the Triton kernels where they pass their test."""

from __future__ import annotations

import functools
import logging

import torch

from . import unusable

log = logging.getLogger(__name__)

KERNEL_DTYPES = (torch.bfloat16, torch.float32)


def choose_implementation(
    impl: str, device: torch.device, dtype: torch.dtype, kind: str, from_head: bool
) -> str:
    """Return the implementation that "auto" stands for, or the named one.

    Raises ValueError for "triton" in a dtype without kernels, RuntimeError where triton cannot run.
    """
    has_kernels = dtype in KERNEL_DTYPES
    if impl == "triton" and not has_kernels:
        raise ValueError(
            f"impl is 'triton' for {dtype}; the kernels are for bfloat16 and float32: use "
            "impl='torch'."
        )
    if impl == "triton":
        reason = unusable()
        if reason is not None:
            raise RuntimeError(f"impl 'triton' cannot run: {reason}; or pass impl='torch'.")
    if impl != "auto":
        return impl
    if device.type == "cuda" and has_kernels and is_right(device, dtype, kind, from_head):
        return "triton"
    return "torch"


def describe_choice(
    impl: str, device: torch.device, dtype: torch.dtype, kind: str, from_head: bool
) -> str:
    """Describe what runs: "triton", or "torch" and, on a GPU, why."""
    if impl != "auto":
        return impl
    if device.type != "cuda":
        return "torch"
    reason = reason_against(device, dtype, kind, from_head)
    if reason is None:
        return "triton"
    return f"torch ({reason})"


@functools.cache
def is_right(device: torch.device, dtype: torch.dtype, kind: str, from_head: bool) -> bool:
    """Return True if the kernels run here and give what torch gives; else log why not."""
    reason = reason_against(device, dtype, kind, from_head)
    if reason is not None:
        log.warning("the distillation loss runs on torch, not on its kernel: %s", reason)
    return reason is None


@functools.cache
def reason_against(
    device: torch.device, dtype: torch.dtype, kind: str, from_head: bool
) -> str | None:
    """Return in one line why the kernels must not run; None if they may.

    They cannot, are known to fail, or failed when tried.
    """
    reason = unusable()
    if reason is None and dtype not in KERNEL_DTYPES:
        reason = f"the kernels are for bfloat16 and float32, not {dtype}"
    # Imported late: the rest of the loss needs no triton.
    if reason is None:
        from .known_bad import known_bad

        reason = known_bad("distillation loss", device)
    if reason is None:
        from .selftest import check_kernel

        reason = check_kernel("distillation loss", device, dtype, kind=kind, from_head=from_head)
    return reason
