"""Initialize recurrent heads from the teacher's weights or at random. benchmarks/init.py compares the inits.

A good initialization approximates the attention head before the first training step. It models softmax attention as a
decaying average of the values, plus a term for the content that the head looks for,

    softmax(s)_ij  ~  (average + content s_ij) (1 - a) a^(i - j)  +  skip [i = j]

with s_ij = q_i . k_j / sqrt(P), computed from the best factors of W_q^T W_k. The N state dimensions hold

    B_j = [ constant | F = N - 1 factors of k_j ]      C_i = [ constant | F factors of q_i ]
             average             content                        average         content

and the factor 1 - a turns the state's sum over the past into an average. Convolution taps imitate heads that look back
one, two or three tokens. Without calibration data, the coefficients are guesses; with it, they are fitted to each head
by least squares, in closed form.

Shapes: R recurrent heads, P head dim, N state size, D model width, K conv width, F factors, C = R N rows of B or C.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from ..model import HybridConfig
from ..model.decays import raw_decay
from ..model.layout import HEAD_NORMS
from ..model.recurrences import FORMS, Recurrence
from ..model.recurrent_heads import CLOSED_GATE, OPEN_GATE
from ..teacher import HeadSite
from .fit import WRITE, Coefficients, fit_coefficients, guess_coefficients
from .score_factors import (
    Factors,
    InputMoments,
    LayerTrace,
    head_rows,
    input_moments,
    key_sides,
    projection_of,
    score_factors,
    small_noise,
)

Names = tuple[str, ...]
SourcedTensors = dict[str, tuple[Tensor, Names]]
"""Tensors of `SSMHeads` by name, each with the names of the attention tensors that it was made from."""

FLOOR = 0.05  # smallest coefficient of the average: at 0, neither B nor C would get a gradient

Init = Literal["fitted", "teacher", "random"]
INITS: tuple[Init, ...] = get_args(Init)
DEFAULT_INIT: Init = "teacher"  # the best init without calibration text


class _Rows(NamedTuple):
    """Weight [rows, D] and bias [rows] of a projection."""

    weight: Tensor
    bias: Tensor


class _Start(NamedTuple):
    """Projections of x, B and C, and what the other tensors are made from."""

    x: _Rows
    b: _Rows
    c: _Rows
    coefficients: Coefficients
    open_gate_D: Tensor | float
    """Weight of every channel's output gate that opens it at the mean input, for a gate without a bias."""
    from_v: Names = ()
    """Names of the attention tensors that x was made from."""
    from_qk: Names = ()
    """Names of the attention tensors that B and C were made from."""


def init_ssm(
    init: Init,
    site: HeadSite,
    heads: tuple[int, ...],
    config: HybridConfig,
    generator: torch.Generator,
    trace: LayerTrace | None = None,
) -> SourcedTensors:
    """Make the tensors of the `SSMHeads` that replace ``heads``, in fp32 on the teacher's device.

    ``fitted`` requires a ``trace``; the others take none.
    """
    form = FORMS[config.recurrence]
    if init == "random":
        start = _random_start(site, len(heads), config, generator)
    else:
        start = _teacher_start(site, heads, config, generator, trace)
    a_bias = _rate_biases(form, start.coefficients.half_life_R)
    if form.has_silu:
        start = _start_before_silu(start, a_bias, config.d_state)
    # The decay does not depend on the input at first.
    width = start.x.weight.shape[1]
    a_weight = start.x.weight.new_zeros(len(a_bias), width)
    return {
        **_projections_of_inputs(form, start),
        **_output_gate(form, start, config.window, generator),
        "a_proj.weight": (a_weight, ()),
        "a_proj.bias": (a_bias, ()),
        "conv_weight": (_convolution(start, config.conv_width, site.head_dim), ()),
        "D": (start.coefficients.skip_R, ()),
    }


def _rate_biases(form: Recurrence, half_life_R: Tensor) -> Tensor:
    """Return the bias of a_proj: the decay of each head and, for the delta rule, its write gate."""
    decay_R = raw_decay(half_life_R)
    write_R = torch.full_like(decay_R, WRITE).logit()
    rates = [decay_R]
    if form.delta_rule:
        rates.append(write_R)
    # The rows of a head are neighbors.
    return torch.stack(rates, dim=1).flatten()


def _start_before_silu(start: _Start, a_bias: Tensor, d_state: int) -> _Start:
    """Return the start whose x, B and C are right after Mamba-2's SiLU and step size, which multiplies B."""
    step_R = nn.functional.softplus(a_bias)
    step_C = step_R.repeat_interleave(d_state)
    b_weight = start.b.weight / step_C.unsqueeze(1)
    b_bias = start.b.bias / step_C
    return start._replace(
        x=_before_silu(start.x),
        b=_before_silu(_Rows(b_weight, b_bias)),
        c=_before_silu(start.c),
    )


