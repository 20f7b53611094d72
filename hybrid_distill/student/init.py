"""Initialize recurrent heads from the teacher's weights or at random. benchmarks/init.py compares the inits.

A good initialization approximates the attention head before the first training step. It models softmax attention as a
decaying average of the values, plus a term for the content that the head looks for,

    softmax(s)_ij  ~  (average + content s_ij) (1 - a) a^(i - j)  +  skip [i = j]

with s_ij = q_i . k_j / sqrt(P), computed from the best factors of W_q^T W_k. One state dimension is a constant feature,
for the average; the factor 1 - a turns the state's sum over the past into an average. Convolution taps imitate heads
that look back one, two or three tokens. Without calibration data, the coefficients are guesses; with it, they are
fitted to each head by least squares, in closed form.

Shapes: B batch, L length, R recurrent heads, P head dim, N state size, D model width, K conv width, F factors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from ..model import HybridConfig
from ..model.gated_delta import delta_scan, unit_keys
from ..model.layout import HEAD_NORMS, Part, head_norm, is_over_all_heads
from ..model.mixer import OPEN_GATE, spread_half_lives
from ..model.ssd import causal_conv, raw_decay, ssd_scan
from ..teacher import AttentionSite

Started = dict[str, tuple[Tensor, tuple[str, ...]]]
"""Tensors of `SSMHeads` by name, each with the names of the attention tensors that it was made from."""

NOISE = 0.02  # standard deviation of B where C is 0: if both were 0, neither would get a gradient
FLOOR = 0.05  # smallest coefficient of the average, for the same reason
HALF_LIVES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)  # candidates of the fit, in tokens
RIDGE = 1e-4  # relative; features of the fit may be nearly collinear


Init = Literal["fitted", "teacher", "random"]
INITS: tuple[Init, ...] = get_args(Init)
DEFAULT_INIT: Init = "teacher"  # the best init without calibration text
CONTENT = 0.1  # content coefficient without a fit, in standard deviations over white inputs
WRITE = 0.5  # write gate of the delta rule: closest to the teacher among 0.5, 0.95 and 1 - a (docs/method.md)
HALF_LIVES_OF_LAYER = (2.0, 64.0)  # range without a fit, in tokens, log-spaced over the heads of a layer


@dataclass(frozen=True)
class LayerTrace:
    """Attention inputs and head outputs of one layer on calibration data."""

    hidden_BLD: Tensor
    heads_BLHP: Tensor
    seq_idx_BL: Tensor | None


class _Coefficients(NamedTuple):
    """Coefficients of the module docstring, one per head, and the convolution taps of the values."""

    half_life_R: Tensor
    average_R: Tensor
    content_R: Tensor
    skip_R: Tensor
    taps_RK: Tensor


class _Factors(NamedTuple):
    """Factors of each head's scores C u_i . B u_j, F rows per head, with about unit standard deviation."""

    b_weight_RFD: Tensor
    b_bias_RF: Tensor
    c_weight_RFD: Tensor
    c_bias_RF: Tensor


