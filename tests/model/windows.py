"""Windowed students, and their reference: the teacher itself under a dense mask for each head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hybrid_distill.model import HybridForCausalLM, layer_windows
from hybrid_distill.plan import HeadPlan
from hybrid_distill.student.build import build_student

NAME = "dense_mask_of_each_head"
WINDOW = 7
SINKS = 2


def windowed_student(
    teacher: PreTrainedModel,
    plan: HeadPlan,
    window: int = WINDOW,
    sinks: int = SINKS,
    d_state: int = 4,
    **options: object,
) -> HybridForCausalLM:
    """Build a student whose recurrent heads, if any, are silent."""
    student, _ = build_student(
        teacher, plan, d_state=d_state, window=window, sinks=sinks, init="random", **options
    )
    return student.eval()


def opened(student: HybridForCausalLM) -> HybridForCausalLM:
    """Open the gates of the recurrent heads: both parts of a replaced head then count."""
    with torch.no_grad():
        for heads in student.recurrent_heads():
            heads.z_proj.bias.fill_(0.7)
    return student


def visible(length: int, window: int, sinks: int, limit: int | None) -> Tensor:
    """Return which tokens j a token i of one document sees, [i, j]."""
    place = torch.arange(length)
    distance = place[:, None] - place
    seen = (distance >= 0) & ((distance < window) | (place < sinks))
    return seen if limit is None else seen & (distance < limit)


@contextmanager
def masked_teacher(
    teacher: PreTrainedModel, plan: HeadPlan, window: int = WINDOW, sinks: int = SINKS
) -> Iterator[PreTrainedModel]:
    """Let the teacher's heads outside the plan see a window alone.

    One document a row, without padding."""
    limits = layer_windows(teacher.config)

    def attend(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        scaling: float | None = None,
        softcap: float | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        n_heads, length, head_dim = query.shape[1:]
        n_repeats = n_heads // key.shape[1]
        key = key.repeat_interleave(n_repeats, 1)
        value = value.repeat_interleave(n_repeats, 1)

        layer = module.layer_idx
        near = visible(length, window, sinks, limits[layer])
        everything = visible(length, length, 0, limits[layer])
        kept = plan.kept_in(layer)
        seen = torch.stack([everything if head in kept else near for head in range(n_heads)])

        scale = head_dim**-0.5 if scaling is None else scaling
        scores = query @ key.mT * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return (weights @ value).transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
    # A new name needs a mask function too, though `attend` does not read its mask.
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
    own = teacher.config._attn_implementation
    teacher.config._attn_implementation = NAME
    try:
        yield teacher
    finally:
        teacher.config._attn_implementation = own
