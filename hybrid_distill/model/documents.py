"""Packed documents: their boundaries in a row, and inputs that keep them separate.

Shapes: B batch, L length, S source length, X = L + 1 columns: the last cached token first.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig

from .document_kernels import has_document_attention
from .document_mask import DocumentMask, visible
from .rows import document_begins
from .windows import FULL, kinds_and_windows

CACHE_WITH_PACKING = (
    "packed documents (seq_idx, cu_seq_lens_q, or position_ids that restart) cannot be continued from a cache; "
    "drop the cache, or pass positions that continue from it."
)
PACKING = ("sdpa", "eager")
"""Attention implementations whose mask arguments can keep packed documents separate."""


def seq_idx_of_borders(borders: Tensor, batch: int, length: int) -> Tensor:
    """Make seq_idx_BL from the document boundaries in all rows concatenated: 0, the first document's length, ..."""
    place_T = torch.arange(batch * length, device=borders.device)
    return torch.bucketize(place_T, borders.flatten()[1:].long(), right=True).view(batch, length)


def seq_idx_of_positions(
    position_BL: Tensor,
    attention_mask: Any,
    token_mask_BL: Tensor | None,
    n_past: Any,
    is_cached: bool,
) -> Tensor | None:
    """Make seq_idx_BL: a document starts where positions do not increase; None if they increase everywhere.

    Without a mask and a cache, a jump by more than 1 is a boundary too, as in transformers. Synchronizes once with the
    device to find out if there are boundaries. A compiled graph cannot: it assumes some, but none with a cache.
    """
    is_token_BL = torch.ones_like(position_BL, dtype=torch.bool)
    if token_mask_BL is not None:
        is_token_BL = token_mask_BL != 0
        # Without asking for n_past, which a static cache has on the device: nothing precedes an empty cache.
        n_past = (attention_mask[:, : -position_BL.shape[1]] != 0).sum(dim=1)
    rise_BL = _rise_since_last_token(position_BL, is_token_BL, n_past)
    starts_BL = (rise_BL <= 0) & is_token_BL
    if attention_mask is None and not is_cached:
        starts_BL[:, 1:] |= rise_BL[:, 1:] > 1
    if torch.compiler.is_compiling():
        if is_cached:
            # Checked on the device, when the graph runs.
            torch.ops.aten._assert_async.msg(~starts_BL.any(), CACHE_WITH_PACKING)
            return None
    elif not starts_BL.any():
        return None
    return starts_BL.cumsum(dim=1)


def _rise_since_last_token(position_BL: Tensor, is_token_BL: Tensor, n_past: Any) -> Tensor:
    """Return how far each position lies above that of the token before it, passing over padding.

    The token before the first one is the last in the cache, at position ``n_past`` - 1 (-1 without a cache).
    """
    position_BX = F.pad(position_BL, (1, 0))
    position_BX[:, 0] = n_past - 1
    is_token_BX = F.pad(is_token_BL, (1, 0), value=True)
    column_X = torch.arange(position_BX.shape[1], device=position_BX.device)
    latest_token_BX = torch.where(is_token_BX, column_X, 0).cummax(dim=1).values
    return position_BL - position_BX.gather(1, latest_token_BX[:, :-1])


def positions_in_documents(seq_idx_BL: Tensor) -> Tensor:
    """Return positions that restart at 0 with each document."""
    index_L = torch.arange(seq_idx_BL.shape[1], device=seq_idx_BL.device)
    return index_L - document_begins(seq_idx_BL)


def packs_by_itself(config: PretrainedConfig, position_ids: Tensor | None, batch: int) -> bool:
    """Return True if the backbone's attention separates documents by `forward`'s own arguments, without a mask."""
    implementation = getattr(config, "_attn_implementation", None) or ""
    if implementation == "flex_attention":
        return position_ids is not None
    # In several rows, transformers does not look for documents.
    return "flash" in implementation and batch == 1


