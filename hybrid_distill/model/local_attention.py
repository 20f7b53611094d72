"""Attention of replaced heads within a window: the last W tokens of a document, and its first S (sinks).

No part grows with the square of the length: queries run in blocks, each against its own near keys and
the sinks of one document.

Shapes: B batch, L length, H windowed query heads, G KV heads that they read, P head dim, W window,
S sinks, T tokens (earlier ones and the row's), Q queries per block, N blocks, K keys per block,
R = S + W slots of a ring.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .rows import pick_tokens
from .window_kernels import attend_with_kernel, is_visible, kernel_runs

BLOCK = 128
"""Queries per block; each block also reads W - 1 + S keys of earlier tokens."""


class Reach(NamedTuple):
    """Part of its document that a windowed head sees, in tokens."""

    window: int
    """Latest tokens, the current one included."""
    sinks: int
    """First tokens of the document."""
    limit: int | None = None
    """Sliding window of the layer itself, beyond which the teacher sees nothing, not even the sinks."""

    def shrunk(self, window: int, sinks: int) -> Reach:
        """Return this reach with at most that window and those sinks, also where the layer limits it."""
        limit = self.limit
        if limit is not None:
            limit = min(limit, window)
        return Reach(min(self.window, window), min(self.sinks, sinks), limit)

    def sees(self, distance: Tensor, place: Tensor) -> Tensor:
        """Return where a token of this ``place`` in the document is seen from this ``distance``."""
        return is_visible(distance, place, self.window, self.sinks, self.limit)


class Earlier(NamedTuple):
    """Tokens before a row, from a ring: at most the last W - 1 in order, the first S, and their number."""

    near_keys: Tensor
    near_values: Tensor
    sink_keys: Tensor
    sink_values: Tensor
    n_tokens_B: Tensor


class Scoring(NamedTuple):
    """How a family turns products of queries and keys into attention weights."""

    scale: float | None = None
    softcap: float | None = None
    dropout: float = 0.0


def attend_locally(
    query_BHLP: Tensor,
    key_BGLP: Tensor,
    value_BGLP: Tensor,
    begin_BL: Tensor,
    reach: Reach,
    scoring: Scoring,
    earlier: Earlier | None = None,
) -> Tensor:
    """Compute windowed attention of a row, [B, H, L, P].

    ``begin_BL`` is the index of the first token of each token's document; with ``earlier`` tokens, which belong to the
    row's only document, it is not read. Consecutive query heads share a KV head.
    """
    if earlier is None and kernel_runs(query_BHLP, scoring.dropout):
        return attend_with_kernel(
            query_BHLP,
            key_BGLP,
            value_BGLP,
            begin_BL,
            reach,
            scoring.scale,
            scoring.softcap,
        )
    return _attend_in_blocks(query_BHLP, key_BGLP, value_BGLP, begin_BL, reach, scoring, earlier)


def _attend_in_blocks(
    query_BHLP: Tensor,
    key_BGLP: Tensor,
    value_BGLP: Tensor,
    begin_BL: Tensor,
    reach: Reach,
    scoring: Scoring,
    earlier: Earlier | None,
) -> Tensor:
    """Attend with one batched call, in which each block of queries has its near keys and one document's sinks."""
    length = query_BHLP.shape[2]
    size = min(BLOCK, length)
    n_blocks = -(-length // size)
    padding = n_blocks * size - length

    # Indices count from the first of n_past earlier tokens, real or not: query i is token n_past + i.
    if earlier is None:
        # The last block has no more tokens before it.
        n_past = min(reach.window - 1, (n_blocks - 1) * size)
        key_BGTP = F.pad(key_BGLP, (0, 0, n_past, padding))
        value_BGTP = F.pad(value_BGLP, (0, 0, n_past, padding))
        begin_BL = begin_BL + n_past
    else:
        n_past = earlier.near_keys.shape[2]
        key_BGTP = _after(earlier.near_keys, key_BGLP, padding)
        value_BGTP = _after(earlier.near_values, value_BGLP, padding)
        # Negative for a document that began before these tokens.
        begin_BL = (n_past - earlier.n_tokens_B).unsqueeze(1).expand(-1, length)
    begin_BNQ = F.pad(begin_BL, (0, padding)).unflatten(1, (n_blocks, size))

    key_BNGKP = _near_blocks(key_BGTP, n_past + size, size)
    value_BNGKP = _near_blocks(value_BGTP, n_past + size, size)
    seen_BNQK = _seen_near(begin_BNQ, reach, n_past)
    # A single block without earlier tokens has its sinks among its near keys.
    if reach.sinks and (n_blocks > 1 or earlier is not None):
        # Only one document can have sinks before a block's near keys: that of its first query.
        sink_keys = None
        sink_values = None
        if earlier is not None:
            sink_keys = earlier.sink_keys
            sink_values = earlier.sink_values
        begin_BN = begin_BNQ[:, :, 0]
        key_BNGSP = _sinks(key_BGTP, begin_BN, reach.sinks, sink_keys)
        value_BNGSP = _sinks(value_BGTP, begin_BN, reach.sinks, sink_values)
        seen_BNQS = _seen_sinks(begin_BNQ, reach, n_past)
        key_BNGKP = torch.cat([key_BNGSP, key_BNGKP], dim=3)
        value_BNGKP = torch.cat([value_BNGSP, value_BNGKP], dim=3)
        seen_BNQK = torch.cat([seen_BNQS, seen_BNQK], dim=3)

    query_BHTP = F.pad(query_BHLP, (0, 0, 0, padding))
    query_BNHQP = query_BHTP.unflatten(2, (n_blocks, size)).transpose(1, 2)
    # Every block is a row of its own to the attention function.
    out_NHQP = attend_masked(
        query_BNHQP.flatten(0, 1),
        key_BNGKP.flatten(0, 1),
        value_BNGKP.flatten(0, 1),
        seen_BNQK.flatten(0, 1),
        scoring,
    )
    out_BNHQP = out_NHQP.unflatten(0, (-1, n_blocks))
    out_BHTP = out_BNHQP.transpose(1, 2).flatten(2, 3)
    return out_BHTP[:, :, :length]


def _after(earlier_BGXP: Tensor, row_BGLP: Tensor, padding: int) -> Tensor:
    """Return a row after earlier tokens, with padding behind it, [B, G, T, P]."""
    t_BGTP = torch.cat([earlier_BGXP, row_BGLP], dim=2)
    return F.pad(t_BGTP, (0, 0, 0, padding))


def seen_in_ring(place_BR: Tensor, last_place_B1: Tensor, reach: Reach) -> Tensor:
    """Return which slots of a ring its last token sees, by the ``place`` of the token in each slot."""
    distance_BR = last_place_B1 - place_BR
    seen_BR = reach.sees(distance_BR, place_BR)
    # A sink that is still in the window is read there.
    is_sink_R = torch.arange(place_BR.shape[1], device=place_BR.device) < reach.sinks
    return seen_BR & ~(is_sink_R & (distance_BR < reach.window))


def attend_masked(
    query_BHQP: Tensor,
    key_BGKP: Tensor,
    value_BGKP: Tensor,
    seen_BQK: Tensor,
    scoring: Scoring,
) -> Tensor:
    """Attend under a boolean mask; H / G consecutive query heads read each KV head."""
    _, n_heads, n_queries, _ = query_BHQP.shape
    n_groups = key_BGKP.shape[1]
    # The heads of a KV head become more queries of one head: no key is copied for them.
    group_size = n_heads // n_groups
    query_BGQP = query_BHQP.unflatten(1, (n_groups, group_size)).flatten(2, 3)
    if n_queries > 1:
        # One query is the same row of the mask for all heads.
        seen_BQK = seen_BQK.repeat(1, group_size, 1)
    seen_B1QK = seen_BQK.unsqueeze(1)
    if scoring.softcap is None:
        out_BGQP = F.scaled_dot_product_attention(
            query_BGQP,
            key_BGKP,
            value_BGKP,
            attn_mask=seen_B1QK,
            dropout_p=scoring.dropout,
            scale=scoring.scale,
        )
    else:
        maps_BGQK = _maps(query_BGQP, key_BGKP, seen_B1QK, scoring)
        out_BGQP = F.dropout(maps_BGQK, scoring.dropout) @ value_BGKP
    return out_BGQP.unflatten(2, (group_size, n_queries)).flatten(1, 2)


def local_maps(
    query_BHLP: Tensor, key_BGLP: Tensor, begin_BL: Tensor, reach: Reach, scoring: Scoring
) -> Tensor:
    """Return the attention maps behind `attend_locally`, [B, H, L, L]: for analysis, of short rows."""
    index_L = torch.arange(query_BHLP.shape[2], device=query_BHLP.device)
    distance_LL = index_L.unsqueeze(1) - index_L
    place_BLL = index_L - begin_BL.unsqueeze(2)
    seen_B1LL = reach.sees(distance_LL, place_BLL).unsqueeze(1)
    n_repeats = query_BHLP.shape[1] // key_BGLP.shape[1]
    key_BHLP = key_BGLP.repeat_interleave(n_repeats, dim=1)
    return _maps(query_BHLP, key_BHLP, seen_B1LL, scoring)


def _maps(query: Tensor, key: Tensor, seen: Tensor, scoring: Scoring) -> Tensor:
    """Return attention weights [..., Q, K] in the dtype of the queries."""
    scale = scoring.scale
    if scale is None:
        scale = query.shape[-1] ** -0.5
    scores = query @ key.mT * scale
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    return scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)


