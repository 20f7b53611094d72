"""Kernels that a stage runs on: tried before its first step, compared between processes, and
reported in one line.

A fallback in one process of a launch is easy to miss, since only process 0 prints, and costs all of
them: every step waits for the slowest, and weights that were trained on two implementations are
nobody's.
"""

from __future__ import annotations

import logging

import torch
from hybrid_kernels import loss_choice

from ..distributed import WorldError, compute_everywhere
from ..model.kernel_choice import DELTA_RULE, KernelCall, describe_choice, try_together
from ..model.recurrent_heads import SSMHeads
from .end_to_end import EndToEnd, loss_implementation
from .on_policy import OnPolicy
from .stage import Stage

log = logging.getLogger(__name__)

Implementations = dict[str, str]
"""Implementation by kernel: "triton", "torch", or "torch" with the reason."""


def agree_on_kernels(stage: Stage, device: torch.device) -> Implementations:
    """Return what a stage's kernels run on, after trying them on a device and comparing all
    processes; log it.

    Every process must call this. Raises WorldError, in all of them, if they differ.
    """
    by_process = compute_everywhere(lambda: kernels_of(stage, device))
    difference = difference_between(by_process)
    if difference:
        raise WorldError(
            f"the processes of this launch run {difference}; give all nodes the same packages and "
            "GPUs, or pass --student.kernels torch."
        )
    implementations = by_process[0]
    words = [f"{kernel} {implementation}" for kernel, implementation in implementations.items()]
    log.info("%s: kernels: %s", stage.config.name, ", ".join(words) or "none")
    return implementations


def difference_between(by_process: list[Implementations]) -> str:
    """Describe the first kernel that runs on different implementations in different processes;
    empty if none does.

    Reasons may differ: they name devices.
    """
    for kernel, on_main in by_process[0].items():
        for process, implementations in enumerate(by_process):
            here = implementations[kernel]
            if here.partition(" ")[0] != on_main.partition(" ")[0]:
                return f"the {kernel} on {on_main} in process 0 and on {here} in process {process}"
    return ""


def kernels_of(stage: Stage, device: torch.device) -> Implementations:
    """Try the kernels that a stage's steps call, and return what runs for each."""
    try_together(device, calls_of(stage))
    chosen: Implementations = {}
    heads = stage.student.first_recurrent_heads()
    if heads is not None:
        dtype = _dtype_of_heads(stage, heads)
        chosen |= _head_implementations(heads, device, dtype)
        if isinstance(stage, OnPolicy):
            for call in heads.step_calls(dtype, masked=True):
                chosen[call.kernel] = _call_implementation(heads, device, call)
    if isinstance(stage, EndToEnd):
        chosen["distillation loss"] = _loss_implementation(stage, device)
    return chosen


def calls_of(stage: Stage) -> list[KernelCall]:
    """List the kernels that "auto" will ask for in a stage's steps, if all of them are right."""
    calls: list[KernelCall] = []
    heads = stage.student.first_recurrent_heads()
    if heads is not None and heads.impl == "auto":
        dtype = _dtype_of_heads(stage, heads)
        calls += heads.row_calls(dtype, training=True, packed=True)
        if isinstance(stage, OnPolicy):
            calls += heads.step_calls(dtype, masked=True)
    if isinstance(stage, EndToEnd):
        calls += _loss_calls(stage)
    return calls


def _loss_calls(stage: EndToEnd) -> list[KernelCall]:
    if not stage.is_fused or loss_implementation(stage.student) != "auto":
        return []
    options = {"kind": stage.config.kind, "from_head": bool(stage.teachers)}
    return [KernelCall("distillation loss", _dtype_of_loss(stage), (), options)]


def _dtype_of_loss(stage: EndToEnd) -> torch.dtype:
    return torch.bfloat16 if stage.bf16 else stage.student.lm_head.weight.dtype


def _dtype_of_heads(stage: Stage, heads: SSMHeads) -> torch.dtype:
    return torch.bfloat16 if stage.bf16 else heads.D.dtype


def _head_implementations(
    heads: SSMHeads, device: torch.device, dtype: torch.dtype
) -> Implementations:
    """Return what the kernels of a training step run on; its rows are always packed."""
    chosen: Implementations = {}
    for call in heads.row_calls(dtype, training=True, packed=True):
        chosen[call.kernel] = _call_implementation(heads, device, call)
        if call.kernel == DELTA_RULE and chosen[DELTA_RULE] != "triton":
            # Without its kernel, the recurrence follows torch's products.
            options = {**call.options, "gated": False}
            recurrence = KernelCall("recurrence", torch.float32, call.sizes, options)
            chosen["recurrence"] = _call_implementation(heads, device, recurrence)
    chosen.setdefault("convolution", "torch")
    return chosen


def _call_implementation(heads: SSMHeads, device: torch.device, call: KernelCall) -> str:
    """Return what a call of these heads runs on."""
    # The delta rule has a kernel at "auto" alone, and mamba-ssm's scan has none for the convolution.
    if call.kernel == DELTA_RULE and heads.impl != "auto":
        return "torch"
    if call.kernel == "convolution" and heads.impl == "mamba_ssm":
        return "torch"
    kernel, dtype, sizes, options = call
    return describe_choice(heads.impl, kernel, device, dtype, *sizes, **options)


def _loss_implementation(stage: EndToEnd, device: torch.device) -> str:
    if not stage.is_fused:
        return "torch (not fused)"
    impl = loss_implementation(stage.student)
    return loss_choice.describe_choice(
        impl, device, _dtype_of_loss(stage), stage.config.kind, bool(stage.teachers)
    )
