"""Choose the coefficients of recurrent heads: guessed, or fitted to the teacher's heads.

Shapes: B batch, L length, R recurrent heads, P head dim, N state size, K conv width, F factors,
G features of a least-squares problem, X packed coefficients of a head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..model.convolution import causal_conv
from ..model.gated_delta import delta_scan, unit_keys
from ..model.recurrent_heads import spread_half_lives
from ..model.ssd import ssd_scan
from .score_factors import RIDGE, Factors, LayerTrace

HALF_LIVES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)
"""Candidates of the fit, in tokens."""
HALF_LIVES_OF_LAYER = (2.0, 64.0)
"""Range without a fit, in tokens, log-spaced over a layer's heads."""
N_SCALARS = 4
"""Fitted numbers of a head before its taps: half-life, average, content and skip."""
SKIP = 2
"""Index of x among the features of the fit: average, content, x."""
CONTENT = 0.1
"""Content coefficient without a fit, in standard deviations over white inputs."""
PIECES = 64
"""Pieces of a row, at most, over which products are summed apart."""
CHUNK = 128
"""Tokens of an average that one matrix product computes."""
WRITE = 0.5
"""Write gate of the delta rule: closest to the teacher among 0.5, 0.95 and 1 - a (docs/method.md)."""


class Coefficients(NamedTuple):
    """Coefficients of the formula in `init`, one per head, and the convolution taps of the values."""

    half_life_R: Tensor
    average_R: Tensor
    content_R: Tensor
    skip_R: Tensor
    taps_RK: Tensor

    def packed(self) -> Tensor:
        """Join all fields, [R, N_SCALARS + K], so that a head's coefficients are replaced together."""
        scalars_R4 = torch.stack(self[:N_SCALARS], dim=1)
        return torch.cat([scalars_R4, self.taps_RK], dim=1)

    @classmethod
    def unpacked(cls, values_RX: Tensor) -> Coefficients:
        """Take apart what `packed` has joined."""
        half_life_R, average_R, content_R, skip_R = values_RX[:, :N_SCALARS].unbind(1)
        return cls(half_life_R, average_R, content_R, skip_R, values_RX[:, N_SCALARS:])


def guess_coefficients(
    n_heads: int, conv_width: int, device: torch.device, key_norm_R: Tensor | None = None
) -> Coefficients:
    """Return coefficients without a fit: log-spaced half-lives, a content part of CONTENT.

    ``key_norm_R`` is the usual length of the keys before they are normalized; only the delta rule normalizes them.
    """
    scale_R = torch.ones(n_heads, device=device)
    half_life_R = spread_half_lives(n_heads, *HALF_LIVES_OF_LAYER).to(device)
    if key_norm_R is not None:
        # Makes the delta rule's read an average, for keys that share one direction.
        a_R = 0.5 ** (1.0 / half_life_R)
        stays_R = a_R * (1.0 - WRITE / key_norm_R**2)
        scale_R = (1.0 - stays_R) * key_norm_R / WRITE
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
    """Fit coefficients to the heads' outputs: per head, the best of all half-lives, with and without a convolution.

    ``x_weight`` [R P, D] and ``x_bias`` [R P] compute the values of the recurrent heads.
    """
    n_heads = len(heads)
    hidden_BLD = trace.hidden_BLD.float()
    seq_idx_BL = trace.seq_idx_BL
    target_BLRP = trace.heads_BLHP[:, :, list(heads)].float()
    values_BLX = hidden_BLD @ x_weight.T + x_bias
    values_BLRP = values_BLX.unflatten(-1, (n_heads, -1))
    b_BLRF = torch.einsum("bld,rfd->blrf", hidden_BLD, factors.b_weight) + factors.b_bias
    c_BLRF = torch.einsum("bld,rfd->blrf", hidden_BLD, factors.c_weight) + factors.c_bias
    averages = [_average(values_BLRP, half_life, seq_idx_BL) for half_life in HALF_LIVES]
    identity_RK = _identity_taps(n_heads, conv_width, hidden_BLD.device)
    fitted_RK = _fit_taps(values_BLRP, target_BLRP, identity_RK, averages, seq_idx_BL)

    best = _Best(hidden_BLD.new_zeros(n_heads, N_SCALARS + conv_width))
    problem = _LeastSquares(target_BLRP, n_features=3)
    for taps_RK, is_convolved in ((identity_RK, False), (fitted_RK, True)):
        x_BLRP = values_BLRP
        if is_convolved:
            x_BLRP = _convolved(values_BLRP, taps_RK, seq_idx_BL)
        # Once for all half-lives: only the features before it change with them.
        problem.set_features(SKIP, x_BLRP)
        for half_life, average_BLRP in zip(HALF_LIVES, averages, strict=True):
            if is_delta:
                past = _delta_averages(x_BLRP, half_life, seq_idx_BL, b_BLRF, c_BLRF)
            else:
                average_of_x_BLRP = average_BLRP
                if is_convolved:
                    # Cheaper than averaging again, and the same: both are linear, within a document.
                    average_of_x_BLRP = _convolved(average_BLRP, taps_RK, seq_idx_BL)
                content_BLRP = _content_average(x_BLRP, half_life, seq_idx_BL, b_BLRF, c_BLRF)
                past = (average_of_x_BLRP, content_BLRP)
            problem.set_features(0, *past)
            weights_R3, error_R = problem.solve()
            average_R, content_R, skip_R = weights_R3.unbind(1)
            half_life_R = torch.full_like(skip_R, half_life)
            candidate = Coefficients(half_life_R, average_R, content_R, skip_R, taps_RK)
            best.offer(candidate.packed(), error_R)
    return Coefficients.unpacked(best.values_RX)


