"""Blocks of a projection's rows, one for each head, in the order and number that a format wants."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def gather_blocks(rows: Tensor, positions: Sequence[int | None], width: int) -> Tensor:
    """Gather the blocks of ``width`` rows at these positions, in this order; None becomes a block of zeros."""
    blocks = rows.reshape(len(rows) // width, width, *rows.shape[1:])
    zeros = blocks.new_zeros(1, *blocks.shape[1:])
    blocks_and_zeros = torch.cat([blocks, zeros])
    last = len(blocks)
    order = [last if position is None else position for position in positions]
    return blocks_and_zeros[order].flatten(0, 1)


def padded(positions: Sequence[int | None], size: int) -> list[int | None]:
    """Append None until there are ``size`` positions."""
    n_missing = size - len(positions)
    return list(positions) + [None] * n_missing


def heads_at(positions: Sequence[int | None], heads: Sequence[int]) -> list[int | None]:
    """Return the head at each position; None where the position is padding."""
    heads_and_padding: list[int | None] = []
    for position in positions:
        heads_and_padding.append(None if position is None else heads[position])
    return heads_and_padding
