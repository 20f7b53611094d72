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
    """Make the model of a backbone's config, with random weights in the default dtype.

    ``attn_implementation`` is transformers' own choice if None. Raises ValueError for a config without a causal
    language model in transformers, or with one that is not a decoder whose layers have attention.
    """
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"transformers {__version__} has no causal language model for a config of type {config.model_type}; "
            "use a teacher that AutoModelForCausalLM.from_config can make."
        )
    # The dtype is explicit, because the backbone's config may name that of another checkpoint.
    options: dict[str, Any] = {"dtype": torch.get_default_dtype(), "trust_remote_code": False}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    backbone = AutoModelForCausalLM.from_config(config, **options)
    layers = getattr(decoder_of(backbone), "layers", None)
    has_attention = layers is not None and all(map(attention_name, layers))
    if backbone.get_output_embeddings() is None or not has_attention:
        raise ValueError(
            f"{type(backbone).__name__} has no output embeddings, or no layers with attention; expected a decoder with "
            "both: take a teacher of another family (docs/heads.md)."
        )
    return backbone


def longrope_switch(backbone: PreTrainedModel) -> int | None:
    """Return the length beyond which `generate` with LongRoPE recomputes all tokens; None if it never does."""
    name = "prepare_inputs_for_generation"
    # An own way to prepare inputs: Phi-3 has one, Llama does not.
    if getattr(type(backbone), name) is getattr(GenerationMixin, name):
        return None
    for rope in rope_settings(backbone.config):
        if rope.get("rope_type", rope.get("type")) == "longrope":
            trained = rope.get("original_max_position_embeddings")
            return trained or getattr(backbone.config, "original_max_position_embeddings", None)
    return None
