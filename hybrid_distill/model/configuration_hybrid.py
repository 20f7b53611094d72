"""Configuration of a hybrid model: the teacher's config, and which of its heads stay attention."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Mapping
from reprlib import repr as shortened
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

RECURRENCES = ("discrete", "mamba2", "mamba2-stock", "gdn")
ATTENTION = ("sdpa", "eager")
"""Attention implementations that run on every machine."""

# Largest value per field: far above any existing model, yet small enough to raise an error before memory runs out.
LARGEST = {
    "vocab_size": 2**24,
    "hidden_size": 2**17,
    "intermediate_size": 2**20,
    "num_hidden_layers": 2**10,
    "num_attention_heads": 2**10,
    "num_key_value_heads": 2**10,
    "head_dim": 2**12,
    "max_position_embeddings": 2**31,
    "num_labels": 2**14,  # transformers stores a name for each
}
REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
LARGEST_MODEL = 2**41  # parameters, estimated
MAX_ENTRIES = 2**14  # in one list, dictionary or string
MAX_DEPTH = 8

Rule = tuple[Callable[[Any], bool], str]
"""Condition on a value, and its description for errors."""


def _whole(least: int, most: int) -> Rule:
    return (
        lambda value: type(value) is int and least <= value <= most,
        f"a whole number from {least} to {most}",
    )


def _all_ids(value: Any) -> bool:
    ids = value if isinstance(value, list) else [value]
    return all(type(token) is int and -1 <= token < LARGEST["vocab_size"] for token in ids)


_FRACTION: Rule = (
    lambda value: type(value) in (int, float) and 0 <= value <= 1,
    "a number from 0 to 1",
)
_SWITCH: Rule = (lambda value: type(value) is bool, "true or false")
_TOKENS: Rule = (_all_ids, "a token id, a list of them, or null")
# Rules for fields that are present and not null.
_RULES: dict[str, Rule] = {
    **{name: _whole(1, largest) for name, largest in LARGEST.items()},
    **dict.fromkeys(
        ("rms_norm_eps", "layer_norm_eps", "attention_dropout", "initializer_range"), _FRACTION
    ),
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias", "use_cache"), _SWITCH),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), _TOKENS),
    "rope_theta": (lambda value: type(value) in (int, float) and value > 0, "a positive number"),
    "rope_parameters": (lambda value: isinstance(value, Mapping), "a dictionary, or null"),
}
_OWN_RULES: dict[str, Rule] = {
    "d_state": (
        lambda value: type(value) is int and (value == 0 or 4 <= value <= 128),
        "a whole number from 4 to 128, or 0 for windows alone",
    ),
    "window": _whole(0, LARGEST["max_position_embeddings"]),
    "sinks": _whole(0, LARGEST["max_position_embeddings"]),
    "conv_width": _whole(1, 16),
    "conv_bias": _SWITCH,
    "recurrence": (lambda value: value in RECURRENCES, f"one of {', '.join(RECURRENCES)}"),
    "checked_attention": (
        lambda value: value in (None, *ATTENTION),
        f"one of {', '.join(ATTENTION)}, or null",
    ),
}

_WINDOW_FIELDS = ("window", "sinks", "d_state", "recurrence")
# Facts that belong to one file or one process, not to the architecture.
_NOT_ARCHITECTURE = (
    "_name_or_path", "transformers_version", "dtype", "torch_dtype", "_attn_implementation", "attn_implementation",
    "auto_map", "quantization_config",
)  # fmt: skip
# Fields that a HybridConfig holds itself; every other field of a backbone is the backbone's.
_OWN = (
    *_OWN_RULES, *_NOT_ARCHITECTURE, "checked_transformers", "kept", "backbone", "model_type", "architectures",
    "name_or_path", "id2label", "label2id", "num_labels", "problem_type", "is_encoder_decoder",
)  # fmt: skip
# Fields that transformers gives every config: set in both.
_IN_BOTH = ("output_hidden_states", "output_attentions", "return_dict", "chunk_size_feed_forward")
_ROPE_OF_TRANSFORMERS_4 = (
    "rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor", "rotary_emb_base", "rotary_pct",
)  # fmt: skip
# Fields of the backbone that readers of a config.json look for at its top.
_AT_THE_TOP = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")
# Values of fields that generation, evaluation suites and launchers read, where a backbone leaves them out.
_DERIVED: dict[str, Callable[[Any], Any]] = {
    "num_key_value_heads": lambda backbone: backbone.num_attention_heads,
    "head_dim": lambda backbone: backbone.hidden_size // backbone.num_attention_heads,
    "max_position_embeddings": lambda backbone: None,
    "initializer_range": lambda backbone: 0.02,
    **dict.fromkeys(_AT_THE_TOP, lambda backbone: None),
}


class HybridConfig(PretrainedConfig):
    """Configuration of a `HybridForCausalLM`.

    ``backbone`` is the teacher's ``config.to_dict()``. ``kept`` lists, per layer and ascending, the query heads that
    stay attention; every other head is recurrent with state size ``d_state``, in one of the `RECURRENCES` (see
    `SSMHeads`). With a ``window``, these heads also attend to the last ``window`` tokens of a document and its first
    ``sinks``; with ``d_state`` 0, they do nothing else. Only Llamba sets ``conv_bias``. An export records how it was
    checked: ``checked_attention``, the default attention implementation, and ``checked_transformers``, the versions of
    transformers under which exports of its family computed the same, oldest first. An older version is refused, an
    unknown one makes the model check itself when it is loaded. Raises ValueError for invalid fields, before any tensor
    is allocated.

    Every field of the backbone's config is also a field of this one (``config.vocab_size``): as a keyword, to read, to
    write, and in ``to_dict()``. Only the backbone stores it, and a model's decoder computes with that same backbone's
    config, so that a change reaches the decoder. Raises ValueError for a value that no backbone can have or that
    contradicts ``kept``.
    """

    model_type = "hybrid_distill"
    has_no_defaults_at_init = True
    keys_to_ignore_at_inference = ["cache", "past_key_values"]

    def __init__(
        self,
        backbone: dict[str, Any] | None = None,
        kept: list[list[int]] | None = None,
        d_state: int = 16,
        conv_width: int = 4,
        conv_bias: bool = False,
        recurrence: str = "discrete",
        window: int = 0,
        sinks: int = 0,
        checked_attention: str | None = None,
        checked_transformers: list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        check_version(checked_transformers)
        _check_fields(kwargs)
        self.d_state = d_state
        self.conv_width = conv_width
        self.conv_bias = conv_bias
        self.recurrence = recurrence
        self.window = window
        self.sinks = sinks
        self.checked_attention = checked_attention
        self.checked_transformers = checked_transformers
        for name, rule in _OWN_RULES.items():
            _check(name, getattr(self, name), rule)
        check_windows(window, sinks, d_state, recurrence)
        if conv_bias and recurrence != "discrete":
            raise ValueError(
                f"conv_bias is for discrete heads, and recurrence is {recurrence!r}; leave it out."
            )
        shared = None
        # Transformers builds some configs without arguments, to compare with the defaults.
        if backbone is not None:
            backbone = _clean_backbone(backbone)
            check_sizes(backbone)
            _check_padding(backbone)
            given = _fields_of(backbone, kwargs)
            backbone = _updated(backbone, given)
            check_sizes(backbone)
            shared = _backbone_config(backbone)
            kept = _check_kept(kept, shared)
            _check_padding(backbone)
            for name in given:
                del kwargs[name]
        self.kept: Any = kept
        super().__init__(**kwargs)
        if shared is not None:
            for name in _IN_BOTH:
                value = kwargs.get(name, getattr(shared, name, None))
                setattr(shared, name, value)
                super().__setattr__(name, value)
            shared._attn_implementation = self._attn_implementation
            self._backbone = shared

    @property
    def backbone(self) -> dict[str, Any] | None:
        """The backbone's config as a dictionary, in the spellings of transformers 4 and 5."""
        shared = self.__dict__.get("_backbone")
        return None if shared is None else _clean_backbone(shared.to_dict())

    def backbone_config(self) -> PretrainedConfig:
        """Make a new config of the teacher's class."""
        return _backbone_config(_clean_backbone(self.shared_backbone().to_dict()))

    def shared_backbone(self) -> PretrainedConfig:
        """Return the config that stores the backbone's fields, and that a model's decoder reads."""
        shared = self.__dict__.get("_backbone")
        if shared is None:
            raise ValueError(
                "this HybridConfig has no backbone; pass the teacher's config.to_dict() as backbone."
            )
        return shared

    def share_backbone(self, config: PretrainedConfig) -> None:
        """Store the backbone's fields in ``config``, the one that a decoder reads."""
        self._backbone = config

    def replaced_in(self, layer: int) -> tuple[int, ...]:
        """Return the query heads of a layer that are not kept, ascending."""
        kept = set(self.kept[layer])
        return tuple(head for head in range(self.num_attention_heads) if head not in kept)

    def __getattr__(self, name: str) -> Any:
        """Read a field of the backbone; called for names that this config lacks."""
        shared = self.__dict__.get("_backbone")
        if shared is None or name.startswith("_") or name in _OWN:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        value = getattr(shared, name, None)
        if value is None and name in _DERIVED:
            return _DERIVED[name](shared)
        if value is None and not hasattr(shared, name):
            raise AttributeError(
                f"neither {type(self).__name__} nor its backbone's config has {name!r}"
            )
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        """Write a field of the backbone where it is stored, and any other field here."""
        shared = self.__dict__.get("_backbone")
        if name == "_attn_implementation" and shared is not None:
            shared._attn_implementation = value
        if shared is None or name.startswith("_"):
            super().__setattr__(name, value)
        elif name in _IN_BOTH:
            setattr(shared, name, value)
            super().__setattr__(name, value)
        elif name == "backbone":
            raise ValueError(
                "backbone cannot be replaced; make a new HybridConfig, or set the backbone's fields."
            )
        elif name in _OWN or not (name in _DERIVED or hasattr(shared, name)):
            if name in _OWN_RULES:
                _check(name, value, _OWN_RULES[name])
            if name in _WINDOW_FIELDS:
                fields = {field: getattr(self, field) for field in _WINDOW_FIELDS}
                check_windows(**{**fields, name: value})
            if name == "kept":
                value = _check_kept(value, shared)
            super().__setattr__(name, value)
        else:
            if name in _RULES and value is not None:
                _check(name, value, _RULES[name])
            if name in ("num_hidden_layers", "num_attention_heads"):
                changed = copy.copy(shared)
                setattr(changed, name, value)
                _check_kept(self.kept, changed)
            setattr(shared, name, value)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields: this config's own, the backbone's, and the latter once more as ``backbone``."""
        own = super().to_dict()
        own.pop("_backbone", None)
        backbone = self.backbone
        if backbone is None:
            return own
        derived = {name: getattr(self, name) for name in _DERIVED}
        return {**self._fields_of_backbone(), **derived, **own, "backbone": backbone}

    def to_diff_dict(self) -> dict[str, Any]:
        """Return what a config.json holds: the backbone's fields once, under ``backbone``."""
        fields = super().to_diff_dict()
        if self.backbone is None:
            return fields
        twice = {*_DERIVED, *self._fields_of_backbone()} - {*_AT_THE_TOP, *self.__dict__}
        return {name: value for name, value in fields.items() if name not in twice}

    def _fields_of_backbone(self) -> dict[str, Any]:
        stored = self.shared_backbone().to_dict()
        return {
            name: value
            for name, value in stored.items()
            if name not in _OWN and not name.startswith("_")
        }


