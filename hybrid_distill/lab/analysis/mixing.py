"""Matrices with which heads mix the tokens of one prompt: attention maps and materialized SSMs.

Every kind of head computes ``matrix x values``, in the model's own numbers:

    attention   softmax(q k^T)                                      values of its KV group
    ssm         C_i . B_j dt_j prod_{j < s <= i} a_s, D on the diagonal    x after the convolution (Mamba-2, students)
    channel     sum_n C_in B_jn dt_j prod_{j < s <= i} a_sn, same          one channel of x (Mamba-1)

The output projection reads that times ``scale``: the gate and the norm after an SSM (docs/heads.md).

Shapes: T target token, S source token, L length, H head, P head dim, N state size, C channel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...model.ssd import mixing_matrix
from ...plan import HeadId
from ...probes.answering import forward
from ...teacher import HeadKind, HeadSite, check_exists, eager_attention, eval_mode, head_sites, longest_context

Mixer = Any
"""Mixer of any family, with that family's attributes; also a mixer's output."""
Scan = Callable[[int], tuple[Tensor, Tensor, Tensor]]
"""A layer's recurrence: (matrix_TS, values_SP, scale_TP) of a head."""
Found = TypeVar("Found")

MAX_GB = 4.0
BYTES_PER_ENTRY = 28  # of a mixing matrix while it is made: decays in float64, and the products in float32


class Call(NamedTuple):
    """Latest call of a module: its input hidden states and its output."""

    given: Mixer
    output: Mixer


Calls = dict[nn.Module, Call]


@dataclass(frozen=True, eq=False)
class HeadMix:
    """One head on one prompt: the output projection reads ``scale_TP * (matrix_TS @ values_SP)``.

    ``scale_TP`` is None for an attention head, else the gate of an SSM head and the norm after it, if any. Tensors are
    float32 (float64 in a float64 model).
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


def mix_heads(
    model: PreTrainedModel,
    ids: Sequence[int],
    heads: Sequence[HeadId],
    read: Callable[[HeadMix], Found] = lambda mix: mix,
    *,
    kind: HeadKind | None = None,
    max_gb: float = MAX_GB,
) -> list[Found]:
    """Return ``read`` of each head's `HeadMix` on one prompt (by default the `HeadMix` itself), from one forward.

    Matrices are made one at a time. ``kind`` as in `head_sites`. Raises ValueError for a head or kind that the
    model does not have, and as `check_prompt` does.
    """
    check_prompt(model, ids, heads, kind, max_gb)
    found: dict[HeadId, Found] = {}

    def note(site: HeadSite, mixes: Iterator[HeadMix], calls: Calls) -> None:
        found.update((mix.head, read(mix)) for mix in mixes)

    ids_1L = torch.tensor([ids], device=model.device)
    with eval_mode(model), _behind_mixers(model, heads, kind, note):
        forward(model, ids_1L, torch.ones_like(ids_1L), logits_to_keep=1)
    return [found[head] for head in heads]


Action = Callable[[HeadSite, Iterator[HeadMix], Calls], object]
"""Callback after a mixer's forward, given the matrices of its heads."""


