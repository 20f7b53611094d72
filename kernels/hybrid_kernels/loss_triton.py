"""`loss_torch` as Triton kernels: one program per token, the gradient overwrites the logits.

A row of logits is read once for the normalisers, once for the mean pull (which forward KL knows
beforehand: -1, and which needs both normalisers), and once more for the gradient, which is written
over it; log, exp and the sums are in fp32 and to base 2. A lane keeps sums of its own until the row
ends.

Shapes: M tokens, V vocabulary, K stored tokens of the teacher, O outcomes that are compared.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import INTERPRETED, Compilation, check_device, dot_mode, narrow
from .loss_torch import compare_outcomes
from .loss_types import Options, Tokens

LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2.0))
NOTHING = tl.constexpr(-1e30)  # a first maximum; a logit beyond the row: finite, probability 0
SMALLEST = tl.constexpr(1e-37)  # a mixture below it has a weight of nothing

BLOCK = 1024
NUM_WARPS = 4


def of_head(
    student_MV: Tensor, teacher_MV: Tensor, tokens: Tokens, options: Options
) -> tuple[Tensor, Tensor]:
    """loss_M in float32, and the gradient by the student's logits, in their place."""
    check_device("student_MV", student_MV, student_MV)
    n_tokens, n_vocabulary = student_MV.shape
    loss_M = torch.empty(n_tokens, dtype=torch.float32, device=student_MV.device)
    with torch.cuda.device_of(student_MV):
        _compare[(n_tokens,)](
            student_MV,
            teacher_MV,
            tokens.soft_M,
            tokens.hard_M,
            tokens.labels_M,
            loss_M,
            n_vocabulary,
            student_MV.stride(0),
            teacher_MV.stride(0),
            1.0 / options.temperature,
            options.beta,
            KIND=options.kind,
            **_constants(student_MV, options),
        )
    return loss_M, student_MV


def of_top_k(
    student_MV: Tensor, ids_MK: Tensor, log_probs_MK: Tensor, tokens: Tokens, options: Options
) -> tuple[Tensor, Tensor]:
    """The same with a teacher that is known at K tokens. The kernels see the other tokens; the K
    are small work."""
    check_device("student_MV", student_MV, student_MV)
    n_tokens, n_vocabulary = student_MV.shape
    stored_MK = student_MV.gather(1, ids_MK).float()
    label_M = student_MV.gather(1, tokens.labels_M.unsqueeze(-1)).squeeze(-1).float()
    # The K stored tokens leave the row: what remains is the outcome "any other token".
    student_MV.scatter_(1, ids_MK, -math.inf)
    rest_M, rest_at_1_M = (
        torch.empty(n_tokens, dtype=torch.float32, device=student_MV.device) for _ in range(2)
    )
    shape = (n_vocabulary, student_MV.stride(0), 1.0 / options.temperature)
    constants = _constants(student_MV, options)
    with torch.cuda.device_of(student_MV):
        _normalisers[(n_tokens,)](student_MV, rest_M, rest_at_1_M, *shape, **constants)

    log_q_MO = torch.cat([stored_MK / options.temperature, rest_M.unsqueeze(-1)], -1).log_softmax(
        -1
    )
    divergence_M, gradient_MO = compare_outcomes(log_q_MO, log_probs_MK, n_vocabulary, options)
    loss_M = tokens.soft_M * divergence_M
    gradient_MO = gradient_MO * (tokens.soft_M / options.temperature).unsqueeze(-1)
    gradient_MK = gradient_MO[:, :-1]
    of_rest_M = gradient_MO[:, -1].contiguous()
    normaliser_at_1_M = rest_M
    if options.hard_weight:
        normaliser_at_1_M = torch.cat([stored_MK, rest_at_1_M.unsqueeze(-1)], -1).logsumexp(-1)
        loss_M = loss_M + tokens.hard_M * (normaliser_at_1_M - label_M)
        is_label_MK = ids_MK == tokens.labels_M.unsqueeze(-1)
        surplus_MK = (stored_MK - normaliser_at_1_M.unsqueeze(-1)).exp() - is_label_MK.float()
        gradient_MK = gradient_MK + tokens.hard_M.unsqueeze(-1) * surplus_MK
    with torch.cuda.device_of(student_MV):
        _share_out[(n_tokens,)](
            student_MV,
            rest_M,
            normaliser_at_1_M,
            of_rest_M,
            tokens.hard_M,
            tokens.labels_M,
            *shape,
            **constants,
        )
    return loss_M, student_MV.scatter_(1, ids_MK, gradient_MK.to(student_MV.dtype))


