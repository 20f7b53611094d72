"""Attention windows of a decoder's layers, read from its config."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from .configuration_hybrid import HybridConfig
from .once import once

FULL = "full_attention"
# Layer types with limited attention, and the config field with their size.
LIMITED = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
FIELDS = ("layer_types", *LIMITED.values())


def layer_windows(config: PretrainedConfig) -> list[int | None]:
    """Return each layer's attention window in tokens, the current token included; None for full attention."""
    return [window for _, window in kinds_and_windows(config)]


def kinds_and_windows(config: PretrainedConfig | None) -> list[tuple[str, int | None]]:
    """Return the kind of each layer, from `LIMITED` or `FULL`, and its window.

    Reads only fields that the family's configs define: a config.json may contain others, which no model reads.
    """
    if config is None:
        return []
    config = _backbone_of(config).get_text_config(decoder=True)
    fields = {name: getattr(config, name, None) for name in _known_fields(type(config))}
    kinds = fields.get("layer_types")
    if kinds is None:
        # One window field without a list of kinds limits every layer (Mistral).
        limits = [kind for kind, field in LIMITED.items() if fields.get(field) is not None]
        kinds = [limits[0] if limits else FULL] * config.num_hidden_layers
    # transformers' early exit (`assistant_early_exit`) lowers the number of layers for a while, not their list.
    kinds = kinds[: config.num_hidden_layers]
    windows: list[tuple[str, int | None]] = []
    for kind in kinds:
        if kind in LIMITED:
            windows.append((kind, fields[LIMITED[kind]]))
        else:
            windows.append((FULL, None))
    return windows


def _backbone_of(config: Any) -> PretrainedConfig:
    """Return the config of a student's backbone, whose layers see what the teacher's do; any other config as it is."""
    # Not by class: the code of an export has one of its own.
    if config.model_type == HybridConfig.model_type:
        return config.shared_backbone()
    return config


@once
def _known_fields(config_class: type[PretrainedConfig]) -> tuple[str, ...]:
    """Return which of `FIELDS` the family's configs define."""
    try:
        default = config_class()
    except Exception:  # remote code may require arguments
        return FIELDS
    return tuple(name for name in FIELDS if hasattr(default, name))
