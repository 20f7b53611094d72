"""Matrix products of a CPU in float32, by oneDNN where it is the faster library.

torch gives float32 products to MKL, which on CPUs with AVX-512 that Intel did not make runs at half the speed of
oneDNN. Those in bfloat16 go to oneDNN in any case.
"""

from __future__ import annotations

import ctypes
import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h
LARGE = 2**18  # elements of a weight: smaller ones are fast anyway, and keep their bits on every CPU


def product(a_MK: Tensor, b_KN: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Return a @ b + bias for matrices in any layout, without autograd."""
    on_cpu = a_MK.device.type == "cpu" and a_MK.dtype == torch.float32
    if on_cpu and a_MK.numel() and b_KN.numel() >= LARGE and _has_onednn():
        return torch.ops.mkldnn._linear_pointwise(a_MK, b_KN.mT, bias_N, "none", [], "")
    return a_MK @ b_KN if bias_N is None else torch.addmm(bias_N, a_MK, b_KN)


def on_fast_cpu(device: torch.device, recomputes: bool = False) -> AbstractContextManager[object]:
    """Where the device is a CPU, run linear layers in float32 by `product`, forward and backward, and keep memory.

    Linear layers stay as they are where the backward ``recomputes`` the forward: torch leaves this context in there.
    """
    if device.type != "cpu":
        return nullcontext()
    _keep_freed_memory()
    return _FasterLinear() if _has_onednn() and not recomputes else nullcontext()


@functools.cache
def _has_onednn() -> bool:
    """Return True where oneDNN has kernels for AVX-512 and this torch a way to them: always the same on a machine."""
    wide = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return wide and torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@functools.cache
def _keep_freed_memory() -> None:
    """Keep freed memory for the process's life: getting cleared pages again takes up to half of a step."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # not glibc
        return
    mallopt(M_MMAP_MAX, 0)
    mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


class _FasterLinear(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and not kwargs and _fits(*args):
            return _Linear.apply(*args)
        return func(*args, **(kwargs or {}))


def _fits(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    given = [input, weight] if bias is None else [input, weight, bias]
    plain = all(type(t) in (Tensor, torch.nn.Parameter) and t.dtype == torch.float32 for t in given)
    on_cpu = plain and input.device.type == "cpu" and input.numel() > 0
    return on_cpu and weight.ndim == 2 and weight.numel() >= LARGE and not torch.is_autocast_enabled("cpu")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        ctx.save_for_backward(input, weight)
        return product(_rows(input), weight.mT, bias).view(*input.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        gradient = _rows(grad_outputs[0])
        wanted = ctx.needs_input_grad
        of_bias = (gradient.sum(0) if wanted[2] else None,) if len(wanted) == 3 else ()
        return (
            product(gradient, weight).view(input.shape) if wanted[0] else None,
            product(gradient.mT, _rows(input)) if wanted[1] else None,
            *of_bias,
        )


def _rows(t: Tensor) -> Tensor:
    return t.reshape(-1, t.shape[-1])
