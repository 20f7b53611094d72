"""Build a student from a teacher: slice the kept heads, copy the other weights, initialize the recurrent heads."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from ..model import HybridConfig, HybridForCausalLM, HybridMixer, packed_inputs
from ..model.layout import HEAD_NORMS, decoder_of
from ..model.mixer import silence
from ..model.recurrent_heads import SSMHeads
from ..model.self_check import check_rows
from ..plan import HeadPlan
from ..teacher import (
    SUPPORTED,
    AttentionSite,
    MixerCall,
    attention_sites,
    eval_mode,
    fingerprint,
    trace_mixers,
)
from .init import DEFAULT_INIT, INITS, Init, LayerTrace, init_ssm

log = logging.getLogger(__name__)
SMALL = 256
"""Vocabulary and MLP width of the student that `check_family` makes."""
SHORT_WINDOW = 3
"""Largest window of that student, shorter than the document that it is checked on."""
Action = Literal["copied", "sliced", "initialized", "dropped"]
_REFUSED = "Its heads can be scored and ablated, but not replaced: take a teacher of another family (docs/heads.md)."
_OTHER_TEACHER = (
    f"Take a teacher of another family ({SUPPORTED}) or another version of transformers, or remove from its "
    "config.json windows that its attention does not have (sliding_window)."
)


@dataclass(frozen=True)
class TensorRecord:
    """Origin of a student tensor (copied, sliced, initialized), or a teacher tensor that was dropped.

    ``source`` names the teacher tensors that it was made from.
    """

    name: str
    action: Action
    shape: tuple[int, ...]
    source: tuple[str, ...] = ()


@dataclass(frozen=True)
class BuildReport:
    """Record of every student tensor, and of every teacher tensor that the student does not use."""

    tensors: tuple[TensorRecord, ...]
    init: str
    kept_heads: int
    recurrent_heads: int


def build_student(
    teacher: PreTrainedModel,
    plan: HeadPlan,
    *,
    d_state: int,
    conv_width: int = 4,
    recurrence: str = "discrete",
    window: int = 0,
    sinks: int = 0,
    init: Init = DEFAULT_INIT,
    calibration: Mapping[str, object] | None = None,
    recurrent: Mapping[str, Tensor] | None = None,
    seed: int = 0,
    kernels: str = "auto",
) -> tuple[HybridForCausalLM, BuildReport]:
    """Copy the teacher, in its dtype, and replace every head outside the plan by a recurrent head.

    With a ``window``, a replaced head also attends to the last ``window`` tokens of a document and its first ``sinks``,
    with the teacher's own weights. Its recurrent part is fitted to what that leaves over, and starts behind a closed
    gate: the new student computes what the teacher would under these windows. ``d_state`` 0 leaves the windows alone.

    ``init`` initializes the recurrent heads; ``fitted`` needs ``calibration``, a batch of ordinary text:
    ``input_ids`` and optionally ``seq_idx``, both [B, L]. ``recurrence`` is the form of the recurrent heads
    (`SSMHeads`), ``kernels`` their implementation (`ssd.IMPLEMENTATIONS`), which the student checks itself on.
    ``seed`` sets all random draws. ``recurrent`` holds the `recurrent_tensors` of the same student, built before:
    nothing is initialized then, and the student has the same bits. The teacher is unchanged and shares no tensor with
    the student; to share, call `share_frozen_weights`. Raises ValueError for a plan made for another teacher, a bad
    option, unsupported attention, and a model that fails `check_rows`.
    """
    check_plan(plan, teacher)
    sites = checked_sites(teacher, plan, init)
    student = empty_student(
        teacher,
        plan,
        d_state=d_state,
        conv_width=conv_width,
        recurrence=recurrence,
        window=window,
        sinks=sinks,
    )
    student.set_ssm_implementation(kernels)  # before the student checks itself
    check_teacher_rows(teacher)
    made = list(_copied_tensors(student, teacher, sites))
    _load(student, made)
    _copy_buffers(student, teacher)
    student.tie_weights()
    if recurrent is not None:
        started = list(_known_tensors(student, recurrent, teacher.device))
    else:
        traces: Sequence[LayerTrace | None] = [None] * len(sites)
        if d_state:
            traces = _trace(teacher, student, calibration, init)
        with torch.no_grad():
            started = list(_initialized_tensors(student, sites, init, traces, seed))
    _load(student, started)
    made += started
    student.generation_config = copy.deepcopy(teacher.generation_config)
    check_rows(student, _OTHER_TEACHER)
    records = [record for record, _ in made]
    used = {name for record in records for name in record.source}
    dropped = [
        TensorRecord(name, "dropped", tuple(tensor.shape), (name,))
        for name, tensor in teacher.state_dict().items()
        if name not in used
    ]
    report = BuildReport((*records, *dropped), init, plan.k, plan.n_layers * plan.n_heads - plan.k)
    return student.train(teacher.training), report


def check_plan(plan: HeadPlan, teacher: PreTrainedModel) -> None:
    """Raise ValueError for a plan that was made for another teacher."""
    plan.check_fits(teacher)
    if plan.teacher and plan.teacher != (found := fingerprint(teacher)):
        raise ValueError(
            f"the plan was made for the teacher {plan.teacher}, this one is {found}; "
            "score this teacher and make a new plan."
        )


def check_teacher_rows(teacher: PreTrainedModel) -> None:
    """Check that the teacher itself computes a document in every way alike. Raises ValueError as `check_rows` does."""
    check_rows(teacher, _OTHER_TEACHER)


def check_family(teacher: PreTrainedModel, recurrence: str = "discrete", window: int = 0) -> None:
    """Check a small random student of the teacher's family with `check_rows`, before anything is computed.

    It has the teacher's config, but few layers (one of each type), a small vocabulary and narrow MLPs. The teacher may
    be on the meta device. Raises ValueError if this version of transformers computes such a student wrongly.
    """
    try:
        config = _small_config(teacher.config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            small = AutoModelForCausalLM.from_config(
                config,
                dtype=torch.float32,
                attn_implementation=teacher.config._attn_implementation,
                trust_remote_code=False,
            )
    except Exception as error:  # a family whose sizes depend on each other; its student is checked when it is built
        log.debug("no small %s could be made: %s", type(teacher).__name__, error)
        return
    first_heads = [(layer, 0) for layer in range(config.num_hidden_layers)]
    plan = HeadPlan.from_pairs(small, first_heads)
    build_student(
        small,
        plan,
        d_state=4,
        recurrence=recurrence,
        window=min(window, SHORT_WINDOW),
        sinks=min(window, 1),
        init="random",
    )


def _small_config(config: PretrainedConfig) -> PretrainedConfig:
    fields = config.to_dict()
    n_layers = config.num_hidden_layers
    types = fields.get("layer_types") or ["first", "second"][:n_layers]
    layers = sorted({types.index(kind) for kind in types})
    for name, value in fields.items():
        if isinstance(value, list) and len(value) == n_layers:
            fields[name] = [value[layer] for layer in layers]
        if name.endswith("token_id"):  # may lie outside the small vocabulary
            fields[name] = None
    fields |= {"num_hidden_layers": len(layers), "vocab_size": min(config.vocab_size, SMALL)}
    if isinstance(fields.get("intermediate_size"), int):
        fields["intermediate_size"] = min(fields["intermediate_size"], SMALL)
    return type(config).from_dict(fields)


def empty_student(
    teacher: PreTrainedModel,
    plan: HeadPlan,
    *,
    d_state: int,
    conv_width: int,
    recurrence: str = "discrete",
    window: int = 0,
    sinks: int = 0,
) -> HybridForCausalLM:
    """Make a student on the meta device: shapes without values. The teacher may be on the meta device too."""
    config = HybridConfig(
        backbone=teacher.config.to_dict(),
        kept=[list(plan.kept_in(layer)) for layer in range(plan.n_layers)],
        d_state=d_state,
        conv_width=conv_width,
        recurrence=recurrence,
        window=window,
        sinks=sinks,
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


def checked_sites(teacher: PreTrainedModel, plan: HeadPlan, init: Init) -> list[AttentionSite]:
    """Find the teacher's attention. Raises ValueError for an unknown init, a plan of another shape or unknown parts."""
    if init not in INITS:
        raise ValueError(f"init is {init!r}; it must be one of {', '.join(INITS)}.")
    plan.check_fits(teacher)
    sites = attention_sites(teacher)
    for site in sites:
        _check_attention(site, plan.n_kv_heads)
    return sites


