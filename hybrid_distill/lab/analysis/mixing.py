"""Matrices with which heads mix the tokens of one prompt: attention maps and materialized SSMs.

Every kind of head computes ``matrix x values``, in the model's own numbers:

    attention   softmax(q k^T)                                      values of its KV group ssm
    C_i . B_j dt_j prod_{j < s <= i} a_s, D on the diagonal    x after the convolution (Mamba-2,
    students) channel     sum_n C_in B_jn dt_j prod_{j < s <= i} a_sn, same          one channel of
    x (Mamba-1)

The output projection reads that times ``scale``: the gate and the norm after an SSM
(docs/heads.md).

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
from ...scoring.head_scores import heads_of
from ...teacher import (
    HeadKind,
    HeadSite,
    check_exists,
    eager_attention,
    eval_mode,
    head_sites,
    longest_context,
)

Mixer = Any
"""Mixer of any family, with that family's attributes; also a mixer's output."""
Scan = Callable[[int], tuple[Tensor, Tensor, Tensor]]
"""A layer's recurrence: (matrix_TS, values_SP, scale_TP) of a head."""
T = TypeVar("T")

MAX_GB = 4.0
BYTES_PER_KEPT_ENTRY = 4
# Of a mixing matrix while it is made: decays in float64, and the products in float32.
BYTES_PER_MIXING_ENTRY = 28


class Call(NamedTuple):
    """Latest call of a module: its input hidden states and its output."""

    hidden: Mixer
    output: Mixer


Calls = dict[nn.Module, Call]


@dataclass(frozen=True, eq=False)
class HeadMix:
    """One head on one prompt: the output projection reads ``scale_TP * (matrix_TS @ values_SP)``.

    ``scale_TP`` is None for an attention head, else the gate of an SSM head and the norm after it,
    if any. Tensors are float32 (float64 in a float64 model).
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
    read: Callable[[HeadMix], T] = lambda mix: mix,
    *,
    kind: HeadKind | None = None,
    max_gb: float = MAX_GB,
) -> list[T]:
    """Return ``read`` of each head's `HeadMix` on one prompt (by default the `HeadMix` itself),
    from one forward.

    Matrices are made one at a time. ``kind`` as in `head_sites`. Raises ValueError for a head or
    kind that the model does not have, and as `check_prompt` does.
    """
    check_prompt(model, ids, heads, kind, max_gb)
    results: dict[HeadId, T] = {}

    def read_all(site: HeadSite, mixes: Iterator[HeadMix], calls: Calls) -> None:
        for mix in mixes:
            results[mix.head] = read(mix)

    ids_1L = torch.tensor([ids], device=model.device)
    with eval_mode(model), _behind_mixers(model, heads, kind, read_all):
        forward(model, ids_1L, torch.ones_like(ids_1L), logits_to_keep=1)
    return [results[head] for head in heads]


Action = Callable[[HeadSite, Iterator[HeadMix], Calls], object]
"""Callback after a mixer's forward, given the matrices of its heads."""


@contextmanager
def mask_heads(
    model: PreTrainedModel, masks: Mapping[HeadId, Tensor], *, kind: HeadKind | None = None
) -> Iterator[None]:
    """Make each named head mix by ``matrix * mask``, with boolean masks [T, S]. ``kind`` as in
    `head_sites`.

    Rows are not renormalized; a row whose mask keeps everything stays identical to the last bit. An
    SSM's gate and norm stay those of the whole head. Attention runs eagerly, because no other
    implementation returns its maps. Raises ValueError for a head that does not exist, and for
    forwards of anything but one prompt of T tokens without a cache.
    """

    def project_masked(site: HeadSite, mixes: Iterator[HeadMix], calls: Calls) -> object:
        heads_BTHP = calls[site.o_proj].hidden.unflatten(-1, (-1, site.head_dim)).clone()
        for mix in mixes:
            mask_TS = masks[mix.head].to(mix.matrix_TS.device)
            if len(heads_BTHP) != 1 or mask_TS.shape != mix.matrix_TS.shape:
                raise ValueError(
                    f"the mask of {mix.head} is {tuple(mask_TS.shape)}, the forward has "
                    f"{len(heads_BTHP)} rows of {heads_BTHP.shape[1]} tokens; run one prompt of "
                    "as many tokens as its mask has, without a cache."
                )
            own_TP = heads_BTHP[0, :, mix.head.head]
            masked = replace(mix, matrix_TS=mix.matrix_TS * mask_TS)
            masked_TP = masked.output().to(own_TP.dtype)
            # The product rounds differently than the model does: whole rows stay the model's own.
            future_TS = ~torch.ones_like(mask_TS).tril()
            whole_T1 = (mask_TS | future_TS).all(-1, keepdim=True)
            heads_BTHP[0, :, mix.head.head] = torch.where(whole_T1, own_TP, masked_TP)
        # Without the hooks of o_proj, which have seen this forward already.
        out_BTD = site.o_proj.forward(heads_BTHP.flatten(-2))
        output = calls[site.module].output
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
    """Call ``act`` after each mixer that has some of the heads.

    Its result, if any, replaces the mixer's output.
    """
    kinds = {site.kind_of(head.head) for head, site in find_heads(model, kind).items()}
    with ExitStack() as hooks:
        if "attention" in kinds:
            hooks.enter_context(eager_attention(model))
        for site in sites_of(model, heads, kind):
            in_layer = [head for head in heads if head.layer == site.layer]
            hooks.enter_context(_behind_mixer(site, in_layer, act))
        yield


