"""Shared parts of the kernels: products at a stated precision, rounding, and the checks of what a
caller passes.

Triton's interpreter (TRITON_INTERPRET=1, set before triton is imported) runs every kernel on a CPU,
but it computes with the bits of a bf16 number as if they were an integer, and cuts off where a GPU
rounds. So every product and every store of a kernel goes through `mm` and `narrow`, which the
interpreter runs in fp32 with the GPU's rounding put in.

MODE, a compile-time argument of every kernel, says which arithmetic that is:
    "gpu"     bf16 operands, fp32 sums, on tensor cores
    "hip"     the same on matrix cores of AMD
    "emu"     the same numbers, computed by the interpreter
    "tf32x3"  fp32 operands on tensor cores, three products each: close to fp32
    "ieee"    fp32 operands, fp32 sums
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
RUNS_HERE = INTERPRETED or torch.cuda.is_available()
# Also check what a GPU would have to be waited for
DEBUG = os.environ.get("HYBRID_KERNELS_DEBUG") == "1"
DTYPES = (torch.bfloat16, torch.float32)


def dot_mode(dtype: torch.dtype) -> str:
    """The MODE for inputs of a dtype: bf16 is multiplied as bf16, fp32 as (nearly) fp32."""
    is_amd = torch.version.hip is not None
    if dtype == torch.bfloat16:
        if INTERPRETED:
            return "emu"
        return "hip" if is_amd else "gpu"
    # AMD's matrix cores multiply fp32 as it is; tf32 is a format of NVIDIA's.
    return "ieee" if INTERPRETED or is_amd else "tf32x3"


@triton.jit
def rne(x):
    """The bf16 number nearest to an fp32 one, ties to even, as fp32; a NaN stays one."""
    # Adding 0x7FFF, and 1 more if the last kept bit is odd, carries into the upper 16 bits exactly
    # where rounding to nearest even goes up.
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    # The sum could carry a NaN's payload into the sign or to infinity.
    return tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)


@triton.jit
def mm(a, b, MODE: tl.constexpr):
    """a @ b with fp32 sums; the contracted dimension must be at least 16."""
    if MODE == "gpu" or MODE == "hip":
        product = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))
    elif MODE == "emu":
        product = tl.dot(rne(a.to(tl.float32)), rne(b.to(tl.float32)), input_precision="ieee")
    elif MODE == "tf32x3":
        product = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="tf32x3")
    else:
        product = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return product


@triton.jit
def once(x, MODE: tl.constexpr):
    """x as the operand of products, computed a single time.

    Else the compiler repeats the arithmetic that leads to it in the layout of every product it
    enters, and the copies fill the registers. By PTX, which only NVIDIA's GPUs have."""
    if MODE == "gpu":
        x = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x.to(tl.bfloat16)], tl.bfloat16, False, 2
        )
    elif MODE == "tf32x3":
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.float32, False, 1)
    elif MODE == "hip":
        x = x.to(tl.bfloat16)
    elif MODE == "emu":
        x = rne(x)
    return x


@triton.jit
def narrow(x, dtype: tl.constexpr, MODE: tl.constexpr):
    """An fp32 tensor in the dtype it is stored in, rounded to nearest: narrow(x,
    p.dtype.element_ty, MODE)."""
    if MODE == "emu" and dtype == tl.bfloat16:
        x = rne(x)
    return x.to(dtype)


class Compilation(NamedTuple):
    """One kernel in one configuration, for compiling it ahead of time.

    Each kernel module has ``compilations(capability) -> list[Compilation]``, one for every entry of
    its tile table. ``arguments`` maps every argument of the kernel to a type ("*bf16", "i32",
    "fp32") or, if it is a compile-time constant, to its value; pointers and integers named in
    ``divisible`` are multiples of 16, as they are in practice. ``tensor_cores`` says whether the
    binary must contain tensor-core instructions, ``max_spills`` how many spill instructions are
    known and accepted, ``min_resident`` how many programs a multiprocessor must hold."""

    name: str
    kernel: triton.JITFunction
    arguments: Mapping[str, object]
    constants: frozenset[str]
    divisible: frozenset[str]
    num_warps: int
    num_stages: int
    tensor_cores: bool = True
    max_spills: int = 0
    min_resident: int = 0