@contextmanager
def mask_heads(
    model: PreTrainedModel, masks: Mapping[HeadId, Tensor], *, kind: HeadKind | None = None
) -> Iterator[None]:
    """Make each named head mix by ``matrix * mask``, with boolean masks [T, S]. ``kind`` as in `head_sites`.

    Rows are not renormalized; a row whose mask keeps everything stays identical to the last bit. An SSM's gate and norm
    stay those of the whole head. Attention runs eagerly, because no other implementation returns its maps. Raises
    ValueError for a head that does not exist, and for forwards of anything but one prompt of T tokens without a cache.
    """

    def project_masked(site: HeadSite, mixes: Iterator[HeadMix], calls: Calls) -> object:
        heads_BTHP = calls[site.o_proj].given.unflatten(-1, (-1, site.head_dim)).clone()
        for mix in mixes:
            mask_TS = masks[mix.head].to(mix.matrix_TS.device)
            if len(heads_BTHP) != 1 or mask_TS.shape != mix.matrix_TS.shape:
                raise ValueError(
                    f"the mask of {mix.head} is {tuple(mask_TS.shape)}, the forward has {len(heads_BTHP)} rows of "
                    f"{heads_BTHP.shape[1]} tokens; run one prompt of as many tokens as its mask has, without a cache."
                )
            own_TP = heads_BTHP[0, :, mix.head.head]
            whole_T1 = (mask_TS | ~torch.ones_like(mask_TS).tril()).all(-1, keepdim=True)
            masked_TP = replace(mix, matrix_TS=mix.matrix_TS * mask_TS).output().to(own_TP.dtype)
            heads_BTHP[0, :, mix.head.head] = torch.where(whole_T1, own_TP, masked_TP)
        out_BTD, output = site.o_proj.forward(heads_BTHP.flatten(-2)), calls[site.module].output  # without its hooks
        return (out_BTD, *output[1:]) if isinstance(output, tuple) else out_BTD

    with _behind_mixers(model, list(masks), kind, project_masked):
        yield


@contextmanager
def _behind_mixers(
    model: PreTrainedModel,
    heads: Sequence[HeadId],
    kind: HeadKind | None,
    act: Action,
) -> Iterator[None]:
    """Call ``act`` after each mixer that has some of the heads; its result, if any, replaces the mixer's output."""
    with ExitStack() as hooks:
        if any(site.kind_of(head) == "attention" for (_, head), site in find_heads(model, kind).items()):
            hooks.enter_context(eager_attention(model))
        for site in sites_of(model, heads, kind):
            hooks.enter_context(_behind_mixer(site, [head for head in heads if head.layer == site.layer], act))
        yield


@contextmanager
def _behind_mixer(site: HeadSite, heads: list[HeadId], act: Action) -> Iterator[None]:
    calls: Calls = {}
    inner = ExitStack()  # hooks of the mixer while its block runs: layers may share a mixer

    def record(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Mixer) -> None:
        calls[module] = Call(args[0] if args else kwargs.get("hidden_states"), output)

    def enter(*_: object) -> None:
        for module in site.module.modules():
            inner.enter_context(module.register_forward_hook(record, with_kwargs=True, prepend=True))

    def behind(*_: object) -> object:
        return act(site, _mixes(site, heads, calls), calls) if calls else None  # no calls: it runs for another layer

    def leave(*_: object) -> None:
        inner.close()
        calls.clear()

    with (
        site.block.register_forward_pre_hook(enter),
        site.module.register_forward_hook(behind),
        site.block.register_forward_hook(leave, always_call=True),
    ):
        yield


def find_heads(model: PreTrainedModel, kind: HeadKind | None = None) -> dict[HeadId, HeadSite]:
    """Find all heads of a kind, as `head_sites` does; in a student those that are kept, or recurrent."""
    sites = head_sites(model)
    if sites[0].kind != "hybrid":
        sites = head_sites(model, kind)
    found = {HeadId(s.layer, h): s for s in sites for h in range(s.n_heads) if kind in (None, s.kind_of(h))}
    if not found:
        raise ValueError(f"this student has no heads of kind {kind!r}; leave out --kind.")
    return found


def sites_of(model: PreTrainedModel, heads: Sequence[HeadId], kind: HeadKind | None = None) -> list[HeadSite]:
    """Return the layers of some heads. Raises ValueError for a head that does not exist, or is of another kind."""
    every = find_heads(model, kind)
    for head in heads:
        if head not in every:
            check_exists(model, list({site.layer: site for site in every.values()}.values()), head)
            raise ValueError(f"{head} of this student is of another kind than {kind!r}; leave out --kind.")
    return list({head.layer: every[head] for head in heads}.values())


