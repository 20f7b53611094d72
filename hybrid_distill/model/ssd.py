"""State-space duality (SSD): the math of recurrent heads.

Per head, with one scalar decay a_t in (0, 1) per token (discrete Mamba-2, arXiv 2405.21060 and
2502.14458):

    S_t = a_t S_{t-1} + x_t B_t^T          y_t = S_t C_t          S in R^{P x N}

As a matrix, y = T x with T[i, j] = (C_i . B_j) prod_{j < s <= i} a_s: the *mixing matrix*.

Shapes: B batch, L length, S source length, H head, P head dim, N state size, C channels, K conv width, M chunks,
Q chunk size. States and decays are in fp32 or fp64, independent of the inputs' dtype and autocast.
"""

from __future__ import annotations

import importlib
import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .kernel_choice import KERNEL_WIDTHS, KERNELS, choose

CHUNK_SIZE = 32
"""Tokens of a chunk. On a CPU, shorter chunks are too many calls and longer ones too many products."""
CHUNKS_PER_BLOCK = 64
"""Chunks over which one product carries the state; its cost is quadratic in this number."""
MIN_LOG_DECAY = -30.0
"""Smallest log decay: it erases an fp32 state completely, and keeps sums finite."""
MAMBA_CHUNK_SIZE = 128
SMALLEST_STEP = 1e-20
"""Smallest step for mamba-ssm: exp(-1e-20) is 1, and dividing by it stays finite."""


def log_decay(raw: Tensor) -> Tensor:
    """Compute the decay for every code path, in fp32 or fp64: log a = -softplus(raw)."""
    return -F.softplus(raw.to(state_dtype(raw)))


def raw_decay(half_life: Tensor) -> Tensor:
    """Invert `log_decay`: the raw value whose decay halves a state in ``half_life`` tokens."""
    # expm1: exp(x) - 1 would lose long half-lives to rounding.
    return torch.log(torch.expm1(math.log(2.0) / half_life))


