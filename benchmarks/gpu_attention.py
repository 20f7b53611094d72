"""Compare attention over packed rows with the mask of all pairs: a row of `gpu_check.py`, in a process of its own.

    python benchmarks/gpu_attention.py cuda    # values and gradients; on a cpu values alone

Each way that this machine has is compared: FlexAttention, and flash-attn where it is installed. Windows with sinks run
in FlexAttention and in blocks.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybrid_distill.model import document_kernels, document_mask, window_kernels
from hybrid_distill.model.local_attention import Reach, Scoring, attend_locally

N_QUERIES = 8
N_KEYS = 2
WIDTH = 64
"""Channels of a head."""
ROWS_OF = {"cuda": ((2, 2048, 700), (2, 1900, 60)), "cpu": ((2, 300, 150),)}
"""Batch, length, and mean length of the documents of these rows."""
REACH = Reach(window=200, sinks=4)
TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 3e-2}  # float32 may be computed in TF32


class Packed(NamedTuple):
    """Random documents in rows: the first token that each token sees, [B, L]."""

    dtype: torch.dtype
    first_BL: Tensor
    window: int | None


def packed_rows(device: str) -> Iterator[Packed]:
    """Yield rows of every dtype and size, with and without a window."""
    for dtype in TOLERANCE:
        for batch, length, mean in ROWS_OF[device]:
            for window in (None, 200):
                first_BL = draw_first_seen(batch, length, mean, window)
                yield Packed(dtype, first_BL.to(device), window)


def draw_first_seen(batch: int, length: int, mean: int, window: int | None) -> Tensor:
    """Draw where documents begin; return the first token that each token sees."""
    place_L = torch.arange(length)
    is_start_BL = torch.rand(batch, length) < 1 / mean
    is_start_BL[:, 0] = True
    first_BL = torch.where(is_start_BL, place_L, 0).cummax(1).values
    if window is not None:
        first_BL = first_BL.maximum(place_L - window + 1)
    return first_BL


def compare(device: str) -> dict[str, float]:
    """Return the largest error of each way, tensor and dtype, relative to the largest expected entry."""
    flash = document_kernels.flash_function()
    ways = {"flex": None}
    if flash is not None:
        ways["flash-attn"] = flash
    errors: dict[str, float] = {}
    torch.manual_seed(0)
    for rows in packed_rows(device):
        heads = draw(rows)
        seen = document_mask.visible(rows.first_BL).unsqueeze(1)
        expected = attended(heads, with_mask(seen))
        for way, function in ways.items():
            document_kernels.flash_function = lambda function=function: function
            mask = document_mask.DocumentMask.of(rows.first_BL, None, rows.window)
            enter(errors, way, rows.dtype, attended(heads, with_mask(mask)), expected)
        if rows.window is None:
            in_blocks, in_flex = attended_in_windows(heads, rows.first_BL)
            enter(errors, "windows", rows.dtype, in_flex, in_blocks)
    document_kernels.flash_function = lambda: flash
    return errors


def enter(
    errors: dict[str, float],
    way: str,
    dtype: torch.dtype,
    actual: dict[str, Tensor],
    expected: dict[str, Tensor],
) -> None:
    """Enter the errors of a way, where they are larger than those of other rows."""
    for name, tensor in expected.items():
        error = (actual[name] - tensor).abs().max() / tensor.abs().max()
        key = f"{way} {name} {str(dtype).removeprefix('torch.')}"
        errors[key] = max(errors.get(key, 0.0), error.item())


def attended_in_windows(
    heads: list[Tensor], begin_BL: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return what windows with sinks compute in blocks, then in FlexAttention."""
    on_gpus = window_kernels.has_document_attention

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend_locally(query, key, value, begin_BL, REACH, Scoring())

    in_blocks = attended(heads, attend)
    window_kernels.has_document_attention = lambda device: True
    try:
        with document_kernels.compiling_for(None):
            in_flex = attended(heads, attend)
    finally:
        window_kernels.has_document_attention = on_gpus
    return in_blocks, in_flex


def with_mask(mask: Tensor) -> Callable[..., Tensor]:
    """Return attention with a mask."""
    attend = torch.nn.functional.scaled_dot_product_attention
    return partial(attend, attn_mask=mask, enable_gqa=True)


def draw(rows: Packed) -> list[Tensor]:
    """Draw queries, keys and values."""
    batch, length = rows.first_BL.shape
    like_rows: dict[str, Any] = {"device": rows.first_BL.device, "dtype": rows.dtype}
    heads: list[Tensor] = []
    for n_heads in (N_QUERIES, N_KEYS, N_KEYS):
        heads.append(torch.randn(batch, n_heads, length, WIDTH, **like_rows))
    return heads


def attended(heads: list[Tensor], attend: Callable[..., Tensor]) -> dict[str, Tensor]:
    """Return attention's output, and on a GPU its gradients: FlexAttention has none on a CPU."""
    has_gradients = heads[0].is_cuda
    leaves = [t.detach().requires_grad_(has_gradients) for t in heads]
    out = attend(*leaves)
    tensors = {"out": out.detach().float()}
    if has_gradients:
        # Another gradient for every entry.
        weights = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=out.dtype)
        weighted = out * weights.view(out.shape)
        gradients = torch.autograd.grad(weighted.sum(), leaves)
        for name, gradient in zip(("dq", "dk", "dv"), gradients):
            tensors[name] = gradient.float()
    return tensors


def wrong(errors: dict[str, float]) -> list[str]:
    """Return the names of errors that are too large; NaN is."""
    names = []
    for name, error in errors.items():
        dtype = getattr(torch, name.split()[-1])
        if not error < TOLERANCE[dtype]:
            names.append(name)
    return names


def main() -> None:
    """Print the largest errors in a line; exit status 1 if one is too large."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("device", choices=ROWS_OF)
    errors = compare(parser.parse_args().device)
    text = ", ".join(f"{name} {error:.0e}" for name, error in errors.items())
    if names := wrong(errors):
        raise SystemExit(f"Error: packed attention differs from its mask in {names[0]}: {text}")
    print(text)


if __name__ == "__main__":
    main()
