"""Decays of recurrent states: their logarithms, sums and products over the tokens of a document.

Shapes: B batch, L length, H head. Decays are in fp32 or fp64, independent of the inputs' dtype and autocast.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

MIN_LOG_DECAY = -30.0
"""Smallest log decay: it erases an fp32 state completely, and keeps sums finite."""


def log_decay(raw: Tensor) -> Tensor:
    """Compute the decay for every code path, in fp32 or fp64: log a = -softplus(raw)."""
    return -F.softplus(raw.to(state_dtype(raw)))


def raw_decay(half_life: Tensor) -> Tensor:
    """Invert `log_decay`: the raw value whose decay halves a state in ``half_life`` tokens."""
    # expm1: exp(x) - 1 would lose long half-lives to rounding.
    return torch.log(torch.expm1(math.log(2.0) / half_life))


def state_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the dtype of states: fp64 if a tensor is, else fp32."""
    is_double = any(tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if is_double else torch.float32


def unseen_mask(seq_idx: Tensor | None, length: int, like: Tensor) -> Tensor:
    """Return a mask [.., L, L]: -inf where token i does not see token j (later, or in another document), else 0."""
    is_later = torch.ones(length, length, dtype=torch.bool, device=like.device).triu(1)
    if seq_idx is None:
        is_unseen = is_later.unsqueeze(0)
    else:
        is_unseen = is_later | (seq_idx.unsqueeze(-1) != seq_idx.unsqueeze(-2))
    unseen = torch.zeros(is_unseen.shape, dtype=state_dtype(like), device=like.device)
    return unseen.masked_fill_(is_unseen, -math.inf)


def sum_over_seen(log_a: Tensor, unseen: Tensor) -> Tensor:
    """Sum log a [.., H, L] over the tokens that token i sees: cum_i, which restarts with each document.

    Uses a matrix product, so that no document affects the sums or gradients of another, not even in the last bit. Uses
    float64, because differences of long sums lose small terms in float32 (MPS has only float32).
    """
    wide = log_a.dtype if log_a.device.type == "mps" else torch.float64
    is_seen = (unseen == 0).to(wide)
    return log_a.to(wide) @ is_seen.mT


def decay_matrix(cum: Tensor, unseen: Tensor) -> Tensor:
    """Return exp(cum_i - cum_j), 0 where unseen."""
    log_decay_ij = (cum.unsqueeze(-1) - cum.unsqueeze(-2)).to(unseen.dtype)
    # Masked before exp, which could overflow where token j is later.
    return log_decay_ij.add_(unseen).exp_()