class _Best:
    """Best values so far for every head, by squared error."""

    def __init__(self, values_RX: Tensor) -> None:
        self.values_RX = values_RX
        # In float64, as products are summed: errors of candidates are close to one another.
        self.error_R = torch.full_like(values_RX[:, 0], math.inf, dtype=torch.float64)

    def offer(self, values_RX: Tensor, error_R: Tensor) -> None:
        """Take over the values of the heads whose error is smaller than any before."""
        is_better_R = error_R < self.error_R
        self.values_RX = torch.where(is_better_R[:, None], values_RX, self.values_RX)
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
    """Return the decaying average of x: y_i = a y_(i-1) + (1 - a) x_i, from zero in every document.

    All heads share the decay, so that a chunk of C tokens is one product with a matrix of its powers. Takes a third of
    the time of the scan, which is for heads with decays of their own.
    """
    a = 0.5 ** (1.0 / half_life)
    batch, length = x_BLRP.shape[:2]
    if seq_idx_BL is None:
        seq_idx_BL = torch.zeros(batch, length, dtype=torch.long, device=x_BLRP.device)
    place_C = torch.arange(min(CHUNK, length), device=x_BLRP.device)
    distance_CC = place_C.unsqueeze(1) - place_C
    # Clamped: a power of a negative distance could be infinite.
    weight_CC = a ** distance_CC.clamp_min(0) * (1.0 - a)
    weight_CC = torch.where(distance_CC >= 0, weight_CC, 0.0)
    x_BLX = x_BLRP.flatten(2)
    averages = []
    last_BX = None
    for begin in range(0, length, CHUNK):
        x_BCX = x_BLX[:, begin : begin + CHUNK]
        seq_idx_BC = seq_idx_BL[:, begin : begin + CHUNK]
        n = x_BCX.shape[1]
        is_same_BCC = seq_idx_BC.unsqueeze(2) == seq_idx_BC.unsqueeze(1)
        average_BCX = (weight_CC[:n, :n] * is_same_BCC) @ x_BCX
        if last_BX is not None:
            continues_BC = seq_idx_BC == seq_idx_BL[:, begin - 1, None]
            carry_BC = a ** (place_C[:n] + 1) * continues_BC
            average_BCX += carry_BC.unsqueeze(2) * last_BX.unsqueeze(1)
        averages.append(average_BCX)
        last_BX = average_BCX[:, -1]
    return torch.cat(averages, dim=1).view_as(x_BLRP)


def _content_average(
    x_BLRP: Tensor, half_life: float, seq_idx_BL: Tensor | None, b_BLRF: Tensor, c_BLRF: Tensor
) -> Tensor:
    """Return the decaying average of x, weighted by C_i . B_j."""
    a = 0.5 ** (1.0 / half_life)
    batch, length, n_heads, _ = x_BLRP.shape
    log_a_BLR = torch.full((batch, length, n_heads), math.log(a), device=x_BLRP.device)
    b_BLRF = b_BLRF * (1.0 - a)
    average_BLRP, _ = ssd_scan(x_BLRP, log_a_BLR, b_BLRF, c_BLRF, seq_idx_BL=seq_idx_BL)
    return average_BLRP


