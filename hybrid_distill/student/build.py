"""Make a student from a teacher: slice the kept heads, copy what stays, start the recurrent heads."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..model import HybridConfig, HybridForCausalLM, packed_inputs
from ..model.layout import HEAD_NORMS, decoder_of
from ..model.mixer import HybridMixer, SSMHeads
from ..plan import HeadPlan
from ..teacher import AttentionSite, attention_sites, eval_mode, fingerprint, trace_mixers
from .init import DEFAULT_INIT, INITS, LayerTrace, SSMInit, init_ssm
from .self_check import check_rows

ACTIONS = ("copied", "sliced", "initialised", "dropped")


_REFUSED = "Its heads can be scored and ablated, but not replaced: take a teacher of another family (docs/heads.md)."


@dataclass(frozen=True)
class TensorRecord:
    """What became of a tensor: of the student's (copied, sliced, initialised), of the teacher's (dropped).

    ``source`` names the teacher's tensors it was made from.
    """

    name: str
    action: str
    shape: tuple[int, ...]
    source: tuple[str, ...] = ()


@dataclass(frozen=True)
class BuildReport:
    """Every tensor of the student, and every tensor of the teacher that the student has no use for."""

    tensors: tuple[TensorRecord, ...]
    init: str
    kept_heads: int
    recurrent_heads: int

    def summary(self) -> str:
        """A few lines for people."""
        lines = [f"{self.kept_heads} heads kept, {self.recurrent_heads} recurrent (init {self.init!r})"]
        for action in ACTIONS:
            records = [record for record in self.tensors if record.action == action]
            n_elements = sum(torch.Size(record.shape).numel() for record in records)
            lines.append(f"  {action:<12}{len(records):>6} tensors {n_elements:>15,} elements")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def build_student(
    teacher: PreTrainedModel,
    plan: HeadPlan,
    *,
    d_state: int,
    conv_width: int = 4,
    recurrence: str = "discrete",
    init: str = DEFAULT_INIT,
    calibration: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> tuple[HybridForCausalLM, BuildReport]:
    """The teacher with every head outside the plan replaced by a recurrent head, in the teacher's dtype.

    ``init`` names how recurrent heads start (`ssm_init.INITS`); a fitted one needs ``calibration``, a batch
    of ordinary text: ``input_ids`` and perhaps ``seq_idx``, [B, L]. ``recurrence`` is the form of the recurrent
    heads (`SSMHeads`), ``seed`` covers everything drawn. The teacher is left as it is and shares no tensor with the
    student (`share_frozen_weights` does that). Raises ValueError for a plan made for another teacher, a bad
    ``d_state``, ``conv_width``, ``recurrence`` or ``init``, for a teacher whose attention is not understood, and for a
    teacher or a student that computes a document otherwise in a packed or padded row or from a cache (`check_rows`).
    """
    check_plan(plan, teacher)
    student = checked_student(teacher, plan, d_state, conv_width, recurrence, init)
    sites = attention_sites(teacher)
    check_rows(teacher)
    traces = _trace(teacher, calibration, init)
    with torch.no_grad():
        tensors, records = _fill(student, teacher, sites, INITS[init], traces, seed)
    student.load_state_dict(tensors, strict=True, assign=True)
    _copy_buffers(student, teacher)
    student.tie_weights()
    student.generation_config = copy.deepcopy(teacher.generation_config)
    check_rows(student)
    report = BuildReport(tuple(records), init, plan.k, plan.n_layers * plan.n_heads - plan.k)
    return student.train(teacher.training), report


def share_frozen_weights(student: HybridForCausalLM, teacher: PreTrainedModel) -> None:
    """Point every parameter of the student outside its mixers at the teacher's own: no second copy in memory.

    Training such a parameter would train the teacher: call `unshare_weights` first.
    """
    named = _teacher_names(teacher)
    _replace_outside_mixers(student, lambda name, parameter: teacher.get_parameter(named(name)))


def unshare_weights(student: HybridForCausalLM) -> None:
    """Give the student its own copy of every parameter outside its mixers; tied parameters stay tied."""
    copies: dict[int, nn.Parameter] = {}

    def own(name: str, parameter: nn.Parameter) -> nn.Parameter:
        if id(parameter) not in copies:
            copies[id(parameter)] = nn.Parameter(
                parameter.detach().clone(), requires_grad=parameter.requires_grad
            )
        return copies[id(parameter)]

    _replace_outside_mixers(student, own)


def _replace_outside_mixers(student: HybridForCausalLM, replacement: Any) -> None:
    inside = tuple(f"{name}." for name in _mixer_names(student))
    for name, parameter in list(student.named_parameters(remove_duplicate=False)):
        if not name.startswith(inside):
            module_name, _, attribute = name.rpartition(".")
            setattr(student.get_submodule(module_name), attribute, replacement(name, parameter))


def check_plan(plan: HeadPlan, teacher: PreTrainedModel) -> None:
    """Raise ValueError for a plan that was made for another teacher."""
    plan.check_fits(teacher)
    if plan.teacher and plan.teacher != (found := fingerprint(teacher)):
        raise ValueError(
            f"the plan was made for the teacher {plan.teacher}, this one is {found}; "
            "score this teacher and make a new plan."
        )


def _mixer_names(student: HybridForCausalLM) -> list[str]:
    return [name for name, module in student.named_modules() if isinstance(module, HybridMixer)]


def _teacher_names(teacher: PreTrainedModel) -> Callable[[str], str]:
    """What turns a student's name of a tensor outside its mixers into the teacher's."""
    output = teacher.get_output_embeddings()
    head = next(name for name, module in teacher.named_modules() if module is output)
    decoder = decoder_of(teacher)
    theirs = {"model": next(name for name, module in teacher.named_modules() if module is decoder), "lm_head": head}

    def named(name: str) -> str:
        root, _, rest = name.partition(".")
        return f"{theirs[root]}.{rest}"

    return named


def _check_attention(site: AttentionSite, n_kv_heads: int) -> None:
    """Refuse what would be lost or cut wrongly: odd projections, unknown norms, unknown tensors."""
    assert site.layout is not None
    for name in site.layout.inputs:
        rows = site.module.get_submodule(name).out_features
        all_heads = range(site.n_heads), range(n_kv_heads)
        n_blocks = len(site.layout.blocks(name, *all_heads, site.n_heads, n_kv_heads))
        if rows != n_blocks * site.head_dim:
            raise ValueError(
                f"{site.name}.{name} has {rows} rows; expected {n_blocks} heads x {site.head_dim} = "
                f"{n_blocks * site.head_dim}. {_REFUSED}"
            )
    linears = (*site.layout.inputs, site.layout.output)
    known = {f"{name}.{part}" for name in linears for part in ("weight", "bias")}
    for name, tensor in site.module.state_dict().items():
        if name not in known and not _is_head_norm(name, tensor, site, n_kv_heads):
            raise ValueError(
                f"{site.name} ({type(site.module).__name__}) holds {name} {list(tensor.shape)}; expected "
                f"{', '.join(linears)}, and at most q_norm and k_norm over one head's {site.head_dim} channels or "
                f"over all heads. {_REFUSED}"
            )


def _is_head_norm(name: str, tensor: Tensor, site: AttentionSite, n_kv_heads: int) -> bool:
    """Whether a tensor of an attention module is that of a norm over one head, or over all where these are alone."""
    module, _, kind = name.rpartition(".")
    n_heads = {"query": site.n_heads, "key": n_kv_heads}
    part = next((part for part, names in HEAD_NORMS.items() if module in names), None)
    if part is None or kind not in ("weight", "bias"):
        return False
    is_fused = site.layout is not None and len(site.layout.inputs) == 1
    return tensor.shape == (site.head_dim,) or (not is_fused and tensor.shape == (n_heads[part] * site.head_dim,))


def checked_student(
    teacher: PreTrainedModel, plan: HeadPlan, d_state: int, conv_width: int, recurrence: str, init: str
) -> HybridForCausalLM:
    """The `empty_student` of a teacher, which may be on the meta device too.

    Raises ValueError for all that `build_student` refuses but the teacher's fingerprint and what only values show.
    """
    if init not in INITS:
        raise ValueError(f"init is {init!r}; it must be one of {', '.join(INITS)}.")
    plan.check_fits(teacher)
    for site in attention_sites(teacher):
        _check_attention(site, plan.n_kv_heads)
    return empty_student(teacher, plan, d_state, conv_width, recurrence)


def empty_student(
    teacher: PreTrainedModel, plan: HeadPlan, d_state: int, conv_width: int, recurrence: str = "discrete"
) -> HybridForCausalLM:
    """A student of the right shapes on the meta device: parameters without values."""
    config = HybridConfig(
        backbone=teacher.config.to_dict(),
        kept=[list(plan.kept_in(layer)) for layer in range(plan.n_layers)],
        d_state=d_state,
        conv_width=conv_width,
        recurrence=recurrence,
        dtype=teacher.dtype,
    )
    config._attn_implementation = teacher.config._attn_implementation
    default = torch.get_default_dtype()
    torch.set_default_dtype(teacher.dtype)
    try:
        with torch.device("meta"):
            return HybridForCausalLM(config)
    finally:
        torch.set_default_dtype(default)


def _fill(
    student: HybridForCausalLM,
    teacher: PreTrainedModel,
    sites: list[AttentionSite],
    init: SSMInit,
    traces: Sequence[LayerTrace | None],
    seed: int,
) -> tuple[dict[str, Tensor], list[TensorRecord]]:
    """The student's state dict, and a record for each tensor of both models."""
    generator = torch.Generator().manual_seed(seed)
    config = cast(HybridConfig, student.config)
    source = teacher.state_dict()
    tensors: dict[str, Tensor] = {}
    records: list[TensorRecord] = []

    def put(name: str, action: str, tensor: Tensor, *made_from: str) -> None:
        tensors[name] = tensor.clone(memory_format=torch.contiguous_format)
        records.append(TensorRecord(name, action, tuple(tensor.shape), made_from))

    parts = zip(sites, _mixer_names(student), student.mixers(), traces, strict=True)
    for site, own, mixer, trace in parts:
        for name, tensor in _kept_tensors(site, mixer).items():
            original = f"{site.name}.{name}"
            action = "copied" if tensor.shape == source[original].shape else "sliced"
            put(f"{own}.attention.{name}", action, tensor, original)
        assert site.layout is not None
        for name, tensor in site.o_proj.state_dict().items():
            put(f"{own}.o_proj.{name}", "copied", tensor, f"{site.name}.{site.layout.output}.{name}")
        if mixer.ssm is not None:
            like = {name: tensor.dtype for name, tensor in mixer.ssm.state_dict().items()}
            started = init_ssm(init, site, mixer.recurrent, config, generator, trace)
            for name, (tensor, used) in started.items():
                put(
                    f"{own}.ssm.{name}",
                    "initialised",
                    tensor.to(like[name]),
                    *(f"{site.name}.{n}" for n in used),
                )
    named = _teacher_names(teacher)
    for name in student.state_dict():
        if name not in tensors:
            put(name, "copied", source[named(name)], named(name))
    used = {name for record in records for name in record.source}
    for name, tensor in source.items():
        if name not in used:
            records.append(TensorRecord(name, "dropped", tuple(tensor.shape), (name,)))
    return tensors, records