def _check_attention(site: AttentionSite, n_kv_heads: int) -> None:
    """Raise ValueError for parts that a student would lose or slice wrongly: odd projections, unknown tensors."""
    assert site.layout is not None
    for name in site.layout.inputs:
        rows = site.linear(name).out_features
        all_heads = range(site.n_heads), range(n_kv_heads)
        n_blocks = len(site.layout.blocks(name, *all_heads, site.n_heads, n_kv_heads))
        if rows != n_blocks * site.head_dim:
            raise ValueError(
                f"{site.name}.{name} has {rows} rows; expected {n_blocks} heads x {site.head_dim} = "
                f"{n_blocks * site.head_dim}. {_REFUSED}"
            )
    linears = (*site.layout.inputs, site.layout.output)
    known = {f"{name}.{part}" for name in linears for part in ("weight", "bias")}
    # A norm covers one head, or all heads if queries, keys and values have separate linears.
    sizes = {
        "query": {site.head_dim, site.n_heads * site.head_dim},
        "key": {site.head_dim, n_kv_heads * site.head_dim},
    }
    norms = {
        f"{name}.{kind}": sizes[part] if len(site.layout.inputs) > 1 else {site.head_dim}
        for part, names in HEAD_NORMS.items()
        for name in names
        for kind in ("weight", "bias")
    }
    for name, tensor in site.module.state_dict().items():
        if name not in known and not (tensor.dim() == 1 and len(tensor) in norms.get(name, ())):
            raise ValueError(
                f"{site.name} ({type(site.module).__name__}) holds {name} {list(tensor.shape)}; expected "
                f"{', '.join(linears)}, and at most q_norm and k_norm over one head's {site.head_dim} channels or "
                f"over all heads. {_REFUSED}"
            )