def compilations(capability: int) -> list[Compilation]:
    """Every configuration, for compiling ahead of time; the same ones for every ``capability``."""
    pointers = {"student": "*bf16", "teacher": "*bf16", "labels": "*i64"}
    floats = ("soft", "hard", "loss", "rest", "rest_at_1", "normaliser_at_1", "of_rest")
    scalars = {
        "V": "i32",
        "student_row": "i32",
        "teacher_row": "i32",
        "inverse_temperature": "fp32",
        "beta": "fp32",
    }
    runtime = pointers | dict.fromkeys(floats, "*fp32") | scalars
    not_divisible = {"V", "inverse_temperature", "beta"}
    kernels: list[tuple[str, Any, dict[str, object]]] = [
        ("loss normalisers", _normalisers, {}),
        ("loss share out", _share_out, {}),
        *(
            (f"loss {kind}", _compare, {"KIND": kind})
            for kind in ("forward_kl", "reverse_kl", "jsd")
        ),
    ]
    found = []
    for (name, kernel, more), hard in itertools.product(kernels, (False, True)):
        constants = {"HARD": hard, "BLOCK": BLOCK, "MODE": "gpu", **more}
        arguments = {**runtime, **constants}
        found.append(
            Compilation(
                name=f"{name}{' + cross-entropy' if hard else ''}",
                kernel=kernel,
                arguments={argument: arguments[argument] for argument in kernel.arg_names},
                constants=frozenset(constants),
                divisible=frozenset(kernel.arg_names) - frozenset(constants) - not_divisible,
                num_warps=NUM_WARPS,
                num_stages=2,
                tensor_cores=False,
            )
        )
    return found


def _constants(student_MV: Tensor, options: Options) -> dict[str, Any]:
    return {
        "HARD": options.hard_weight > 0,
        "BLOCK": min(BLOCK, triton.next_power_of_2(student_MV.shape[1])) if INTERPRETED else BLOCK,
        "MODE": dot_mode(student_MV.dtype),
        "num_warps": NUM_WARPS,
    }


@triton.jit
def _places(start, BLOCK: tl.constexpr):
    """Places of a block's entries, [lanes, 8]: the eight of a lane are read at once, and reduced
    without the others."""
    return start + tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]


@triton.jit
def _read(logits, place, V, beyond, LAST: tl.constexpr):
    """Entries in fp32, ``beyond`` past the row's end, which only the LAST block sees: a mask may
    cost wide loads."""
    if LAST:
        entries = tl.where(
            place < V, tl.load(logits + place, mask=place < V, other=0.0).to(tl.float32), beyond
        )
    else:
        entries = tl.load(logits + place).to(tl.float32)
    return entries


@triton.jit
def _write(logits, place, entries, V, MODE: tl.constexpr, LAST: tl.constexpr):
    entries = narrow(entries, logits.dtype.element_ty, MODE)
    if LAST:
        tl.store(logits + place, entries, mask=place < V)
    else:
        tl.store(logits + place, entries)


@triton.jit
def _add_exponentials(largest, total, x):
    """Each lane's running maximum, and running sum of 2^(x - maximum)."""
    new = tl.maximum(largest, tl.max(x, 1))
    return new, total * tl.exp2(largest - new) + tl.sum(tl.exp2(x - new[:, None]), 1)


