"""Factorize a teacher head's scores into the products that B and C of a recurrent head can hold.

Shapes: B batch, L length, P head dim, D model width, F factors, C channels of a norm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..model.layout import Part, head_norm, is_over_all_heads
from ..teacher import HeadSite

NOISE = 0.02
"""Standard deviation of B where C is 0: if both were 0, neither would get a gradient."""
RIDGE = 1e-4
"""Relative ridge: inputs of a layer and features of the fit may be nearly collinear."""


@dataclass(frozen=True)
class LayerTrace:
    """Attention inputs and head outputs of one layer on calibration data."""

    hidden_BLD: Tensor
    heads_BLHP: Tensor
    seq_idx_BL: Tensor | None


class InputMoments(NamedTuple):
    """Mean of a layer's inputs, and square roots of their second moment and of their covariance."""

    mean_D: Tensor
    root_moment_DD: Tensor
    root_covariance_DD: Tensor


class Factors(NamedTuple):
    """Factors of scores C u_i . B u_j, F rows per head, with about unit standard deviation.

    Weights are [F, D] and biases [F] for one head; [R, F, D] and [R, F] stacked over the heads of a layer.
    """

    b_weight: Tensor
    b_bias: Tensor
    c_weight: Tensor
    c_bias: Tensor


def small_noise(generator: torch.Generator, *shape: int, like: Tensor) -> Tensor:
    """Draw small noise on the CPU, for the same values on every device."""
    unit_noise = torch.randn(*shape, generator=generator, device="cpu")
    return unit_noise.to(like.device) * NOISE


def projection_of(site: HeadSite, part: Part) -> nn.Linear:
    """Return the projection of the site's attention that computes ``part``."""
    return site.linear(getattr(site.layout, part))


def head_rows(site: HeadSite, part: Part, head: int) -> tuple[Tensor, Tensor]:
    """Return one head's weight [P, D] and bias [P] (zeros if absent) of a projection, in fp32."""
    assert site.layout is not None
    projection = projection_of(site, part)
    block = site.layout.block(part, head, site.n_heads, site.n_kv_heads)
    begin = block * site.head_dim
    rows = slice(begin, begin + site.head_dim)
    weight_PD = projection.weight[rows].float()
    if projection.bias is None:
        return weight_PD, weight_PD.new_zeros(site.head_dim)
    return weight_PD, projection.bias[rows].float()


def input_moments(site: HeadSite, trace: LayerTrace | None) -> InputMoments:
    """Estimate the moments of the layer's inputs from the trace; without one, from the layer's input norm."""
    if trace is None:
        return _white_moments(site)
    hidden_TD = trace.hidden_BLD.flatten(0, 1).float()
    mean_D = hidden_TD.mean(0)
    # Centered first: as the difference of two moments, the covariance would be lost in rounding.
    centered_TD = hidden_TD - mean_D
    covariance_DD = (centered_TD.mT @ centered_TD).double() / len(hidden_TD)
    moment_DD = covariance_DD + torch.outer(mean_D, mean_D).double()
    return InputMoments(mean_D, _root(moment_DD), _root(covariance_DD))


def _white_moments(site: HeadSite) -> InputMoments:
    """Assume white noise whose standard deviation per channel is the gain of the layer's input norm."""
    gains_D = norm_gains(getattr(site.block, "input_layernorm", None))
    if gains_D is None:
        channel_D = projection_of(site, "query").weight[0]
        gains_D = torch.ones_like(channel_D).float()
    else:
        # A channel with gain 0 would make the roots singular.
        gains_D = gains_D.abs().clamp_min(1e-3)
    root_DD = torch.diag(gains_D)
    return InputMoments(torch.zeros_like(gains_D), root_DD, root_DD)


def _root(matrix_DD: Tensor) -> Tensor:
    """Return the Cholesky factor of a matrix in fp64, in fp32."""
    # Fewer tokens than channels leave the matrix singular, which Cholesky refuses.
    jitter = RIDGE * matrix_DD.diagonal().mean() + 1e-12
    identity_DD = torch.eye(len(matrix_DD), device=matrix_DD.device)
    root_DD = torch.linalg.cholesky(matrix_DD + jitter * identity_DD)
    return root_DD.float()


class KeySide(NamedTuple):
    """Part of the scores that all heads of a KV group have in common."""

    weight_PD: Tensor
    r_PP: Tensor
    """R of the thin QR of the keys over the layer's inputs."""
    inverse_PP: Tensor
    """Pseudoinverse of R."""