Made = tuple[TensorRecord, Tensor]


def _load(student: HybridForCausalLM, made: Sequence[Made]) -> None:
    """Give the student these tensors, as copies. Raises RuntimeError for a tensor that it does not have."""
    tensors = {}
    for record, tensor in made:
        tensors[record.name] = tensor.clone(memory_format=torch.contiguous_format)
    unexpected = student.load_state_dict(tensors, strict=False, assign=True).unexpected_keys
    if unexpected:
        raise RuntimeError(f"the student has no tensors {', '.join(unexpected)}")


@torch.no_grad()
def _trace(
    teacher: PreTrainedModel,
    student: HybridForCausalLM,
    calibration: Mapping[str, object] | None,
    init: Init,
) -> Sequence[LayerTrace | None]:
    """Record what the recurrent heads of every layer are fitted to, if ``init`` needs it.

    That is the teacher's heads on the calibration batch; beside a window, what the window leaves over.
    """
    if init != "fitted":
        return [None] * teacher.config.num_hidden_layers
    if calibration is None:
        raise ValueError(
            f"init {init!r} is fitted to data; pass a batch as calibration, or choose 'teacher'."
        )
    input_ids = calibration.get("input_ids")
    seq_idx = calibration.get("seq_idx")
    if not isinstance(input_ids, Tensor):
        raise ValueError(f"calibration has {', '.join(calibration)}; it needs input_ids.")
    if not isinstance(seq_idx, Tensor):
        seq_idx = torch.zeros_like(input_ids)
    seq_idx = seq_idx.to(teacher.device)
    with eval_mode(teacher), trace_mixers(teacher) as calls:
        packed = packed_inputs(seq_idx, teacher.dtype, teacher.config)
        decoder_of(teacher)(input_ids=input_ids.to(teacher.device), use_cache=False, **packed)
    traces = []
    for mixer, call in zip(student.mixers(), calls.values(), strict=True):
        target_BLHP = call.heads_BLHP
        if mixer.windowed is not None:
            target_BLHP = target_BLHP - _windowed_heads(mixer, call, seq_idx)
        traces.append(LayerTrace(call.hidden_BLD, target_BLHP, seq_idx))
    return traces


def _windowed_heads(mixer: HybridMixer, call: MixerCall, seq_idx_BL: Tensor) -> Tensor:
    """Return what a layer's heads compute without recurrence, [B, L, H, P], on the teacher's input to the layer."""
    attended = call.heads_BLHP[:, :, list(mixer.kept)]
    arguments = {**call.kwargs, "seq_idx": seq_idx_BL, "attended": attended}
    with silence([mixer], "recurrence"):
        return mixer.heads(*call.args, **arguments)