def check_shape(name: str, tensor: Tensor, expected: Sequence[int | None], dims: str) -> None:
    """Raise ValueError unless the shape is ``expected``, None for any size; ``dims`` names the
    dimensions."""
    fits = tensor.dim() == len(expected) and all(
        want in (None, got) for got, want in zip(tensor.shape, expected)
    )
    if not fits:
        wanted = ", ".join(
            letter if size is None else f"{letter}={size}" for letter, size in zip(dims, expected)
        )
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}; it must be [{wanted}]: check how it was "
            "reshaped."
        )


def check_dtype(name: str, tensor: Tensor, allowed: Sequence[torch.dtype] = DTYPES) -> None:
    """Raise ValueError unless the dtype is one of ``allowed``."""
    if tensor.dtype not in allowed:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise ValueError(
            f"{name} is {str(tensor.dtype).removeprefix('torch.')}; it must be {names}: cast it "
            "with .to()."
        )


def check_device(name: str, tensor: Tensor, like: Tensor) -> None:
    """Raise ValueError unless both are on one device, and on one that can run a kernel."""
    if tensor.device != like.device:
        raise ValueError(
            f"{name} is on {tensor.device}, the first argument on {like.device}; move it there "
            "with .to()."
        )
    if tensor.device.type != "cuda" and not INTERPRETED:
        raise ValueError(
            f"{name} is on {tensor.device}; the kernels need a CUDA device: move it there, or set "
            "TRITON_INTERPRET=1 "
            "before triton is imported to run them, slowly, on a CPU."
        )


def check_not_empty(name: str, tensor: Tensor) -> None:
    """Raise ValueError for a tensor without elements."""
    if tensor.numel() == 0:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}; a kernel needs at least one element: skip "
            "the call."
        )


def check_seq_idx(seq_idx_BL: Tensor, batch: int, length: int) -> None:
    """Raise ValueError unless it is [B, L], of whole numbers, and ascending.

    That it ascends is looked at on a CPU and with HYBRID_KERNELS_DEBUG=1; else the GPU would have
    to be waited for."""
    check_shape("seq_idx_BL", seq_idx_BL, (batch, length), "BL")
    check_dtype("seq_idx_BL", seq_idx_BL, (torch.int32, torch.int64))
    if seq_idx_BL.device.type == "cpu" or DEBUG:
        falls = (seq_idx_BL.diff(dim=1) < 0).nonzero()
        if len(falls):
            row, place = falls[0].tolist()
            before, after = seq_idx_BL[row, place : place + 2].tolist()
            raise ValueError(
                f"seq_idx_BL falls from {before} to {after} at row {row}, token {place + 1}; it "
                "must ascend: number "
                "the documents of a row in their order."
            )


def no_second_derivative(ctx: object, *_: object) -> None:
    """Stand in for the gradient of a gradient, which no kernel computes."""
    raise RuntimeError(
        "the kernels have no second derivative (create_graph=True): pass impl='reference' to "
        "differentiate twice."
    )


def rows(tensor: Tensor) -> tuple[Tensor, int]:
    """[B, L, H, .] so that token t of row b starts ``(b L + t) stride`` elements in, and that
    stride.

    A slice of a wider [B, L, C] tensor already is of that form; anything else is copied.
    """
    batch, length = tensor.shape[:2]
    token = tensor[0, 0]
    row = tensor.stride(1) if length > 1 else tensor.stride(0) if batch > 1 else token.numel()
    # Rows of the batch must follow each other without a gap, as kernels compute (b L + t) stride.
    in_one_piece = batch == 1 or length == 1 or tensor.stride(0) == length * row
    if token.is_contiguous() and row >= token.numel() and in_one_piece:
        return tensor, row
    return tensor.contiguous(), token.numel()