def init_ssm(
    init: Init,
    site: AttentionSite,
    heads: tuple[int, ...],
    config: HybridConfig,
    generator: torch.Generator,
    trace: LayerTrace | None = None,
) -> Started:
    """Make the tensors of the `SSMHeads` that replace ``heads``, in fp32 on the teacher's device.

    ``fitted`` requires a ``trace``; the others take none.
    """
    open_D: Tensor | float = 0.0
    is_delta, key_R = config.recurrence == "gdn", None
    if init == "random":
        width = _projection(site, "value").in_features
        x_weight = _normal(generator, len(heads) * site.head_dim, width, like=_projection(site, "value").weight)
        b_weight, c_weight = (
            _normal(generator, len(heads), config.d_state, width, like=x_weight).flatten(0, 1) for _ in range(2)
        )
        x_bias, b_bias, c_bias = (x_weight.new_zeros(len(rows)) for rows in (x_weight, b_weight, c_weight))
        chosen = _guess(len(heads), config.conv_width, x_weight.device)._replace(skip_R=x_weight.new_ones(len(heads)))
    else:
        group_size = site.n_heads // site.n_kv_heads
        per_head = [_rows(site, "value", head // group_size) for head in heads]
        x_weight, x_bias = (torch.cat(column) for column in zip(*per_head))
        inputs = _input_moments(site, trace)
        open_D = OPEN_GATE * torch.cholesky_solve(inputs[0].unsqueeze(1), inputs[1])[:, 0]
        per_head = [_score_factors(site, head, config.d_state - 1, inputs, generator) for head in heads]
        factors = _Factors(*(torch.stack(column) for column in zip(*per_head)))
        key_R = (1 + (factors.b_weight_RFD @ inputs[2]).square().sum((1, 2))).sqrt() if is_delta else None
        if trace is None:
            chosen = _guess(len(heads), config.conv_width, x_weight.device, key_R)
        else:
            chosen = _fit(site, heads, x_weight, x_bias, factors, config.conv_width, trace, key_R)
        b_weight, b_bias, c_weight, c_bias = _projections(factors, chosen, is_delta)
    a_bias = raw_decay(chosen.half_life_R)
    if is_delta:
        a_bias = torch.stack([a_bias, torch.full_like(a_bias, WRITE).logit()], dim=1).flatten()
    if config.recurrence.startswith("mamba2"):
        step_C = nn.functional.softplus(a_bias).repeat_interleave(config.d_state)
        x_weight, x_bias = _before_silu(x_weight, x_bias)
        b_weight, b_bias = _before_silu(b_weight / step_C.unsqueeze(1), b_bias / step_C)
        c_weight, c_bias = _before_silu(c_weight, c_bias)
    conv = torch.zeros(2 * b_bias.numel() + x_bias.numel(), config.conv_width, device=x_weight.device)
    conv[:, -1] = 1.0
    conv[: x_bias.numel()] = chosen.taps_RK.repeat_interleave(site.head_dim, dim=0)
    assert site.layout is not None
    layout, norms = site.layout, (*HEAD_NORMS["query"], *HEAD_NORMS["key"])
    from_v = _names(site, layout.value) if init != "random" else ()
    from_qk = _names(site, layout.query, layout.key, *norms) if init != "random" else ()
    gate = {"z_proj.weight": torch.zeros_like(x_weight), "z_proj.bias": torch.full_like(x_bias, OPEN_GATE)}
    if config.recurrence == "mamba2-stock":  # open at the mean input, if calibration data provides it
        gate = {"z_proj.weight": open_D + _normal(generator, *x_weight.shape, like=x_weight)}
    biases = {"x_proj.bias": (x_bias, from_v), "b_proj.bias": (b_bias, from_qk), "c_proj.bias": (c_bias, from_qk)}
    if config.recurrence.startswith("mamba2"):  # the convolution adds them
        biases = {"conv_bias": (torch.cat([x_bias, b_bias, c_bias]), (*from_v, *from_qk))}
    return {
        "x_proj.weight": (x_weight, from_v),
        "b_proj.weight": (b_weight, from_qk),
        "c_proj.weight": (c_weight, from_qk),
        **biases,
        **{name: (tensor, ()) for name, tensor in gate.items()},
        "a_proj.weight": (x_weight.new_zeros(len(a_bias), x_weight.shape[1]), ()),
        "a_proj.bias": (a_bias, ()),
        "conv_weight": (conv, ()),
        "D": (chosen.skip_R, ()),
    }


def _guess(n_heads: int, conv_width: int, device: torch.device, key_R: Tensor | None = None) -> _Coefficients:
    """Return coefficients without a fit: half-lives are log-spaced over the heads, the content part is CONTENT."""
    taps = torch.zeros(n_heads, conv_width, device=device)
    taps[:, -1] = 1.0
    scale_R = torch.ones(n_heads, device=device)
    half_life_R = spread_half_lives(n_heads, *HALF_LIVES_OF_LAYER).to(device)
    if key_R is not None:  # delta rule: makes the read an average, for keys that share one direction
        scale_R = (1.0 - 0.5 ** (1.0 / half_life_R) * (1.0 - WRITE / key_R**2)) * key_R / WRITE
    return _Coefficients(half_life_R, scale_R, CONTENT * scale_R, torch.zeros_like(scale_R), taps)


def _projections(factors: _Factors, chosen: _Coefficients, is_delta: bool) -> tuple[Tensor, ...]:
    """Return weights and biases of b_proj and c_proj.

    B and C share each scale evenly; C takes the sign. The delta rule normalizes B, so C takes the full scale.
    """
    if is_delta:
        of_c = chosen.content_R, chosen.average_R
        of_b = torch.ones_like(chosen.content_R), torch.ones_like(chosen.content_R)
    else:
        new_R = 1.0 - 0.5 ** (1.0 / chosen.half_life_R)
        average_R = chosen.average_R.sign() * chosen.average_R.abs().clamp_min(FLOOR) * new_R
        scales = chosen.content_R * new_R, average_R
        of_b = tuple(scale_R.abs().sqrt() for scale_R in scales)
        of_c = tuple(scale_R.sign() * scale_R.abs().sqrt() for scale_R in scales)

    def scaled(weight_RFD: Tensor, bias_RF: Tensor, scale_R: Tensor, constant_R: Tensor) -> tuple[Tensor, Tensor]:
        weight_RND = nn.functional.pad(weight_RFD * scale_R[:, None, None], (0, 0, 1, 0))
        bias_RN = torch.cat([constant_R[:, None], bias_RF * scale_R[:, None]], dim=1)
        return weight_RND.flatten(0, 1), bias_RN.flatten()

    return *scaled(factors.b_weight_RFD, factors.b_bias_RF, *of_b), *scaled(
        factors.c_weight_RFD, factors.c_bias_RF, *of_c
    )


def _before_silu(weight_CD: Tensor, bias_C: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows whose SiLU approximates the given rows.

    Rows that depend on the input are doubled, because SiLU has slope 1/2 at 0; for positive constants, SiLU is inverted
    numerically.
    """
    inverse_C = bias_C.clone()
    for _ in range(20):  # y = silu(v) as v = y / sigmoid(v), for y > 0
        inverse_C = bias_C / inverse_C.sigmoid()
    is_constant_C = (weight_CD == 0).all(dim=1) & (bias_C > 0)
    return 2 * weight_CD, torch.where(is_constant_C, inverse_C, 2 * bias_C)


def _names(site: AttentionSite, *modules: str) -> tuple[str, ...]:
    return tuple(name for name in site.module.state_dict() if name.partition(".")[0] in modules)


def _projection(site: AttentionSite, part: Part) -> nn.Linear:
    return site.linear(getattr(site.layout, part))


def _rows(site: AttentionSite, part: Part, head: int) -> tuple[Tensor, Tensor]:
    """Return one head's weight [P, D] and bias [P] (zeros if absent) of a projection, in fp32."""
    assert site.layout is not None
    projection, head_dim = _projection(site, part), site.head_dim
    block = site.layout.block(part, head, site.n_heads, site.n_kv_heads)
    rows = slice(block * head_dim, (block + 1) * head_dim)
    weight = projection.weight[rows].float()
    return weight, weight.new_zeros(head_dim) if projection.bias is None else projection.bias[rows].float()


def _normal(generator: torch.Generator, *shape: int, like: Tensor) -> Tensor:
    """Draw small noise on the CPU, for the same values on every device."""
    return torch.randn(*shape, generator=generator).to(like.device) * NOISE


def _input_moments(site: AttentionSite, trace: LayerTrace | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean [D] of the layer's inputs, and square roots [D, D] of their second moment and covariance.

    Without data, assume white noise whose standard deviation per channel is the gain of the layer's input norm.
    """
    if trace is None:
        weight, gains_D = _projection(site, "query").weight, _gains(getattr(site.block, "input_layernorm", None))
        gains_D = torch.ones_like(weight[0]).float() if gains_D is None else gains_D.abs().clamp_min(1e-3)
        return torch.zeros_like(gains_D), torch.diag(gains_D), torch.diag(gains_D)
    hidden = trace.hidden_BLD.flatten(0, 1).double()
    mean_D = hidden.mean(0)
    moment_DD = hidden.mT @ hidden / len(hidden)
    roots = []
    for matrix_DD in (moment_DD, moment_DD - torch.outer(mean_D, mean_D)):
        jitter = RIDGE * matrix_DD.diagonal().mean() + 1e-12
        roots.append(torch.linalg.cholesky(matrix_DD + jitter * torch.eye(len(mean_D), device=hidden.device)))
    return mean_D.float(), roots[0].float(), roots[1].float()


def _score_factors(
    site: AttentionSite,
    head: int,
    n_factors: int,
    inputs: tuple[Tensor, Tensor, Tensor],
    generator: torch.Generator,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return B and C such that C u_i . B u_j best approximates the head's score with F products, without positions.

    Minimizes the mean squared error over the layer's inputs. Keys are relative to their mean, which softmax ignores.
    Beyond the rank of the scores, B is small noise and C is zero.
    """
    mean_D, root_q_DD, root_k_DD = inputs
    group = head // (site.n_heads // site.n_kv_heads)
    wq_PD, bq_P = _head_projection(site, "query", head, root_q_DD)
    wk_PD, _ = _head_projection(site, "key", group, root_k_DD)
    # Thin QRs of both sides reduce the SVD from D x D to P x P.
    rq_PP, rk_PP = (torch.linalg.qr((w @ root).T).R for w, root in ((wq_PD, root_q_DD), (wk_PD, root_k_DD)))
    u_PP, s_P, vh_PP = torch.linalg.svd(rq_PP @ rk_PP.T)
    rank = min(n_factors, len(s_P))
    s_P = s_P / s_P.norm().clamp_min(1e-6)
    root_F1 = s_P[:rank, None].sqrt()
    to_c_FP = root_F1 * (u_PP[:, :rank].T @ torch.linalg.pinv(rq_PP).T)
    to_b_FP = root_F1 * (vh_PP[:rank] @ torch.linalg.pinv(rk_PP).T)
    missing = (0, 0, 0, n_factors - rank)
    b_weight, c_weight = (nn.functional.pad(w, missing) for w in (to_b_FP @ wk_PD, to_c_FP @ wq_PD))
    b_bias, c_bias = (nn.functional.pad(b, missing[2:]) for b in (-to_b_FP @ (wk_PD @ mean_D), to_c_FP @ bq_P))
    b_weight[rank:] = _normal(generator, n_factors - rank, b_weight.shape[1], like=b_weight)
    return b_weight, b_bias, c_weight, c_bias


def _head_projection(site: AttentionSite, part: Part, head: int, root_DD: Tensor) -> tuple[Tensor, Tensor]:
    """Return one head's query or key projection, with the typical effect of the norm after it folded in."""
    weight_PD, bias_P = _rows(site, part, head)
    norm = head_norm(site.module, part)
    if norm is None:
        return weight_PD, bias_P
    normed_CD, normed_bias_C, places = weight_PD, bias_P, slice(None)
    if is_over_all_heads(norm, site.head_dim):
        n_heads = site.n_heads if part == "query" else site.n_kv_heads
        rows = [_rows(site, part, other) for other in range(n_heads)]
        normed_CD, normed_bias_C = (torch.cat(column) for column in zip(*rows, strict=True))
        places = slice(head * site.head_dim, (head + 1) * site.head_dim)
    usual_rms = ((normed_CD @ root_DD).square().sum() / len(normed_CD) + normed_bias_C.square().mean()).sqrt()
    gain = 1 / usual_rms.clamp_min(1e-6)
    if (gains_C := _gains(norm)) is not None:
        gain = gain * gains_C[places, None]
    return weight_PD * gain, bias_P * gain.flatten()


def _gains(norm: nn.Module | None) -> Tensor | None:
    """Return a norm's gains: its weight or, in families such as Gemma, 1 + weight, whichever its outputs match."""
    if norm is None or (weight := getattr(norm, "weight", None)) is None:
        return None
    signs_C = torch.ones_like(weight)
    signs_C[1::2] = -1
    seen_C = (signs_C * (norm(signs_C) - norm(-signs_C)) / 2).float()
    return min(weight.float(), 1 + weight.float(), key=lambda gains_C: (gains_C - seen_C).abs().sum().item())


class _Best:
    """Best coefficients so far for every head, by squared error."""

    def __init__(self, found_RG: Tensor) -> None:
        self.found_RG = found_RG
        self.error_R = torch.full_like(found_RG[:, 0], math.inf, dtype=torch.float64)

    def offer(self, found_RG: Tensor, error_R: Tensor) -> None:
        better_R = error_R < self.error_R
        self.found_RG = torch.where(better_R[:, None], found_RG, self.found_RG)
        self.error_R = torch.where(better_R, error_R, self.error_R)


def _fit(
    site: AttentionSite,
    heads: tuple[int, ...],
    x_weight: Tensor,
    x_bias: Tensor,
    factors: _Factors,
    conv_width: int,
    trace: LayerTrace,
    key_R: Tensor | None = None,
) -> _Coefficients:
    """Fit coefficients to the heads' outputs, per head; try its values both unchanged and convolved."""
    hidden, seq_idx = trace.hidden_BLD.float(), trace.seq_idx_BL
    target_BLRP = trace.heads_BLHP[:, :, list(heads)].float()
    values_BLRP = (hidden @ x_weight.T + x_bias).unflatten(-1, (len(heads), -1))
    b_BLRF = torch.einsum("bld,rfd->blrf", hidden, factors.b_weight_RFD) + factors.b_bias_RF
    c_BLRF = torch.einsum("bld,rfd->blrf", hidden, factors.c_weight_RFD) + factors.c_bias_RF
    identity_RK = torch.zeros(len(heads), conv_width, device=hidden.device)
    identity_RK[:, -1] = 1.0

    best = _Best(hidden.new_zeros(len(heads), 4 + conv_width))
    for taps_RK in (identity_RK, _fit_taps(values_BLRP, target_BLRP, identity_RK, seq_idx)):
        x = _convolved(values_BLRP, taps_RK, seq_idx)
        for half_life in HALF_LIVES:
            if key_R is not None:
                past = _delta_averages(x, half_life, seq_idx, b_BLRF, c_BLRF)
            else:
                past = [_average(x, half_life, seq_idx, *bc) for bc in ((), (b_BLRF, c_BLRF))]
            features = torch.stack([*past, x])
            weights_R3, error_R = _least_squares(features, target_BLRP)
            half_life_R1 = torch.full_like(weights_R3[:, :1], half_life)
            best.offer(torch.cat([half_life_R1, weights_R3, taps_RK], dim=1), error_R)
    half_life_R, average_R, content_R, skip_R = best.found_RG[:, :4].unbind(1)
    return _Coefficients(half_life_R, average_R, content_R, skip_R, best.found_RG[:, 4:])


def _convolved(values_BLRP: Tensor, taps_RK: Tensor, seq_idx_BL: Tensor | None) -> Tensor:
    weight_CK = taps_RK.repeat_interleave(values_BLRP.shape[-1], dim=0)
    return causal_conv(values_BLRP.flatten(-2), weight_CK, seq_idx_BL=seq_idx_BL)[0].view_as(values_BLRP)


def _average(x_BLRP: Tensor, half_life: float, seq_idx_BL: Tensor | None, *bc_BLRF: Tensor) -> Tensor:
    """Return the decaying average of x, weighted by C_i . B_j if B and C are given."""
    a = 0.5 ** (1.0 / half_life)
    b, c = bc_BLRF if bc_BLRF else (torch.ones_like(x_BLRP[..., :1]),) * 2
    log_a_BLR = torch.full(x_BLRP.shape[:3], math.log(a), device=x_BLRP.device)
    return ssd_scan(x_BLRP, log_a_BLR, b * (1.0 - a), c, seq_idx_BL=seq_idx_BL)[0]


def _delta_averages(
    x_BLRP: Tensor, half_life: float, seq_idx_BL: Tensor | None, b_BLRF: Tensor, c_BLRF: Tensor
) -> list[Tensor]:
    """Read the delta rule's states twice: along the direction that all keys share, and with C."""
    log_a_BLR, write_BLR = (x_BLRP.new_full(x_BLRP.shape[:3], value) for value in (-math.log(2.0) / half_life, WRITE))
    k_BLRN = unit_keys(nn.functional.pad(b_BLRF, (1, 0), value=1.0))
    reads = nn.functional.pad(0 * c_BLRF, (1, 0), value=1.0), nn.functional.pad(c_BLRF, (1, 0))
    return [delta_scan(x_BLRP, log_a_BLR, write_BLR, k_BLRN, c, seq_idx_BL=seq_idx_BL)[0] for c in reads]


def _least_squares(features_GBLRP: Tensor, target_BLRP: Tensor) -> tuple[Tensor, Tensor]:
    """Fit feature weights [R, G] to the target by least squares, per head; return them and the squared error [R]."""
    features = features_GBLRP.movedim(3, 0).flatten(2)  # [R, G, B * L * P]
    target = target_BLRP.movedim(2, 0).reshape(len(features), -1, 1)
    gram = (features @ features.mT).double()
    moment = (features @ target).double()
    jitter = RIDGE * gram.diagonal(dim1=-2, dim2=-1) + 1e-12
    weights = torch.linalg.solve(gram + torch.diag_embed(jitter), moment)
    explained = (weights.mT @ (2 * moment - gram @ weights)).flatten()
    return weights.squeeze(-1).float(), target.double().square().sum((-2, -1)) - explained


def _fit_taps(values_BLRP: Tensor, target_BLRP: Tensor, identity_RK: Tensor, seq_idx_BL: Tensor | None) -> Tensor:
    """Fit convolution taps, jointly with a decaying average, to the target by least squares; they sum to 1."""
    width = identity_RK.shape[1]
    taps = [identity_RK.roll(-back, 1) for back in reversed(range(width))]
    looking_back = [_convolved(values_BLRP, taps_RK, seq_idx_BL) for taps_RK in taps]
    best = _Best(identity_RK)
    for half_life in HALF_LIVES:
        average = _average(values_BLRP, half_life, seq_idx_BL)
        weights_RG, error_R = _least_squares(torch.stack([*looking_back, average]), target_BLRP)
        taps_RK = weights_RG[:, :width]
        total_R1 = taps_RK.sum(1, keepdim=True)
        # Taps that cancel each other would erase the average.
        cancels_R = total_R1.squeeze(1).abs() < 0.3 * taps_RK.abs().sum(1)
        best.offer(taps_RK / total_R1, error_R.masked_fill(cancels_R, math.inf))
    return best.found_RG