def _copied_tensors(
    student: HybridForCausalLM, teacher: PreTrainedModel, sites: Sequence[AttentionSite]
) -> Iterator[Made]:
    """Yield every tensor that the student takes from the teacher, with its record."""
    source = teacher.state_dict()

    def copied(name: str, action: Action, tensor: Tensor, original: str) -> Made:
        return TensorRecord(name, action, tuple(tensor.shape), (original,)), tensor

    mixer_names = _mixer_names(student)
    for site, own, mixer in zip(sites, mixer_names, student.mixers(), strict=True):
        assert site.layout is not None
        for name, tensor in _kept_tensors(site, mixer).items():
            original = f"{site.name}.{name}"
            action = "copied" if tensor.shape == source[original].shape else "sliced"
            yield copied(f"{own}.attention.{name}", action, tensor, original)
        for name, tensor in site.o_proj.state_dict().items():
            original = f"{site.name}.{site.layout.output}.{name}"
            yield copied(f"{own}.o_proj.{name}", "copied", tensor, original)
    named = _teacher_names(teacher)
    inside = tuple(f"{name}." for name in mixer_names)
    for name in student.state_dict():
        if not name.startswith(inside):
            yield copied(name, "copied", source[named(name)], named(name))


def _known_tensors(
    student: HybridForCausalLM, recurrent: Mapping[str, Tensor], device: torch.device
) -> Iterator[Made]:
    """Yield the given tensors of all recurrent heads, with their records."""
    for name in recurrent_tensors(student):
        tensor = recurrent[name].to(device)
        yield TensorRecord(name, "initialized", tuple(tensor.shape)), tensor


def _initialized_tensors(
    student: HybridForCausalLM,
    sites: Sequence[AttentionSite],
    init: Init,
    traces: Sequence[LayerTrace | None],
    seed: int,
) -> Iterator[Made]:
    """Yield new tensors of all recurrent heads, with their records."""
    generator = torch.Generator().manual_seed(seed)
    config = student.config
    assert isinstance(config, HybridConfig)
    mixer_names = _mixer_names(student)
    for site, own, mixer, trace in zip(sites, mixer_names, student.mixers(), traces, strict=True):
        if mixer.ssm is None:
            continue
        like = mixer.ssm.state_dict()
        started = init_ssm(init, site, mixer.replaced, config, generator, trace)
        for name, (tensor, used) in started.items():
            originals = tuple(f"{site.name}.{original}" for original in used)
            record = TensorRecord(
                f"{own}.ssm.{name}", "initialized", tuple(tensor.shape), originals
            )
            yield record, tensor.to(like[name].dtype)


def recurrent_tensors(student: HybridForCausalLM) -> dict[str, Tensor]:
    """Return the tensors of a student's recurrent heads by name: all that it does not copy from its teacher."""
    inside = tuple(f"{name}.ssm." for name in _mixer_names(student))
    return {
        name: tensor for name, tensor in student.state_dict().items() if name.startswith(inside)
    }


def load_recurrent_heads(
    student: HybridForCausalLM, tensors: Mapping[str, Tensor], source: str
) -> None:
    """Set a student's recurrent heads, and nothing else, so that `graft_recurrent_heads` can copy them.

    Raises ValueError, naming the ``source``, for the tensors of another student.
    """
    own = {}
    for name, expected in recurrent_tensors(student).items():
        shape = tuple(tensors[name].shape) if name in tensors else None
        if shape != tuple(expected.shape):
            raise ValueError(
                f"{source} holds another student: {name} has shape {shape} there and {tuple(expected.shape)} here; "
                "align a student that keeps no head, with the same d_state, conv_width and recurrence."
            )
        own[name] = tensors[name]
    student.load_state_dict(own, strict=False, assign=True)


def _kept_tensors(site: AttentionSite, mixer: HybridMixer) -> dict[str, Tensor]:
    """Slice the teacher's attention tensors to the kept heads where the student's shape differs; norms stay whole."""
    if mixer.attention is None:
        return {}
    assert site.layout is not None
    own = mixer.attention.state_dict()
    cut = {}
    for name, tensor in site.module.state_dict().items():
        module = name.partition(".")[0]
        if name in own and own[name].shape != tensor.shape:
            heads = mixer.kept, mixer.kv_groups, site.n_heads, site.n_kv_heads
            tensor = tensor.unflatten(0, (-1, site.head_dim))[
                site.layout.blocks(module, *heads)
            ].flatten(0, 1)
        if module != site.layout.output:
            cut[name] = tensor
    return cut


