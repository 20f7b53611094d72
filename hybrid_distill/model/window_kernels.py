"""FlexAttention for windows: on a GPU, one kernel reads the near keys and the sinks in place.

Shapes: B batch, L length, H heads, G KV heads, P head dim, N blocks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention

from .document_kernels import (
    FLEX_BLOCK,
    as_autocast,
    flex_function,
    flex_runs,
    has_document_attention,
)


def kernel_runs(query_BHLP: Tensor, dropout: float) -> bool:
    """Return True if FlexAttention runs these queries faster than blocks of dense attention do.

    Prompts and texts have many lengths: it runs in training alone, where a loop opens `compiling_for`.
    """
    if dropout or not has_document_attention(query_BHLP.device):
        return False
    return flex_runs(query_BHLP, by_default=False)


def is_visible(
    distance: Tensor, place: Tensor, window: int, sinks: int, limit: int | None
) -> Tensor:
    """Return where a token at this ``place`` of its document is seen from this ``distance`` (`Reach`)."""
    seen = (distance < window) | (place < sinks)
    seen = seen & (distance >= 0) & (place >= 0)
    if limit is not None:
        seen = seen & (distance < limit)
    return seen


def attend_with_kernel(
    query_BHLP: Tensor,
    key_BGLP: Tensor,
    value_BGLP: Tensor,
    begin_BL: Tensor,
    sizes: tuple[int, int, int | None],
    scale: float | None,
    softcap: float | None,
) -> Tensor:
    """Compute `attend_locally` of a row without earlier tokens; ``sizes`` are window, sinks and limit."""
    attend = flex_function()

    def capped(score: Tensor, *place: Tensor) -> Tensor:
        assert softcap is not None
        return softcap * torch.tanh(score / softcap)

    return attend(
        *as_autocast(query_BHLP, key_BGLP, value_BGLP),
        score_mod=None if softcap is None else capped,
        block_mask=window_blocks(begin_BL, *sizes),
        scale=scale,
        enable_gqa=query_BHLP.shape[1] != key_BGLP.shape[1],
    )


def window_blocks(
    begin_BL: Tensor, window: int, sinks: int, limit: int | None
) -> flex_attention.BlockMask:
    """Make FlexAttention's mask: of each block of queries, the blocks with near keys and with sinks.

    Only one document has sinks before a block's near keys: that of its first query. Blocks are listed
    in ascending order, as many as the longest list; what stands beyond a list's count is not read.
    """
    length = begin_BL.shape[1]
    first_query_N = torch.arange(0, length, FLEX_BLOCK, device=begin_BL.device)
    n_blocks = len(first_query_N)
    block_N = torch.arange(n_blocks, device=begin_BL.device)
    first_near_N = (first_query_N - window + 1).clamp_min(0) // FLEX_BLOCK
    begin_BN = begin_BL[:, first_query_N]
    first_sink_BN = begin_BN // FLEX_BLOCK
    end_sink_BN = (begin_BN + sinks - 1).clamp_min(0) // FLEX_BLOCK + 1
    n_sink_BN = (end_sink_BN.minimum(first_near_N) - first_sink_BN).clamp_min(0)
    if not sinks:
        n_sink_BN = torch.zeros_like(n_sink_BN)
    count_BN = n_sink_BN + block_N - first_near_N + 1

    column_BNN = block_N.expand(len(begin_BL), n_blocks, -1)
    n_sink_BN1 = n_sink_BN.unsqueeze(2)
    near_BNN = first_near_N.unsqueeze(1) + column_BNN - n_sink_BN1
    sink_BNN = first_sink_BN.unsqueeze(2) + column_BNN
    index_BNN = torch.where(column_BNN < n_sink_BN1, sink_BNN, near_BNN)
    index_BNN = index_BNN.clamp(0, n_blocks - 1)

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        place = key - begin_BL[batch, query]
        return is_visible(query - key, place, window, sinks, limit)

    options: dict[str, Any] = {}
    # Otherwise the mask would be one for whole blocks.
    if length % FLEX_BLOCK:
        options["seq_lengths"] = (length, length)
    return flex_attention.BlockMask.from_kv_blocks(
        count_BN.unsqueeze(1).int(),
        index_BNN.unsqueeze(1).int(),
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=seen,
        **options,
    )