@torch.no_grad()
def _trace(
    teacher: PreTrainedModel, calibration: Mapping[str, Any] | None, init: str
) -> Sequence[LayerTrace | None]:
    """What went into and came out of every layer's heads on the calibration batch, if ``init`` is fitted."""
    if not INITS[init].fitted:
        return [None] * teacher.config.num_hidden_layers
    if calibration is None:
        raise ValueError(
            f"init {init!r} is fitted to data; pass a batch as calibration, or choose 'teacher'."
        )
    input_ids, seq_idx = (calibration.get(name) for name in ("input_ids", "seq_idx"))
    if input_ids is None:
        raise ValueError(f"calibration has {', '.join(calibration)}; it needs input_ids.")
    device = teacher.device
    seq_idx = torch.zeros_like(input_ids) if seq_idx is None else seq_idx
    packed = packed_inputs(seq_idx.to(device), teacher.dtype, teacher.config)
    with eval_mode(teacher), trace_mixers(teacher) as calls:
        decoder_of(teacher)(input_ids=input_ids.to(device), use_cache=False, **packed)
    return [LayerTrace(call.hidden_BLD, call.heads_BLHP, seq_idx.to(device)) for call in calls]


def _kept_tensors(site: AttentionSite, mixer: HybridMixer) -> dict[str, Tensor]:
    """The teacher's attention tensors cut down to the kept heads, where the student's are; norms stay whole."""
    if mixer.attention is None:
        return {}
    assert site.layout is not None
    own = mixer.attention.state_dict()
    cut = {}
    for name, tensor in site.module.state_dict().items():
        module = name.partition(".")[0]
        if name in own and own[name].shape != tensor.shape:
            heads = mixer.kept, mixer.kv_groups, site.n_heads, site.n_kv_heads
            tensor = tensor.unflatten(0, (-1, site.head_dim))[site.layout.blocks(module, *heads)].flatten(0, 1)
        if module != site.layout.output:
            cut[name] = tensor
    return cut


