"""Attention of packed rows that reads each key once for all heads that share it.

With a mask, transformers repeats keys and values for every head before it calls sdpa: kernels that
take a dense mask cannot read them in groups. Those behind a `DocumentMask` can.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..model.document_mask import DocumentMask

GROUPED_OPTIONS = ("dropout", "scaling")
"""Options of an attention function that `attend_in_groups` knows; others change the scores."""


def attend_in_groups(
    query_BHLP: Tensor,
    key_BGLP: Tensor,
    value_BGLP: Tensor,
    mask: Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
) -> tuple[Tensor, None]:
    """Attend as an attention function of transformers does; return outputs [B, L, H, P] and no maps."""
    out_BHLP = F.scaled_dot_product_attention(
        query_BHLP,
        key_BGLP,
        value_BGLP,
        attn_mask=mask,
        dropout_p=dropout,
        scale=scaling,
        enable_gqa=query_BHLP.shape[1] != key_BGLP.shape[1],
    )
    return out_BHLP.transpose(1, 2).contiguous(), None


@contextmanager
def grouped_attention() -> Iterator[None]:
    """Let attention with a `DocumentMask` read keys in groups while the context is open."""
    repeating = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> tuple[Tensor, Any]:
        has_softcap = options.get("softcap") is not None
        has_bias = options.get("position_bias") is not None
        if has_softcap or has_bias or not isinstance(mask, DocumentMask):
            return repeating(module, query, key, value, mask, **options)
        grouped = {name: options[name] for name in GROUPED_OPTIONS if name in options}
        return attend_in_groups(query, key, value, mask, **grouped)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = attend
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = repeating
