"""Configuration of a hybrid model: the teacher's own, and which of its heads stayed attention."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from reprlib import repr as shortened
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

D_STATE_RANGE = (4, 128)
CONV_WIDTH_RANGE = (1, 16)
RECURRENCES = ("discrete", "mamba2")
ATTENTION = ("sdpa", "eager")
"""Attention implementations that every machine has."""

# Far above every model there is, far below what would fill a memory before the first error: name -> largest value.
LARGEST = {
    "vocab_size": 2**24,
    "hidden_size": 2**17,
    "intermediate_size": 2**20,
    "num_hidden_layers": 2**10,
    "num_attention_heads": 2**10,
    "num_key_value_heads": 2**10,
    "head_dim": 2**12,
    "max_position_embeddings": 2**31,
    "num_labels": 2**14,  # transformers writes down a name for each
}
REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
LARGEST_MODEL = 2**41  # parameters, roughly counted
FRACTIONS = ("rms_norm_eps", "layer_norm_eps", "attention_dropout", "initializer_range")
SWITCHES = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_cache")
MAX_ENTRIES = 2**14  # of one list, dictionary or text
MAX_DEPTH = 8

# Facts that belong to one file or one process, not to the architecture.
_NOT_ARCHITECTURE = (
    "_name_or_path", "transformers_version", "dtype", "torch_dtype", "_attn_implementation", "attn_implementation",
    "auto_map",
)  # fmt: skip
_FROM_BACKBONE = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")


class HybridConfig(PretrainedConfig):
    """What a `HybridForCausalLM` is made of.

    ``backbone`` is the teacher's ``config.to_dict()``; ``kept`` lists, per layer and ascending, the query
    heads that stay attention; every other head is recurrent with state size ``d_state``, in one of the
    `RECURRENCES` (see `SSMHeads`). ``conv_bias`` is a bias behind the convolution of discrete heads, which only
    checkpoints made elsewhere have (Llamba). An export also holds what it was checked with: ``checked_attention``, the
    attention implementation to use unless another is asked for, and ``oldest_transformers``, below which it would
    compute something else. Raises ValueError for any field that describes no model, and under an older transformers,
    before a tensor is allocated.
    """

    model_type = "hybrid_distill"
    has_no_defaults_at_init = True
    keys_to_ignore_at_inference = ["past_key_values"]

    def __init__(
        self,
        backbone: dict[str, Any] | None = None,
        kept: list[list[int]] | None = None,
        d_state: int = 16,
        conv_width: int = 4,
        conv_bias: bool = False,
        recurrence: str = "discrete",
        checked_attention: str | None = None,
        oldest_transformers: str | None = None,
        **kwargs: Any,
    ) -> None:
        check_version(oldest_transformers)
        check_values("", kwargs)
        if checked_attention not in (None, *ATTENTION):
            raise ValueError(
                f"checked_attention is {shortened(checked_attention)}; it must be one of {', '.join(ATTENTION)}."
            )
        if backbone is not None:  # transformers builds some configs without arguments, to compare with the defaults
            backbone = _clean_backbone(backbone)
            check_sizes(backbone)
            teacher = _backbone_config(backbone)
            kept = _check_kept(kept, teacher)
            _check_range("d_state", d_state, D_STATE_RANGE)
            _check_range("conv_width", conv_width, CONV_WIDTH_RANGE)
            if recurrence not in RECURRENCES:
                raise ValueError(f"recurrence is {shortened(recurrence)}; it must be one of {', '.join(RECURRENCES)}.")
            if type(conv_bias) is not bool:
                raise ValueError(f"conv_bias is {shortened(conv_bias)}; it must be true or false.")
            if conv_bias and recurrence != "discrete":
                raise ValueError(f"conv_bias is for discrete heads, and recurrence is {recurrence!r}; leave it out.")
            for name in _FROM_BACKBONE:
                kwargs.setdefault(name, getattr(teacher, name, None))
            check_token_ids(kwargs, backbone["vocab_size"])
        self.backbone: Any = backbone
        self.kept: Any = kept
        self.d_state = d_state
        self.conv_width = conv_width
        self.conv_bias = conv_bias
        self.recurrence = recurrence
        self.checked_attention = checked_attention
        self.oldest_transformers = oldest_transformers
        super().__init__(**kwargs)

    def backbone_config(self) -> PretrainedConfig:
        """A fresh configuration object of the teacher's class."""
        if self.backbone is None:
            raise ValueError("this HybridConfig has no backbone; pass the teacher's config.to_dict() as backbone.")
        return _backbone_config(self.backbone)

    def recurrent_in(self, layer: int) -> tuple[int, ...]:
        """Query heads of a layer that are recurrent, ascending."""
        kept = set(self.kept[layer])
        return tuple(head for head in range(self.num_attention_heads) if head not in kept)

    # What generation, evaluation harnesses and launchers ask for; the backbone is its one home.
    @property
    def vocab_size(self) -> int:
        return self.backbone["vocab_size"]

    @vocab_size.setter
    def vocab_size(self, value: int) -> None:
        self.backbone["vocab_size"] = value

    @property
    def hidden_size(self) -> int:
        return self.backbone["hidden_size"]

    @property
    def num_hidden_layers(self) -> int:
        return self.backbone["num_hidden_layers"]

    @property
    def num_attention_heads(self) -> int:
        return self.backbone["num_attention_heads"]

    @property
    def num_key_value_heads(self) -> int:
        return self.backbone.get("num_key_value_heads") or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        return self.backbone.get("head_dim") or self.hidden_size // self.num_attention_heads

    @property
    def max_position_embeddings(self) -> int | None:
        return self.backbone.get("max_position_embeddings")

    @property
    def initializer_range(self) -> float:
        return self.backbone.get("initializer_range", 0.02)


