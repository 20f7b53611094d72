"""The recurrence of SSM heads, one forward and one backward pass with the state in registers.

Per head, with one decay per token, a skip D and a gate z (the last two optional):

    S_t = a_t S_{t-1} + x_t B_t^T        y_t = (S_t C_t + D x_t) silu(z_t)
    log a = -softplus(raw)

A program owns one head of one row and walks over its chunks of Q tokens. With cum_i = sum_{s <= i}
log a_s inside the chunk and S the state before it, kept as [N, P] so that no product ever needs it
transposed:

    scores_ij = (C_i . B_j) exp(cum_i - cum_j) for j <= i        y = scores x + exp(cum) C S
    S <- exp(cum_Q) S + B^T (exp(cum_Q - cum) x)

The backward walks in reverse with dS, the gradient of the state after the chunk, and the state
before each chunk, which the forward has stored. With dscores_ij = (dy_i . x_j) exp(cum_i - cum_j)
for j <= i:

    dC = dscores B + exp(cum) dy S^T
    dB^T = C^T dscores + (dS x^T) exp(cum_Q - cum)
    dx = scores^T dy + exp(cum_Q - cum) B dS + D dy
    dS <- exp(cum_Q) dS + C^T (exp(cum) dy)
    dlog a_t = sum_{i >= t > j} scores_ij (dy_i . x_j)        token before t -> token after t
             + sum_{i >= t} exp(cum_i) dy_i . (S^T C_i)       state before -> token after t
             + sum_{j < t} exp(cum_Q - cum_j) x_j . (dS^T B_j)   token before t -> state after
             + exp(cum_Q) <dS, S>                             state before -> state after

scores^T is computed as B C^T, never by transposing what a product has left in registers: triton
before 3.7.1 compiles that wrongly for Hopper. Nothing is shared between programs, so results do not
depend on the order they run in.

Two small kernels stand around these: one sums the log decays of all chunks beforehand, one adds up
dlog a afterwards from what the backward wrote of each token. The gate is a pass of its own: inside,
its divisions and exponentials would take registers and time where both are scarce.

Where rows and heads are too few for the device, a row is cut into segments: one kernel finds what
each adds to the state, a small one carries the states over, and the main kernels then run on every
segment at once.

Shapes: B batch, L length, H head, P head dim, N state size, Q tokens in a chunk, M chunks, S
segments.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from .common import check_device, check_dtype, check_shape
from .ssd_launch import ScanArguments, check_scan
from .ssd_operators import gate, scan
from .ssd_tiles import LARGEST_FP32_BLOCK


def ssd(
    x_BLHP: Tensor,
    a_BLH: Tensor,
    b_BLHN: Tensor,
    c_BLHN: Tensor,
    *,
    D_H: Tensor | None = None,
    z_BLHP: Tensor | None = None,
    state_BHPN: Tensor | None = None,
    seq_idx_BL: Tensor | None = None,
    softplus: bool = True,
    n_segments: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return y_BLHP in the dtype of x, and the state after the last token in fp32.

    Both are differentiable in every float argument. ``a_BLH`` is the raw decay,
    log a = -softplus(raw), and -inf means "no decay"; with ``softplus=False`` it is log a. Below
    -30 log a counts as -30 and gets no gradient. ``state_BHPN`` is the state before the first token
    (zero if absent). ``seq_idx_BL`` numbers the documents packed in a row, ascending: the state
    restarts where the number changes, and a given state belongs to the first document.
    ``n_segments`` overrides how many parts of a row run at once, which otherwise follows from the
    shape and the device.

    bfloat16 inputs are multiplied as bf16 with fp32 sums, float32 ones nearly as fp32, a large N or
    P in blocks; states stay in fp32.

    Raises ValueError for shapes that do not fit, other dtypes, an empty x, N or P above 128, a
    falling seq_idx (looked at on a CPU, or with HYBRID_KERNELS_DEBUG=1).
    """
    arguments = ScanArguments(
        x_BLHP, a_BLH, b_BLHN, c_BLHN, D_H, state_BHPN, seq_idx_BL, softplus, n_segments
    )
    if z_BLHP is not None:
        check_shape("z_BLHP", z_BLHP, x_BLHP.shape, "BLHP")
        check_dtype("z_BLHP", z_BLHP, (x_BLHP.dtype,))
        check_device("z_BLHP", z_BLHP, x_BLHP)
    largest = max(x_BLHP.shape[-1], b_BLHN.shape[-1])
    if x_BLHP.dtype == torch.float32 and largest > LARGEST_FP32_BLOCK:
        check_scan(arguments)
        y, final = _scan_in_blocks(arguments)
    else:
        y, final = scan(arguments)
    if z_BLHP is not None:
        y = gate(y, z_BLHP)
    return y, final


def _scan_in_blocks(arguments: ScanArguments) -> tuple[Tensor, Tensor]:
    """Scan block by block of the state: P is split freely, and y is a sum over blocks of N."""
    x = arguments.x_BLHP
    D = arguments.D_H
    state = arguments.state_BHPN
    ys = []
    finals = []
    for p in _fp32_blocks(x.shape[-1]):
        ys_of_p = []
        finals_of_p = []
        for n in _fp32_blocks(arguments.b_BLHN.shape[-1]):
            block_state = None
            if state is not None:
                block_state = state[:, :, p, n]
            block = arguments._replace(
                x_BLHP=x[..., p],
                b_BLHN=arguments.b_BLHN[..., n],
                c_BLHN=arguments.c_BLHN[..., n],
                D_H=None,
                state_BHPN=block_state,
            )
            y, final = scan(block)
            ys_of_p.append(y)
            finals_of_p.append(final)
        # A stack and a sum, not a running total: the order of the sum is the order of the blocks.
        ys.append(torch.stack(ys_of_p).sum(0))
        finals.append(torch.cat(finals_of_p, dim=-1))
    y = torch.cat(ys, dim=-1)
    if D is not None:
        # Last, because each block of N would add the skip once.
        y = y + D.unsqueeze(-1) * x
    return y, torch.cat(finals, dim=-2)


def _fp32_blocks(size: int) -> list[slice]:
    """Cut N or P into blocks of at most LARGEST_FP32_BLOCK.

    Each fp32 product is three on tensor cores and takes twice the registers, so that a large state
    does not fit one program.
    """
    blocks = []
    for begin in range(0, size, LARGEST_FP32_BLOCK):
        end = min(begin + LARGEST_FP32_BLOCK, size)
        blocks.append(slice(begin, end))
    return blocks


def block_sizes(dtype: torch.dtype, head_dim: int, d_state: int) -> list[tuple[int, int]]:
    """List the different (P, N) of the blocks in which `ssd` runs a state."""
    if dtype != torch.float32:
        return [(head_dim, d_state)]
    blocks = itertools.product(_fp32_blocks(head_dim), _fp32_blocks(d_state))
    sizes = [(p.stop - p.start, n.stop - n.start) for p, n in blocks]
    return list(dict.fromkeys(sizes))