def ssd_scan(
    x_BLHP: Tensor,
    log_a_BLH: Tensor,
    b_BLHN: Tensor,
    c_BLHN: Tensor,
    *,
    state_BHPN: Tensor | None = None,
    seq_idx_BL: Tensor | None = None,
    impl: str = "auto",
    chunk_size: int = CHUNK_SIZE,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence over a whole sequence.

    ``state_BHPN`` is the state before the first token (default: zero). ``seq_idx_BL`` numbers the documents packed in
    a row, ascending: the state resets where the number changes, and a given state belongs to the first document.
    Returns y_BLHP in the dtype of x, and the state after the last token in fp32 (fp64 for fp64).

    Raises ValueError for an unknown ``impl`` or a bad ``chunk_size``, RuntimeError for an ``impl`` that cannot run.
    """
    sizes = x_BLHP.shape[-1], b_BLHN.shape[-1]
    chosen = choose(impl, "recurrence", x_BLHP, *sizes, gated=False, packed=seq_idx_BL is not None)
    if type(chunk_size) is not int or chunk_size < 1:
        raise ValueError(
            f"chunk_size is {chunk_size!r}; it counts tokens: pass a whole number of at least 1."
        )
    length = x_BLHP.shape[1]
    # Autocast would run fp32 matmuls in bf16.
    with torch.autocast(x_BLHP.device.type, enabled=False):
        if chosen == "triton" and length > 0:
            options = {"state_BHPN": state_BHPN, "seq_idx_BL": seq_idx_BL, "softplus": False}
            return KERNELS["ssd"](x_BLHP, log_a_BLH, b_BLHN, c_BLHN, **options)
        state = initial_state(state_BHPN, x_BLHP, b_BLHN.shape[-1])
        if length == 0:
            return x_BLHP, state
        if chosen == "mamba_ssm":
            return _scan_mamba_ssm(x_BLHP, log_a_BLH, b_BLHN, c_BLHN, state, seq_idx_BL)
        scan = _scan_reference if chosen == "reference" else _scan_chunked
        dtype = state.dtype
        x = x_BLHP.to(dtype)
        log_a = log_a_BLH.to(dtype)
        b = b_BLHN.to(dtype)
        c = c_BLHN.to(dtype)
        y, state = scan(x, log_a, b, c, state, seq_idx_BL, min(chunk_size, length))
    return y.to(x_BLHP.dtype), state


def gated_ssd_scan(
    x_BLHP: Tensor,
    raw_BLH: Tensor,
    b_BLHN: Tensor,
    c_BLHN: Tensor,
    D_H: Tensor,
    z_BLHP: Tensor,
    *,
    state_BHPN: Tensor | None = None,
    seq_idx_BL: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Compute ``(scan(x) + D x) silu(z)`` and the last state, in one kernel if available.

    Arguments and errors as in `ssd_scan`, but with the raw decay instead of log a.
    """
    sizes = x_BLHP.shape[-1], b_BLHN.shape[-1]
    chosen = choose(impl, "recurrence", x_BLHP, *sizes, gated=True, packed=seq_idx_BL is not None)
    options: dict[str, Any] = {"state_BHPN": state_BHPN, "seq_idx_BL": seq_idx_BL}
    if x_BLHP.shape[1] > 0 and chosen == "triton":
        with torch.autocast(x_BLHP.device.type, enabled=False):
            return KERNELS["ssd"](
                x_BLHP, raw_BLH, b_BLHN, c_BLHN, D_H=D_H, z_BLHP=z_BLHP, **options
            )
    log_a_BLH = log_decay(raw_BLH)
    y_BLHP, state = ssd_scan(x_BLHP, log_a_BLH, b_BLHN, c_BLHN, impl=impl, **options)
    return skip_and_gate(y_BLHP, x_BLHP, D_H, z_BLHP), state


def gated_ssd_step(
    x_BHP: Tensor,
    raw_BH: Tensor,
    b_BHN: Tensor,
    c_BHN: Tensor,
    D_H: Tensor,
    z_BHP: Tensor,
    state_BHPN: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute one token of `gated_ssd_scan`; return y_BHP and the new state."""
    y_BHP, state = ssd_step(x_BHP, log_decay(raw_BH), b_BHN, c_BHN, state_BHPN)
    return skip_and_gate(y_BHP, x_BHP, D_H, z_BHP), state


def step_in_place(
    xbc_BC: Tensor,
    raw_BH: Tensor,
    z_BHP: Tensor,
    conv_weight_CK: Tensor,
    D_H: Tensor,
    conv_state_BCK: Tensor,
    ssm_state_BHPN: Tensor,
    *,
    token_mask_B: Tensor | None = None,
    impl: str = "auto",
) -> Tensor | None:
    """Run one token of `causal_conv` and `gated_ssd_scan` in one kernel; update both states in place, return y_BHP.

    ``token_mask_B`` is 0 at padding, which leaves both states unchanged. Returns None, and does nothing, if gradients
    are enabled, ``impl`` has no such kernel, or the states or the convolution width do not fit it.
    """
    # In place, so not where autograd may still need the states as they are.
    if torch.is_grad_enabled():
        return None
    conv_width = conv_weight_CK.shape[1]
    if ssm_state_BHPN.dtype != torch.float32 or conv_width not in KERNEL_WIDTHS:
        return None
    if not (conv_state_BCK.is_contiguous() and ssm_state_BHPN.is_contiguous()):
        return None
    sizes = *ssm_state_BHPN.shape[2:], conv_width
    chosen = choose(impl, "decoding step", xbc_BC, *sizes, masked=token_mask_B is not None)
    if chosen != "triton":
        return None
    inputs = xbc_BC, raw_BH, z_BHP, conv_weight_CK, D_H
    return KERNELS["ssd_step"](*inputs, conv_state_BCK, ssm_state_BHPN, token_mask_B=token_mask_B)


def skip_and_gate(y: Tensor, x: Tensor, D_H: Tensor, z: Tensor) -> Tensor:
    """Return (y + D x) silu(z)."""
    skip_H1 = D_H.to(y.dtype).unsqueeze(-1)
    return torch.addcmul(y, x, skip_H1) * F.silu(z)


def ssd_step(
    x_BHP: Tensor, log_a_BH: Tensor, b_BHN: Tensor, c_BHN: Tensor, state_BHPN: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute one token; return y_BHP in the dtype of x, and a new state."""
    dtype = state_dtype(x_BHP, state_BHPN)
    decay_BH11 = log_a_BH.to(dtype).exp()[..., None, None]
    x_BHP1 = x_BHP.to(dtype).unsqueeze(-1)
    b_BH1N = b_BHN.to(dtype).unsqueeze(-2)
    c_BH1N = c_BHN.to(dtype).unsqueeze(-2)
    state = decay_BH11 * state_BHPN.to(dtype) + x_BHP1 * b_BH1N
    y_BHP = (state * c_BH1N).sum(-1)
    return y_BHP.to(x_BHP.dtype), state


def mixing_matrix(
    log_a_BLH: Tensor, b_BLHN: Tensor, c_BLHN: Tensor, seq_idx_BL: Tensor | None = None
) -> Tensor:
    """Return T_BHLS with T[i, j] = (C_i . B_j) prod_{j < s <= i} a_s for j <= i in one document, else 0.

    This is the counterpart of an attention map: quadratic in the length. In fp32 (fp64 for fp64 inputs).
    """
    with torch.autocast(b_BLHN.device.type, enabled=False):
        dtype = state_dtype(b_BLHN)
        log_a_BHL = log_a_BLH.to(dtype).transpose(1, 2)
        b_BHLN = b_BLHN.to(dtype).transpose(1, 2)
        c_BHLN = c_BLHN.to(dtype).transpose(1, 2)
        unseen_BLL = _unseen(seq_idx_BL, b_BLHN.shape[1], b_BLHN)
        scores_BHLS = c_BHLN @ b_BHLN.mT
        cum_BHL = _sums(log_a_BHL, unseen_BLL)
        return scores_BHLS * decay_matrix(cum_BHL, unseen_BLL.unsqueeze(1))


def causal_conv(
    x_BLC: Tensor,
    weight_CK: Tensor,
    *,
    state_BCK: Tensor | None = None,
    seq_idx_BL: Tensor | None = None,
    n_tokens_B: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Convolve channels causally, with identity activation: y_t = sum_k weight[:, k] x_{t - (K - 1) + k}.

    The last tap reads the current token. The state is the last K - 1 inputs, [B, C, K - 1] (default: zeros). With
    ``seq_idx_BL``, no tap reads another document. Returns y_BLC and the state after each row's last token: the last
    input, or input ``n_tokens_B`` - 1 if padding follows the tokens.
    """
    n_past = weight_CK.shape[1] - 1
    length = x_BLC.shape[1]
    if state_BCK is not None:
        state_BCK = state_BCK.to(x_BLC.dtype)
    chosen = "torch"
    if length > 0 and n_past + 1 in KERNEL_WIDTHS:
        chosen = choose(impl, "convolution", x_BLC, n_past + 1, packed=seq_idx_BL is not None)
    if chosen == "triton":
        conv = KERNELS["causal_conv"]
        y_BLC, last_BCK = conv(x_BLC, weight_CK, state_BCK=state_BCK, seq_idx_BL=seq_idx_BL)
    else:
        y_BLC, last_BCK = _conv_by_taps(x_BLC, weight_CK, state_BCK, seq_idx_BL)
    if n_tokens_B is not None:
        # Either way has returned the last inputs of a row, which here are padding.
        last_BCK = _last_tokens(x_BLC, state_BCK, n_tokens_B, n_past)
    return y_BLC, last_BCK


def _conv_by_taps(
    x_BLC: Tensor, weight_CK: Tensor, state_BCK: Tensor | None, seq_idx_BL: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute `causal_conv` as a sum over taps."""
    n_past = weight_CK.shape[1] - 1
    length = x_BLC.shape[1]
    if state_BCK is None:
        past_BKC = x_BLC.new_zeros(x_BLC.shape[0], n_past, x_BLC.shape[2])
    else:
        past_BKC = state_BCK.mT
    with_past_BLC = torch.cat([past_BKC, x_BLC], dim=1)
    y_BLC = x_BLC * weight_CK[:, -1]
    for back in range(1, n_past + 1):
        tap_BLC = with_past_BLC[:, n_past - back : n_past - back + length]
        if seq_idx_BL is not None:
            tap_BLC = tap_BLC * _same_document(seq_idx_BL, back).unsqueeze(-1)
        y_BLC = torch.addcmul(y_BLC, tap_BLC, weight_CK[:, -1 - back])
    return y_BLC, with_past_BLC[:, length:].mT


def _last_tokens(
    x_BLC: Tensor, state_BCK: Tensor | None, n_tokens_B: Tensor, n_past: int
) -> Tensor:
    """Return the last K - 1 inputs up to each row's last token, [B, C, K - 1]; some may come from the state."""
    back_K = torch.arange(-n_past, 0, device=x_BLC.device)
    place_BK1 = (n_tokens_B.unsqueeze(1) + back_K).unsqueeze(-1)
    # Negative places are in the state. Each source is read at all places, so they are clamped.
    new_BKC = x_BLC.gather(1, place_BK1.clamp_min(0).expand(-1, -1, x_BLC.shape[2]))
    if state_BCK is None:
        return new_BKC.masked_fill(place_BK1 < 0, 0.0).mT
    place_in_state_BK1 = (place_BK1 + n_past).clamp_max(n_past - 1)
    held_BKC = state_BCK.mT.gather(1, place_in_state_BK1.expand_as(new_BKC))
    return torch.where(place_BK1 < 0, held_BKC, new_BKC).mT


def _scan_mamba_ssm(
    x: Tensor, log_a: Tensor, b: Tensor, c: Tensor, state: Tensor, seq_idx: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Scan with mamba-ssm's kernels.

    They compute the continuous form: a step dt decays the state by exp(-dt) and scales the input. Here dt is -log a,
    and the input is divided by dt first.
    """
    combined = importlib.import_module("mamba_ssm.ops.triton.ssd_combined")
    dt_BLH = (-log_a.float()).clamp_min(SMALLEST_STEP)
    x_over_dt = x.float() / dt_BLH.unsqueeze(-1)
    minus_one_H = log_a.new_full((x.shape[2],), -1.0, dtype=torch.float32)
    y, state = combined.mamba_chunk_scan_combined(
        x_over_dt.to(x.dtype),
        dt_BLH,
        minus_one_H,
        b.contiguous(),
        c.contiguous(),
        chunk_size=MAMBA_CHUNK_SIZE,
        initial_states=state,
        seq_idx=None if seq_idx is None else seq_idx.int(),
        return_final_states=True,
    )
    return y, state


def state_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the dtype of states: fp64 if a tensor is, else fp32."""
    is_double = any(tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if is_double else torch.float32


def initial_state(state_BHPN: Tensor | None, x_BLHP: Tensor, d_state: int) -> Tensor:
    """Return the state before the first token, zeros by default, in the dtype of states."""
    dtype = state_dtype(x_BLHP)
    if state_BHPN is not None:
        return state_BHPN.to(dtype)
    batch, _, n_heads, head_dim = x_BLHP.shape
    return x_BLHP.new_zeros(batch, n_heads, head_dim, d_state, dtype=dtype)


def _same_document(seq_idx_BL: Tensor, back: int) -> Tensor:
    """Mark tokens whose predecessor ``back`` tokens earlier is in the same document; the past is the first document."""
    length = seq_idx_BL.shape[1]
    past_BK = seq_idx_BL[:, :1].expand(-1, back)
    earlier_BL = torch.cat([past_BK, seq_idx_BL], dim=1)[:, :length]
    return earlier_BL == seq_idx_BL


def _unseen(seq_idx: Tensor | None, length: int, like: Tensor) -> Tensor:
    """Return a mask [.., L, L]: -inf where token i does not see token j (later, or in another document), else 0."""
    is_later = torch.ones(length, length, dtype=torch.bool, device=like.device).triu(1)
    if seq_idx is None:
        is_unseen = is_later.unsqueeze(0)
    else:
        is_unseen = is_later | (seq_idx.unsqueeze(-1) != seq_idx.unsqueeze(-2))
    unseen = torch.zeros(is_unseen.shape, dtype=state_dtype(like), device=like.device)
    return unseen.masked_fill_(is_unseen, -math.inf)


def _sums(log_a: Tensor, unseen: Tensor) -> Tensor:
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


def _scan_reference(
    x: Tensor,
    log_a: Tensor,
    b: Tensor,
    c: Tensor,
    state: Tensor,
    seq_idx: Tensor | None,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence of the module docstring token by token."""
    ys = []
    for t in range(x.shape[1]):
        if seq_idx is not None and t > 0:
            continues_B = seq_idx[:, t] == seq_idx[:, t - 1]
            state = state * continues_B[:, None, None, None]
        y, state = ssd_step(x[:, t], log_a[:, t], b[:, t], c[:, t], state)
        ys.append(y)
    return torch.stack(ys, dim=1), state


def _scan_chunked(
    x: Tensor,
    log_a: Tensor,
    b: Tensor,
    c: Tensor,
    state: Tensor,
    seq_idx: Tensor | None,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """Scan with matrix products: a mixing matrix within each chunk, states between chunks.

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
    unseen = _unseen(seq_BMQ, chunk_size, log_a_BLH)
    cum_BHMQ = _sums(log_a_BHMQ.transpose(1, 2), unseen).transpose(1, 2)
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

    ``bt`` and ``ct`` are B and C with the tokens last, [B, H, M, N, Q].

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
        unseen = _unseen(segments, states.shape[2], states)
        cum = _sums(log_decays, unseen)
        decay = decay_matrix(cum, unseen.unsqueeze(1))
        states = (decay @ states.flatten(-2)).view_as(states)
        before.append(states[:, :, :-1])
        state_BHNP = states[:, :, -1]
    return torch.cat(before, dim=2), state_BHNP
