"""Rules for the fields of a hybrid's config.json, checked before any tensor is allocated."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping
from reprlib import repr as shortened
from typing import Any, Literal, get_args

import transformers
from transformers import PretrainedConfig

RecurrenceName = Literal["discrete", "mamba2", "mamba2-stock", "gdn"]
RECURRENCES: tuple[str, ...] = get_args(RecurrenceName)
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
RULES: dict[str, Rule] = {
    **{name: _whole(1, largest) for name, largest in LARGEST.items()},
    **dict.fromkeys(
        ("rms_norm_eps", "layer_norm_eps", "attention_dropout", "initializer_range"), _FRACTION
    ),
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias", "use_cache"), _SWITCH),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), _TOKENS),
    "rope_theta": (lambda value: type(value) in (int, float) and value > 0, "a positive number"),
    "rope_parameters": (lambda value: isinstance(value, Mapping), "a dictionary, or null"),
}
OWN_RULES: dict[str, Rule] = {
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


def check_sizes(fields: Mapping[str, Any]) -> None:
    """Raise ValueError, naming the field, for a decoder config with invalid or absurd sizes.

    Only reads the raw fields of a config.json; allocates nothing and instantiates no class.
    """
    for name in REQUIRED:
        check_field(name, fields.get(name), RULES[name])
    check_fields(fields)
    check_fields({"rope_theta": (fields.get("rope_parameters") or {}).get("rope_theta")})
    width = fields["hidden_size"]
    heads = fields["num_attention_heads"]
    groups = fields.get("num_key_value_heads")
    if groups is not None and heads % groups:
        raise ValueError(
            f"num_key_value_heads is {groups}; it must divide num_attention_heads, which is {heads}."
        )
    head_dim = fields.get("head_dim")
    if head_dim is None and width % heads:
        raise ValueError(
            f"num_attention_heads is {heads}; without a head_dim it must divide hidden_size, {width}."
        )
    # An estimate from above: four projections and a gated MLP in each layer, and two embeddings.
    attention = 4 * heads * (head_dim or width // heads)
    mlp = 3 * (fields.get("intermediate_size") or 4 * width)
    layers = fields["num_hidden_layers"] * width * (attention + mlp)
    size = layers + 2 * fields["vocab_size"] * width
    if size > LARGEST_MODEL:
        raise ValueError(
            f"the sizes make a model of {size:.1e} parameters; it must be at most {LARGEST_MODEL:.1e}."
        )


def check_field(name: str, value: Any, rule: Rule) -> None:
    """Raise ValueError for a value that breaks its rule."""
    holds, words = rule
    if not holds(value):
        raise ValueError(f"{name} is {shortened(value)}; it must be {words}.")


def check_fields(fields: Mapping[str, Any]) -> None:
    """Raise ValueError for a value that no configuration can have, or that breaks the rule of its field."""
    _check_values("", fields)
    for name, rule in RULES.items():
        if fields.get(name) is not None:
            check_field(name, fields[name], rule)


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
    if not isinstance(value, Mapping):
        return
    for key, item in value.items():
        place = f"{name}.{key}" if name else str(key)
        _check_values(place, item, depth + 1)


def check_kept(kept: Any, teacher: PretrainedConfig) -> list[list[int]]:
    """Return the kept heads as lists. Raises ValueError for other than the teacher's, each once, ascending."""
    n_layers = teacher.num_hidden_layers
    n_heads = teacher.num_attention_heads
    if not isinstance(kept, (list, tuple)) or len(kept) != n_layers:
        raise ValueError(
            f"kept is {shortened(kept)}; it must be {n_layers} lists of heads, one per layer of this backbone."
        )
    for layer, heads in enumerate(kept):
        is_list = isinstance(heads, (list, tuple)) and all(type(head) is int for head in heads)
        if not is_list or list(heads) != sorted(set(heads) & set(range(n_heads))):
            raise ValueError(
                f"kept[{layer}] is {shortened(heads)}; "
                f"it must list heads from 0 to {n_heads - 1}, ascending, each once."
            )
    return [list(heads) for heads in kept]


def check_padding(backbone: Mapping[str, Any]) -> None:
    """Raise ValueError for a padding token that the vocabulary does not have."""
    padding = backbone.get("pad_token_id")
    vocab_size = backbone["vocab_size"]
    if isinstance(padding, int) and padding >= vocab_size:
        raise ValueError(
            f"pad_token_id is {padding}; it must be below the vocabulary's size, {vocab_size}."
        )


def check_windows(
    window: int, sinks: int, d_state: int, recurrence: str, names: Mapping[str, str] | None = None
) -> None:
    """Raise ValueError for a window that no student can have; ``names`` are those of the caller's options."""
    own = {name: name for name in ("window", "sinks", "d_state", "recurrence")}
    name = {**own, **(names or {})}
    if sinks > window:
        raise ValueError(
            f"{name['sinks']} is {sinks} and {name['window']} {window}; sinks are further tokens beside a window: pass "
            f"a {name['window']} of at least {sinks}, or at most {window} sinks."
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
        if not isinstance(version, str) or not re.fullmatch(r"\d{1,4}(\.\d{1,4}){1,2}", version):
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
