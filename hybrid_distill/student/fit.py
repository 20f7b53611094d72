"""Choose the coefficients of recurrent heads: guessed, or fitted to the teacher's heads.

Shapes: B batch, L length, R recurrent heads, P head dim, N state size, K conv width, F factors,
G features of a least-squares problem.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..model.gated_delta import delta_scan, unit_keys
from ..model.recurrent_heads import spread_half_lives
from ..model.ssd import causal_conv, ssd_scan
from .score_factors import RIDGE, Factors, LayerTrace

HALF_LIVES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)  # candidates, in tokens
HALF_LIVES_OF_LAYER = (2.0, 64.0)  # range without a fit, in tokens, log-spaced over a layer's heads
CONTENT = 0.1  # content coefficient without a fit, in standard deviations over white inputs
WRITE = 0.5  # write gate of the delta rule: closest to the teacher among 0.5, 0.95 and 1 - a (docs/method.md)


class Coefficients(NamedTuple):
    """Coefficients of the formula in `init`, one per head, and the convolution taps of the values."""

    half_life_R: Tensor
    average_R: Tensor
    content_R: Tensor
    skip_R: Tensor
    taps_RK: Tensor


def guess_coefficients(
    n_heads: int, conv_width: int, device: torch.device, key_norm_R: Tensor | None = None
) -> Coefficients:
    """Return coefficients without a fit: log-spaced half-lives, a content part of CONTENT.

    ``key_norm_R`` is the usual length of the keys before they are normalized; the delta rule
    alone has one.
    """
    scale_R = torch.ones(n_heads, device=device)
    half_life_R = spread_half_lives(n_heads, *HALF_LIVES_OF_LAYER).to(device)
    if key_norm_R is not None:
        # Makes the delta rule's read an average, for keys that share one direction.
        a_R = 0.5 ** (1.0 / half_life_R)
        scale_R = (1.0 - a_R * (1.0 - WRITE / key_norm_R**2)) * key_norm_R / WRITE
    return Coefficients(
        half_life_R=half_life_R,
        average_R=scale_R,
        content_R=CONTENT * scale_R,
        skip_R=torch.zeros_like(scale_R),
        taps_RK=_identity_taps(n_heads, conv_width, device),
    )


def fit_coefficients(
    heads: tuple[int, ...],
    x_weight: Tensor,
    x_bias: Tensor,
    factors: Factors,
    conv_width: int,
    trace: LayerTrace,
    is_delta: bool,
) -> Coefficients:
    """Fit coefficients to the heads' outputs, per head; try its values both unchanged and convolved.

    ``x_weight`` [R P, D] and ``x_bias`` [R P] compute the values of the recurrent heads.
    """
    hidden_BLD = trace.hidden_BLD.float()
    seq_idx_BL = trace.seq_idx_BL
    target_BLRP = trace.heads_BLHP[:, :, list(heads)].float()
    values_BLRP = (hidden_BLD @ x_weight.T + x_bias).unflatten(-1, (len(heads), -1))
    b_BLRF = torch.einsum("bld,rfd->blrf", hidden_BLD, factors.b_weight) + factors.b_bias
    c_BLRF = torch.einsum("bld,rfd->blrf", hidden_BLD, factors.c_weight) + factors.c_bias
    identity_RK = _identity_taps(len(heads), conv_width, hidden_BLD.device)
    fitted_RK = _fit_taps(values_BLRP, target_BLRP, identity_RK, seq_idx_BL)

    # Columns: half-life, average, content, skip, then the taps.
    best = _Best(hidden_BLD.new_zeros(len(heads), 4 + conv_width))
    for taps_RK in (identity_RK, fitted_RK):
        x_BLRP = _convolved(values_BLRP, taps_RK, seq_idx_BL)
        for half_life in HALF_LIVES:
            if is_delta:
                pasts = _delta_averages(x_BLRP, half_life, seq_idx_BL, b_BLRF, c_BLRF)
            else:
                average_BLRP = _average(x_BLRP, half_life, seq_idx_BL)
                content_BLRP = _content_average(x_BLRP, half_life, seq_idx_BL, b_BLRF, c_BLRF)
                pasts = (average_BLRP, content_BLRP)
            features = torch.stack([*pasts, x_BLRP])
            weights_R3, error_R = _least_squares(features, target_BLRP)
            half_life_R1 = torch.full_like(weights_R3[:, :1], half_life)
            best.offer(torch.cat([half_life_R1, weights_R3, taps_RK], dim=1), error_R)
    half_life_R, average_R, content_R, skip_R = best.values_RG[:, :4].unbind(1)
    return Coefficients(half_life_R, average_R, content_R, skip_R, best.values_RG[:, 4:])


class _Best:
    """Best values so far for every head, by squared error."""

    def __init__(self, values_RG: Tensor) -> None:
        self.values_RG = values_RG
        self.error_R = torch.full_like(values_RG[:, 0], math.inf, dtype=torch.float64)

    def offer(self, values_RG: Tensor, error_R: Tensor) -> None:
        is_better_R = error_R < self.error_R
        self.values_RG = torch.where(is_better_R[:, None], values_RG, self.values_RG)
        self.error_R = torch.where(is_better_R, error_R, self.error_R)


def _identity_taps(n_heads: int, conv_width: int, device: torch.device) -> Tensor:
    taps_RK = torch.zeros(n_heads, conv_width, device=device)
    taps_RK[:, -1] = 1.0
    return taps_RK


def _convolved(values_BLRP: Tensor, taps_RK: Tensor, seq_idx_BL: Tensor | None) -> Tensor:
    weight_CK = taps_RK.repeat_interleave(values_BLRP.shape[-1], dim=0)
    convolved_BLC, _ = causal_conv(values_BLRP.flatten(-2), weight_CK, seq_idx_BL=seq_idx_BL)
    return convolved_BLC.view_as(values_BLRP)


def _average(x_BLRP: Tensor, half_life: float, seq_idx_BL: Tensor | None) -> Tensor:
    """Return the decaying average of x."""
    ones_BLR1 = torch.ones_like(x_BLRP[..., :1])
    return _content_average(x_BLRP, half_life, seq_idx_BL, ones_BLR1, ones_BLR1)


def _content_average(
    x_BLRP: Tensor, half_life: float, seq_idx_BL: Tensor | None, b_BLRF: Tensor, c_BLRF: Tensor
) -> Tensor:
    """Return the decaying average of x, weighted by C_i . B_j."""
    a = 0.5 ** (1.0 / half_life)
    log_a_BLR = torch.full(x_BLRP.shape[:3], math.log(a), device=x_BLRP.device)
    return ssd_scan(x_BLRP, log_a_BLR, b_BLRF * (1.0 - a), c_BLRF, seq_idx_BL=seq_idx_BL)[0]


def _delta_averages(
    x_BLRP: Tensor, half_life: float, seq_idx_BL: Tensor | None, b_BLRF: Tensor, c_BLRF: Tensor
) -> tuple[Tensor, Tensor]:
    """Read the delta rule's states twice: along the direction that all keys share, and with C."""
    log_a_BLR = x_BLRP.new_full(x_BLRP.shape[:3], -math.log(2.0) / half_life)
    write_BLR = x_BLRP.new_full(x_BLRP.shape[:3], WRITE)
    k_BLRN = unit_keys(nn.functional.pad(b_BLRF, (1, 0), value=1.0))
    shared_BLRN = nn.functional.pad(0 * c_BLRF, (1, 0), value=1.0)
    content_BLRN = nn.functional.pad(c_BLRF, (1, 0))
    gates = (log_a_BLR, write_BLR)
    average_BLRP, _ = delta_scan(x_BLRP, *gates, k_BLRN, shared_BLRN, seq_idx_BL=seq_idx_BL)
    content_BLRP, _ = delta_scan(x_BLRP, *gates, k_BLRN, content_BLRN, seq_idx_BL=seq_idx_BL)
    return average_BLRP, content_BLRP


