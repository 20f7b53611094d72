"""Mask of packed documents that attention kernels use without materializing its elements.

Shapes: B batch, L length, H heads, P head dim.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import flex_attention
from torch.utils._pytree import tree_map_only

from .document_kernels import (
    as_autocast,
    block_mask,
    flash_attend,
    flash_runs,
    flex_function,
    flex_runs,
)


def visible(first_BL: Tensor) -> Tensor:
    """Return a boolean mask [B, L, L]: each token sees the tokens from ``first_BL`` to itself."""
    index_L = torch.arange(first_BL.shape[1], device=first_BL.device)
    return (index_L >= first_BL.unsqueeze(2)) & (index_L <= index_L.unsqueeze(1))


class DocumentMask(Tensor):
    """Boolean mask [B, 1, L, L] that `F.scaled_dot_product_attention` uses without materializing its elements.

    FlashAttention reads the document boundaries (float16 and bfloat16, if flash-attn is installed), FlexAttention the
    first token that each token sees. Any other function gets a materialized mask and stays correct.
    """

    first_BL: Tensor
    """First token that each token sees; the last one is the token itself."""
    borders: Tensor | None
    """Boundaries of documents, or of their chunks, in all rows concatenated, int32; computed on demand if None."""
    window: int | None

    @classmethod
    def of(cls, first_BL: Tensor, borders: Tensor | None, window: int | None) -> DocumentMask:
        batch, length = first_BL.shape
        # Expanded from one element: has the shape of a mask, and takes no memory.
        one_element = first_BL.new_empty((), dtype=torch.bool)
        mask = one_element.expand(batch, 1, length, length).as_subclass(cls)
        mask.first_BL = first_BL
        mask.borders = borders
        mask.window = window
        return mask

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attend(*args, **kwargs)
        # Reads shape, dtype or device.
        if func.__name__ in ("__get__", "size", "dim", "stride", "is_floating_point"):
            return super().__torch_function__(func, types, args, kwargs)
        if func is Tensor.__getitem__:
            # transformers slices masks to the length of the keys: here, all of it.
            sliced = cast(Tensor, super().__torch_function__(func, types, args, kwargs))
            if sliced.shape == args[0].shape:
                return args[0]
        args, kwargs = tree_map_only(cls, DocumentMask.elements, (args, kwargs))
        return func(*args, **kwargs)

    def elements(self) -> Tensor:
        """Return the materialized mask, a plain tensor [B, 1, L, L]."""
        return visible(self.first_BL).unsqueeze(1)

    def document_borders(self) -> Tensor:
        """Return ``borders``, int32 and one-dimensional; the first call finds them if they are None."""
        if self.borders is None:
            batch, length = self.first_BL.shape
            begins_BL = self.first_BL == torch.arange(length, device=self.first_BL.device)
            begin_places = begins_BL.flatten().nonzero().flatten()
            self.borders = F.pad(begin_places, (0, 1), value=batch * length)
        return self.borders.flatten().int()

    @cached_property
    def blocks(self) -> flex_attention.BlockMask:
        """FlexAttention's mask, made once for all layers that share this mask."""
        return block_mask(self.first_BL)


def _attend(
    query_BHLP: Tensor,
    key_BHLP: Tensor,
    value_BHLP: Tensor,
    attn_mask: DocumentMask,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run `F.scaled_dot_product_attention` with a `DocumentMask`."""
    qkv = as_autocast(query_BHLP, key_BHLP, value_BHLP)
    if flash_runs(*qkv):
        borders = attn_mask.document_borders()
        return flash_attend(*qkv, borders, attn_mask.window, dropout_p, scale)
    # Packed rows mostly have one length.
    if dropout_p or not flex_runs(query_BHLP, by_default=True):
        query, key, value = qkv
        # Kernels for dense masks do not group heads: sdpa would materialize all of its scores.
        n_repeats = query.shape[1] // key.shape[1]
        return F.scaled_dot_product_attention(
            query,
            key.repeat_interleave(n_repeats, dim=1),
            value.repeat_interleave(n_repeats, dim=1),
            attn_mask=attn_mask.elements(),
            dropout_p=dropout_p,
            scale=scale,
        )
    attend = flex_function()
    return attend(*qkv, block_mask=attn_mask.blocks, scale=scale, enable_gqa=enable_gqa)
