"""How a head mixes the tokens of one prompt, as a matrix: attention maps and materialised SSMs.

For each kind of head, ``matrix x values`` is what the head computes, in the model's own numbers:

    attention   softmax(q k^T)                                      values of its KV group
    ssm         C_i . B_j dt_j prod_{j < s <= i} a_s, D on the diagonal    x after the convolution (Mamba-2, students)
    channel     sum_n C_in B_jn dt_j prod_{j < s <= i} a_sn, same          one channel of x (Mamba-1)

and the output projection reads that times ``scale``, the gate and the norm behind an SSM (docs/heads.md).

Shapes: T target token, S source token, L length, H head, P head dim, N state size, C channel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...model.ssd import mixing_matrix
from ...plan import HeadId
from ...probes.answering import forward
from ...teacher import (
    HeadKind,
    HeadSite,
    asked_for,
    check_exists,
    eager_attention,
    eval_mode,
    head_sites,
    longest_context,
    record_heads,
)

Mixer = Any
"""A mixer of some family, with that family's attributes."""
Recorded = Mapping[str, Tensor]
Read = Callable[[tuple[Tensor, ...], dict[str, Tensor], tuple[Tensor, ...]], Tensor]
"""Takes a tensor from a module's call: positional arguments, named ones, output."""
Scan = Callable[[int], tuple[Tensor, Tensor, Tensor]]
"""A layer's recurrence: (matrix_TS, values_SP, scale_TP) of a head."""

MAX_BYTES = 4 * 2**30
BYTES_PER_ENTRY = 28  # of a mixing matrix while it is made: decays in float64, and the products in float32


@dataclass(frozen=True, eq=False)
class HeadMix:
    """One head on one prompt: the output projection reads ``scale_TP * (matrix_TS @ values_SP)``.

    ``scale_TP`` is None for an attention head, else the gate of an SSM head and the norm behind it, if any. Float32
    (float64 in a model of that).
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
    heads: Iterable[HeadId],
    *,
    kind: HeadKind | None = None,
    max_bytes: int = MAX_BYTES,
) -> list[HeadMix]:
    """Return the matrices of some heads on one prompt, in order, from one forward. ``kind`` as in `head_sites`.

    Raises ValueError for a head or kind that the model does not have, for a prompt beyond its context, and for matrices
    of more than ``max_bytes`` (`mixing_bytes`), before anything is computed.
    """
    heads = [HeadId(*head) for head in heads]
    sites = mixing_sites(model, kind)
    chosen = _sites_of(model, sites, heads, kind)
    check_prompt(model, ids, heads, sites, max_bytes)
    with eval_mode(model), _eager_where_needed(model, sites), _recording(chosen, heads) as recorded:
        ids_1L = torch.tensor([list(ids)], device=model.device)
        forward(model, ids_1L, torch.ones_like(ids_1L), logits_to_keep=1)
        mixes = {mix.head: mix for site in chosen for mix in _mixes(site, heads, recorded[site.layer])}
    return [mixes[head] for head in heads]


@contextmanager
def mask_heads(
    model: PreTrainedModel, masks: Mapping[HeadId, Tensor], *, kind: HeadKind | None = None
) -> Iterator[None]:
    """Let each named head mix by ``matrix * mask``, masks being booleans [T, S]. ``kind`` as in `head_sites`.

    Rows are not normalized anew. A row whose mask keeps everything stays the same to the last bit; a mask of nothing
    removes the head. The gate and the norm behind an SSM stay those of the whole head. Raises ValueError for a head
    that does not exist, and for forwards of anything but one prompt of T tokens without a cache. All attention runs
    eagerly: no other returns its maps.
    """
    masks = {HeadId(*head): mask_TS for head, mask_TS in masks.items()}
    chosen = _sites_of(model, mixing_sites(model, kind), masks, kind)
    with ExitStack() as hooks:
        hooks.enter_context(_eager_where_needed(model, chosen))
        recorded = hooks.enter_context(_recording(chosen, list(masks)))
        for site in chosen:
            own = {head: mask_TS for head, mask_TS in masks.items() if head.layer == site.layer}
            read = hooks.enter_context(record_heads(model, site.layer, kind=asked_for(site.kind)))
            masked = _masker(site, own, recorded[site.layer], read)
            hooks.callback(site.module.register_forward_hook(masked).remove)
        yield


def _masker(
    site: HeadSite, masks: Mapping[HeadId, Tensor], recorded: Recorded, read: list[Tensor]
) -> Callable[[nn.Module, object, object], object]:
    """Make a hook behind a mixer that computes its output anew from its heads, some of them masked."""

    def masked(module: nn.Module, args: object, output: object) -> object:
        if not read:
            return None  # a shared module that runs for another layer
        heads_BTHP = read.pop()
        for mix in _mixes(site, list(masks), recorded):
            _mask_one(mix, masks[mix.head].to(mix.matrix_TS.device), heads_BTHP)
        # Not by a call: hooks on the projection have seen these heads.
        out_BTD = site.o_proj.forward(heads_BTHP.flatten(-2))
        return (out_BTD, *output[1:]) if isinstance(output, tuple) else out_BTD

    return masked


def _mask_one(mix: HeadMix, mask_TS: Tensor, heads_BTHP: Tensor) -> None:
    """Put a masked head's output in the place of its own."""
    if len(heads_BTHP) != 1 or mask_TS.shape != mix.matrix_TS.shape:
        raise ValueError(
            f"the mask of {mix.head} is {tuple(mask_TS.shape)}, the forward has {len(heads_BTHP)} rows of "
            f"{heads_BTHP.shape[1]} tokens; run one prompt of as many tokens as its mask has, without a cache."
        )
    own_TP = heads_BTHP[0, :, mix.head.head]
    whole_T1 = (mask_TS | ~torch.ones_like(mask_TS).tril()).all(-1, keepdim=True)
    masked_TP = replace(mix, matrix_TS=mix.matrix_TS * mask_TS).output().to(own_TP.dtype)
    heads_BTHP[0, :, mix.head.head] = torch.where(whole_T1, own_TP, masked_TP)