def _least_squares(features_GBLRP: Tensor, target_BLRP: Tensor) -> tuple[Tensor, Tensor]:
    """Fit feature weights [R, G] to the target, per head; return them and the squared error [R]."""
    features = features_GBLRP.movedim(3, 0).flatten(2)  # [R, G, B * L * P]
    target = target_BLRP.movedim(2, 0).reshape(len(features), -1, 1)
    gram = (features @ features.mT).double()
    moment = (features @ target).double()
    jitter = RIDGE * gram.diagonal(dim1=-2, dim2=-1) + 1e-12
    weights = torch.linalg.solve(gram + torch.diag_embed(jitter), moment)
    explained_R = (weights.mT @ (2 * moment - gram @ weights)).flatten()
    error_R = target.double().square().sum((-2, -1)) - explained_R
    return weights.squeeze(-1).float(), error_R


def _fit_taps(
    values_BLRP: Tensor, target_BLRP: Tensor, identity_RK: Tensor, seq_idx_BL: Tensor | None
) -> Tensor:
    """Fit convolution taps, jointly with a decaying average, by least squares; they sum to 1."""
    width = identity_RK.shape[1]
    delayed_values = []
    for delay in reversed(range(width)):
        taps_RK = identity_RK.roll(-delay, 1)
        delayed_values.append(_convolved(values_BLRP, taps_RK, seq_idx_BL))
    best = _Best(identity_RK)
    for half_life in HALF_LIVES:
        average_BLRP = _average(values_BLRP, half_life, seq_idx_BL)
        features = torch.stack([*delayed_values, average_BLRP])
        weights_RG, error_R = _least_squares(features, target_BLRP)
        taps_RK = weights_RG[:, :width]
        total_R1 = taps_RK.sum(1, keepdim=True)
        # Taps that cancel each other would erase the average.
        cancels_R = total_R1.squeeze(1).abs() < 0.3 * taps_RK.abs().sum(1)
        best.offer(taps_RK / total_R1, error_R.masked_fill(cancels_R, math.inf))
    return best.values_RG
