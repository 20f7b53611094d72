"""Gated delta rule (arXiv 2412.06464): a recurrence that overwrites the value stored for a key.

Per head, with unit keys k_t, a decay a_t and a write gate w_t, both in (0, 1):

    S_t = a_t S_{t-1} (I - w_t k_t k_t^T) + w_t x_t k_t^T        y_t = S_t C_t

It is the recurrence of `ssd` with other values: S_t = a_t S_{t-1} + u_t k_t^T. The *write* u_t is
the part of x_t that the state does not contain yet: w_t (x_t - a_t S_{t-1} k_t). Each form below
computes the writes; `ssd` does the rest. On a GPU, a kernel may do both (`hybrid_kernels.delta_rule`).

Shapes as in `ssd`; G rates: the raw decay and the raw write gate of each head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.linalg import solve_triangular

from .chunked_scan import chunk_decays, to_chunks
from .decays import decay_matrix, log_decay, state_dtype
from .kernel_choice import DELTA_RULE, KERNELS, choose_implementation
from .ssd import CHUNK_SIZE, initial_state, mixing_matrix, skip_and_gate, ssd_scan, ssd_step


def decay_and_write(raw_BLHG: Tensor) -> tuple[Tensor, Tensor]:
    """Compute log a and the write gate w, in fp32 or fp64."""
    raw_decay, raw_write = raw_BLHG.unbind(-1)
    return log_decay(raw_decay), raw_write.to(state_dtype(raw_write)).sigmoid()


def unit_keys(b_BLHN: Tensor) -> Tensor:
    """Scale keys to length 1; keys near zero stay shorter, so that their gradients stay finite."""
    wide = b_BLHN.to(state_dtype(b_BLHN))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(b_BLHN.dtype)


def delta_scan(
    x_BLHP: Tensor,
    log_a_BLH: Tensor,
    write_BLH: Tensor,
    k_BLHN: Tensor,
    c_BLHN: Tensor,
    *,
    state_BHPN: Tensor | None = None,
    seq_idx_BL: Tensor | None = None,
    impl: str = "auto",
    chunk_size: int = CHUNK_SIZE,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence over a whole sequence; arguments and results as in `ssd_scan`."""
    # At auto alone: "triton" asks for our kernels, and this one is flash-linear-attention's.
    if impl == "auto" and x_BLHP.shape[1] > 0:
        sizes = x_BLHP.shape[-1], k_BLHN.shape[-1]
        if (
            choose_implementation(impl, DELTA_RULE, x_BLHP, *sizes, packed=seq_idx_BL is not None)
            == "triton"
        ):
            inputs = x_BLHP, log_a_BLH, write_BLH, k_BLHN, c_BLHN
            return KERNELS["delta_rule"](*inputs, state_BHPN=state_BHPN, seq_idx_BL=seq_idx_BL)
    with torch.autocast(x_BLHP.device.type, enabled=False):
        state = initial_state(state_BHPN, x_BLHP, k_BLHN.shape[-1])
        dtype = state.dtype
        u = x_BLHP.to(dtype)
        log_a = log_a_BLH.to(dtype)
        write = write_BLH.to(dtype)
        k = k_BLHN.to(dtype)
        c = c_BLHN.to(dtype)
        length = u.shape[1]
        if length > 0:
            u = _writes(u, log_a, write, k, state, seq_idx_BL, min(chunk_size, length))
        options: dict[str, Any] = {"impl": impl, "chunk_size": chunk_size}
        y, state = ssd_scan(u, log_a, k, c, state_BHPN=state, seq_idx_BL=seq_idx_BL, **options)
    return y.to(x_BLHP.dtype), state