@contextmanager
def _behind_mixer(site: HeadSite, heads: list[HeadId], act: Action) -> Iterator[None]:
    calls: Calls = {}
    # Hooks of the mixer, only while its block runs: layers may share a mixer.
    inner = ExitStack()

    def record(
        module: nn.Module,
        args: tuple[Tensor, ...],
        kwargs: dict[str, Tensor],
        output: Mixer,
    ) -> None:
        hidden = args[0] if args else kwargs.get("hidden_states")
        calls[module] = Call(hidden, output)

    def enter(*_: object) -> None:
        # Prepended: outputs are recorded before any other hook replaces them.
        for module in site.module.modules():
            inner.enter_context(
                module.register_forward_hook(record, with_kwargs=True, prepend=True)
            )

    def behind(*_: object) -> object:
        if not calls:  # it runs for another layer
            return None
        return act(site, _mixes(site, heads, calls), calls)

    def leave(*_: object) -> None:
        inner.close()
        calls.clear()

    with (
        site.block.register_forward_pre_hook(enter),
        site.module.register_forward_hook(behind),
        # Also after an error: no hook may stay behind.
        site.block.register_forward_hook(leave, always_call=True),
    ):
        yield


def find_heads(model: PreTrainedModel, kind: HeadKind | None = None) -> dict[HeadId, HeadSite]:
    """Find all heads of a kind, as `head_sites` does.

    In a student those that are kept, or recurrent.
    """
    # A student's sites hold heads of both kinds; head_sites of a kind would refuse it.
    sites = head_sites(model)
    if sites[0].kind != "hybrid":
        sites = head_sites(model, kind)
    site_of: dict[HeadId, HeadSite] = {}
    for site in sites:
        for head in heads_of([site]):
            if kind in (None, site.kind_of(head.head)):
                site_of[head] = site
    if not site_of:
        raise ValueError(f"this student has no heads of kind {kind!r}; leave out --kind.")
    return site_of


def sites_of(
    model: PreTrainedModel, heads: Sequence[HeadId], kind: HeadKind | None = None
) -> list[HeadSite]:
    """Return the layers of some heads.

    Raises ValueError for a head that does not exist, or is of another kind.
    """
    site_of = find_heads(model, kind)
    by_layer = {site.layer: site for site in site_of.values()}
    for head in heads:
        if head not in site_of:
            check_exists(model, list(by_layer.values()), head)
            raise ValueError(
                f"{head} of this student is of another kind than {kind!r}; leave out --kind."
            )
    layers = dict.fromkeys(head.layer for head in heads)
    return [by_layer[layer] for layer in layers]


def check_prompt(
    model: PreTrainedModel,
    ids: Sequence[int],
    heads: Sequence[HeadId],
    kind: HeadKind | None,
    max_gb: float,
) -> None:
    """Raise ValueError for a prompt that is empty or too long, or whose matrices are too large."""
    context = longest_context(model.config)
    if not ids or (context is not None and len(ids) > context):
        limit = "at least 1 token"
        if context is not None:
            limit = f"1 to {context} tokens, the model's context"
        raise ValueError(f"the prompt has {len(ids)} tokens; it must have {limit}.")
    # Only one matrix is being made at a time, in addition to those that are kept.
    sites = sites_of(model, heads, kind)
    making = max((_bytes_while_making(site) for site in sites), default=0)
    needed = len(ids) ** 2 * (BYTES_PER_KEPT_ENTRY * len(heads) + making) / 2**30
    if needed > max_gb:
        raise ValueError(
            f"the matrices of {len(heads)} heads on {len(ids)} tokens take about {needed:.1f} "
            f"GiB, more than the {max_gb:.1f} GiB allowed; take a shorter prompt or fewer heads, "
            "or allow more with --max-gb."
        )


