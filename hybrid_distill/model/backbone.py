"""Backbone of a hybrid: the teacher's own model class, made from its config."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
    __version__,
)

from .backbone_config import rope_settings
from .layout import attention_name, decoder_of


def make_backbone(config: PretrainedConfig, attn_implementation: str | None) -> PreTrainedModel:
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"transformers {__version__} has no causal language model for a config of type {config.model_type}; "
            "use a teacher that AutoModelForCausalLM.from_config can make."
        )
    chosen: dict[str, Any] = (
        {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    )
    # The dtype is explicit, because the backbone's config may name that of another checkpoint.
    chosen["trust_remote_code"] = False
    backbone = AutoModelForCausalLM.from_config(config, dtype=torch.get_default_dtype(), **chosen)
    layers = getattr(decoder_of(backbone), "layers", None)
    if (
        layers is None
        or backbone.get_output_embeddings() is None
        or not all(map(attention_name, layers))
    ):
        raise ValueError(
            f"{type(backbone).__name__} has no output embeddings, or no layers with attention; expected a decoder with "
            "both: take a teacher of another family (docs/heads.md)."
        )
    return backbone


def longrope_switch(backbone: PreTrainedModel) -> int | None:
    """Return the length beyond which `generate` with LongRoPE recomputes all tokens; None if it never does."""
    name = "prepare_inputs_for_generation"
    # True for Phi-3, not for Llama.
    has_own_way = getattr(type(backbone), name) is not getattr(GenerationMixin, name)
    for rope in rope_settings(backbone.config) if has_own_way else ():
        if rope.get("rope_type", rope.get("type")) == "longrope":
            trained = rope.get("original_max_position_embeddings")
            return trained or getattr(backbone.config, "original_max_position_embeddings", None)
    return None