def check_prompt(
    model: PreTrainedModel, ids: Sequence[int], heads: Sequence[HeadId], kind: HeadKind | None, max_gb: float
) -> None:
    """Raise ValueError for a prompt that is empty or beyond the model's context, or whose matrices are too large."""
    context = longest_context(model.config)
    if not ids or (context is not None and len(ids) > context):
        limit = "at least 1 token" if context is None else f"1 to {context} tokens, the model's context"
        raise ValueError(f"the prompt has {len(ids)} tokens; it must have {limit}.")
    making = 0  # in addition to the matrices that are kept
    for site in sites_of(model, heads, kind):
        mixer: Mixer = site.module  # every state of a Mamba-1 channel has its own matrix
        mixed = BYTES_PER_ENTRY * (mixer.A_log.shape[-1] if site.kind == "channel" else 1)
        making = max(making, mixed, 8 * site.n_heads if site.kind in ("attention", "hybrid") else 0)
    if (needed := len(ids) ** 2 * (4 * len(heads) + making) / 2**30) > max_gb:
        raise ValueError(
            f"the matrices of {len(heads)} heads on {len(ids)} tokens take about {needed:.1f} GiB, more than the "
            f"{max_gb:.1f} GiB allowed; take a shorter prompt or fewer heads, or allow more with --max-gb."
        )


def _mixes(site: HeadSite, heads: Sequence[HeadId], calls: Calls) -> Iterator[HeadMix]:
    """Yield the matrices of the named heads of one layer, one at a time."""
    mixer: Mixer = site.module
    scan: Scan | None = None
    for named in heads:
        if site.kind_of(named.head) == "attention":
            yield HeadMix(named, "attention", *_map_and_values(site, named.head, calls))
            continue
        scan = scan or {"channel": _of_mamba1, "ssm": _of_mamba2, "hybrid": _of_student}[site.kind](mixer, calls)
        index = mixer.recurrent.index(named.head) if site.kind == "hybrid" else named.head
        yield HeadMix(named, site.kind_of(named.head), *scan(index))