def _bytes_while_making(site: HeadSite) -> int:
    """Return the bytes per entry of a matrix while it is made."""
    mixer: Mixer = site.module
    # Every state of a Mamba-1 channel has its own matrix.
    n_matrices = mixer.A_log.shape[-1] if site.kind == "channel" else 1
    # Eager attention makes the maps of all heads at once: scores and softmax in float32.
    of_maps = 8 * site.n_heads if site.kind in ("attention", "hybrid") else 0
    return max(BYTES_PER_MIXING_ENTRY * n_matrices, of_maps)


def _mixes(site: HeadSite, heads: Sequence[HeadId], calls: Calls) -> Iterator[HeadMix]:
    """Yield the matrices of the named heads of one layer, one at a time."""
    mixer: Mixer = site.module
    scan: Scan | None = None
    for head in heads:
        kind = site.kind_of(head.head)
        if kind == "attention":
            # Made lazily: the caller reads one matrix before the next is made.
            yield HeadMix(head, kind, *_map_and_values(site, head.head, calls))
            continue
        if scan is None:  # made once for a layer's heads, and only if one of them is recurrent
            scan = SCANS[site.kind](mixer, calls)
        index = mixer.recurrent.index(head.head) if site.kind == "hybrid" else head.head
        yield HeadMix(head, kind, *scan(index))


def _map_and_values(site: HeadSite, head: int, calls: Calls) -> tuple[Tensor, Tensor]:
    """Return a query head's attention map and values, the latter from the value projection."""
    attention: Mixer = site.module
    layout = site.layout
    own: Sequence[int] = range(site.n_heads)
    groups: Sequence[int] = range(site.n_kv_heads)
    if site.kind == "hybrid":
        # A student's attention holds only the kept heads and the KV heads that they read.
        own = attention.kept
        groups = attention.kv_groups
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


def _scan(
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


def _of_student(mixer: Mixer, calls: Calls) -> Scan:
    inputs = mixer.ssm.scan_inputs(calls[mixer].hidden)
    x_LHP, gates_LH, b_LHN, c_LHN, z_LHP = [_wide(part[0]) for part in inputs]
    return _scan(
        x_LHP,
        gates_LH,
        b_LHN,
        c_LHN,
        _wide(mixer.ssm.D),
        z_LHP,
        mixer.ssm.form.matrix,
    )


def _of_mamba2(mixer: Mixer, calls: Calls) -> Scan:
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
    return _scan(
        x_LHP=_wide(x_LC).unflatten(-1, (n_heads, -1)),
        gates_LH=-_wide(mixer.A_log).exp() * dt_LH,
        b_LHN=by_head(b_LC) * dt_LH.unsqueeze(-1),
        c_LHN=by_head(c_LC),
        d_H=_wide(mixer.D),
        scale_LHP=scale_LC.unflatten(-1, (n_heads, -1)),
    )


def _of_mamba1(mixer: Mixer, calls: Calls) -> Scan:
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
        of_states = mixing_matrix(log_a_LN[None], b_LN1[None], c_LN[None, ..., None])[0]
        matrix_LS = of_states.sum(0)
        # D passes a token's own input on, past the state.
        matrix_LS.diagonal().add_(d_C[channel])
        return matrix_LS, x_LC[:, channel, None], scale_LC[:, channel, None]

    return head


def _convolved(mixer: Mixer, x_LC: Tensor) -> Tensor:
    """Apply the mixer's causal convolution and its activation."""
    # The convolution pads both ends; only its first L outputs are causal.
    return mixer.act(mixer.conv1d(x_LC.mT.unsqueeze(0))[0, :, : len(x_LC)].mT)


def _wide(t: Tensor) -> Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32))


SCANS: dict[str, Callable[[Mixer, Calls], Scan]] = {
    "channel": _of_mamba1,
    "ssm": _of_mamba2,
    "hybrid": _of_student,
}
"""Reader of a mixer's recurrence, by the kind of its site."""