def mixing_sites(model: PreTrainedModel, kind: HeadKind | None = None) -> list[HeadSite]:
    """Return `head_sites`; of a student those that have heads of this kind, kept or recurrent."""
    sites = head_sites(model)
    if kind is None or sites[0].kind != "hybrid":
        return head_sites(model, kind)
    found = [site for site in sites if heads_in(site, kind)]
    if not found:
        raise ValueError(f"this student has no heads of kind {kind!r}: of its {len(sites)} layers none has any.")
    return found


def heads_in(site: HeadSite, kind: HeadKind | None) -> list[HeadId]:
    """Return a layer's heads of this kind."""
    return [HeadId(site.layer, head) for head in range(site.n_heads) if kind in (None, site.kind_of(head))]


def _sites_of(
    model: PreTrainedModel, sites: list[HeadSite], heads: Iterable[HeadId], kind: HeadKind | None
) -> list[HeadSite]:
    """Return the sites of these heads. Raises ValueError for a head that does not exist, or is of another kind."""
    by_layer = {site.layer: site for site in sites}
    for head in heads:
        check_exists(model, sites, head)
        if head not in heads_in(site := by_layer[head.layer], kind):
            raise ValueError(
                f"{head} of this student is of kind {site.kind_of(head.head)!r}; ask for one of kind {kind!r}."
            )
    layers = {head.layer for head in heads}
    return [site for site in sites if site.layer in layers]


def check_prompt(
    model: PreTrainedModel, ids: Sequence[int], heads: Sequence[HeadId], sites: Sequence[HeadSite], max_bytes: int
) -> None:
    """Raise ValueError for a prompt that is empty or beyond the model's context, or whose matrices are too large."""
    context = longest_context(model.config)
    if not ids or (context is not None and len(ids) > context):
        limit = "at least 1 token" if context is None else f"1 to {context} tokens, the model's context"
        raise ValueError(f"the prompt has {len(ids)} tokens; it must have {limit}.")
    needed = mixing_bytes(model, len(ids), heads, sites)
    if needed > max_bytes:
        raise ValueError(
            f"the matrices of {len(heads)} heads on {len(ids)} tokens take about {needed / 2**30:.1f} GiB, more than "
            f"the {max_bytes / 2**30:.1f} GiB allowed; take a shorter prompt or fewer heads, or allow more."
        )


def mixing_bytes(model: PreTrainedModel, n_tokens: int, heads: Sequence[HeadId], sites: Sequence[HeadSite]) -> int:
    """Estimate the memory that `mix_heads` needs beside the model: the matrices, and what making them takes."""
    kept = max(4, model.dtype.itemsize) * len(heads)
    layers = {head.layer for head in heads}
    # Every state of a Mamba-1 channel has its own decay: as many matrices are added up.
    mixers: dict[int, Mixer] = {site.layer: site.module for site in sites if site.kind == "channel"}
    states = {layer: mixer.A_log.shape[-1] for layer, mixer in mixers.items()}
    working = [BYTES_PER_ENTRY * states.get(layer, 1) for layer in layers]
    # All layers run in eager attention, one after the other: the scores, and their softmax in float32.
    working += [site.n_heads * (4 + 2 * model.dtype.itemsize) for site in sites if _has_attention(site)]
    return n_tokens**2 * (kept + max(working, default=0))


