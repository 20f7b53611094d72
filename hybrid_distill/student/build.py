"""Build a student from a teacher: slice the kept heads, copy the other weights, initialize the recurrent heads."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..kernels import run_on
from ..model import HybridConfig, HybridForCausalLM, HybridMixer, packed_inputs
from ..model.layout import decoder_of, rope_frequencies
from ..model.mixer import zero_part
from ..model.self_check import check_same_logits
from ..plan import HeadPlan
from ..teacher import (
    SUPPORTED,
    HeadSite,
    MixerCall,
    attention_sites,
    eval_mode,
    fingerprint,
    float16_note,
    trace_mixers,
)
from .copying import (
    StudentTensor,
    TensorRecord,
    check_attention,
    copied_tensors,
    copy_buffers,
    mixer_names,
)
from .dtypes import default_dtype
from .grafting import recurrent_tensors
from .init import DEFAULT_INIT, INITS, Init, LayerTrace, init_ssm

_OTHER_TEACHER = (
    f"Take a teacher of another family ({SUPPORTED}) or another version of transformers, or remove from its "
    "config.json windows that its attention does not have (sliding_window)."
)


@dataclass(frozen=True)
class BuildReport:
    """Record of every student tensor, and of every teacher tensor that the student does not use."""

    tensors: tuple[TensorRecord, ...]
    init: str
    kept_heads: int
    recurrent_heads: int


@default_dtype(torch.float32)
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
    (`SSMHeads`), ``kernels`` their implementation (`kernel_choice.IMPLEMENTATIONS`), which the student checks itself
    on. ``seed`` sets all random draws. ``recurrent`` holds the `recurrent_tensors` of the same student, built before:
    nothing is initialized then, and the student has the same bits. The teacher is unchanged and shares no tensor with
    the student; to share, call `share_frozen_weights`. Raises ValueError for a plan made for another teacher, a bad
    option, unsupported attention, and a model that fails `check_same_logits`.
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
    # The student checks itself on these kernels, unless they need a GPU and the teacher is not on one.
    checked_kernels = kernels
    if not run_on(kernels, teacher.device):
        checked_kernels = "torch"
    student.set_ssm_implementation(checked_kernels)
    check_teacher_rows(teacher)
    copied = list(copied_tensors(student, teacher, sites))
    _load(student, copied)
    copy_buffers(student, teacher)
    # Loading has given tied parameters a tensor each.
    student.tie_weights()
    # After the copies: fitting runs the student's windows, with the teacher's weights.
    if recurrent is not None:
        initialized = list(_built_before(student, recurrent, teacher.device))
    else:
        traces = _calibration_traces(teacher, student, calibration, init)
        initialized = _initialized_tensors(student, sites, init, traces, seed)
    _load(student, initialized)
    student.generation_config = copy.deepcopy(teacher.generation_config)
    check_same_logits(student, _OTHER_TEACHER)
    student.set_ssm_implementation(kernels)
    records = [tensor.record for tensor in (*copied, *initialized)]
    report = BuildReport(
        tensors=(*records, *_dropped_tensors(teacher, records)),
        init=init,
        kept_heads=plan.k,
        recurrent_heads=plan.n_layers * plan.n_heads - plan.k,
    )
    return student.train(teacher.training), report


def check_plan(plan: HeadPlan, teacher: PreTrainedModel) -> None:
    """Raise ValueError for a plan that was made for another teacher."""
    plan.check_fits(teacher)
    if not plan.teacher:
        return
    actual = fingerprint(teacher)
    if plan.teacher != actual:
        raise ValueError(
            f"the plan was made for the teacher {plan.teacher}, this one is {actual}; "
            f"score this teacher and make a new plan.{float16_note(teacher)}"
        )


def check_teacher_rows(teacher: PreTrainedModel) -> None:
    """Check that the teacher itself computes a document in every way alike, with exact positions.

    Raises ValueError for RoPE's frequencies in half precision, and as `check_same_logits` does.
    """
    for name, frequencies in rope_frequencies(teacher).items():
        if frequencies.dtype.itemsize < 4:
            dtype = str(frequencies.dtype).removeprefix("torch.")
            raise ValueError(
                f"the teacher's {name} is {dtype}, so its positions are inexact; load it with "
                f"from_pretrained(..., dtype=torch.{dtype}) instead of casting it with .to(), .half() or .bfloat16()."
            )
    check_same_logits(teacher, _OTHER_TEACHER)


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
    # to_dict() leaves it out.
    config._attn_implementation = teacher.config._attn_implementation
    # As from_pretrained does: modules are made in the default dtype.
    with default_dtype(teacher.dtype), torch.device("meta"):
        return HybridForCausalLM(config)


def checked_sites(teacher: PreTrainedModel, plan: HeadPlan, init: Init) -> list[HeadSite]:
    """Find the teacher's attention.

    Raises ValueError for an unknown init, a hybrid, a plan of another shape or unknown parts.
    """
    if init not in INITS:
        raise ValueError(f"init is {init!r}; it must be one of {', '.join(INITS)}.")
    if isinstance(teacher, HybridForCausalLM):
        raise ValueError(
            f"the teacher, {teacher.name_or_path!r}, is a hybrid, and only attention heads can be replaced; "
            "pass the model that it was distilled from."
        )
    plan.check_fits(teacher)
    sites = attention_sites(teacher)
    for site in sites:
        check_attention(site, plan.n_kv_heads)
    return sites


def _dropped_tensors(
    teacher: PreTrainedModel, records: Sequence[TensorRecord]
) -> Iterator[TensorRecord]:
    """Yield a record of every teacher tensor that the student was not made from."""
    used: set[str] = set()
    for record in records:
        used.update(record.source)
    for name, tensor in teacher.state_dict().items():
        if name not in used:
            yield TensorRecord(name, "dropped", tuple(tensor.shape), (name,))


def _load(student: HybridForCausalLM, student_tensors: Sequence[StudentTensor]) -> None:
    """Load copies of the tensors into the student. Raises RuntimeError for a tensor that it does not have."""
    tensors = {}
    for record, tensor in student_tensors:
        tensors[record.name] = tensor.clone(memory_format=torch.contiguous_format)
    # Assigned: the student is on the meta device, where nothing can be copied into.
    unexpected = student.load_state_dict(tensors, strict=False, assign=True).unexpected_keys
    if unexpected:
        raise RuntimeError(f"the student has no tensors {', '.join(unexpected)}")


def _built_before(
    student: HybridForCausalLM, recurrent: Mapping[str, Tensor], device: torch.device
) -> Iterator[StudentTensor]:
    """Yield the tensors of all recurrent heads from an earlier build, with their records."""
    for name in recurrent_tensors(student):
        tensor = recurrent[name].to(device)
        yield StudentTensor(TensorRecord(name, "initialized", tuple(tensor.shape)), tensor)


@torch.no_grad()
def _calibration_traces(
    teacher: PreTrainedModel,
    student: HybridForCausalLM,
    calibration: Mapping[str, object] | None,
    init: Init,
) -> Sequence[LayerTrace | None]:
    """Record the target that each layer's recurrent heads are fitted to; None for each if ``init`` fits nothing.

    The target is the output of the teacher's heads on the calibration batch, less that of their windows.
    """
    has_recurrent_heads = student.config.d_state > 0
    if init != "fitted" or not has_recurrent_heads:
        return [None] * teacher.config.num_hidden_layers
    input_ids, seq_idx = _calibration_rows(calibration, teacher.device)
    with eval_mode(teacher), trace_mixers(teacher) as calls:
        packed = packed_inputs(seq_idx, teacher.dtype, teacher.config)
        decoder_of(teacher)(input_ids=input_ids, use_cache=False, **packed)
    traces = []
    for mixer, call in zip(student.mixers(), calls.values(), strict=True):
        target_BLHP = call.heads_BLHP
        if mixer.windowed is not None:
            target_BLHP = target_BLHP - _windowed_heads(mixer, call, seq_idx)
        traces.append(LayerTrace(call.hidden_BLD, target_BLHP, seq_idx))
    return traces


def _calibration_rows(
    calibration: Mapping[str, object] | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the batch's input_ids and seq_idx; without seq_idx, every row is one document."""
    if calibration is None:
        raise ValueError(
            "init 'fitted' is fitted to data; pass a batch as calibration, or choose 'teacher'."
        )
    input_ids = calibration.get("input_ids")
    seq_idx = calibration.get("seq_idx")
    if not isinstance(input_ids, Tensor):
        raise ValueError(f"calibration has {', '.join(calibration)}; it needs input_ids.")
    if not isinstance(seq_idx, Tensor):
        seq_idx = torch.zeros_like(input_ids)
    return input_ids.to(device), seq_idx.to(device)


