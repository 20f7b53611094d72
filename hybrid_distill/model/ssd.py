"""State-space duality (SSD): the math of recurrent heads.

Per head, with one scalar decay a_t in (0, 1) per token (discrete Mamba-2, arXiv 2405.21060 and
2502.14458):

    S_t = a_t S_{t-1} + x_t B_t^T          y_t = S_t C_t          S in R^{P x N}

As a matrix, y = T x with T[i, j] = (C_i . B_j) prod_{j < s <= i} a_s: the *mixing matrix*.

Shapes: B batch, L length, S source length, H head, P head dim, N state size, C channels, K conv width. States and
decays are in fp32 or fp64, independent of the inputs' dtype and autocast.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .chunked_scan import scan_chunked
from .decays import decay_matrix, log_decay, state_dtype, sum_over_seen, unseen_mask
from .kernel_choice import KERNEL_WIDTHS, KERNELS, choose_implementation

CHUNK_SIZE = 32
"""Tokens of a chunk. On a CPU, shorter chunks are too many calls and longer ones too many products."""
MAMBA_CHUNK_SIZE = 128
SMALLEST_STEP = 1e-20
"""Smallest step for mamba-ssm: exp(-1e-20) is 1, and dividing by it stays finite."""


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
    chosen = choose_implementation(
        impl, "recurrence", x_BLHP, *sizes, gated=False, packed=seq_idx_BL is not None
    )
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
        scan = _scan_reference if chosen == "reference" else scan_chunked
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
    chosen = choose_implementation(
        impl, "recurrence", x_BLHP, *sizes, gated=True, packed=seq_idx_BL is not None
    )
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
    chosen = choose_implementation(
        impl, "decoding step", xbc_BC, *sizes, masked=token_mask_B is not None
    )
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
        unseen_BLL = unseen_mask(seq_idx_BL, b_BLHN.shape[1], b_BLHN)
        scores_BHLS = c_BHLN @ b_BHLN.mT
        cum_BHL = sum_over_seen(log_a_BHL, unseen_BLL)
        return scores_BHLS * decay_matrix(cum_BHL, unseen_BLL.unsqueeze(1))


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


def initial_state(state_BHPN: Tensor | None, x_BLHP: Tensor, d_state: int) -> Tensor:
    """Return the state before the first token, zeros by default, in the dtype of states."""
    dtype = state_dtype(x_BLHP)
    if state_BHPN is not None:
        return state_BHPN.to(dtype)
    batch, _, n_heads, head_dim = x_BLHP.shape
    return x_BLHP.new_zeros(batch, n_heads, head_dim, d_state, dtype=dtype)


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