def _copy_buffers(student: HybridForCausalLM, teacher: PreTrainedModel) -> None:
    """Copy the teacher's rotary frequencies and other buffers that no state dict contains.

    Modules without parameters are copied whole: dynamic RoPE also stores frequencies for the longest row so far.
    """
    named = _teacher_names(teacher)
    mixers = _mixer_names(student)
    for module_name in {
        name.rpartition(".")[0] for name, buffer in student.named_buffers() if buffer.is_meta
    }:
        their_name = named(module_name)
        for mixer in (
            mixers
        ):  # Nemotron's attention had a rotary embedding of its own, until transformers 5.14
            if module_name.startswith(f"{mixer}.attention."):
                their_name = named(module_name.replace(f"{mixer}.attention.", f"{mixer}.", 1))
        theirs = teacher.get_submodule(their_name)
        if next(theirs.parameters(), None) is None:
            parent, _, attribute = module_name.rpartition(".")
            setattr(student.get_submodule(parent), attribute, copy.deepcopy(theirs))
        else:
            own = student.get_submodule(module_name)
            for attribute, buffer in list(own.named_buffers(recurse=False)):
                setattr(
                    own,
                    attribute,
                    theirs.get_buffer(attribute).clone() if buffer.is_meta else buffer,
                )


def _mixer_names(student: HybridForCausalLM) -> list[str]:
    return [name for name, module in student.named_modules() if isinstance(module, HybridMixer)]


def _teacher_names(teacher: PreTrainedModel) -> Callable[[str], str]:
    """Return a function that maps a student's tensor name, outside its mixers, to the teacher's name."""
    output, decoder = teacher.get_output_embeddings(), decoder_of(teacher)
    names = {
        module: name
        for name, module in teacher.named_modules()
        if module is output or module is decoder
    }

    def named(name: str) -> str:
        root, _, rest = name.partition(".")
        return f"{names[decoder if root == 'model' else output]}.{rest}"

    return named


def share_frozen_weights(student: HybridForCausalLM, teacher: PreTrainedModel) -> None:
    """Make the student share the teacher's parameters outside its mixers, to save a second copy in memory.

    Training a shared parameter would train the teacher: call `unshare_weights` first.
    """
    named = _teacher_names(teacher)
    _replace_outside_mixers(student, lambda name, parameter: teacher.get_parameter(named(name)))


def unshare_weights(student: HybridForCausalLM) -> None:
    """Give the student its own copy of every parameter outside its mixers; tied parameters stay tied."""
    copies: dict[int, nn.Parameter] = {}

    def own(name: str, parameter: nn.Parameter) -> nn.Parameter:
        if id(parameter) not in copies:
            copied = parameter.detach().clone()
            copies[id(parameter)] = nn.Parameter(copied, requires_grad=parameter.requires_grad)
        return copies[id(parameter)]

    _replace_outside_mixers(student, own)


def _replace_outside_mixers(
    student: HybridForCausalLM, replacement: Callable[[str, nn.Parameter], nn.Parameter]
) -> None:
    inside = tuple(f"{name}." for name in _mixer_names(student))
    for name, parameter in list(student.named_parameters(remove_duplicate=False)):
        if not name.startswith(inside):
            module_name, _, attribute = name.rpartition(".")
            setattr(student.get_submodule(module_name), attribute, replacement(name, parameter))


def graft_recurrent_heads(student: HybridForCausalLM, donor: HybridForCausalLM) -> None:
    """Copy the donor's recurrent heads into the student's, each from the same layer and head.

    Use a donor without kept heads that was aligned head by head, so that students that differ only in their plan share
    one alignment. Raises ValueError for a donor of another shape, or one that keeps a head that the student replaces.
    """
    for mixer, source in zip(student.mixers(), donor.mixers(), strict=True):
        ours, theirs = mixer.ssm, source.ssm
        if ours is None:
            continue
        missing = sorted(set(mixer.replaced) - set(source.replaced))
        if (
            missing
            or theirs is None
            or (theirs.d_state, theirs.recurrence) != (ours.d_state, ours.recurrence)
        ):
            raise ValueError(
                f"layer {mixer.layer} of the donor has no recurrent heads {missing or 'of this form'}; "
                "align a student that keeps no head, with the same d_state, conv_width and recurrence."
            )
        _copy_heads(ours, theirs, [source.replaced.index(head) for head in mixer.replaced])


@torch.no_grad()
def _copy_heads(target: SSMHeads, source: SSMHeads, picked: list[int]) -> None:
    """Copy the picked heads of ``source`` to ``target``; every tensor stores the channels of a head contiguously."""
    own = dict(target.named_parameters())
    for name, tensor in source.named_parameters():
        # Convolution channels: x of all heads, then B of all heads, then C.
        sizes = [source.n_heads * n for n in (source.head_dim, source.d_state, source.d_state)]
        parts = tensor.split(sizes) if name == "conv_weight" else [tensor]
        rows = [part.unflatten(0, (source.n_heads, -1))[picked].flatten(0, 1) for part in parts]
        own[name].copy_(torch.cat(rows))