def check_version(oldest: Any) -> None:
    """Raise ValueError under a transformers older than ``oldest``, and where that is not a version."""
    if oldest is None:
        return
    parts = oldest.split(".") if isinstance(oldest, str) else []
    if len(parts) not in (2, 3) or not all(part.isdecimal() and len(part) < 5 for part in parts):
        raise ValueError(f"oldest_transformers is {shortened(oldest)}; it must be a version such as 5.0.0.")
    if release(transformers.__version__) < release(oldest):
        raise ValueError(
            f"this student computes what was recorded from transformers {oldest} on, and this is transformers "
            f"{transformers.__version__}; pip install 'transformers>={oldest}'."
        )


def release(version: str) -> tuple[int, ...]:
    """Numbers of a version to compare it by: (5, 23, 0) of "5.23.0.dev0"."""
    leading = ("".join(itertools.takewhile(str.isdecimal, part)) for part in version.split(".")[:3])
    return tuple(int(digits) for digits in leading if digits)


def check_values(name: str, value: Any, depth: int = 0) -> None:
    """Raise ValueError for a number that is none, and for what is longer or deeper than any configuration.

    Looks into lists and dictionaries; ``name`` is what the value is called in the message.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} is {value}; a configuration holds finite numbers only.")
    if isinstance(value, (str, list, tuple, Mapping)) and len(value) > MAX_ENTRIES:
        raise ValueError(f"{name} has {len(value)} entries; a configuration has at most {MAX_ENTRIES} in one place.")
    if depth > MAX_DEPTH:
        raise ValueError(f"{name} is nested deeper than {MAX_DEPTH} levels; no configuration is.")
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    for key, item in value.items() if isinstance(value, Mapping) else ():
        if key in LARGEST and depth == 0:
            _check_whole(str(key), item, LARGEST[key])
        check_values(f"{name}.{key}" if name else str(key), item, depth + 1)


def check_sizes(fields: Mapping[str, Any]) -> None:
    """Raise ValueError, naming the field, for a decoder's configuration that describes no model or an absurd one.

    Nothing is allocated and no class is built: the fields are looked at as they stand in a config.json.
    """
    check_values("", fields)
    for name in REQUIRED:
        if fields.get(name) is None:
            raise ValueError(f"{name} is missing; a decoder's configuration has it.")
    for name in FRACTIONS:
        value = fields.get(name)
        if value is not None and (type(value) not in (int, float) or not 0 <= value < 1):
            raise ValueError(f"{name} is {shortened(value)}; it must be a number from 0 to less than 1.")
    rope = fields.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise ValueError(f"rope_parameters is {shortened(rope)}; it must be a dictionary, or null.")
    for theta in (fields.get("rope_theta"), rope.get("rope_theta")):
        if theta is not None and (type(theta) not in (int, float) or theta <= 0):
            raise ValueError(f"rope_theta is {shortened(theta)}; it must be a positive number.")
    for name in SWITCHES:
        if fields.get(name) is not None and type(fields[name]) is not bool:
            raise ValueError(f"{name} is {shortened(fields[name])}; it must be true or false.")
    width, heads = fields["hidden_size"], fields["num_attention_heads"]
    if (groups := fields.get("num_key_value_heads")) is not None and heads % groups:
        raise ValueError(f"num_key_value_heads is {groups}; it must divide num_attention_heads, which is {heads}.")
    if (head_dim := fields.get("head_dim")) is None and width % heads:
        raise ValueError(f"num_attention_heads is {heads}; without a head_dim it must divide hidden_size, {width}.")
    layer = width * (4 * heads * (head_dim or width // heads) + 3 * (fields.get("intermediate_size") or 4 * width))
    if (size := 2 * fields["vocab_size"] * width + fields["num_hidden_layers"] * layer) > LARGEST_MODEL:
        raise ValueError(f"the sizes make a model of {size:.1e} parameters; it must be at most {LARGEST_MODEL:.1e}.")


def check_token_ids(fields: Mapping[str, Any], vocab_size: int) -> None:
    """Raise ValueError for a special token that is no token id."""
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = fields.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int and -1 <= token < LARGEST["vocab_size"] for token in ids):
            raise ValueError(f"{name} is {shortened(value)}; it must be a token id, a list of them, or null.")
    padding = fields.get("pad_token_id")
    if isinstance(padding, int) and padding >= vocab_size:
        raise ValueError(f"pad_token_id is {padding}; it must be below the vocabulary's size, {vocab_size}.")


def _check_whole(name: str, value: Any, largest: int) -> None:
    if value is not None and (type(value) is not int or not 1 <= value <= largest):
        raise ValueError(f"{name} is {shortened(value)}; it must be a whole number from 1 to {largest}.")


def _backbone_config(backbone: dict[str, Any]) -> PretrainedConfig:
    # Copied: transformers completes the dictionaries that it is given.
    fields: dict[str, Any] = {name: dict(v) if isinstance(v, dict) else v for name, v in backbone.items()}
    try:
        config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    except Exception as error:  # each version of transformers has errors of its own for fields of a wrong type
        reason = " ".join(str(error).split())
        raise ValueError(
            f"backbone describes no {backbone['model_type']} model ({type(error).__name__}: {reason}); "
            "pass the teacher's config.to_dict()."
        ) from error
    wanted, understood = backbone.get("rope_parameters"), getattr(config, "rope_parameters", None)
    by_type = _rope_by_layer_type(wanted)
    if isinstance(understood, dict) and not _rope_by_layer_type(understood) and len({*map(str, by_type.values())}) > 1:
        raise ValueError(
            f"transformers {transformers.__version__} gives all layers of {backbone['model_type']} one RoPE, and this "
            "backbone has another for each type of layer; pip install --upgrade transformers."
        )
    return config


def _rope_by_layer_type(rope: Any) -> dict[str, Any]:
    """RoPE settings of each type of layer, empty where all layers have the same."""
    return rope if isinstance(rope, dict) and isinstance(rope.get("full_attention"), dict) else {}


def _clean_backbone(backbone: Any) -> dict[str, Any]:
    if not isinstance(backbone, dict) or "model_type" not in backbone:
        raise ValueError(
            f"backbone is {type(backbone).__name__} without a model_type; pass the teacher's config.to_dict()."
        )
    model_type = backbone["model_type"]
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING or model_type == HybridConfig.model_type:
        raise ValueError(
            f"backbone has model_type {shortened(model_type)}, which this transformers does not know as a teacher's; "
            "use a teacher of a model type that transformers implements."
        )
    cleaned = {name: value for name, value in backbone.items() if name not in _NOT_ARCHITECTURE}
    return _with_old_rope_spelling(cleaned)


def _with_old_rope_spelling(backbone: dict[str, Any]) -> dict[str, Any]:
    """transformers 5 keeps RoPE settings in ``rope_parameters``; 4.x reads the names that are added here."""
    rope, old = backbone.get("rope_parameters"), {}
    by_type = _rope_by_layer_type(rope)
    if by_type and release(transformers.__version__) < (5,):  # 5 would take the old names for all types of layers
        old["rope_local_base_freq"] = (by_type.get("sliding_attention") or {}).get("rope_theta")
        rope = by_type["full_attention"]
    if not isinstance(rope, dict) or "rope_theta" not in rope:
        return backbone
    old |= {"rope_theta": rope["rope_theta"], "rope_scaling": None}
    if rope.get("rope_type", "default") != "default":
        old["rope_scaling"] = {name: value for name, value in rope.items() if name != "rope_theta"}
    if "partial_rotary_factor" in rope:
        old["partial_rotary_factor"] = rope["partial_rotary_factor"]
    if backbone["model_type"] == "gpt_neox":
        old |= {"rotary_emb_base": rope["rope_theta"], "rotary_pct": rope["partial_rotary_factor"]}
    if backbone["model_type"] == "phi3" and old["rope_scaling"]:  # 4.x wants these three and no others
        old["rope_scaling"] = {"type": "longrope", **{name: rope[name] for name in ("short_factor", "long_factor")}}
    return {**backbone, **old}


def _check_kept(kept: Any, teacher: PretrainedConfig) -> list[list[int]]:
    n_layers, n_heads = teacher.num_hidden_layers, teacher.num_attention_heads
    if not isinstance(kept, (list, tuple)) or len(kept) != n_layers:
        raise ValueError(
            f"kept is {shortened(kept)}; it lists the kept heads of each layer, "
            f"so it needs {n_layers} lists for this backbone."
        )
    for layer, heads in enumerate(kept):
        valid = isinstance(heads, (list, tuple)) and all(type(head) is int for head in heads)
        if not valid or list(heads) != sorted(set(heads)) or any(not 0 <= head < n_heads for head in heads):
            raise ValueError(
                f"kept[{layer}] is {shortened(heads)}; "
                f"it must list heads from 0 to {n_heads - 1}, ascending, each once."
            )
    return [list(heads) for heads in kept]


def _check_range(name: str, value: Any, allowed: tuple[int, int]) -> None:
    low, high = allowed
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name} is {shortened(value)}; it must be a whole number from {low} to {high}.")
