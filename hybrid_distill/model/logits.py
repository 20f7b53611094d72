"""Logits of a hybrid: the output embedding, and the scaling and the cap that some families add."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from .layout import decoder_of

LOGIT_OPTIONS = ("logits_scaling", "logit_scale", "final_logit_softcapping")
"""Fields of the configs of Granite, Cohere and Gemma 2."""


def finishes_logits(config: PretrainedConfig) -> bool:
    """Return True if the family scales or caps the logits after the output embedding."""
    return any(getattr(config, name, None) is not None for name in LOGIT_OPTIONS)


def logits_of(model: PreTrainedModel, hidden_BLD: Tensor) -> Tensor:
    """Compute a decoder's logits from its last hidden states."""
    embedding: Any = model.get_output_embeddings()
    return finish_logits(embedding(hidden_BLD), decoder_of(model).config)


def finish_logits(logits_BLV: Tensor, config: PretrainedConfig) -> Tensor:
    """Scale and cap logits after the output embedding, as some families do (`LOGIT_OPTIONS`)."""
    if getattr(config, "logits_scaling", None) is not None:
        logits_BLV = logits_BLV / config.logits_scaling
    if getattr(config, "logit_scale", None) is not None:
        logits_BLV = logits_BLV * config.logit_scale
    cap = getattr(config, "final_logit_softcapping", None)
    return logits_BLV if cap is None else cap * torch.tanh(logits_BLV / cap)
