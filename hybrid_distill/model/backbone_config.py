"""The backbone's config inside a hybrid's: its fields, their spellings, and the config object made from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from reprlib import repr as shortened
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from .field_rules import OWN_RULES

MODEL_TYPE = "hybrid_distill"

# Facts that belong to one file or one process, not to the architecture.
_NOT_ARCHITECTURE = (
    "_name_or_path", "transformers_version", "dtype", "torch_dtype", "_attn_implementation", "attn_implementation",
    "auto_map", "quantization_config",
)  # fmt: skip
# Fields that a HybridConfig holds itself; every other field of a backbone is the backbone's.
OWN = (
    *OWN_RULES, *_NOT_ARCHITECTURE, "checked_transformers", "kept", "backbone", "model_type", "architectures",
    "name_or_path", "id2label", "label2id", "num_labels", "problem_type", "is_encoder_decoder",
)  # fmt: skip
# Fields that transformers gives every config: set in both.
IN_BOTH = ("output_hidden_states", "output_attentions", "return_dict", "chunk_size_feed_forward")
_ROPE_OF_TRANSFORMERS_4 = (
    "rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor", "rotary_emb_base", "rotary_pct",
)  # fmt: skip
# Fields of the backbone that readers of a config.json look for at its top.
AT_THE_TOP = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")
# Values of fields that generation, evaluation suites and launchers read, where a backbone leaves them out.
DERIVED: dict[str, Callable[[Any], Any]] = {
    "num_key_value_heads": lambda backbone: backbone.num_attention_heads,
    "head_dim": lambda backbone: backbone.hidden_size // backbone.num_attention_heads,
    "max_position_embeddings": lambda backbone: None,
    "initializer_range": lambda backbone: 0.02,
    "is_causal": lambda backbone: True,
    **dict.fromkeys(AT_THE_TOP, lambda backbone: None),
}


def backbone_fields(backbone: dict[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the fields that are the backbone's."""
    names = {*backbone, *DERIVED, *_ROPE_OF_TRANSFORMERS_4}
    names |= make_backbone_config(backbone).to_dict().keys()
    names -= {*OWN, *IN_BOTH}
    return {name: value for name, value in fields.items() if name in names}


def with_changes(backbone: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return a backbone with the changes. Raises ValueError for RoPE fields against ``rope_parameters``."""
    rope = backbone.get("rope_parameters")
    if "rope_parameters" in changes and changes["rope_parameters"] != rope:
        # The old spelling would still be that of the old RoPE.
        backbone = {
            name: value for name, value in backbone.items() if name not in _ROPE_OF_TRANSFORMERS_4
        }
    elif isinstance(rope, dict):
        for name in _ROPE_OF_TRANSFORMERS_4:
            if name in changes and changes[name] != backbone.get(name):
                raise ValueError(
                    f"{name} is {shortened(changes[name])}, and the backbone has rope_parameters; pass "
                    "rope_parameters, with all its entries."
                )
    config = make_backbone_config(backbone)
    for name, value in changes.items():
        # A field that the backbone leaves out stays out, if the change is to its derived value.
        is_left_out = name in DERIVED and backbone.get(name) is None
        if is_left_out and value == DERIVED[name](config):
            continue
        backbone = {**backbone, name: value}
    return _with_old_rope_spelling(backbone)


def make_backbone_config(backbone: dict[str, Any]) -> PretrainedConfig:
    """Make the backbone's config object. Raises ValueError for fields that this transformers does not understand."""
    fields: dict[str, Any] = {}
    for name, value in backbone.items():
        # Copied, because transformers fills in missing entries in place.
        fields[name] = dict(value) if isinstance(value, dict) else value
    try:
        config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    # Errors for fields of a wrong type vary by version of transformers.
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"backbone is not a valid {backbone['model_type']} config ({type(error).__name__}: {reason}); "
            "pass the teacher's config.to_dict()."
        ) from error
    if _shares_one_rope(config) and _has_several_ropes(backbone):
        raise ValueError(
            f"transformers {transformers.__version__} has one RoPE for all layers of {backbone['model_type']}, but "
            "this backbone has one per layer type; pip install --upgrade transformers."
        )
    return config


def clean_backbone(backbone: Any) -> dict[str, Any]:
    """Return the fields that describe the architecture, with RoPE in the spellings of transformers 4 and 5."""
    if not isinstance(backbone, dict) or "model_type" not in backbone:
        raise ValueError(
            f"backbone is {type(backbone).__name__} without a model_type; pass the teacher's config.to_dict()."
        )
    model_type = backbone["model_type"]
    if (
        not isinstance(model_type, str)
        or model_type not in CONFIG_MAPPING
        or model_type == MODEL_TYPE
    ):
        raise ValueError(
            f"backbone has model_type {shortened(model_type)}, which this transformers does not support as a teacher; "
            "use a teacher of a model type that transformers implements."
        )
    cleaned = {name: value for name, value in backbone.items() if name not in _NOT_ARCHITECTURE}
    return _with_old_rope_spelling(cleaned)


def _with_old_rope_spelling(backbone: dict[str, Any]) -> dict[str, Any]:
    """Add the RoPE field names of transformers 4; transformers 5 has them in ``rope_parameters``."""
    rope = backbone.get("rope_parameters")
    # One for each layer type has no old spelling.
    if not isinstance(rope, dict) or "rope_theta" not in rope:
        return backbone
    old = {"rope_theta": rope["rope_theta"], "rope_scaling": None}
    if rope.get("rope_type", "default") != "default":
        old["rope_scaling"] = {name: value for name, value in rope.items() if name != "rope_theta"}
    if "partial_rotary_factor" in rope:
        old["partial_rotary_factor"] = rope["partial_rotary_factor"]
    if backbone["model_type"] == "gpt_neox":
        old |= {"rotary_emb_base": rope["rope_theta"], "rotary_pct": rope["partial_rotary_factor"]}
    if backbone["model_type"] == "phi3" and old["rope_scaling"]:
        # transformers 4 accepts exactly these three.
        old["rope_scaling"] = {
            "type": "longrope",
            "short_factor": rope["short_factor"],
            "long_factor": rope["long_factor"],
        }
    return {**backbone, **old}


def _shares_one_rope(config: PretrainedConfig) -> bool:
    """Return True if a config object has one RoPE setting for all its layers."""
    rope = getattr(config, "rope_parameters", None)
    return isinstance(rope, dict) and not _rope_by_layer_type(rope)


def _has_several_ropes(backbone: dict[str, Any]) -> bool:
    """Return True if a backbone's layer types differ in their RoPE settings."""
    settings = _rope_by_layer_type(backbone.get("rope_parameters")).values()
    return len({str(setting) for setting in settings}) > 1


def _rope_by_layer_type(rope: Any) -> dict[str, Any]:
    """Return the RoPE settings of each layer type; empty if all layers share one setting."""
    if isinstance(rope, dict) and isinstance(rope.get("full_attention"), dict):
        return rope
    return {}


def rope_settings(config: PretrainedConfig) -> list[Mapping[str, Any]]:
    """List a decoder's RoPE settings: one entry for all layers, or one per layer type."""
    text: Any = config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    by_layer_type = [setting for setting in rope.values() if isinstance(setting, Mapping)]
    return by_layer_type or [rope]