def key_sides(site: HeadSite, heads: tuple[int, ...], inputs: InputMoments) -> dict[int, KeySide]:
    """Return the key side of the KV groups of ``heads``, by group."""
    group_size = site.n_heads // site.n_kv_heads
    groups = {head // group_size for head in heads}
    sides = {}
    for group in sorted(groups):
        # The covariance, not the moment: softmax ignores what all keys have in common.
        weight_PD, _ = _head_projection(site, "key", group, inputs.root_covariance_DD)
        keys_PD = weight_PD @ inputs.root_covariance_DD
        r_PP = torch.linalg.qr(keys_PD.T).R
        sides[group] = KeySide(weight_PD, r_PP, torch.linalg.pinv(r_PP))
    return sides


def score_factors(
    site: HeadSite,
    head: int,
    key: KeySide,
    n_factors: int,
    inputs: InputMoments,
    generator: torch.Generator,
) -> Factors:
    """Find B and C such that C u_i . B u_j best approximates the head's score, without positions.

    Minimizes the mean squared error over the layer's inputs with ``n_factors`` products; ``key`` is the side of the
    head's group (`key_sides`). Keys are relative to their mean, which softmax ignores. Beyond the rank of the scores,
    B is small noise and C is zero.
    """
    wq_PD, bq_P = _head_projection(site, "query", head, inputs.root_moment_DD)
    wk_PD = key.weight_PD
    # Thin QRs of both sides reduce the SVD from D x D to P x P.
    queries_PD = wq_PD @ inputs.root_moment_DD
    rq_PP = torch.linalg.qr(queries_PD.T).R
    u_PP, s_P, vh_PP = torch.linalg.svd(rq_PP @ key.r_PP.T)
    rank = min(n_factors, len(s_P))
    s_P = s_P / s_P.norm().clamp_min(1e-6)
    # B and C share each singular value evenly.
    root_F1 = s_P[:rank, None].sqrt()
    u_PF = u_PP[:, :rank]
    vh_FP = vh_PP[:rank]
    to_c_FP = root_F1 * (u_PF.T @ torch.linalg.pinv(rq_PP).T)
    to_b_FP = root_F1 * (vh_FP @ key.inverse_PP.T)
    mean_key_P = wk_PD @ inputs.mean_D

    n_missing = n_factors - rank
    b_weight_FD = nn.functional.pad(to_b_FP @ wk_PD, (0, 0, 0, n_missing))
    c_weight_FD = nn.functional.pad(to_c_FP @ wq_PD, (0, 0, 0, n_missing))
    b_bias_F = nn.functional.pad(-to_b_FP @ mean_key_P, (0, n_missing))
    c_bias_F = nn.functional.pad(to_c_FP @ bq_P, (0, n_missing))
    width = b_weight_FD.shape[1]
    b_weight_FD[rank:] = small_noise(generator, n_missing, width, like=b_weight_FD)
    return Factors(b_weight_FD, b_bias_F, c_weight_FD, c_bias_F)


def _head_projection(
    site: HeadSite, part: Part, head: int, root_DD: Tensor
) -> tuple[Tensor, Tensor]:
    """Return one head's query or key projection; the norm after it is folded in as a usual gain.

    A norm depends on the input, a projection cannot: the norm's factor for a typical input takes its place.
    """
    weight_PD, bias_P = head_rows(site, part, head)
    norm = head_norm(site.module, part)
    if norm is None:
        return weight_PD, bias_P
    normed_CD = weight_PD
    normed_bias_C = bias_P
    own_channels = slice(None)
    if is_over_all_heads(norm, site.head_dim):
        n_heads = site.n_heads if part == "query" else site.n_kv_heads
        rows = [head_rows(site, part, other) for other in range(n_heads)]
        normed_CD = torch.cat([weight for weight, _ in rows])
        normed_bias_C = torch.cat([bias for _, bias in rows])
        begin = head * site.head_dim
        own_channels = slice(begin, begin + site.head_dim)
    # With M = R R^T the second moment of u, the mean of |W u|^2 is the squared norm of W R.
    normed_root_CD = normed_CD @ root_DD
    mean_square = normed_root_CD.square().sum() / len(normed_CD)
    bias_square = normed_bias_C.square().mean()
    usual_rms = (mean_square + bias_square).sqrt()
    gain = 1 / usual_rms.clamp_min(1e-6)
    gains_C = norm_gains(norm)
    if gains_C is not None:
        gain = gain * gains_C[own_channels, None]
    return weight_PD * gain, bias_P * gain.flatten()


def norm_gains(norm: nn.Module | None) -> Tensor | None:
    """Return a norm's gains: its weight or, in families such as Gemma, 1 + weight."""
    weight = getattr(norm, "weight", None)
    if norm is None or weight is None:
        return None
    # No attribute says which of the two it is: compare with what the norm does to +1 and -1,
    # whose RMS is 1. The difference of both signs cancels a bias.
    signs_C = torch.ones_like(weight)
    signs_C[1::2] = -1
    without_bias_C = (norm(signs_C) - norm(-signs_C)) / 2
    applied_C = (signs_C * without_bias_C).float()
    weight_C = weight.float()
    error = (weight_C - applied_C).abs().sum()
    error_with_one = (1 + weight_C - applied_C).abs().sum()
    if error <= error_with_one:
        return weight_C
    return 1 + weight_C