@triton.jit
def _log2_sum(largest, total):
    """Reduce the lanes of `_add_exponentials`: log2 of the sum of 2^x."""
    over_lanes = tl.max(largest, 0)
    return over_lanes + tl.log2(tl.sum(total * tl.exp2(largest - over_lanes), 0))


@triton.jit
def _pull(log2_q, log2_p, beta, KIND: tl.constexpr):
    """Return each entry's part of the divergence and its pull q r (see `loss_torch`), without q for
    forward KL."""
    q = tl.exp2(log2_q)
    p = tl.exp2(log2_p)
    if KIND == "forward_kl":
        value = LN_2 * p * (log2_p - log2_q)
        pull = -p
    elif KIND == "reverse_kl":
        value = LN_2 * q * (log2_q - log2_p)
        pull = value
    else:
        log2_m = tl.log2(tl.maximum(beta * p + (1.0 - beta) * q, SMALLEST))
        pull = LN_2 * (1.0 - beta) * q * (log2_q - log2_m)
        value = LN_2 * beta * p * (log2_p - log2_m) + pull
    return q, value, pull


@triton.jit
def _compare(
    student,
    teacher,
    soft,
    hard,
    labels,
    loss,
    V,
    student_row,
    teacher_row,
    inverse_temperature,
    beta,
    KIND: tl.constexpr,
    HARD: tl.constexpr,
    BLOCK: tl.constexpr,
    MODE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    student += token * student_row
    teacher += token * teacher_row
    soft_scale = tl.load(soft + token).to(tl.float32)
    to_base_2 = inverse_temperature * LOG2_E
    whole = V // BLOCK * BLOCK
    if HARD:
        hard_scale = tl.load(hard + token).to(tl.float32)
        label = tl.load(labels + token)
        of_label = tl.load(student + label, mask=(label >= 0) & (label < V), other=float("nan")).to(
            tl.float32
        )

    # One maximum and sum a lane, joined after the row: a reduction in each block would make all
    # lanes wait for each other.
    q_max = tl.full([BLOCK // 8], NOTHING, tl.float32)
    q_sum = tl.zeros([BLOCK // 8], tl.float32)
    p_max = q_max
    p_sum = q_sum
    hard_max = q_max
    hard_sum = q_sum
    # Twice the same loop: over whole blocks without a mask, then over the last one with it.
    for LAST in tl.static_range(2):
        for start in range(whole * LAST, whole + (V - whole) * LAST, BLOCK):
            place = _places(start, BLOCK)
            # Beyond the row -inf, not NOTHING: times less than 1, NOTHING exceeds the maximum that
            # a lane begins with, and becomes it. x - maximum would then be 0, but fused with the
            # multiplication it is what rounded off, 1e22, and 2 to it infinite.
            s = _read(student, place, V, float("-inf"), LAST)
            t = _read(teacher, place, V, float("-inf"), LAST)
            q_max, q_sum = _add_exponentials(q_max, q_sum, s * to_base_2)
            p_max, p_sum = _add_exponentials(p_max, p_sum, t * to_base_2)
            if HARD:
                hard_max, hard_sum = _add_exponentials(hard_max, hard_sum, s * LOG2_E)
    log2_q_total = _log2_sum(q_max, q_sum)
    log2_p_total = _log2_sum(p_max, p_sum)
    if HARD:
        log2_hard_total = _log2_sum(hard_max, hard_sum)

    # sum_u q_u r_u is -1 for forward KL, as p sums to 1: one pass over the row less.
    mean_pull = -1.0
    if KIND != "forward_kl":
        pulls = tl.zeros([BLOCK // 8], tl.float32)
        for LAST in tl.static_range(2):
            for start in range(whole * LAST, whole + (V - whole) * LAST, BLOCK):
                place = _places(start, BLOCK)
                log2_q = _read(student, place, V, NOTHING, LAST) * to_base_2 - log2_q_total
                log2_p = _read(teacher, place, V, NOTHING, LAST) * to_base_2 - log2_p_total
                q, value, pull = _pull(log2_q, log2_p, beta, KIND)
                pulls += tl.sum(pull, 1)
        mean_pull = tl.sum(pulls, 0)

    values = tl.zeros([BLOCK // 8], tl.float32)
    for LAST in tl.static_range(2):
        for start in range(whole * LAST, whole + (V - whole) * LAST, BLOCK):
            place = _places(start, BLOCK)
            s = _read(student, place, V, NOTHING, LAST)
            log2_p = _read(teacher, place, V, NOTHING, LAST) * to_base_2 - log2_p_total
            q, value, pull = _pull(s * to_base_2 - log2_q_total, log2_p, beta, KIND)
            values += tl.sum(value, 1)
            gradient = soft_scale * inverse_temperature * (pull - q * mean_pull)
            if HARD:
                gradient += hard_scale * (
                    tl.exp2(s * LOG2_E - log2_hard_total) - (place == label).to(tl.float32)
                )
            # Over the logits: nobody reads this block again.
            _write(student, place, gradient, V, MODE, LAST)
    # One store of one program: no atomics, the same bits every time.
    total = soft_scale * tl.sum(values, 0)
    if HARD:
        total += hard_scale * (LN_2 * log2_hard_total - of_label)
    tl.store(loss + token, total)


@triton.jit
def _normalisers(
    student,
    rest,
    rest_at_1,
    V,
    student_row,
    inverse_temperature,
    HARD: tl.constexpr,
    BLOCK: tl.constexpr,
    MODE: tl.constexpr,
):
    """log sum exp of a row's finite entries at temperature T and at 1."""
    token = tl.program_id(0).to(tl.int64)
    student += token * student_row
    whole = V // BLOCK * BLOCK
    largest = tl.full([BLOCK // 8], NOTHING, tl.float32)
    total = tl.zeros([BLOCK // 8], tl.float32)
    hard_max = largest
    hard_sum = total
    for LAST in tl.static_range(2):
        for start in range(whole * LAST, whole + (V - whole) * LAST, BLOCK):
            s = _read(student, _places(start, BLOCK), V, float("-inf"), LAST)
            largest, total = _add_exponentials(largest, total, s * (inverse_temperature * LOG2_E))
            if HARD:
                hard_max, hard_sum = _add_exponentials(hard_max, hard_sum, s * LOG2_E)
    tl.store(rest + token, _log2_sum(largest, total) * LN_2)
    if HARD:
        tl.store(rest_at_1 + token, _log2_sum(hard_max, hard_sum) * LN_2)


@triton.jit
def _share_out(
    student,
    rest,
    normaliser_at_1,
    of_rest,
    hard,
    labels,
    V,
    student_row,
    inverse_temperature,
    HARD: tl.constexpr,
    BLOCK: tl.constexpr,
    MODE: tl.constexpr,
):
    """The gradient of "any other token" among the finite entries, by their probabilities; and the
    cross-entropy's."""
    token = tl.program_id(0).to(tl.int64)
    student += token * student_row
    whole = V // BLOCK * BLOCK
    log2_rest = tl.load(rest + token) * LOG2_E
    scale = tl.load(of_rest + token).to(tl.float32)
    if HARD:
        log2_total = tl.load(normaliser_at_1 + token) * LOG2_E
        hard_scale = tl.load(hard + token).to(tl.float32)
        label = tl.load(labels + token)
    for LAST in tl.static_range(2):
        for start in range(whole * LAST, whole + (V - whole) * LAST, BLOCK):
            place = _places(start, BLOCK)
            s = _read(student, place, V, float("-inf"), LAST)
            gradient = scale * tl.exp2(s * (inverse_temperature * LOG2_E) - log2_rest)
            if HARD:
                gradient += hard_scale * (
                    tl.exp2(s * LOG2_E - log2_total) - (place == label).to(tl.float32)
                )
            _write(student, place, gradient, V, MODE, LAST)
