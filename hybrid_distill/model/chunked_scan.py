"""Scan of the recurrence with matrix products: a mixing matrix within each chunk, states between chunks.

Shapes: B batch, L length, H head, P head dim, N state size, M chunks, Q chunk size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .decays import MIN_LOG_DECAY, decay_matrix, sum_over_seen, unseen_mask

CHUNKS_PER_BLOCK = 64
"""Chunks over which one product carries the state; its cost is quadratic in this number."""


def scan_chunked(
    x: Tensor,
    log_a: Tensor,
    b: Tensor,
    c: Tensor,
    state: Tensor,
    seq_idx: Tensor | None,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """Return y_BLHP and the last state, as `ssd.ssd_scan` does.

    1. Each chunk's addition to the state.  2. The state before each chunk.  3. The outputs, from both.
    """
    batch, length, n_heads, head_dim = x.shape
    # Copied once, instead of in every product.
    x_BHMQP = to_chunks(x, chunk_size).contiguous()
    # Products are faster if their last dimension is not the small N.
    b_BHMNQ = to_chunks(b, chunk_size).mT.contiguous()
    c_BHMNQ = to_chunks(c, chunk_size).mT.contiguous()
    cum_BHMQ, unseen, to_end, from_start, seq_BMQ = chunk_decays(log_a, seq_idx, chunk_size)

    added_BHMNP = (b_BHMNQ * to_end.unsqueeze(-2)) @ x_BHMQP
    over_chunk_BHM = cum_BHMQ[..., -1]
    before_BHMNP, state = _carry(added_BHMNP, over_chunk_BHM, state.mT, seq_BMQ)
    # Detached: the backward by hand gives cum the gradient of both its uses.
    from_start = from_start.detach()
    y_BHMQP = _ChunkOutputs.apply(
        x_BHMQP, b_BHMNQ, c_BHMNQ, cum_BHMQ, before_BHMNP, unseen, from_start
    )
    y_BLHP = y_BHMQP.permute(0, 2, 3, 1, 4).reshape(batch, -1, n_heads, head_dim)
    return y_BLHP[:, :length], state.mT


class ChunkDecays(NamedTuple):
    """Decays within each chunk, and the document of each token."""

    cum_BHMQ: Tensor
    """Sum of log a up to each token, from where its chunk or document begins."""
    unseen: Tensor
    """Mask for `decay_matrix`, [.., M, Q, Q]."""
    to_end: Tensor
    """Decay from each token to the end of its chunk, [B, H, M, Q]; 0 across documents."""
    from_start: Tensor
    """Decay from the state before the chunk to each token, [B, H, M, Q]; 0 across documents."""
    seq_BMQ: Tensor | None


def chunk_decays(log_a_BLH: Tensor, seq_idx_BL: Tensor | None, chunk_size: int) -> ChunkDecays:
    """Compute the decays within each chunk."""
    log_a_BLH1 = log_a_BLH.clamp_min(MIN_LOG_DECAY).unsqueeze(-1)
    log_a_BHMQ = to_chunks(log_a_BLH1, chunk_size).squeeze(-1)
    dtype = log_a_BHMQ.dtype
    seq_BMQ = None
    if seq_idx_BL is not None:
        seq_BMQ = _documents_by_chunk(seq_idx_BL, chunk_size)
    unseen = unseen_mask(seq_BMQ, chunk_size, log_a_BLH)
    cum_BHMQ = sum_over_seen(log_a_BHMQ.transpose(1, 2), unseen).transpose(1, 2)
    unseen = unseen.unsqueeze(1)
    log_to_end = (cum_BHMQ[..., -1:] - cum_BHMQ[..., :-1]).to(dtype)
    to_end = (log_to_end + unseen[..., -1, :-1]).exp()
    # The last token is the end.
    to_end = F.pad(to_end, (0, 1), value=1.0)
    from_start = cum_BHMQ.to(dtype).exp()
    if seq_BMQ is not None:
        continues_BMQ = seq_BMQ == _incoming(seq_BMQ)
        from_start = from_start * continues_BMQ.unsqueeze(1)
    return ChunkDecays(cum_BHMQ, unseen, to_end, from_start, seq_BMQ)


class _ChunkOutputs(torch.autograd.Function):
    """y_i = sum_j (C_i . B_j) decay_ij x_j + exp(cum_i) C_i S in every chunk, S the state before the chunk.

    ``x`` and y are [B, H, M, Q, P], ``bt`` and ``ct``, B and C with the tokens last, [B, H, M, N, Q], ``cum`` and
    ``from_start`` [B, H, M, Q], ``before``, the states S, [B, H, M, N, P], ``unseen`` as in `ChunkDecays`.

    The backward is written by hand: autograd would store three Q x Q matrices instead of one and make twice as many
    passes over them. Except for j = i, every term of y_i has the factor exp(cum_i) and every term of dx_j the factor
    exp(-cum_j), so that the gradient of cum is dy_i . y_i - x_i . dx_i. Terms with j = i, which have no decay, are
    kept separate: under strong decays they would swamp the others.
    """

    @staticmethod
    def forward(ctx, x, bt, ct, cum, before, unseen, from_start) -> Tensor:
        decay = decay_matrix(cum, unseen)
        decay.diagonal(dim1=-2, dim2=-1).zero_()
        # The scores have no name, which would hold a Q x Q matrix for longer than their product.
        earlier = (ct.mT @ bt).mul_(decay) @ x
        earlier += (ct * from_start.unsqueeze(-2)).mT @ before
        own = (ct * bt).sum(-2).unsqueeze(-1)
        ctx.save_for_backward(x, bt, ct, decay, from_start, before, earlier, own)
        return torch.addcmul(earlier, own, x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> Any:
        (dy,) = grad_outputs
        x, bt, ct, decay, from_start, before, earlier, own = ctx.saved_tensors
        from_start = from_start.unsqueeze(-2)
        # It comes permuted, as y leaves. Copied once, instead of in every product.
        dy = dy.contiguous()
        # Scores recomputed: one product costs less than a second Q x Q matrix in memory.
        dx = (ct.mT @ bt).mul_(decay).mT @ dy
        dcum = (dy * earlier).sum(-1) - (x * dx).sum(-1)
        dscores = (dy @ x.mT).mul_(decay)
        d_own = (dy * x).sum(-1).unsqueeze(-2)
        dct = (bt @ dscores.mT).addcmul_(before @ dy.mT, from_start).addcmul_(d_own, bt)
        dbefore = (ct * from_start) @ dy
        dbt = (ct @ dscores).addcmul_(d_own, ct)
        return dx.addcmul_(own, dy), dbt, dct, dcum, dbefore, None, None


def to_chunks(t_BLH: Tensor, chunk_size: int) -> Tensor:
    """Reshape [B, L, H, .] to [B, H, M, Q, .]; zeros pad the last chunk and change no state (a = 1)."""
    missing = -t_BLH.shape[1] % chunk_size
    if missing:
        t_BLH = F.pad(t_BLH, (0, 0, 0, 0, 0, missing))
    return t_BLH.unflatten(1, (-1, chunk_size)).permute(0, 3, 1, 2, 4)


def _documents_by_chunk(seq_idx_BL: Tensor, chunk_size: int) -> Tensor:
    """Reshape to seq_BMQ; padding of the last chunk belongs to the last document."""
    missing = -seq_idx_BL.shape[1] % chunk_size
    padding_BX = seq_idx_BL[:, -1:].expand(-1, missing)
    padded_BL = torch.cat([seq_idx_BL, padding_BX], dim=1)
    return padded_BL.unflatten(1, (-1, chunk_size))


def _incoming(seq_BMQ: Tensor) -> Tensor:
    """Return the document of the state before each chunk, [B, M, 1]."""
    first_token_B11 = seq_BMQ[:, :1, :1]
    last_tokens_BM1 = seq_BMQ[:, :-1, -1:]
    return torch.cat([first_token_B11, last_tokens_BM1], dim=1)


def _carry(
    added_BHMNP: Tensor, log_decay_BHM: Tensor, state_BHNP: Tensor, seq_BMQ: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the states before each chunk and after the last one: S_m = a_m S_{m-1} + added_m, in blocks of chunks.

    A chunk in which a document starts does not pass on the state before it.
    """
    starts_BM = None
    if seq_BMQ is not None:
        starts_BM = (seq_BMQ[..., -1:] != _incoming(seq_BMQ)).squeeze(-1)
    before = []
    for start in range(0, added_BHMNP.shape[2], CHUNKS_PER_BLOCK):
        block = slice(start, start + CHUNKS_PER_BLOCK)
        # The state before the block comes first, and has no decay of its own.
        states = torch.cat([state_BHNP.unsqueeze(2), added_BHMNP[:, :, block]], dim=2)
        log_decays = F.pad(log_decay_BHM[:, :, block], (1, 0))
        segments = None
        if starts_BM is not None:
            segments = F.pad(starts_BM[:, block].cumsum(-1), (1, 0))
        unseen = unseen_mask(segments, states.shape[2], states)
        cum = sum_over_seen(log_decays, unseen)
        decay = decay_matrix(cum, unseen.unsqueeze(1))
        states = (decay @ states.flatten(-2)).view_as(states)
        before.append(states[:, :, :-1])
        state_BHNP = states[:, :, -1]
    return torch.cat(before, dim=2), state_BHNP
