"""Matrices of one layer's heads, read from the calls of its modules in a forward.

Every kind of head computes ``matrix x values``, in the model's own numbers:

    kind        matrix                                          values
    attention   softmax(q k^T)                                  values of its KV group
    ssm         C_i . B_j dt_j prod_{j < s <= i} a_s            x after the convolution
    channel     sum_n C_in B_jn dt_j prod_{j < s <= i} a_sn     one channel of x

with D on the diagonal of the last two. "ssm" is Mamba-2 and students, "channel" Mamba-1. The output
projection reads that times ``scale``: the gate and the norm after an SSM (docs/heads.md).

Shapes: T target token, S source token, L length, H head, P head dim, N state size, C channel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...model.ssd import mixing_matrix
from ...plan import HeadId
from ...teacher import HeadKind, HeadSite

Mixer = Any
"""Mixer of any family, with that family's attributes; also a mixer's output."""
Scan = Callable[[int], tuple[Tensor, Tensor, Tensor]]
"""A layer's recurrence: (matrix_TS, values_SP, scale_TP) of a head."""


class Call(NamedTuple):
    """Latest call of a module: its input hidden states and its output."""

    hidden: Mixer
    output: Mixer


Calls = dict[nn.Module, Call]


@dataclass(frozen=True, eq=False)
class HeadMix:
    """One head on one prompt: the output projection reads ``scale_TP * (matrix_TS @ values_SP)``.

    ``scale_TP`` is None for an attention head, else the gate of an SSM head and the norm after it,
    if any. Tensors are float32 (float64 in a float64 model). A student's head with a window beside
    its recurrence has the matrix of the recurrence, without the window that it adds.
    """

    head: HeadId
    kind: HeadKind
    matrix_TS: Tensor
    values_SP: Tensor
    scale_TP: Tensor | None = None

    def output(self) -> Tensor:
        """Return the head's slice of the output projection's input, [T, P]."""
        mixed_TP = self.matrix_TS @ self.values_SP
        return mixed_TP if self.scale_TP is None else self.scale_TP * mixed_TP


def read_mixes(site: HeadSite, heads: Sequence[HeadId], calls: Calls) -> Iterator[HeadMix]:
    """Yield the matrices of the named heads of one layer, one at a time."""
    mixer: Mixer = site.module
    scan: Scan | None = None
    for head in heads:
        kind = site.kind_of(head.head)
        if kind == "attention":
            # Lazily: the caller reads one matrix before the next is computed.
            map_TS, values_SP = _map_and_values(site, head.head, calls)
            yield HeadMix(head, kind, map_TS, values_SP)
            continue
        # Once for a layer's heads, and only if one of them is recurrent.
        if scan is None:
            scan = SCANS[site.kind](mixer, calls)
        # A student's recurrence has the replaced heads alone.
        index = mixer.replaced.index(head.head) if site.kind == "hybrid" else head.head
        matrix_TS, values_SP, scale_TP = scan(index)
        yield HeadMix(head, kind, matrix_TS, values_SP, scale_TP)