def _projections_of_inputs(form: Recurrence, start: _Start) -> SourcedTensors:
    """Make the tensors of x_proj, b_proj and c_proj, with their biases where the form has them."""
    tensors: SourcedTensors = {
        "x_proj.weight": (start.x.weight, start.from_v),
        "b_proj.weight": (start.b.weight, start.from_qk),
        "c_proj.weight": (start.c.weight, start.from_qk),
    }
    if form.has_silu:  # the convolution adds the biases
        conv_bias = torch.cat([start.x.bias, start.b.bias, start.c.bias])
        tensors["conv_bias"] = (conv_bias, (*start.from_v, *start.from_qk))
    else:
        tensors["x_proj.bias"] = (start.x.bias, start.from_v)
        tensors["b_proj.bias"] = (start.b.bias, start.from_qk)
        tensors["c_proj.bias"] = (start.c.bias, start.from_qk)
    return tensors


def _output_gate(
    form: Recurrence, start: _Start, window: int, generator: torch.Generator
) -> SourcedTensors:
    """Make the tensors of z_proj."""
    x_weight = start.x.weight
    if not form.has_output_gate_bias:
        # Without calibration data the mean input counts as 0: the noise alone then opens the gate.
        noise = small_noise(generator, *x_weight.shape, like=x_weight)
        return {"z_proj.weight": (start.open_gate_D + noise, ())}
    # Closed beside a window: the student then starts as the teacher under its windows.
    bias = CLOSED_GATE if window else OPEN_GATE
    return {
        "z_proj.weight": (torch.zeros_like(x_weight), ()),
        "z_proj.bias": (torch.full_like(start.x.bias, bias), ()),
    }


def _convolution(start: _Start, conv_width: int, head_dim: int) -> Tensor:
    """Return the taps of all channels: those of the coefficients for x, the identity for B and C."""
    n_x = len(start.x.bias)
    n_channels = n_x + len(start.b.bias) + len(start.c.bias)
    conv_CK = torch.zeros(n_channels, conv_width, device=start.x.weight.device)
    # The last tap reads the current token.
    conv_CK[:, -1] = 1.0
    conv_CK[:n_x] = start.coefficients.taps_RK.repeat_interleave(head_dim, dim=0)
    return conv_CK


def _random_start(
    site: HeadSite, n_heads: int, config: HybridConfig, generator: torch.Generator
) -> _Start:
    value = projection_of(site, "value")
    width = value.in_features
    n_values = n_heads * site.head_dim
    n_states = n_heads * config.d_state
    x_weight = small_noise(generator, n_values, width, like=value.weight)
    b_weight = small_noise(generator, n_states, width, like=x_weight)
    c_weight = small_noise(generator, n_states, width, like=x_weight)
    guess = guess_coefficients(n_heads, config.conv_width, x_weight.device)
    # D = 1, as in Mamba's own initialization.
    coefficients = guess._replace(skip_R=x_weight.new_ones(n_heads))
    return _Start(
        x=_Rows(x_weight, x_weight.new_zeros(len(x_weight))),
        b=_Rows(b_weight, x_weight.new_zeros(len(b_weight))),
        c=_Rows(c_weight, x_weight.new_zeros(len(c_weight))),
        coefficients=coefficients,
        open_gate_D=0.0,
    )


def _teacher_start(
    site: HeadSite,
    heads: tuple[int, ...],
    config: HybridConfig,
    generator: torch.Generator,
    trace: LayerTrace | None,
) -> _Start:
    """Take x from the heads' values, B and C from their scores, and fit or guess the coefficients."""
    assert site.layout is not None
    x = _value_rows(site, heads)
    inputs = input_moments(site, trace)
    # One state dimension holds the constant.
    factors = _factors_of_layer(site, heads, config.d_state - 1, inputs, generator)

    is_delta = FORMS[config.recurrence].delta_rule
    width = config.conv_width
    if trace is not None:
        coefficients = fit_coefficients(heads, x.weight, x.bias, factors, width, trace, is_delta)
    else:
        key_norm_R = _key_norms(factors, inputs) if is_delta else None
        coefficients = guess_coefficients(len(heads), width, x.weight.device, key_norm_R)
    b, c = _projections(factors, coefficients, is_delta)
    # Least squares: of all weights w, those with w u closest to 1 over the inputs u.
    one_D1 = torch.cholesky_solve(inputs.mean_D.unsqueeze(1), inputs.root_moment_DD)
    norms = (*HEAD_NORMS["query"], *HEAD_NORMS["key"])
    return _Start(
        x,
        b,
        c,
        coefficients,
        open_gate_D=OPEN_GATE * one_D1[:, 0],
        from_v=_names(site, site.layout.value),
        from_qk=_names(site, site.layout.query, site.layout.key, *norms),
    )


