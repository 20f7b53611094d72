"""Pick and reorder tokens and heads of rows; mark tensors whose addresses stay.

Shapes: B batch, L length, H heads, R picked tokens, P head dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class TokensFirst(NamedTuple):
    """Order that puts each row's tokens before its padding. Indices are into all rows concatenated."""

    order: Tensor
    back: Tensor
    """Inverse of ``order``."""
    mask_BL: Tensor
    """True at tokens, once reordered."""

    @classmethod
    def of(cls, token_mask_BL: Tensor) -> TokensFirst:
        """Find the order. Neither sorts nor synchronizes with the device."""
        is_token_BL = token_mask_BL != 0
        n_tokens_B1 = is_token_BL.sum(dim=1, keepdim=True)
        # Counted from 1: tokens first, in their order, then padding in its own.
        token_place_BL = is_token_BL.cumsum(1)
        padding_place_BL = n_tokens_B1 + (~is_token_BL).cumsum(1)
        place_BL = torch.where(is_token_BL, token_place_BL, padding_place_BL) - 1
        index_BL = torch.arange(place_BL.numel(), device=place_BL.device).view_as(place_BL)
        first_of_row_B1 = index_BL[:, :1]
        back = (place_BL + first_of_row_B1).flatten()
        # The inverse of a permutation, without sorting it.
        order = torch.empty_like(back).scatter_(0, back, index_BL.flatten())
        place_in_row_1L = index_BL[:1]
        return cls(order, back, place_in_row_1L < n_tokens_B1)

    def apply(self, t: Tensor) -> Tensor:
        """Reorder the tokens of [B, L, ...]."""
        return _Reordered.apply(t, self.order, self.back)

    def undo(self, t: Tensor) -> Tensor:
        """Return the tokens of [B, L, ...] to their places."""
        return _Reordered.apply(t, self.back, self.order)

    def documents(self, seq_idx_BL: Tensor) -> Tensor:
        """Reorder document numbers; the padding, now at the end, gets the last document's."""
        reordered_BL = self.apply(seq_idx_BL)
        # Numbers ascend along a row, so the largest so far is that of the last token.
        return reordered_BL.cummax(dim=1).values


class _Reordered(torch.autograd.Function):
    """Reorder tokens [B, L, ..] by ``index`` into the flattened rows; ``back`` reorders the gradient."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, index: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(index, back)
        return t.flatten(0, 1).index_select(0, index).view(t.shape)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        index, back = ctx.saved_tensors
        return _Reordered.apply(*grad_outputs, back, index), None, None


def document_begins(seq_idx_BL: Tensor) -> Tensor:
    """Return the index of the first token of each token's document."""
    index_L = torch.arange(seq_idx_BL.shape[1], device=seq_idx_BL.device)
    is_first_BL = torch.ones_like(seq_idx_BL, dtype=torch.bool)
    is_first_BL[:, 1:] = seq_idx_BL[:, 1:] != seq_idx_BL[:, :-1]
    begin_BL = torch.where(is_first_BL, index_L, 0)
    return begin_BL.cummax(dim=1).values


def pick_heads(t_BHLP: Tensor, heads: list[int]) -> Tensor:
    """Pick heads by slicing: an index tensor would be copied to the device at every call.

    Heads that follow each other are one slice, and a single slice is not copied.
    """
    slices = []
    begin = 0
    for end in range(1, len(heads) + 1):
        if end == len(heads) or heads[end] != heads[end - 1] + 1:
            slices.append(t_BHLP[:, heads[begin] : heads[end - 1] + 1])
            begin = end
    if not slices:
        return t_BHLP[:, :0]
    return slices[0] if len(slices) == 1 else torch.cat(slices, dim=1)


def pick_tokens(t_BHLP: Tensor, index_BR: Tensor) -> Tensor:
    """Return the tokens [B, H, R, P] at each row's own indices."""
    batch, n_heads, _, head_dim = t_BHLP.shape
    index_B1R1 = index_BR.long()[:, None, :, None]
    index_BHRP = index_B1R1.expand(batch, n_heads, -1, head_dim)
    return t_BHLP.gather(2, index_BHRP)


def static(tensor: Tensor) -> Tensor:
    """Mark a tensor's address as static for torch.compile."""
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(tensor)
    return tensor
