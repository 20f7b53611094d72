"""Rows that hold x, B and C side by side, each padded to an alignment that kernels load fast.

Shapes: B batch, L length, C channels of all parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

ALIGNED = 16
"""Alignment, in elements, of rows and of x, B and C in them: kernels can then load 16 bytes at once."""


def join_aligned(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenate x, B and C, each padded with zeros to a multiple of ALIGNED."""
    pieces = []
    for part in parts:
        pieces.append(part)
        shape = list(part.shape)
        shape[dim] = -shape[dim] % ALIGNED
        if shape[dim]:
            pieces.append(part.new_zeros(shape))
    return torch.cat(pieces, dim)


def aligned_parts(row: Tensor, sizes: list[int], dim: int) -> tuple[Tensor, ...]:
    """Return x, B and C of a row, padded or not, as views."""
    widths = sizes
    if row.shape[dim] != sum(sizes):
        widths = [size + -size % ALIGNED for size in sizes]
    parts = []
    for part, size in zip(row.split(widths, dim), sizes, strict=True):
        parts.append(part.narrow(dim, 0, size))
    return tuple(parts)


class AlignedParts(torch.autograd.Function):
    """`aligned_parts` of the last dimension; the gradient is one row, without a copy if a kernel wrote it as one."""

    @staticmethod
    def forward(ctx: Any, row_BLC: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
        ctx.shape = row_BLC.shape
        ctx.sizes = sizes
        return aligned_parts(row_BLC, sizes, -1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        # While a compiler traces, tensors have no addresses to compare.
        if not torch.compiler.is_compiling():
            row_BLC = _common_row(grad_outputs, ctx.shape, ctx.sizes)
            if row_BLC is not None:
                return row_BLC, None
        if ctx.shape[-1] > sum(ctx.sizes):
            return join_aligned(grad_outputs, -1), None
        return torch.cat(grad_outputs, -1), None


def _common_row(
    parts: Sequence[Tensor], shape: tuple[int, int, int], sizes: list[int]
) -> Tensor | None:
    """Return the row [B, L, C] that these parts are views of; None if they are not of one tensor."""
    batch, length, width = shape
    first = parts[0]
    if first.untyped_storage().nbytes() != batch * length * width * first.itemsize:
        return None
    row_BLC = first.as_strided(shape, (length * width, width, 1), 0)
    for part, view in zip(parts, aligned_parts(row_BLC, sizes, -1), strict=True):
        if part.data_ptr() != view.data_ptr() or part.stride() != view.stride():
            return None
    return row_BLC
