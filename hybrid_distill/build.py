"""Make a student from a teacher: slice the kept heads, copy what stays, start the recurrent heads."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .model import HybridConfig, HybridForCausalLM, packed_inputs
from .model.mixer import HybridMixer, SSMHeads
from .plan import HeadPlan
from .ssm_init import DEFAULT_INIT, INITS, LayerTrace, SSMInit, init_ssm
from .teacher import AttentionSite, attention_sites, eval_mode, fingerprint, trace_mixers

ACTIONS = ("copied", "sliced", "initialised", "dropped")
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


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
    ``d_state``, ``conv_width``, ``recurrence`` or ``init``, and for a teacher whose attention is not understood.
    """
    if init not in INITS:
        raise ValueError(f"init is {init!r}; it must be one of {', '.join(INITS)}.")
    plan.check_fits(teacher)
    _check_fingerprint(plan, teacher)
    sites = attention_sites(teacher)
    for site in sites:
        _check_attention(site)
    student = empty_student(teacher, plan, d_state, conv_width, recurrence)
    traces = _trace(teacher, calibration, init)
    with torch.no_grad():
        tensors, records = _fill(student, teacher, sites, INITS[init], traces, seed)
    student.load_state_dict(tensors, strict=True, assign=True)
    _copy_buffers(student, teacher)
    student.tie_weights()
    student.generation_config = copy.deepcopy(teacher.generation_config)
    report = BuildReport(tuple(records), init, plan.k, plan.n_layers * plan.n_heads - plan.k)
    return student.train(teacher.training), report


def share_frozen_weights(student: HybridForCausalLM, teacher: PreTrainedModel) -> None:
    """Point every parameter of the student outside its mixers at the teacher's own: no second copy in memory.

    Training such a parameter would train the teacher: call `unshare_weights` first.
    """
    _replace_outside_mixers(student, lambda name, parameter: teacher.get_parameter(name))


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
    for name, parameter in list(student.named_parameters(remove_duplicate=False)):
        if ".self_attn." not in name:
            module_name, _, attribute = name.rpartition(".")
            setattr(student.get_submodule(module_name), attribute, replacement(name, parameter))


def _check_fingerprint(plan: HeadPlan, teacher: PreTrainedModel) -> None:
    if plan.teacher and plan.teacher != (found := fingerprint(teacher)):
        raise ValueError(
            f"the plan was made for the teacher {plan.teacher}, this one is {found}; "
            "score this teacher and make a new plan."
        )


def _check_attention(site: AttentionSite) -> None:
    """Refuse what would be lost or cut wrongly: odd projections, norms over all heads, unknown tensors."""
    n_rows = {"q_proj": site.n_heads, "k_proj": site.n_kv_heads, "v_proj": site.n_kv_heads}
    for name, n_heads in n_rows.items():
        rows, expected = getattr(site.module, name).out_features, n_heads * site.head_dim
        if rows != expected:
            raise ValueError(
                f"{site.name}.{name} has {rows} rows; "
                f"expected {n_heads} heads x {site.head_dim} = {expected}."
            )
    known = {f"{name}.{part}" for name in _PROJECTIONS for part in ("weight", "bias")}
    for name, tensor in site.module.state_dict().items():
        is_head_norm = name in ("q_norm.weight", "k_norm.weight") and tensor.shape == (site.head_dim,)
        if name not in known and not is_head_norm:
            raise ValueError(
                f"{site.name} ({type(site.module).__name__}) holds {name} {list(tensor.shape)}; expected "
                f"{', '.join(_PROJECTIONS)}, and at most q_norm and k_norm over one head's "
                f"{site.head_dim} channels."
            )


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
        tensors[name] = tensor.contiguous().clone()
        records.append(TensorRecord(name, action, tuple(tensor.shape), made_from))

    for site, mixer, trace in zip(sites, student.mixers(), traces, strict=True):
        for name, tensor in _kept_tensors(site, mixer).items():
            original = f"{site.name}.{name}"
            action = "copied" if tensor.shape == source[original].shape else "sliced"
            put(f"{site.name}.attention.{name}", action, tensor, original)
        if mixer.ssm is not None:
            like = {name: tensor.dtype for name, tensor in mixer.ssm.state_dict().items()}
            started = init_ssm(init, site, mixer.recurrent, config, generator, trace)
            for name, (tensor, used) in started.items():
                put(
                    f"{site.name}.ssm.{name}",
                    "initialised",
                    tensor.to(like[name]),
                    *(f"{site.name}.{n}" for n in used),
                )
    for name in student.state_dict():
        if name not in tensors:
            put(name, "copied", source[name], name)
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
        teacher.base_model(input_ids=input_ids.to(device), use_cache=False, **packed)
    return [LayerTrace(call.hidden_BLD, call.heads_BLHP, seq_idx.to(device)) for call in calls]


def _kept_tensors(site: AttentionSite, mixer: HybridMixer) -> dict[str, Tensor]:
    """The teacher's attention tensors cut down to the kept heads; every head uses the whole head norms."""
    if mixer.attention is None:
        return {}
    heads = {"q_proj": mixer.kept, "k_proj": mixer.kv_groups, "v_proj": mixer.kv_groups}
    cut = {}
    for name, tensor in site.module.state_dict().items():
        module = name.partition(".")[0]
        if module in heads:
            cut[name] = tensor.unflatten(0, (-1, site.head_dim))[list(heads[module])].flatten(0, 1)
        elif module != "o_proj":
            cut[name] = tensor
    return cut


def _copy_buffers(student: HybridForCausalLM, teacher: PreTrainedModel) -> None:
    """Rotary frequencies and the like are in no state dict: take them, computed, from the teacher."""
    theirs = dict(teacher.named_buffers())
    for name, buffer in list(student.named_buffers()):
        if buffer.is_meta:
            module_name, _, attribute = name.rpartition(".")
            setattr(student.get_submodule(module_name), attribute, theirs[name].clone())


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