def check_windows(
    window: int, sinks: int, d_state: int, recurrence: str, names: Mapping[str, str] | None = None
) -> None:
    """Raise ValueError for a window that no student can have; ``names`` are those of the caller's options."""
    own = {name: name for name in ("window", "sinks", "d_state", "recurrence")}
    name = {**own, **(names or {})}
    if sinks > window:
        raise ValueError(
            f"{name['sinks']} is {sinks} and {name['window']} {window}; sinks are further tokens beside a window: pass "
            f"at most {window}."
        )
    if not window and not d_state:
        raise ValueError(
            f"{name['d_state']} is 0, which leaves replaced heads with a window alone, and {name['window']} is 0; "
            f"pass a {name['window']} of at least 1, or a {name['d_state']} of at least 4."
        )
    if window and recurrence == "mamba2-stock":
        raise ValueError(
            f"{name['recurrence']} is 'mamba2-stock', whose output gate cannot start closed, and {name['window']} is "
            f"{window}; pass {name['window']} 0, or discrete, mamba2 or gdn."
        )


def check_version(checked: Any) -> None:
    """Raise ValueError if transformers is older than every version in ``checked``, or if one is not a version."""
    if checked is None:
        return
    if not isinstance(checked, list) or not checked:
        raise ValueError(
            f"checked_transformers is {shortened(checked)}; it must be a list of versions, or null."
        )
    for version in checked:
        parts = version.split(".") if isinstance(version, str) else []
        if len(parts) not in (2, 3) or not all(
            part.isdecimal() and len(part) < 5 for part in parts
        ):
            raise ValueError(
                f"checked_transformers has {shortened(version)}; it must be a version such as 5.2.0."
            )
    oldest = min(checked, key=release)
    if release(transformers.__version__) < release(oldest):
        raise ValueError(
            f"this student needs transformers {oldest} or newer, found {transformers.__version__}; "
            f"pip install 'transformers>={oldest}'."
        )