def _has_attention(site: HeadSite) -> bool:
    return any(site.kind_of(head) == "attention" for head in range(site.n_heads))


@contextmanager
def _eager_where_needed(model: PreTrainedModel, sites: Sequence[HeadSite]) -> Iterator[None]:
    """Run attention eagerly, if there is any, for its maps."""
    with eager_attention(model) if any(map(_has_attention, sites)) else nullcontext():
        yield


@contextmanager
def _recording(sites: Sequence[HeadSite], heads: Sequence[HeadId]) -> Iterator[dict[int, dict[str, Tensor]]]:
    """Yield the ingredients of each layer's matrices, by layer and name; the next forward fills them in."""
    recorded: dict[int, dict[str, Tensor]] = {site.layer: {} for site in sites}
    running: list[int] = []  # layers may share a module, which then runs once for each

    def recorder(layer: int, name: str, read: Read) -> Callable[..., None]:
        def record(module: nn.Module, *call: Mixer) -> None:
            if running == [layer]:
                recorded[layer][name] = read(*call)

        return record

    with ExitStack() as hooks:
        for site in sites:
            enter = site.block.register_forward_pre_hook(lambda *_, layer=site.layer: running.append(layer))
            leave = site.block.register_forward_hook(lambda *_: running.clear(), always_call=True)
            hooks.callback(enter.remove)
            hooks.callback(leave.remove)
            for name, (module, read) in _reads(site, [h.head for h in heads if h.layer == site.layer]).items():
                handle = module.register_forward_hook(recorder(site.layer, name, read), with_kwargs=True)
                hooks.callback(handle.remove)
        yield recorded


def _reads(site: HeadSite, heads: Sequence[int]) -> dict[str, tuple[nn.Module, Read]]:
    """Return the modules of a layer to hook, and what to take from their calls (the prompt is the only row)."""
    mixer: Mixer = site.module
    if site.kind == "hybrid":
        ours: dict[str, tuple[nn.Module, Read]] = {
            "hidden": (mixer, lambda args, kwargs, output: args[0] if args else kwargs["hidden_states"])
        }
        kept = [mixer.kept.index(head) for head in heads if head in mixer.kept]
        return ours | (_attention_reads(mixer.attention, mixer.layout, kept) if kept else {})
    if site.kind == "attention":
        return _attention_reads(mixer, site.layout, list(heads))
    reads: dict[str, tuple[nn.Module, Read]] = {"projected": (mixer.in_proj, lambda args, kwargs, output: output[0])}
    if site.kind == "ssm" and hasattr(mixer.norm, "weight"):
        reads["scanned"] = (mixer.norm, lambda args, kwargs, output: args[0][0])
    return reads


def _attention_reads(attention: Mixer, layout: Mixer, heads: Sequence[int]) -> dict[str, tuple[nn.Module, Read]]:
    """The same for an attention module; ``heads`` counts its own."""

    def chosen_maps(args: object, kwargs: object, output: tuple[Tensor, ...]) -> Tensor:
        if not isinstance(output, tuple) or not isinstance(output[1], Tensor):
            raise ValueError(f"{type(attention).__name__} returns no attention maps, even in eager attention.")
        return output[1][0, list(heads)]

    return {
        "maps": (attention, chosen_maps),
        "values": (attention.get_submodule(layout.value), lambda args, kwargs, output: output[0]),
    }


def _mixes(site: HeadSite, heads: Sequence[HeadId], recorded: Recorded) -> Iterator[HeadMix]:
    """Make the matrices of the named heads of one layer, one after the other."""
    mixer: Mixer = site.module
    scan: Scan = _no_scan
    if site.kind == "channel":
        scan = _of_mamba1(mixer, recorded["projected"])
    elif site.kind == "ssm":
        scan = _of_mamba2(mixer, recorded["projected"], recorded.get("scanned"))
    elif site.kind == "hybrid" and mixer.ssm is not None:
        scan = _of_student(mixer.ssm, recorded["hidden"])
    maps = iter(recorded.get("maps", ()))
    for head in (head for head in heads if head.layer == site.layer):
        if site.kind_of(head.head) == "attention":
            values_SP = _values(site, head.head, recorded["values"])
            yield HeadMix(head, "attention", next(maps).to(values_SP.dtype), values_SP.contiguous())
        else:
            index = mixer.recurrent.index(head.head) if site.kind == "hybrid" else head.head
            yield HeadMix(head, site.kind_of(head.head), *scan(index))