def _near_blocks(t_BGTP: Tensor, n_keys: int, step: int) -> Tensor:
    """Return overlapping blocks of keys, [B, N, G, K, P]."""
    blocks_BGNPK = t_BGTP.unfold(2, n_keys, step)
    return blocks_BGNPK.permute(0, 2, 1, 4, 3)


def _seen_near(begin_BNQ: Tensor, reach: Reach, n_past: int) -> Tensor:
    """Return which near keys each query sees, of ``n_past`` before its block and those within."""
    _, n_blocks, size = begin_BNQ.shape
    device = begin_BNQ.device
    in_block_K = torch.arange(n_past + size, device=device)
    query_Q = n_past + torch.arange(size, device=device)
    distance_QK = query_Q.unsqueeze(1) - in_block_K
    block_N = torch.arange(n_blocks, device=device) * size
    key_NK = block_N.unsqueeze(1) + in_block_K
    place_BNQK = key_NK.unsqueeze(1) - begin_BNQ.unsqueeze(3)
    return reach.sees(distance_QK, place_BNQK)


def _sinks(t_BGTP: Tensor, begin_BN: Tensor, n_sinks: int, stored_BGSP: Tensor | None) -> Tensor:
    """Return the sinks of the document that begins at each index, [B, N, G, S, P]."""
    n_blocks = begin_BN.shape[1]
    n_tokens = t_BGTP.shape[2]
    sink_S = torch.arange(n_sinks, device=begin_BN.device)
    index_BNS = begin_BN.unsqueeze(2) + sink_S
    # Clamped: a short document has fewer sinks, which `_seen_sinks` hides.
    index_BX = index_BNS.clamp(0, n_tokens - 1).flatten(1)
    picked_BGXP = pick_tokens(t_BGTP, index_BX)
    sinks_BNGSP = picked_BGXP.unflatten(2, (n_blocks, n_sinks)).transpose(1, 2)
    if stored_BGSP is None:
        return sinks_BNGSP
    # Sinks before the earlier tokens are in the ring alone.
    is_stored_BN1S1 = (index_BNS < 0)[:, :, None, :, None]
    return torch.where(is_stored_BN1S1, stored_BGSP.unsqueeze(1), sinks_BNGSP)


def _seen_sinks(begin_BNQ: Tensor, reach: Reach, n_past: int) -> Tensor:
    """Return which sinks of a block each query sees: those of its own document before the near keys."""
    _, n_blocks, size = begin_BNQ.shape
    device = begin_BNQ.device
    sink_S = torch.arange(reach.sinks, device=device)
    first_key_N = torch.arange(n_blocks, device=device) * size
    begin_BN = begin_BNQ[:, :, 0]
    index_BNS = begin_BN.unsqueeze(2) + sink_S
    is_before_BNS = index_BNS < first_key_N[:, None]
    is_same_BNQ = begin_BNQ == begin_BN.unsqueeze(2)
    seen_BNQS = is_same_BNQ.unsqueeze(3) & is_before_BNS.unsqueeze(2)
    if reach.limit is not None:
        in_block_Q = torch.arange(size, device=device)
        query_NQ = n_past + first_key_N.unsqueeze(1) + in_block_Q
        distance_BNQS = query_NQ.unsqueeze(2) - index_BNS.unsqueeze(2)
        seen_BNQS = seen_BNQS & (distance_BNQS < reach.limit)
    return seen_BNQS
