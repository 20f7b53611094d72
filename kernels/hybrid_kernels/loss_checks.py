"""Checks of the distillation loss's arguments, each with a ValueError, and what follows from their dtypes and shapes.

Shapes as in `loss`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .loss_types import KINDS, Options, TeacherHead, TeacherTopK, Tokens

IMPLEMENTATIONS = ("auto", "triton", "torch")


def check_options(
    options: Options, labels: Tensor | None, chunk_size: int | None, impl: str
) -> None:
    """Check everything that is not a tensor."""
    kind, temperature, beta, hard_weight = options
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; choose one of {', '.join(KINDS)}.")
    if kind == "jsd" and not 0.0 < beta < 1.0:
        raise ValueError(
            f"beta is {beta}; jsd needs 0 < beta < 1 (its ends are the kinds forward_kl and "
            "reverse_kl)."
        )
    if not temperature > 0:
        raise ValueError(
            f"temperature is {temperature}; it divides the logits and must be above 0."
        )
    if not 0.0 <= hard_weight <= 1.0:
        raise ValueError(f"hard_weight is {hard_weight}; a mixture weight lies between 0 and 1.")
    if hard_weight and labels is None:
        raise ValueError(
            f"hard_weight is {hard_weight} without labels_BL; pass the labels or use hard_weight=0."
        )
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}; it counts tokens: pass at least 1, or None.")
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl is {impl!r}; choose one of {', '.join(IMPLEMENTATIONS)}.")


def check_tensors(
    hidden: Tensor,
    head: Tensor,
    teacher: TeacherHead | TeacherTopK,
    weight: Tensor | None,
    labels: Tensor | None,
) -> None:
    """Check shapes and devices, and that no weight is negative."""
    if hidden.dim() < 2 or hidden.numel() == 0:
        raise ValueError(
            f"student_hidden_BLD has shape {tuple(hidden.shape)}; it must be [B, L, D], none of "
            "them 0."
        )
    _check_head("student_head_VD", head, hidden.shape[-1])
    _check_teacher(teacher)
    if isinstance(teacher, TeacherHead):
        of_teacher = {"the teacher's hidden_BLE": teacher.hidden_BLE}
    else:
        of_teacher = {
            "the teacher's ids_BLK": teacher.ids_BLK,
            "the teacher's log_probs_BLK": teacher.log_probs_BLK,
        }
    of_tokens = {"weight_BL": weight, "labels_BL": labels}
    tokens = hidden.shape[:-1]
    for name, tensor in of_teacher.items():
        if tensor.dim() != hidden.dim() or tensor.shape[:-1] != tokens:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; its tokens must be the student's, "
                f"{tuple(tokens)}."
            )
    for name, tensor in of_tokens.items():
        if tensor is not None and tensor.shape != tokens:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; it must have one entry a token: "
                f"{tuple(tokens)}."
            )
    # A data-dependent branch would break the graph of torch.compile.
    is_traced = torch.compiler.is_compiling()
    if not is_traced and weight is not None and weight.device.type == "cpu" and (weight < 0).any():
        raise ValueError("weight_BL has a negative entry; weights start at 0: clamp them.")
    for name, tensor in {"student_head_VD": head, **of_teacher, **of_tokens}.items():
        if tensor is not None and tensor.device != hidden.device:
            raise ValueError(
                f"{name} is on {tensor.device}, student_hidden_BLD on {hidden.device}; move it "
                "there."
            )


def _check_teacher(teacher: TeacherHead | TeacherTopK) -> None:
    """Check what a teacher's tensors must be to one another."""
    if isinstance(teacher, TeacherHead):
        _check_head("the teacher's head_WE", teacher.head_WE, teacher.hidden_BLE.shape[-1])
        return
    ids, log_probs = teacher
    if ids.shape != log_probs.shape or ids.dtype != torch.int64:
        raise ValueError(
            f"the teacher's ids_BLK are {ids.dtype} of shape {tuple(ids.shape)}, its log_probs_BLK "
            f"of shape {tuple(log_probs.shape)}; pass one int64 id for each."
        )


def _check_head(name: str, head: Tensor, width: int) -> None:
    if head.dim() != 2 or head.shape[1] != width:
        raise ValueError(
            f"{name} has shape {tuple(head.shape)}; it must be [vocabulary, {width}], as its "
            "hidden states."
        )


def check_numbers(teacher: TeacherHead | TeacherTopK, tokens: Tokens, n_real: int) -> None:
    """Check labels and the teacher's ids, on a CPU only.

    A GPU would have to be waited for, and shows NaN or a device-side assertion.
    """
    if tokens.kept_M.device.type != "cpu":
        return
    numbers = {"labels_BL": tokens.labels_M}
    if isinstance(teacher, TeacherTopK):
        numbers["the teacher's ids_BLK"] = teacher.ids_BLK[tokens.kept_M]
    for name, ids in numbers.items():
        outside = ids[(ids < 0) | (ids >= n_real)]
        if len(outside):
            raise ValueError(
                f"{name} has {outside[0].item()}; it must be from 0 to vocab_size - 1, "
                f"{n_real - 1}."
            )


def real_vocabulary(
    head_VD: Tensor, teacher: TeacherHead | TeacherTopK, vocab_size: int | None
) -> int:
    """Return the number of real tokens: ``vocab_size``, or the smaller of the two vocabularies."""
    widths = [len(head_VD)]
    if isinstance(teacher, TeacherHead):
        widths.append(len(teacher.head_WE))
    n_real = vocab_size
    if n_real is None:
        n_real = min(widths)
    if not 0 < n_real <= min(widths):
        raise ValueError(
            f"vocab_size is {n_real}; the heads have {' and '.join(map(str, widths))} rows, so it "
            f"must be from 1 to {min(widths)}."
        )
    if isinstance(teacher, TeacherTopK):
        n_ids = teacher.ids_BLK.shape[-1]
        if not 0 < n_ids <= n_real:
            raise ValueError(
                f"the teacher has {n_ids} ids a token; it must be from 1 to vocab_size, {n_real}."
            )
    return n_real


def product_dtype(hidden: Tensor, head: Tensor, hidden_name: str, head_name: str) -> torch.dtype:
    """Return the dtype in which a linear layer multiplies, never float16.

    float16 ends at 65,504, and gradients of single logits begin below 6e-8.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and torch.float64 not in (hidden.dtype, head.dtype):
        dtype = torch.get_autocast_dtype(device)
    elif hidden.dtype != head.dtype:
        raise ValueError(
            f"{hidden_name} is {hidden.dtype} and {head_name} {head.dtype}; cast one, or use "
            "autocast."
        )
    else:
        dtype = hidden.dtype
    if dtype == torch.float16:
        return torch.float32
    return dtype
