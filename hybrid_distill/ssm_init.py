"""How recurrent heads start: from the teacher's own weights, or at random. Compared in benchmarks/init.py.

Shapes: D model width, P head dim, N state size, R recurrent heads, F factors (N, or N - 1 beside the
constant).

The ``teacher`` start treats softmax attention to first order. With scores s_ij = q_i . k_j / sqrt(P),

    softmax(s)_ij  ~  (1 + s_ij) (1 - a) a^(i - j)

a decaying average of the values (one state dimension is the constant 1) that the best rank-F factors of W_q^T
W_k bend towards what the head looks for. A sum over the past is not an average, hence the factor 1 - a.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .model import HybridConfig
from .model.mixer import OPEN_GATE, spread_half_lives
from .model.ssd import raw_decay
from .teacher import AttentionSite

Started = dict[str, tuple[Tensor, tuple[str, ...]]]

NOISE = 0.02  # for what would otherwise have no gradient: B = C = 0 is a saddle


@dataclass(frozen=True)
class SSMInit:
    """One way to start recurrent heads."""

    values: bool = True  # x from the teacher's v; else at random
    factors: bool = True  # B and C from q and k; else at random
    constant: bool = True  # one state dimension is a constant feature
    average: bool = True  # scale by 1 - a, so that the sum over the past is an average
    skip: float = 0.0  # D
    half_lives: tuple[float, float] = (2.0, 256.0)  # tokens, log-spaced over the heads of a layer


INITS: dict[str, SSMInit] = {
    "teacher": SSMInit(),
    "svd": SSMInit(constant=False, average=False, skip=1.0),
    "values": SSMInit(factors=False),
    "random": SSMInit(values=False, factors=False, constant=False, average=False, skip=1.0),
}


def init_ssm(
    init: SSMInit,
    site: AttentionSite,
    heads: tuple[int, ...],
    config: HybridConfig,
    generator: torch.Generator,
) -> Started:
    """Tensors of the `SSMHeads` that replace ``heads``, each with the teacher's tensors it came from.

    Everything is computed in fp32, heads one after the other, so that the draws do not depend on other
    layers' plans.
    """
    half_lives_R = spread_half_lives(len(heads), *init.half_lives)
    a_R = 0.5 ** (1.0 / half_lives_R)
    x = _values(init, site, heads, generator)
    b, c = _keys_and_queries(init, site, heads, a_R, config.d_state, generator)
    width, n_channels = config.hidden_size, x[0].shape[0] + b[0].shape[0] + c[0].shape[0]
    from_v = _names(site, "v_proj") if init.values else ()
    from_qk = _names(site, "q_proj", "k_proj", "q_norm", "k_norm") if init.factors else ()
    conv = torch.zeros(n_channels, config.conv_width)
    conv[:, -1] = 1.0
    return {
        "x_proj.weight": (x[0], from_v),
        "x_proj.bias": (x[1], from_v),
        "b_proj.weight": (b[0], from_qk),
        "b_proj.bias": (b[1], from_qk),
        "c_proj.weight": (c[0], from_qk),
        "c_proj.bias": (c[1], from_qk),
        "z_proj.weight": (torch.zeros_like(x[0]), ()),
        "z_proj.bias": (torch.full_like(x[1], OPEN_GATE), ()),
        "a_proj.weight": (torch.zeros(len(heads), width), ()),
        "a_proj.bias": (raw_decay(half_lives_R), ()),
        "conv_weight": (conv, ()),
        "D": (torch.full((len(heads),), init.skip), ()),
    }


def _names(site: AttentionSite, *modules: str) -> tuple[str, ...]:
    return tuple(name for name in site.module.state_dict() if name.partition(".")[0] in modules)


def _rows(projection: nn.Linear, head: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Weight [P, D] and bias [P] (zeros if there is none) of one head, in fp32."""
    rows = slice(head * head_dim, (head + 1) * head_dim)
    weight = projection.weight[rows].float()
    return weight, weight.new_zeros(head_dim) if projection.bias is None else projection.bias[rows].float()


def _normal(generator: torch.Generator, *shape: int, std: float = NOISE) -> Tensor:
    return torch.randn(*shape, generator=generator) * std


