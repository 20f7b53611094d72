"""Reference for windowed students: the teacher itself under a dense mask for each head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hybrid_distill.model import layer_windows
from hybrid_distill.plan import HeadPlan

NAME = "dense_mask_of_each_head"


def visible(place_i: Tensor, place_j: Tensor, window: int, sinks: int, limit: int | None) -> Tensor:
    """Return which tokens j a token i sees, by their places in one document."""
    distance = place_i - place_j
    seen = (distance >= 0) & ((distance < window) | (place_j < sinks))
    return seen if limit is None else seen & (distance < limit)


@contextmanager
def masked_teacher(
    teacher: PreTrainedModel, plan: HeadPlan, window: int, sinks: int
) -> Iterator[PreTrainedModel]:
    """Make the teacher's heads outside the plan see a window alone. One document a row, without padding."""
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
        n_heads, length = query.shape[1:3]
        n_repeats = n_heads // key.shape[1]
        key = key.repeat_interleave(n_repeats, 1)
        value = value.repeat_interleave(n_repeats, 1)
        layer = module.layer_idx
        place = torch.arange(length)
        near = visible(place[:, None], place[None], window, sinks, limits[layer])
        everything = visible(place[:, None], place[None], length, 0, limits[layer])
        kept = plan.kept_in(layer)
        seen = torch.stack([everything if head in kept else near for head in range(n_heads)])
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        scores = query @ key.mT * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return (weights @ value).transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
    own = teacher.config._attn_implementation
    teacher.config._attn_implementation = NAME
    try:
        yield teacher
    finally:
        teacher.config._attn_implementation = own