def _map_and_values(site: HeadSite, head: int, calls: Calls) -> tuple[Tensor, Tensor]:
    """Return a query head's attention map, and its values from the output of the value projection."""
    attention, layout = site.module, site.layout
    own, groups = range(site.n_heads), range(site.n_kv_heads)
    if site.kind == "hybrid":
        mixer: Mixer = attention
        attention, layout, own, groups = mixer.attention, mixer.layout, mixer.kept, mixer.kv_groups
    assert layout is not None
    output = calls[attention].output
    if not isinstance(output, tuple) or not isinstance(output[1], Tensor):
        raise ValueError(f"{type(attention).__name__} returns no attention maps, even in eager attention.")
    group = groups.index(head // (site.n_heads // site.n_kv_heads))
    block = layout.block("value", group, len(own), len(groups))
    out_LC = calls[attention.get_submodule(layout.value)].output[0]
    values_SP = _wide(out_LC.unflatten(-1, (-1, site.head_dim))[:, block])
    return output[1][0, own.index(head)].to(values_SP.dtype), values_SP.contiguous()


def _scan(
    x_LHP: Tensor,
    gates_LH: Tensor,
    b_LHN: Tensor,
    c_LHN: Tensor,
    d_H: Tensor,
    scale_LHP: Tensor,
    matrix: Callable[..., Tensor] = mixing_matrix,
) -> Scan:
    """Return a function of a head's index; ``matrix`` makes its mixing matrix from its gates, B and C."""

    def head(h: int) -> tuple[Tensor, Tensor, Tensor]:
        matrix_LS = matrix(*(part[None, :, h : h + 1] for part in (gates_LH, b_LHN, c_LHN)))[0, 0]
        matrix_LS.diagonal().add_(d_H[h])
        return matrix_LS, x_LHP[:, h], scale_LHP[:, h]

    return head


def _of_student(mixer: Mixer, calls: Calls) -> Scan:
    x_LHP, gates_LH, b_LHN, c_LHN, z_LHP = (_wide(part[0]) for part in mixer.ssm.scan_inputs(calls[mixer].given))
    return _scan(x_LHP, gates_LH, b_LHN, c_LHN, _wide(mixer.ssm.D), z_LHP, mixer.ssm.form.matrix)


def _of_mamba2(mixer: Mixer, calls: Calls) -> Scan:
    """Read Mamba-2, Zamba2 or Falcon-H1, which scales the output of ``in_proj`` first.

    After the scan come silu(z) and, if there is a norm, its weight divided by the groups' RMS.
    """
    n_heads, n_groups = mixer.num_heads, mixer.n_groups
    width, state = mixer.intermediate_size, n_groups * mixer.ssm_state_size
    projected_LC = calls[mixer.in_proj].output[0]
    if hasattr(mixer, "mup_vector"):
        projected_LC = projected_LC * mixer.mup_vector.flatten()
    gate_LC, xbc_LC, dt_LH = projected_LC.split([width, width + 2 * state, n_heads], dim=-1)
    x_LC, b_LC, c_LC = _convolved(mixer, xbc_LC).split([width, state, state], dim=-1)
    dt_LH = F.softplus(_wide(dt_LH + mixer.dt_bias)).clamp(*mixer.time_step_limit)
    b_LHN, c_LHN = (
        _wide(t).unflatten(-1, (n_groups, -1)).repeat_interleave(n_heads // n_groups, dim=1) for t in (b_LC, c_LC)
    )
    scale_LC = F.silu(_wide(gate_LC))
    if hasattr(mixer.norm, "weight"):
        before_gate = getattr(mixer.norm, "norm_before_gate", False)
        in_norm_LC = _wide(calls[mixer.norm].given[0]) * (1 if before_gate else scale_LC)
        in_groups = in_norm_LC.unflatten(-1, (n_groups, -1))
        rms = (in_groups.square().mean(-1, keepdim=True) + mixer.norm.variance_epsilon).sqrt()
        scale_LC = scale_LC * mixer.norm.weight / rms.expand_as(in_groups).flatten(-2)
    x_LHP, scale_LHP = (t.unflatten(-1, (n_heads, -1)) for t in (_wide(x_LC), scale_LC))
    log_a_LH = -_wide(mixer.A_log).exp() * dt_LH
    return _scan(x_LHP, log_a_LH, b_LHN * dt_LH.unsqueeze(-1), c_LHN, _wide(mixer.D), scale_LHP)


def _of_mamba1(mixer: Mixer, calls: Calls) -> Scan:
    """Read Falcon-Mamba, which norms dt, B and C, or Mamba, which does not; every channel has N decays."""
    x_LC, gate_LC = calls[mixer.in_proj].output[0].chunk(2, dim=-1)
    x_LC = _convolved(mixer, x_LC)
    parts = mixer.x_proj(x_LC).split([mixer.time_step_rank, *2 * [mixer.ssm_state_size]], dim=-1)
    if hasattr(mixer, "dt_layernorm"):
        norms = (mixer.dt_layernorm, mixer.b_layernorm, mixer.c_layernorm)
        parts = [norm(part) for norm, part in zip(norms, parts, strict=True)]
    dt_LR, b_LN, c_LN = parts
    dt_LC = F.softplus(_wide(F.linear(dt_LR, mixer.dt_proj.weight)) + _wide(mixer.dt_proj.bias))
    a_CN, b_LN, c_LN, d_C = -_wide(mixer.A_log).exp(), _wide(b_LN), _wide(c_LN), _wide(mixer.D)
    x_LC, scale_LC = _wide(x_LC), F.silu(_wide(gate_LC))

    def head(channel: int) -> tuple[Tensor, Tensor, Tensor]:
        dt_L1 = dt_LC[:, channel, None]
        of_states = (dt_L1 * a_CN[channel], (dt_L1 * b_LN)[..., None], c_LN[..., None])
        matrix_LS = mixing_matrix(*(part[None] for part in of_states))[0].sum(0)  # a state is a head with N = 1
        matrix_LS.diagonal().add_(d_C[channel])
        return matrix_LS, x_LC[:, channel, None], scale_LC[:, channel, None]

    return head


def _convolved(mixer: Mixer, x_LC: Tensor) -> Tensor:
    """Apply the mixer's causal convolution and its activation."""
    return mixer.act(mixer.conv1d(x_LC.mT.unsqueeze(0))[0, :, : len(x_LC)].mT)


def _wide(t: Tensor) -> Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32))
