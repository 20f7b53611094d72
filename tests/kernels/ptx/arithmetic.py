"""Functions that the translated code calls: instructions that are more than an operator of numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .text import F32, F64, I64, U8, U16, U32, U64

NAN = np.array(0x7FFFFFFF, U32).view(F32)[()]
BF16_NAN = U16(0x7FFF)


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Round to nearest even."""
    bits = x.view(U32).astype(U64)
    # Half a unit in the last place, a little less where the last bit kept is even.
    half = U64(0x7FFF) + (bits >> U64(16) & U64(1))
    rounded = ((bits + half) >> U64(16)).astype(U16)
    return np.where(np.isnan(x), BF16_NAN, rounded)


def to_tf32(x: np.ndarray) -> np.ndarray:
    """Round to nearest, ties away from zero."""
    bits = x.view(U32)
    rounded = (bits + U32(0x1000)) & U32(0xFFFFE000)
    return np.where(np.isfinite(x), rounded, bits)


def one_nan(x: np.ndarray) -> np.ndarray:
    """Results of fp32 arithmetic: PTX has one NaN for them, whichever NaNs are the operands."""
    return np.where(x == x, x, NAN)


def shifted(value: np.ndarray, by: np.ndarray, left: bool) -> np.ndarray:
    """Shift, by more than the width too."""
    bits = value.dtype.itemsize * 8
    # numpy does not define shifts by 64 or more.
    by = np.minimum(by.astype(I64), 63)
    if left:
        moved = value.astype(U64) << by.astype(U64)
        return np.where(by >= bits, 0, moved).astype(value.dtype)
    wide = I64 if value.dtype.kind == "i" else U64
    return (value.astype(wide) >> by.astype(wide)).astype(value.dtype)


def field(value: np.ndarray, first: np.ndarray, length: np.ndarray) -> np.ndarray:
    """bfe: a bit field, with its sign if the value has one."""
    length = length.astype(I64)
    ones = (1 << length) - 1
    bits = value.astype(I64) >> (first.astype(I64) & 255) & ones
    if value.dtype.kind == "i":
        top = 1 << np.maximum(length - 1, 0)
        bits = (bits ^ top) - top
    return bits.astype(value.dtype)


def permuted(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """prmt: four bytes, each chosen out of eight; a selector's bit 3 asks for the sign alone."""
    choices = np.stack([a, b], 1).view(U8)
    picked = selector[:, None] >> (4 * np.arange(4, dtype=U32))
    data = np.take_along_axis(choices, (picked & 7).astype(I64), 1)
    signs = np.where(data & 128, U8(255), U8(0))
    chosen = np.where(picked & 8, signs, data).astype(U8)
    return chosen.view(U32)[:, 0]


def quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Divide integers, toward zero."""
    sign = np.sign(a) * np.sign(b)
    magnitude = abs(a) // np.maximum(abs(b), 1)
    return (sign * magnitude).astype(a.dtype)


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return a * b + c, rounded once."""
    return (a.astype(F64) * b + c).astype(F32)


def packed(parts: Sequence[np.ndarray], kind: type) -> np.ndarray:
    """Return one wider register of several, the lowest bits first."""
    return np.ascontiguousarray(np.stack(parts, 1)).view(kind)[:, 0]