def _values(site: HeadSite, head: int, out_LC: Tensor) -> Tensor:
    """Return a query head's values, [S, P], from the output of the linear that makes them."""
    mixer: Mixer = site.module
    group, sizes = head // (site.n_heads // site.n_kv_heads), (site.n_heads, site.n_kv_heads)
    layout: Mixer = site.layout
    if site.kind == "hybrid":
        layout, group, sizes = mixer.layout, mixer.kv_groups.index(group), (len(mixer.kept), len(mixer.kv_groups))
    return _wide(out_LC.unflatten(-1, (-1, site.head_dim))[:, layout.block("value", group, *sizes)])


def _no_scan(head: int) -> tuple[Tensor, Tensor, Tensor]:
    raise AssertionError(f"head {head} is in a layer without recurrent heads")


def _scan(x_LHP: Tensor, log_a_LH: Tensor, b_LHN: Tensor, c_LHN: Tensor, d_H: Tensor, scale_LHP: Tensor) -> Scan:
    def head(h: int) -> tuple[Tensor, Tensor, Tensor]:
        matrix_LS = mixing_matrix(*(part[None, :, h : h + 1] for part in (log_a_LH, b_LHN, c_LHN)))[0, 0]
        matrix_LS.diagonal().add_(d_H[h])
        return matrix_LS, x_LHP[:, h], scale_LHP[:, h]

    return head


def _of_student(ssm: Mixer, hidden_1LD: Tensor) -> Scan:
    x_LHP, log_a_LH, b_LHN, c_LHN, gate_LHP = (_wide(part[0]) for part in ssm.scan_inputs(hidden_1LD))
    return _scan(x_LHP, log_a_LH, b_LHN, c_LHN, _wide(ssm.D), gate_LHP)


def _of_mamba2(mixer: Mixer, projected_LC: Tensor, scanned_LC: Tensor | None) -> Scan:
    """Read Mamba-2, Zamba2 or Falcon-H1, from the output of ``in_proj``; Falcon-H1 scales that first."""
    n_heads, n_groups = mixer.num_heads, mixer.n_groups
    width, state = mixer.intermediate_size, n_groups * mixer.ssm_state_size
    if hasattr(mixer, "mup_vector"):
        projected_LC = projected_LC * mixer.mup_vector.flatten()
    gate_LC, xbc_LC, dt_LH = projected_LC.split([width, width + 2 * state, n_heads], dim=-1)
    x_LC, b_LC, c_LC = _convolved(mixer, xbc_LC).split([width, state, state], dim=-1)
    dt_LH = F.softplus(_wide(dt_LH + mixer.dt_bias)).clamp(*mixer.time_step_limit)
    b_LHN, c_LHN = (
        _wide(t).unflatten(-1, (n_groups, -1)).repeat_interleave(n_heads // n_groups, dim=1) for t in (b_LC, c_LC)
    )
    x_LHP, scale_LHP = (
        t.unflatten(-1, (n_heads, -1)) for t in (_wide(x_LC), _gate_and_norm(mixer, _wide(gate_LC), scanned_LC))
    )
    log_a_LH = -_wide(mixer.A_log).exp() * dt_LH
    return _scan(x_LHP, log_a_LH, b_LHN * dt_LH.unsqueeze(-1), c_LHN, _wide(mixer.D), scale_LHP)


def _gate_and_norm(mixer: Mixer, gate_LC: Tensor, scanned_LC: Tensor | None) -> Tensor:
    """Return the factor of the scan's output: silu(z) and, where there is a norm, its weight over the groups' RMS."""
    open_LC = F.silu(gate_LC)
    if scanned_LC is None:
        return open_LC
    norm = mixer.norm
    in_norm_LC = _wide(scanned_LC) * (1 if getattr(norm, "norm_before_gate", False) else open_LC)
    in_groups = in_norm_LC.unflatten(-1, (mixer.n_groups, -1))
    rms = (in_groups.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
    return open_LC * norm.weight / rms.expand_as(in_groups).flatten(-2)


def _of_mamba1(mixer: Mixer, projected_LC: Tensor) -> Scan:
    """Read Falcon-Mamba, which norms dt, B and C, or Mamba, which does not.

    B and C are shared by the channels, each of which has N decays.
    """
    x_LC, gate_LC = projected_LC.chunk(2, dim=-1)
    x_LC = _convolved(mixer, x_LC)
    sizes = [mixer.time_step_rank, mixer.ssm_state_size, mixer.ssm_state_size]
    parts = mixer.x_proj(x_LC).split(sizes, dim=-1)
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
