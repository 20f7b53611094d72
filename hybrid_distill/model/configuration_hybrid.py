"""Configuration of a hybrid model: the teacher's config, and which of its heads stay attention."""

from __future__ import annotations

import copy
from typing import Any

from transformers import PretrainedConfig

from .backbone_config import (
    AT_THE_TOP,
    DERIVED,
    IN_BOTH,
    MODEL_TYPE,
    OWN,
    backbone_fields,
    clean_backbone,
    make_backbone_config,
    with_changes,
)
from .field_rules import (
    OWN_RULES,
    RULES,
    check_field,
    check_fields,
    check_kept,
    check_padding,
    check_sizes,
    check_version,
    check_windows,
)

_WINDOW_FIELDS = ("window", "sinks", "d_state", "recurrence")


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

    model_type = MODEL_TYPE
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
        check_fields(kwargs)
        self.d_state = d_state
        self.conv_width = conv_width
        self.conv_bias = conv_bias
        self.recurrence = recurrence
        self.window = window
        self.sinks = sinks
        self.checked_attention = checked_attention
        self.checked_transformers = checked_transformers
        for name, rule in OWN_RULES.items():
            check_field(name, getattr(self, name), rule)
        check_windows(window, sinks, d_state, recurrence)
        if conv_bias and recurrence != "discrete":
            raise ValueError(
                f"conv_bias is for discrete heads, and recurrence is {recurrence!r}; leave it out."
            )
        shared = None
        # Transformers builds some configs without arguments, to compare with the defaults.
        if backbone is not None:
            backbone = clean_backbone(backbone)
            check_sizes(backbone)
            check_padding(backbone)
            changes = backbone_fields(backbone, kwargs)
            backbone = with_changes(backbone, changes)
            # Again: keywords may have replaced what was checked.
            check_sizes(backbone)
            shared = make_backbone_config(backbone)
            kept = check_kept(kept, shared)
            check_padding(backbone)
            for name in changes:
                del kwargs[name]
        self.kept: Any = kept
        super().__init__(**kwargs)
        if shared is not None:
            for name in IN_BOTH:
                value = kwargs.get(name, getattr(shared, name, None))
                setattr(shared, name, value)
                super().__setattr__(name, value)
            shared._attn_implementation = self._attn_implementation
            self._backbone = shared

    @property
    def backbone(self) -> dict[str, Any] | None:
        """The backbone's config as a dictionary, in the spellings of transformers 4 and 5."""
        shared = self.__dict__.get("_backbone")
        return None if shared is None else clean_backbone(shared.to_dict())

    def backbone_config(self) -> PretrainedConfig:
        """Make a new config of the teacher's class."""
        return make_backbone_config(clean_backbone(self.shared_backbone().to_dict()))

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
        # Not self._backbone: without one, as in a copy that is being made, this would call itself.
        shared = self.__dict__.get("_backbone")
        if shared is None or name.startswith("_") or name in OWN:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        value = getattr(shared, name, None)
        if value is None and name in DERIVED:
            return DERIVED[name](shared)
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
        elif name in IN_BOTH:
            setattr(shared, name, value)
            super().__setattr__(name, value)
        elif name == "backbone":
            raise ValueError(
                "backbone cannot be replaced; make a new HybridConfig, or set the backbone's fields."
            )
        elif name in OWN or not (name in DERIVED or hasattr(shared, name)):
            super().__setattr__(name, self._checked_own_value(name, value))
        else:
            self._check_backbone_value(name, value)
            setattr(shared, name, value)

    def _checked_own_value(self, name: str, value: Any) -> Any:
        """Return a new value of an own field, as it is stored. Raises ValueError for one that breaks its rule."""
        if name in OWN_RULES:
            check_field(name, value, OWN_RULES[name])
        if name in _WINDOW_FIELDS:
            fields = {field: getattr(self, field) for field in _WINDOW_FIELDS}
            fields[name] = value
            check_windows(**fields)
        if name == "kept":
            return check_kept(value, self.shared_backbone())
        return value

    def _check_backbone_value(self, name: str, value: Any) -> None:
        """Raise ValueError for a value that no backbone can have, or that contradicts ``kept``."""
        if name in RULES and value is not None:
            check_field(name, value, RULES[name])
        if name in ("num_hidden_layers", "num_attention_heads"):
            # Tried on a copy: a refused value must leave the config as it was.
            changed = copy.copy(self.shared_backbone())
            setattr(changed, name, value)
            check_kept(self.kept, changed)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields: this config's own, the backbone's, and the latter once more as ``backbone``."""
        own = super().to_dict()
        own.pop("_backbone", None)
        backbone = self.backbone
        if backbone is None:
            return own
        derived = {name: getattr(self, name) for name in DERIVED}
        return {**self._fields_of_backbone(), **derived, **own, "backbone": backbone}

    def to_diff_dict(self) -> dict[str, Any]:
        """Return what a config.json holds: the backbone's fields once, under ``backbone``."""
        fields = super().to_diff_dict()
        if self.backbone is None:
            return fields
        twice = {*DERIVED, *self._fields_of_backbone()} - {*AT_THE_TOP, *self.__dict__}
        return {name: value for name, value in fields.items() if name not in twice}

    def _fields_of_backbone(self) -> dict[str, Any]:
        stored = self.shared_backbone().to_dict()
        return {
            name: value
            for name, value in stored.items()
            if name not in OWN and not name.startswith("_")
        }