def _values(
    init: SSMInit, site: AttentionSite, heads: tuple[int, ...], generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """x_proj: each head reads the values of its KV group."""
    n_rows, width = len(heads) * site.head_dim, site.module.v_proj.in_features
    if not init.values:
        return _normal(generator, n_rows, width), torch.zeros(n_rows)
    group_size = site.n_heads // site.n_kv_heads
    per_head = [_rows(site.module.v_proj, head // group_size, site.head_dim) for head in heads]
    return torch.cat([weight for weight, _ in per_head]), torch.cat([bias for _, bias in per_head])


def _keys_and_queries(
    init: SSMInit,
    site: AttentionSite,
    heads: tuple[int, ...],
    a_R: Tensor,
    d_state: int,
    generator: torch.Generator,
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(weight, bias) of b_proj and of c_proj."""
    parts = []
    for head, a in zip(heads, a_R.tolist()):
        n_factors = d_state - init.constant
        if init.factors:
            b, c = _score_factors(site, head, n_factors, generator)
        else:
            width = site.module.q_proj.in_features
            b, c = ((_normal(generator, n_factors, width), torch.zeros(n_factors)) for _ in range(2))
        if init.constant:
            b, c = _with_constant(*b), _with_constant(*c)
        # Split evenly between B and C: an optimiser step is then the same share of both.
        scale = (1.0 - a) ** 0.5 if init.average else 1.0
        parts.append([tensor * scale for tensor in (*b, *c)])
    b_weight, b_bias, c_weight, c_bias = (torch.cat(column) for column in zip(*parts))
    return (b_weight, b_bias), (c_weight, c_bias)


def _with_constant(weight_FD: Tensor, bias_F: Tensor) -> tuple[Tensor, Tensor]:
    """Put a feature that is 1 for every token before the others."""
    return torch.cat([torch.zeros_like(weight_FD[:1]), weight_FD]), torch.cat([bias_F.new_ones(1), bias_F])


def _score_factors(
    site: AttentionSite, head: int, n_factors: int, generator: torch.Generator
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """B and C with C u_i . B u_j as near to the head's score s_ij as F products can be (positions left out).

    Best in the mean square over inputs that are white before the layer's input norm gains. Beyond the rank of
    the scores B is small noise and C is zero.
    """
    group = head // (site.n_heads // site.n_kv_heads)
    gains_D = _input_gains(site)
    wq_PD, bq_P = _head_projection(site, "q", head, gains_D)
    wk_PD, bk_P = _head_projection(site, "k", group, gains_D)
    # Thin QR, W g = R^T Q^T, leaves an SVD of P x P instead of D x D.
    rq_PP = torch.linalg.qr((wq_PD * gains_D).T).R
    rk_PP = torch.linalg.qr((wk_PD * gains_D).T).R
    u_PP, s_P, vh_PP = torch.linalg.svd(rq_PP @ rk_PP.T)
    rank = min(n_factors, s_P.shape[0])
    root_F1 = s_P[:rank, None].sqrt()
    to_c_FP = root_F1 * (u_PP[:, :rank].T @ torch.linalg.pinv(rq_PP).T)
    to_b_FP = root_F1 * (vh_PP[:rank] @ torch.linalg.pinv(rk_PP).T)
    scale = float(getattr(site.module, "scaling", site.head_dim**-0.5)) ** 0.5
    c = _padded(to_c_FP @ wq_PD * scale, to_c_FP @ bq_P * scale, n_factors)
    b_weight, b_bias = _padded(to_b_FP @ wk_PD * scale, to_b_FP @ bk_P * scale, n_factors)
    b_weight[rank:] = _normal(generator, n_factors - rank, b_weight.shape[1])
    return (b_weight, b_bias), c


def _padded(weight_FD: Tensor, bias_F: Tensor, n_rows: int) -> tuple[Tensor, Tensor]:
    missing = n_rows - weight_FD.shape[0]
    return nn.functional.pad(weight_FD, (0, 0, 0, missing)), nn.functional.pad(bias_F, (0, missing))


def _input_gains(site: AttentionSite) -> Tensor:
    """Gains of the norm before the attention: how strongly each input channel varies, up to a factor."""
    norm = getattr(site.block, "input_layernorm", None)
    weight = getattr(norm, "weight", None)
    width = site.module.q_proj.in_features
    return torch.ones(width) if weight is None else weight.float().abs().clamp_min(1e-3)


def _head_projection(site: AttentionSite, which: str, head: int, gains_D: Tensor) -> tuple[Tensor, Tensor]:
    """One head's query or key projection; a norm behind it is replaced by its usual effect."""
    weight_PD, bias_P = _rows(getattr(site.module, f"{which}_proj"), head, site.head_dim)
    norm = getattr(site.module, f"{which}_norm", None)
    if norm is None:
        return weight_PD, bias_P
    usual_rms = ((weight_PD * gains_D).square().sum() / site.head_dim + bias_P.square().mean()).sqrt()
    gain_P = norm.weight.float() / usual_rms.clamp_min(1e-6)
    return weight_PD * gain_P[:, None], bias_P * gain_P