def _value_rows(site: HeadSite, heads: tuple[int, ...]) -> _Rows:
    """Return the rows of the value projection that each head reads; heads of a KV group get a copy each."""
    group_size = site.n_heads // site.n_kv_heads
    weights = []
    biases = []
    for head in heads:
        weight_PD, bias_P = head_rows(site, "value", head // group_size)
        weights.append(weight_PD)
        biases.append(bias_P)
    return _Rows(torch.cat(weights), torch.cat(biases))


def _factors_of_layer(
    site: HeadSite,
    heads: tuple[int, ...],
    n_factors: int,
    inputs: InputMoments,
    generator: torch.Generator,
) -> Factors:
    """Factorize the scores of every head, stacked over the heads."""
    group_size = site.n_heads // site.n_kv_heads
    keys = key_sides(site, heads, inputs)
    per_head = []
    for head in heads:
        key = keys[head // group_size]
        per_head.append(score_factors(site, head, key, n_factors, inputs, generator))
    b_weights, b_biases, c_weights, c_biases = zip(*per_head, strict=True)
    return Factors(
        b_weight=torch.stack(b_weights),
        b_bias=torch.stack(b_biases),
        c_weight=torch.stack(c_weights),
        c_bias=torch.stack(c_biases),
    )


def _key_norms(factors: Factors, inputs: InputMoments) -> Tensor:
    """Return the usual length of each head's keys: the constant, and the spread of the factors."""
    # With the covariance R R^T, the mean of |W u|^2 around the mean of u is the squared norm of W R.
    factors_RFD = factors.b_weight @ inputs.root_covariance_DD
    spread_R = factors_RFD.square().sum((1, 2))
    return (1 + spread_R).sqrt()


def _projections(
    factors: Factors, coefficients: Coefficients, is_delta: bool
) -> tuple[_Rows, _Rows]:
    """Return the rows of b_proj and of c_proj.

    B and C share each scale evenly; C takes the sign. The delta rule normalizes B, so C takes the full scale.
    """
    if is_delta:
        ones_R = torch.ones_like(coefficients.content_R)
        b = _with_constant(factors.b_weight, factors.b_bias, ones_R, ones_R)
        c = _with_constant(
            factors.c_weight, factors.c_bias, coefficients.content_R, coefficients.average_R
        )
        return b, c
    # 1 - a, which turns the state's sum into an average.
    share_of_new_R = 1.0 - 0.5 ** (1.0 / coefficients.half_life_R)
    floored_R = coefficients.average_R.abs().clamp_min(FLOOR)
    average_R = coefficients.average_R.sign() * floored_R * share_of_new_R
    content_R = coefficients.content_R * share_of_new_R
    root_average_R = average_R.abs().sqrt()
    root_content_R = content_R.abs().sqrt()
    b = _with_constant(factors.b_weight, factors.b_bias, root_content_R, root_average_R)
    c = _with_constant(
        factors.c_weight,
        factors.c_bias,
        content_R.sign() * root_content_R,
        average_R.sign() * root_average_R,
    )
    return b, c


def _with_constant(
    weight_RFD: Tensor, bias_RF: Tensor, scale_R: Tensor, constant_R: Tensor
) -> _Rows:
    """Scale the factors and put the constant before them; return [R N, D] and [R N]."""
    scaled_RFD = weight_RFD * scale_R[:, None, None]
    scaled_RF = bias_RF * scale_R[:, None]
    # A constant is a row without weights: its bias alone.
    weight_RND = nn.functional.pad(scaled_RFD, (0, 0, 1, 0))
    bias_RN = torch.cat([constant_R[:, None], scaled_RF], dim=1)
    return _Rows(weight_RND.flatten(0, 1), bias_RN.flatten())


def _before_silu(rows: _Rows) -> _Rows:
    """Return rows whose SiLU approximates the given rows.

    Rows that depend on the input are doubled, because SiLU has slope 1/2 at 0; for positive constants, SiLU is inverted
    numerically.
    """
    weight_CD, bias_C = rows
    inverse_C = bias_C.clone()
    # Fixed point: y = silu(v) is v = y / sigmoid(v), for y > 0.
    for _ in range(20):
        inverse_C = bias_C / inverse_C.sigmoid()
    is_constant_C = (weight_CD == 0).all(dim=1) & (bias_C > 0)
    silu_bias_C = torch.where(is_constant_C, inverse_C, 2 * bias_C)
    return _Rows(2 * weight_CD, silu_bias_C)


def _names(site: HeadSite, *modules: str) -> Names:
    """Return the names of the tensors of these modules of the site's attention."""
    names = site.module.state_dict()
    return tuple(name for name in names if name.partition(".")[0] in modules)