def _windowed_heads(mixer: HybridMixer, call: MixerCall, seq_idx_BL: Tensor) -> Tensor:
    """Return what a layer's heads compute without recurrence, [B, L, H, P], on the teacher's input to the layer."""
    # The teacher's outputs stand in for kept heads, which then do not run.
    kept_outputs = call.heads_BLHP[:, :, list(mixer.kept)]
    arguments = {**call.kwargs, "seq_idx": seq_idx_BL, "kept_outputs": kept_outputs}
    with zero_part([mixer], "recurrence"):
        return mixer.heads(*call.args, **arguments)


@torch.no_grad()
def _initialized_tensors(
    student: HybridForCausalLM,
    sites: Sequence[HeadSite],
    init: Init,
    traces: Sequence[LayerTrace | None],
    seed: int,
) -> list[StudentTensor]:
    """Initialize the tensors of all recurrent heads; return them with their records."""
    generator = torch.Generator().manual_seed(seed)
    config = student.config
    assert isinstance(config, HybridConfig)
    names = mixer_names(student)
    tensors = []
    for site, own_name, mixer, trace in zip(sites, names, student.mixers(), traces, strict=True):
        if mixer.ssm is None:
            continue
        empty_tensors = mixer.ssm.state_dict()
        initialized = init_ssm(init, site, mixer.replaced, config, generator, trace)
        for name, (tensor, sources) in initialized.items():
            full_name = f"{own_name}.ssm.{name}"
            source_names = tuple(f"{site.name}.{source}" for source in sources)
            record = TensorRecord(full_name, "initialized", tuple(tensor.shape), source_names)
            tensors.append(StudentTensor(record, tensor.to(empty_tensors[name].dtype)))
    return tensors
