"""Layouts of the operands and sums of matrix products, in registers and in shared memory.

Tensor cores see a register of a warp as a block of 8 rows and 4 words, one word a thread. A word
holds two bf16 numbers, or one tf32 number (``wide``)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .text import F32, F64, U16, U32

WARP = 32
K_BYTES = 32
"""Bytes along k of one product's operand."""


def width_of(wide: bool) -> int:
    """Return the bytes of an operand's number."""
    return 4 if wide else 2


def numbers(words: np.ndarray, wide: bool) -> np.ndarray:
    """The numbers in 32-bit words, along the last axis, as float64."""
    if wide:
        # Tensor cores ignore the low 13 bits of an fp32.
        return (words & U32(0xFFFFE000)).view(F32).astype(F64)
    halves = np.ascontiguousarray(words).view(U16)
    return (halves.astype(U32) << U32(16)).view(F32).astype(F64)


def fragment(registers: Sequence[np.ndarray], wide: bool) -> np.ndarray:
    """Operand of products from registers: [warps, 8 or 16 rows, k]; four registers are two rows of
    blocks."""
    words = np.stack([register.view(U32).reshape(-1, 8, 4) for register in registers])
    _, n_warps, rows, _ = words.shape
    block_rows = len(registers) // 2
    # [along k, block rows, warps, rows, numbers]: registers go down first.
    blocks = numbers(words, wide).reshape(2, block_rows, n_warps, rows, -1)
    return blocks.transpose(2, 1, 3, 0, 4).reshape(n_warps, 8 * block_rows, -1)


def accumulator(registers: Sequence[np.ndarray]) -> np.ndarray:
    """Sums of products as a matrix, [warps, 16, 8 * len / 4], in float64."""
    words = np.stack([register.view(F32) for register in registers])
    n_warps = len(registers[0]) // WARP
    # [block columns, upper or lower 8 rows, neighbors in a row, warps, rows, pairs of columns]
    blocks = words.reshape(-1, 2, 2, n_warps, 8, 4)
    return blocks.transpose(3, 1, 4, 0, 5, 2).reshape(n_warps, 16, -1).astype(F64)


def scatter(matrix: np.ndarray) -> np.ndarray:
    """The inverse of `accumulator`: [registers, threads]."""
    n_warps = len(matrix)
    rows = matrix.astype(F32).reshape(n_warps, 2, 8, -1, 4, 2)
    blocks = rows.transpose(3, 1, 5, 0, 2, 4)
    return np.ascontiguousarray(blocks).reshape(-1, n_warps * WARP)


def described_bytes(descriptor: int, rows: int, transposed: bool, wide: bool) -> np.ndarray:
    """Addresses in shared memory of an operand of wgmma, [rows, `K_BYTES`].

    The PTX manual, "Matrix Descriptor Format": addresses are in units of 16 bytes and 14 bits long.
    """
    start, leading, stride = ((descriptor >> bit & 0x3FFF) << 4 for bit in (0, 16, 32))
    line = {1: 128, 2: 64, 3: 32}[descriptor >> 62]  # bytes that are swizzled together
    width = width_of(wide)
    row, k = np.ogrid[:rows, : K_BYTES // width]
    if transposed:
        # k lines of `line` bytes, each with line / 2 rows
        lines = row // (line // 2) * leading + k // 8 * stride
        within = k % 8 * line + row % (line // 2) * 2
    else:
        lines = row // 8 * stride
        within = row % 8 * line + k * width
    address = start + lines + within
    # The swizzle: units of 16 bytes change places by the number of their line of 128 bytes.
    address = address ^ ((address >> 7 & (line // 16 - 1)) << 4)
    return (address[..., None] + np.arange(width)).reshape(rows, -1)