def release(version: str) -> tuple[int, ...]:
    """Parse a version into comparable numbers: (5, 23, 0) for "5.23.0.dev0"."""
    leading = ("".join(itertools.takewhile(str.isdecimal, part)) for part in version.split(".")[:3])
    return tuple(int(digits) for digits in leading if digits)


def check_sizes(fields: Mapping[str, Any]) -> None:
    """Raise ValueError, naming the field, for a decoder config with invalid or absurd sizes.

    Only reads the raw fields of a config.json; allocates nothing and instantiates no class.
    """
    for name in REQUIRED:
        _check(name, fields.get(name), _RULES[name])
    _check_fields(fields)
    _check_fields({"rope_theta": (fields.get("rope_parameters") or {}).get("rope_theta")})
    width, heads = fields["hidden_size"], fields["num_attention_heads"]
    if (groups := fields.get("num_key_value_heads")) is not None and heads % groups:
        raise ValueError(
            f"num_key_value_heads is {groups}; it must divide num_attention_heads, which is {heads}."
        )
    if (head_dim := fields.get("head_dim")) is None and width % heads:
        raise ValueError(
            f"num_attention_heads is {heads}; without a head_dim it must divide hidden_size, {width}."
        )
    layer = width * (
        4 * heads * (head_dim or width // heads)
        + 3 * (fields.get("intermediate_size") or 4 * width)
    )
    if (
        size := 2 * fields["vocab_size"] * width + fields["num_hidden_layers"] * layer
    ) > LARGEST_MODEL:
        raise ValueError(
            f"the sizes make a model of {size:.1e} parameters; it must be at most {LARGEST_MODEL:.1e}."
        )


def _check(name: str, value: Any, rule: Rule) -> None:
    holds, words = rule
    if not holds(value):
        raise ValueError(f"{name} is {shortened(value)}; it must be {words}.")


def _check_fields(fields: Mapping[str, Any]) -> None:
    _check_values("", fields)
    for name, rule in _RULES.items():
        if fields.get(name) is not None:
            _check(name, fields[name], rule)


def _check_values(name: str, value: Any, depth: int = 0) -> None:
    """Raise ValueError for NaN, infinities, and values longer or more deeply nested than in any real config."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} is {value}; a configuration holds finite numbers only.")
    if isinstance(value, (str, list, tuple, Mapping)) and len(value) > MAX_ENTRIES:
        raise ValueError(
            f"{name} has {len(value)} entries; a configuration has at most {MAX_ENTRIES} in one place."
        )
    if depth > MAX_DEPTH:
        raise ValueError(f"{name} is nested deeper than {MAX_DEPTH} levels; no configuration is.")
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    for key, item in value.items() if isinstance(value, Mapping) else ():
        _check_values(f"{name}.{key}" if name else str(key), item, depth + 1)


def _check_kept(kept: Any, teacher: PretrainedConfig) -> list[list[int]]:
    n_layers, n_heads = teacher.num_hidden_layers, teacher.num_attention_heads
    if not isinstance(kept, (list, tuple)) or len(kept) != n_layers:
        raise ValueError(
            f"kept is {shortened(kept)}; it must be {n_layers} lists of heads, one per layer of this backbone."
        )
    for layer, heads in enumerate(kept):
        valid = isinstance(heads, (list, tuple)) and all(type(head) is int for head in heads)
        if (
            not valid
            or list(heads) != sorted(set(heads))
            or any(not 0 <= head < n_heads for head in heads)
        ):
            raise ValueError(
                f"kept[{layer}] is {shortened(heads)}; "
                f"it must list heads from 0 to {n_heads - 1}, ascending, each once."
            )
    return [list(heads) for heads in kept]


def _check_padding(backbone: Mapping[str, Any]) -> None:
    padding = backbone.get("pad_token_id")
    vocab_size = backbone["vocab_size"]
    if isinstance(padding, int) and padding >= vocab_size:
        raise ValueError(
            f"pad_token_id is {padding}; it must be below the vocabulary's size, {vocab_size}."
        )


def _fields_of(backbone: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the given fields that are the backbone's."""
    known = {*backbone, *_DERIVED, *_ROPE_OF_TRANSFORMERS_4, *_backbone_config(backbone).to_dict()}
    return {
        name: value
        for name, value in given.items()
        if name in known and name not in (*_OWN, *_IN_BOTH)
    }


def _updated(backbone: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return a backbone with the given fields. Raises ValueError for RoPE fields against ``rope_parameters``."""
    rope = backbone.get("rope_parameters")
    if "rope_parameters" in given and given["rope_parameters"] != rope:
        backbone = {
            name: value for name, value in backbone.items() if name not in _ROPE_OF_TRANSFORMERS_4
        }
    elif isinstance(rope, dict):
        for name in _ROPE_OF_TRANSFORMERS_4:
            if name in given and given[name] != backbone.get(name):
                raise ValueError(
                    f"{name} is {shortened(given[name])}, and the backbone has rope_parameters; pass rope_parameters, "
                    "with all its entries."
                )
    derived = _backbone_config(backbone)
    for name, value in given.items():
        left_out = name in _DERIVED and backbone.get(name) is None
        if not (left_out and value == _DERIVED[name](derived)):
            backbone = {**backbone, name: value}
    return _with_old_rope_spelling(backbone)


def _backbone_config(backbone: dict[str, Any]) -> PretrainedConfig:
    # Copied, because transformers fills in missing entries in place.
    fields: dict[str, Any] = {
        name: dict(v) if isinstance(v, dict) else v for name, v in backbone.items()
    }
    try:
        config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    except Exception as error:  # errors for fields of a wrong type vary by version of transformers
        reason = " ".join(str(error).split())
        raise ValueError(
            f"backbone is not a valid {backbone['model_type']} config ({type(error).__name__}: {reason}); "
            "pass the teacher's config.to_dict()."
        ) from error
    wanted, understood = backbone.get("rope_parameters"), getattr(config, "rope_parameters", None)
    by_type = _rope_by_layer_type(wanted)
    if (
        isinstance(understood, dict)
        and not _rope_by_layer_type(understood)
        and len({*map(str, by_type.values())}) > 1
    ):
        raise ValueError(
            f"transformers {transformers.__version__} has one RoPE for all layers of {backbone['model_type']}, but "
            "this backbone has one per layer type; pip install --upgrade transformers."
        )
    return config


def _clean_backbone(backbone: Any) -> dict[str, Any]:
    """Return the fields that describe the architecture, with RoPE in the spellings of transformers 4 and 5."""
    if not isinstance(backbone, dict) or "model_type" not in backbone:
        raise ValueError(
            f"backbone is {type(backbone).__name__} without a model_type; pass the teacher's config.to_dict()."
        )
    model_type = backbone["model_type"]
    if (
        not isinstance(model_type, str)
        or model_type not in CONFIG_MAPPING
        or model_type == HybridConfig.model_type
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
    if backbone["model_type"] == "phi3" and old["rope_scaling"]:  # 4.x accepts exactly these three
        old["rope_scaling"] = {
            "type": "longrope",
            **{name: rope[name] for name in ("short_factor", "long_factor")},
        }
    return {**backbone, **old}


def _rope_by_layer_type(rope: Any) -> dict[str, Any]:
    """Return the RoPE settings of each layer type; empty if all layers share one setting."""
    return rope if isinstance(rope, dict) and isinstance(rope.get("full_attention"), dict) else {}


def rope_settings(config: PretrainedConfig) -> list[Mapping[str, Any]]:
    """List a decoder's RoPE settings: one entry for all layers, or one per layer type."""
    shape: Any = config.get_text_config(decoder=True)
    rope = getattr(shape, "rope_parameters", None) or getattr(shape, "rope_scaling", None) or {}
    return [part for part in rope.values() if isinstance(part, Mapping)] or [rope]