def delta_step(
    x_BHP: Tensor,
    log_a_BH: Tensor,
    write_BH: Tensor,
    k_BHN: Tensor,
    c_BHN: Tensor,
    state_BHPN: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute one token; return y_BHP in the dtype of x, and a new state."""
    dtype = state_dtype(x_BHP, state_BHPN)
    x = x_BHP.to(dtype)
    log_a = log_a_BH.to(dtype)
    write = write_BH.to(dtype)
    k = k_BHN.to(dtype)
    state = state_BHPN.to(dtype)
    # The value that the state, once decayed, already holds for this key.
    stored = log_a.exp().unsqueeze(-1) * (state * k.unsqueeze(-2)).sum(-1)
    u = write.unsqueeze(-1) * (x - stored)
    y, state = ssd_step(u, log_a, k, c_BHN, state)
    return y.to(x_BHP.dtype), state


def delta_mixing_matrix(
    log_a_BLH: Tensor,
    write_BLH: Tensor,
    k_BLHN: Tensor,
    c_BLHN: Tensor,
    seq_idx_BL: Tensor | None = None,
) -> Tensor:
    """Return T_BHLS with y = T x: the mixing matrix of `ssd`, which maps writes to y, times the map from x to writes.

    The writes solve (I + w (K K^T * decay)) u = w x, where K K^T has no diagonal.
    """
    writes_to_y = mixing_matrix(log_a_BLH, k_BLHN, c_BLHN, seq_idx_BL)
    overlap = mixing_matrix(log_a_BLH, k_BLHN, k_BLHN, seq_idx_BL)
    write_BHL = write_BLH.to(overlap.dtype).transpose(1, 2)
    overlap = overlap * write_BHL.unsqueeze(-1)
    # unitriangular: the diagonal counts as 1, and what `overlap` has there is not read.
    solved = solve_triangular(overlap, writes_to_y, upper=False, left=False, unitriangular=True)
    return solved * write_BHL.unsqueeze(-2)


def gated_delta_scan(
    x_BLHP: Tensor,
    raw_BLHG: Tensor,
    k_BLHN: Tensor,
    c_BLHN: Tensor,
    D_H: Tensor,
    z_BLHP: Tensor,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Compute ``(scan(x) + D x) silu(z)`` and the last state; ``options`` as in `gated_ssd_scan`."""
    y_BLHP, state = delta_scan(x_BLHP, *decay_and_write(raw_BLHG), k_BLHN, c_BLHN, **options)
    return skip_and_gate(y_BLHP, x_BLHP, D_H, z_BLHP), state


def gated_delta_step(
    x_BHP: Tensor,
    raw_BHG: Tensor,
    k_BHN: Tensor,
    c_BHN: Tensor,
    D_H: Tensor,
    z_BHP: Tensor,
    state_BHPN: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute one token of `gated_delta_scan`; return y_BHP and the new state."""
    y_BHP, state = delta_step(x_BHP, *decay_and_write(raw_BHG), k_BHN, c_BHN, state_BHPN)
    return skip_and_gate(y_BHP, x_BHP, D_H, z_BHP), state


def _writes(
    x: Tensor,
    log_a: Tensor,
    write: Tensor,
    k: Tensor,
    state: Tensor,
    seq_idx: Tensor | None,
    chunk_size: int,
) -> Tensor:
    """Return the writes u_BLHP, computed chunk by chunk (WY representation).

    Within a chunk they solve (I + w (K K^T * decay)) u = w (x - decay K S^T), S the state before the chunk. Both terms
    are solved for before S is known.  1. u = own - read S^T.  2. S after each chunk.  3. The writes.
    """
    batch, length, n_heads, head_dim = x.shape
    d_state = k.shape[-1]
    cum_BHMQ, unseen, to_end, from_start, _ = chunk_decays(log_a, seq_idx, chunk_size)
    x_BHMQP = to_chunks(x, chunk_size)
    # Copied once, instead of in every product.
    k_BHMQN = to_chunks(k, chunk_size).contiguous()
    write_BHMQ1 = to_chunks(write.unsqueeze(-1), chunk_size)
    scaled_k = k_BHMQN * write_BHMQ1
    overlap = scaled_k @ k_BHMQN.mT * decay_matrix(cum_BHMQ, unseen)
    right = torch.cat([x_BHMQP * write_BHMQ1, scaled_k * from_start.unsqueeze(-1)], dim=-1)
    # unitriangular: the diagonal counts as 1, and what `overlap` has there is not read.
    solved = solve_triangular(overlap, right, upper=False, unitriangular=True)
    own_BHMQP, read_BHMQN = solved.split([head_dim, d_state], -1)

    to_state = (k_BHMQN * to_end.unsqueeze(-1)).mT
    added_BHMNP = to_state @ own_BHMQP
    forgotten_BHMNN = to_state @ read_BHMQN
    over_chunk_BHM1 = from_start[..., -1:]
    decays_BHMN = over_chunk_BHM1.expand(*k_BHMQN.shape[:3], d_state)
    kept_BHMNN = torch.diag_embed(decays_BHMN) - forgotten_BHMNN
    before = []
    state = state.mT
    # One by one, unlike in `ssd`: a chunk multiplies the state by a matrix, not by a number.
    for kept_BHNN, added_BHNP in zip(kept_BHMNN.unbind(2), added_BHMNP.unbind(2)):
        before.append(state)
        state = kept_BHNN @ state + added_BHNP
    u_BHMQP = own_BHMQP - read_BHMQN @ torch.stack(before, dim=2)
    u_BLHP = u_BHMQP.permute(0, 2, 3, 1, 4).reshape(batch, -1, n_heads, head_dim)
    return u_BLHP[:, :length]