def check_packs(implementation: str | None) -> None:
    """Raise ValueError for attention that cannot run packed rows; None is the default's name."""
    if implementation is not None and implementation not in PACKING:
        raise ValueError(
            f"attention is {implementation!r}, which cannot run packed rows; pass one of "
            f"{', '.join(PACKING)}. With 'sdpa', packed rows run flash-attn's kernels if the package is "
            "installed."
        )


def packed_inputs(
    seq_idx_BL: Tensor,
    dtype: torch.dtype = torch.float32,
    config: PretrainedConfig | None = None,
    mask_BL: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> dict[str, Any]:
    """Make arguments with which any transformers decoder keeps packed documents separate.

    Returns ``position_ids`` [B, L], restarting at 0 with each document, and ``attention_mask`` [B, 1, L, L]: boolean
    if the ``config`` has sdpa (a `DocumentMask` on a GPU), else additive in ``dtype``, which sdpa and eager accept.
    The ``config`` also provides windows and chunks; if layers differ in kind, the mask is a dictionary by layer type.
    ``mask_BL`` is 0 at padding. ``cu_seqlens``, the document boundaries in all rows concatenated, avoids a
    synchronization with the device. Raises ValueError for an attention implementation without such masks.
    """
    implementation = getattr(config, "_attn_implementation", None)
    check_packs(implementation)
    index_L = torch.arange(seq_idx_BL.shape[1], device=seq_idx_BL.device)
    begin_BL = document_begins(seq_idx_BL)
    # Such a mask has no elements: kernels read its borders.
    has_document_mask = (
        implementation == "sdpa" and mask_BL is None and has_document_attention(seq_idx_BL.device)
    )
    masks = {}
    for kind, window in set(kinds_and_windows(config)) or {(FULL, None)}:
        first_BL = _first_visible(kind, window, begin_BL, mask_BL)
        borders = cu_seqlens
        if kind == "chunked_attention" and window is not None:
            # A chunk is a document of its own: new borders, and no window within it.
            borders = None
            window = None
        if has_document_mask:
            masks[kind] = DocumentMask.of(first_BL, borders, window)
            continue
        visible_BLL = _visible_tokens(first_BL, mask_BL)
        if implementation == "sdpa":
            masks[kind] = visible_BLL.unsqueeze(1)
        else:
            masks[kind] = _additive(visible_BLL, dtype)
    attention_mask: Any = masks
    if len(masks) == 1:
        (attention_mask,) = masks.values()
    return {"position_ids": index_L - begin_BL, "attention_mask": attention_mask}


def _first_visible(
    kind: str, window: int | None, begin_BL: Tensor, mask_BL: Tensor | None
) -> Tensor:
    """Return the index of the first token that each token sees in a layer of this kind, [B, L]."""
    if window is None:
        return begin_BL
    if kind == "chunked_attention":
        index_L = torch.arange(begin_BL.shape[1], device=begin_BL.device)
        return index_L - (index_L - begin_BL) % window
    is_token_BL = torch.ones_like(begin_BL, dtype=torch.bool)
    if mask_BL is not None:
        is_token_BL = mask_BL.bool()
    # Windows count tokens, not padding.
    place_BL = is_token_BL.cumsum(dim=1)
    window_begin_BL = torch.searchsorted(place_BL, place_BL - window, right=True)
    return begin_BL.maximum(window_begin_BL)


def _visible_tokens(first_BL: Tensor, mask_BL: Tensor | None) -> Tensor:
    """Return which tokens (columns) each token (row) sees, [B, L, L]."""
    visible_BLL = visible(first_BL)
    if mask_BL is None:
        return visible_BLL
    # Padding sees itself: a row of the softmax without any key would be NaN.
    itself_LL = torch.eye(first_BL.shape[1], dtype=torch.bool, device=first_BL.device)
    return visible_BLL & (mask_BL.bool().unsqueeze(1) | itself_LL)


def _additive(visible_BLL: Tensor, dtype: torch.dtype) -> Tensor:
    mask_BLL = torch.zeros(visible_BLL.shape, dtype=dtype, device=visible_BLL.device)
    return mask_BLL.masked_fill_(~visible_BLL, torch.finfo(dtype).min).unsqueeze(1)