def _copy_buffers(student: HybridForCausalLM, teacher: PreTrainedModel) -> None:
    """Rotary frequencies and the like are in no state dict: take them, computed, from the teacher.

    With all else that their module knows: dynamic RoPE keeps frequencies for the longest row that it has seen.
    """
    named = _teacher_names(teacher)
    for module_name in {name.rpartition(".")[0] for name, buffer in student.named_buffers() if buffer.is_meta}:
        theirs = teacher.get_submodule(named(module_name))
        if next(theirs.parameters(), None) is None:
            parent, _, attribute = module_name.rpartition(".")
            setattr(student.get_submodule(parent), attribute, copy.deepcopy(theirs))
        else:
            own = student.get_submodule(module_name)
            for attribute, buffer in list(own.named_buffers(recurse=False)):
                setattr(own, attribute, theirs.get_buffer(attribute).clone() if buffer.is_meta else buffer)


def graft_recurrent_heads(student: HybridForCausalLM, donor: HybridForCausalLM) -> None:
    """Copy into the student's recurrent heads those that stand at the same place in ``donor``.

    Meant for a donor without kept heads that was aligned head by head: students that differ in their plan
    alone then share one alignment. Raises ValueError for a donor of another shape, or one that keeps a head
    the student has not.
    """
    for mixer, source in zip(student.mixers(), donor.mixers(), strict=True):
        if mixer.ssm is None:
            continue
        missing = sorted(set(mixer.recurrent) - set(source.recurrent))
        if missing or source.ssm is None or _form(source.ssm) != _form(mixer.ssm):
            raise ValueError(
                f"layer {mixer.layer} of the donor cannot give recurrent heads "
                f"{missing or 'of this form'}; "
                "align a student that keeps no head, with the same d_state, conv_width and recurrence."
            )
        _copy_heads(mixer.ssm, source.ssm, [source.recurrent.index(head) for head in mixer.recurrent])


def _form(heads: SSMHeads) -> tuple[int, bool]:
    return heads.d_state, heads.is_mamba2


@torch.no_grad()
def _copy_heads(target: SSMHeads, source: SSMHeads, picked: list[int]) -> None:
    """Fill ``target`` with the picked heads of ``source``; a head's channels stand together everywhere."""
    own = dict(target.named_parameters())
    for name, tensor in source.named_parameters():
        # The convolution's channels are x, B and C, one after the other, each with all its heads.
        sizes = [source.n_heads * n for n in (source.head_dim, source.d_state, source.d_state)]
        parts = tensor.split(sizes) if name == "conv_weight" else [tensor]
        rows = [part.unflatten(0, (source.n_heads, -1))[picked].flatten(0, 1) for part in parts]
        own[name].copy_(torch.cat(rows))