def _map_and_values(site: HeadSite, head: int, calls: Calls) -> tuple[Tensor, Tensor]:
    """Return a query head's attention map and values, the latter from the value projection."""
    attention: Mixer = site.module
    layout = site.layout
    own: Sequence[int] = range(site.n_heads)
    groups: Sequence[int] = range(site.n_kv_heads)
    if site.kind == "hybrid":
        # A student's attention holds only the kept heads and the KV heads that they read, unless
        # the replaced heads attend to a window: then they follow the kept ones.
        own = attention.kept
        if attention.windowed is None:
            groups = attention.kv_groups
        else:
            own = (*attention.kept, *attention.replaced)
        layout = attention.layout
        attention = attention.attention
    assert layout is not None
    output = calls[attention].output
    if not isinstance(output, tuple) or not isinstance(output[1], Tensor):
        raise ValueError(
            f"{type(attention).__name__} returns no attention maps, even in eager attention."
        )
    # Every batch here is one prompt, so its first row is all of it.
    map_TS = output[1][0, own.index(head)]
    group = groups.index(head // (site.n_heads // site.n_kv_heads))
    block = layout.block("value", group, len(own), len(groups))
    projected_LC = calls[attention.get_submodule(layout.value)].output[0]
    values_SP = _wide(projected_LC.unflatten(-1, (-1, site.head_dim))[:, block])
    return map_TS.to(values_SP.dtype), values_SP.contiguous()


def _scan_by_head(
    x_LHP: Tensor,
    gates_LH: Tensor,
    b_LHN: Tensor,
    c_LHN: Tensor,
    d_H: Tensor,
    scale_LHP: Tensor,
    matrix: Callable[..., Tensor] = mixing_matrix,
) -> Scan:
    """Return a function of a head's index.

    ``matrix`` makes its mixing matrix from its gates, B and C.
    """

    def head(h: int) -> tuple[Tensor, Tensor, Tensor]:
        # As a batch of one row and one head.
        matrix_LS = matrix(
            gates_LH[None, :, h : h + 1],
            b_LHN[None, :, h : h + 1],
            c_LHN[None, :, h : h + 1],
        )[0, 0]
        # D passes a token's own input on, past the state.
        matrix_LS.diagonal().add_(d_H[h])
        return matrix_LS, x_LHP[:, h], scale_LHP[:, h]

    return head


def _student_scan(mixer: Mixer, calls: Calls) -> Scan:
    inputs = mixer.ssm.scan_inputs(calls[mixer].hidden)
    x_LHP, gates_LH, b_LHN, c_LHN, z_LHP = [_wide(part[0]) for part in inputs]
    return _scan_by_head(
        x_LHP,
        gates_LH,
        b_LHN,
        c_LHN,
        _wide(mixer.ssm.D),
        z_LHP,
        mixer.ssm.form.matrix,
    )


def _mamba2_scan(mixer: Mixer, calls: Calls) -> Scan:
    """Read Mamba-2, Zamba2 or Falcon-H1, which scales the output of ``in_proj`` first.

    After the scan come silu(z) and, if there is a norm, its weight divided by the groups' RMS.
    """
    n_heads = mixer.num_heads
    n_groups = mixer.n_groups
    width = mixer.intermediate_size
    state = n_groups * mixer.ssm_state_size
    projected_LC = calls[mixer.in_proj].output[0]
    if hasattr(mixer, "mup_vector"):
        projected_LC = projected_LC * mixer.mup_vector.flatten()
    gate_LC, xbc_LC, dt_LH = projected_LC.split([width, width + 2 * state, n_heads], dim=-1)
    x_LC, b_LC, c_LC = _convolved(mixer, xbc_LC).split([width, state, state], dim=-1)
    # As the model does it: the bias is added in the model's dtype.
    dt_LH = F.softplus(_wide(dt_LH + mixer.dt_bias)).clamp(*mixer.time_step_limit)

    def by_head(state_LC: Tensor) -> Tensor:
        """Repeat the B or C of each group for its heads."""
        state_LGN = _wide(state_LC).unflatten(-1, (n_groups, -1))
        return state_LGN.repeat_interleave(n_heads // n_groups, dim=1)

    # Everything after the scan is a factor of each channel, so it is applied outside.
    scale_LC = F.silu(_wide(gate_LC))
    if hasattr(mixer.norm, "weight"):
        before_gate = getattr(mixer.norm, "norm_before_gate", False)
        # The norm's own input: its RMS is over all channels of a group.
        in_norm_LC = _wide(calls[mixer.norm].hidden[0]) * (1 if before_gate else scale_LC)
        in_groups = in_norm_LC.unflatten(-1, (n_groups, -1))
        rms = (in_groups.square().mean(-1, keepdim=True) + mixer.norm.variance_epsilon).sqrt()
        scale_LC = scale_LC * mixer.norm.weight / rms.expand_as(in_groups).flatten(-2)
    return _scan_by_head(
        x_LHP=_wide(x_LC).unflatten(-1, (n_heads, -1)),
        gates_LH=-_wide(mixer.A_log).exp() * dt_LH,
        b_LHN=by_head(b_LC) * dt_LH.unsqueeze(-1),
        c_LHN=by_head(c_LC),
        d_H=_wide(mixer.D),
        scale_LHP=scale_LC.unflatten(-1, (n_heads, -1)),
    )


def _mamba1_scan(mixer: Mixer, calls: Calls) -> Scan:
    """Read Falcon-Mamba, which norms dt, B and C, or Mamba, which does not.

    Every channel has N decays.
    """
    x_LC, gate_LC = calls[mixer.in_proj].output[0].chunk(2, dim=-1)
    x_LC = _convolved(mixer, x_LC)
    sizes = [mixer.time_step_rank, mixer.ssm_state_size, mixer.ssm_state_size]
    dt_LR, b_LN, c_LN = mixer.x_proj(x_LC).split(sizes, dim=-1)
    if hasattr(mixer, "dt_layernorm"):
        dt_LR = mixer.dt_layernorm(dt_LR)
        b_LN = mixer.b_layernorm(b_LN)
        c_LN = mixer.c_layernorm(c_LN)
    dt_LC = F.softplus(_wide(F.linear(dt_LR, mixer.dt_proj.weight)) + _wide(mixer.dt_proj.bias))
    a_CN = -_wide(mixer.A_log).exp()
    b_LN = _wide(b_LN)
    c_LN = _wide(c_LN)
    d_C = _wide(mixer.D)
    x_LC = _wide(x_LC)
    scale_LC = F.silu(_wide(gate_LC))

    def head(channel: int) -> tuple[Tensor, Tensor, Tensor]:
        dt_L1 = dt_LC[:, channel, None]
        log_a_LN = dt_L1 * a_CN[channel]
        # A state is a head with N = 1; the channel's matrix is the sum of theirs.
        b_LN1 = (dt_L1 * b_LN)[..., None]
        state_matrices = mixing_matrix(log_a_LN[None], b_LN1[None], c_LN[None, ..., None])[0]
        matrix_LS = state_matrices.sum(0)
        # D passes a token's own input on, past the state.
        matrix_LS.diagonal().add_(d_C[channel])
        return matrix_LS, x_LC[:, channel, None], scale_LC[:, channel, None]

    return head


def _convolved(mixer: Mixer, x_LC: Tensor) -> Tensor:
    """Apply the mixer's causal convolution and its activation."""
    # The convolution pads both ends; only its first L outputs are causal.
    return mixer.act(mixer.conv1d(x_LC.mT.unsqueeze(0))[0, :, : len(x_LC)].mT)


def _wide(tensor: Tensor) -> Tensor:
    """Convert half precision to float32; wider types stay."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


SCANS: dict[str, Callable[[Mixer, Calls], Scan]] = {
    "channel": _mamba1_scan,
    "ssm": _mamba2_scan,
    "hybrid": _student_scan,
}
"""Reader of a mixer's recurrence, by the kind of its site."""