def _delta_averages(
    x_BLRP: Tensor, half_life: float, seq_idx_BL: Tensor | None, b_BLRF: Tensor, c_BLRF: Tensor
) -> tuple[Tensor, Tensor]:
    """Read the delta rule's states twice: along the direction that all keys share, and with C."""
    batch, length, n_heads, _ = x_BLRP.shape
    log_a = -math.log(2.0) / half_life
    log_a_BLR = x_BLRP.new_full((batch, length, n_heads), log_a)
    write_BLR = x_BLRP.new_full((batch, length, n_heads), WRITE)
    # The first state dimension is the shared direction: 1 in every key.
    b_BLRN = nn.functional.pad(b_BLRF, (1, 0), value=1.0)
    k_BLRN = unit_keys(b_BLRN)
    nothing_BLRF = torch.zeros_like(c_BLRF)
    shared_query_BLRN = nn.functional.pad(nothing_BLRF, (1, 0), value=1.0)
    content_query_BLRN = nn.functional.pad(c_BLRF, (1, 0))
    inputs = (x_BLRP, log_a_BLR, write_BLR, k_BLRN)
    average_BLRP, _ = delta_scan(*inputs, shared_query_BLRN, seq_idx_BL=seq_idx_BL)
    content_BLRP, _ = delta_scan(*inputs, content_query_BLRN, seq_idx_BL=seq_idx_BL)
    return average_BLRP, content_BLRP


class _LeastSquares:
    """Weights of features that fit a target, per head, where most features stay from one fit to the next.

    Keeps features and target beside one another, [R, pieces of the rows, G + 1, values of a piece], and their
    products, so that a fit costs no more than its new features. The target is the last column.
    """

    def __init__(self, target_BLRP: Tensor, n_features: int) -> None:
        batch, length, n_heads, width = target_BLRP.shape
        # Products are summed in double precision over short pieces: errors of candidates are close to one another.
        n_pieces = batch * math.gcd(length, PIECES)
        n_values = batch * length * width // n_pieces
        n_columns = n_features + 1
        self.columns = target_BLRP.new_zeros(n_heads, n_pieces, n_columns, n_values)
        self.products = target_BLRP.new_zeros(n_heads, n_columns, n_columns).double()
        self.set_features(n_features, target_BLRP)

    def set_features(self, first: int, *features_BLRP: Tensor) -> None:
        """Set consecutive features, from number ``first`` on."""
        end = first + len(features_BLRP)
        for place, feature_BLRP in enumerate(features_BLRP, start=first):
            column = self.columns[:, :, place]
            feature_RBLP = feature_BLRP.movedim(2, 0)
            column.copy_(feature_RBLP.reshape(column.shape))
        products_of_pieces = self.columns[:, :, first:end] @ self.columns.mT
        products = products_of_pieces.double().sum(1)
        self.products[:, first:end] = products
        self.products[:, :, first:end] = products.mT

    def solve(self) -> tuple[Tensor, Tensor]:
        """Return the weights [R, G] and the squared error [R]."""
        gram = self.products[:, :-1, :-1]
        moment = self.products[:, :-1, -1:]
        jitter = RIDGE * gram.diagonal(dim1=-2, dim2=-1) + 1e-12
        ridged_gram = gram + torch.diag_embed(jitter)
        weights = torch.linalg.solve(ridged_gram, moment)
        # Not w^T m alone: with the ridge, the weights do not solve G w = m.
        explained_R = (weights.mT @ (2 * moment - gram @ weights)).flatten()
        target_square_R = self.products[:, -1, -1]
        error_R = target_square_R - explained_R
        return weights.squeeze(-1).float(), error_R


def _fit_taps(
    values_BLRP: Tensor,
    target_BLRP: Tensor,
    identity_RK: Tensor,
    averages: Sequence[Tensor],
    seq_idx_BL: Tensor | None,
) -> Tensor:
    """Fit convolution taps, jointly with one of the decaying averages, by least squares; they sum to 1."""
    width = identity_RK.shape[1]
    problem = _LeastSquares(target_BLRP, n_features=width + 1)
    for place, delay in enumerate(reversed(range(width))):
        # One tap at a time: the values of ``delay`` tokens ago.
        tap_RK = identity_RK.roll(-delay, 1)
        delayed_BLRP = _convolved(values_BLRP, tap_RK, seq_idx_BL)
        problem.set_features(place, delayed_BLRP)
    best = _Best(identity_RK)
    for average_BLRP in averages:
        problem.set_features(width, average_BLRP)
        weights_RG, error_R = problem.solve()
        taps_RK = weights_RG[:, :width]
        total_R1 = taps_RK.sum(1, keepdim=True)
        size_R = taps_RK.abs().sum(1)
        # Taps that cancel each other would erase the average.
        cancels_R = total_R1.squeeze(1).abs() < 0.3 * size_R
        error_R = error_R.masked_fill(cancels_R, math.inf)
        best.offer(taps_RK / total_R1, error_R)
    return best.values_RX
