"""Configuration of a hybrid model: the teacher's own, and which of its heads stayed attention."""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

D_STATE_RANGE = (4, 128)
CONV_WIDTH_RANGE = (1, 16)
RECURRENCES = ("discrete", "mamba2")

# Facts that belong to one file or one process, not to the architecture.
_NOT_ARCHITECTURE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "_attn_implementation")
_FROM_BACKBONE = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")


class HybridConfig(PretrainedConfig):
    """What a `HybridForCausalLM` is made of.

    ``backbone`` is the teacher's ``config.to_dict()``; ``kept`` lists, per layer and ascending, the query
    heads that stay attention; every other head is recurrent with state size ``d_state``, in one of the
    `RECURRENCES` (see `SSMHeads`). ``conv_bias`` is a bias behind the convolution of discrete heads, which only
    checkpoints made elsewhere have (Llamba). Raises ValueError for any field that describes no model, before a
    tensor is allocated.
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
        **kwargs: Any,
    ) -> None:
        if backbone is not None:  # transformers builds some configs without arguments, to compare with the defaults
            backbone = _clean_backbone(backbone)
            teacher = _backbone_config(backbone)
            kept = _check_kept(kept, teacher)
            _check_range("d_state", d_state, D_STATE_RANGE)
            _check_range("conv_width", conv_width, CONV_WIDTH_RANGE)
            if recurrence not in RECURRENCES:
                raise ValueError(f"recurrence is {recurrence!r}; it must be one of {', '.join(RECURRENCES)}.")
            if conv_bias and recurrence != "discrete":
                raise ValueError(f"conv_bias is for discrete heads, and recurrence is {recurrence!r}; leave it out.")
            for name in _FROM_BACKBONE:
                kwargs.setdefault(name, getattr(teacher, name, None))
        self.backbone: Any = backbone
        self.kept: Any = kept
        self.d_state = d_state
        self.conv_width = conv_width
        self.conv_bias = conv_bias
        self.recurrence = recurrence
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


def _backbone_config(backbone: dict[str, Any]) -> PretrainedConfig:
    fields = dict(backbone)
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def _clean_backbone(backbone: Any) -> dict[str, Any]:
    if not isinstance(backbone, dict) or "model_type" not in backbone:
        raise ValueError(
            f"backbone is {type(backbone).__name__} without a model_type; pass the teacher's config.to_dict()."
        )
    if backbone["model_type"] not in CONFIG_MAPPING:
        raise ValueError(
            f"backbone has model_type {backbone['model_type']!r}, which this transformers does not know; "
            "use a teacher of a model type that transformers implements."
        )
    cleaned = {name: value for name, value in backbone.items() if name not in _NOT_ARCHITECTURE}
    return _with_old_rope_spelling(cleaned)


def _with_old_rope_spelling(backbone: dict[str, Any]) -> dict[str, Any]:
    """transformers 5 keeps RoPE settings in ``rope_parameters``; 4.x reads the names that are added here."""
    rope = backbone.get("rope_parameters")
    if not isinstance(rope, dict) or "rope_theta" not in rope:
        return backbone
    old = {"rope_theta": rope["rope_theta"], "rope_scaling": None}
    if rope.get("rope_type", "default") != "default":
        old["rope_scaling"] = {name: value for name, value in rope.items() if name != "rope_theta"}
    if "partial_rotary_factor" in rope:
        old["partial_rotary_factor"] = rope["partial_rotary_factor"]
    return {**backbone, **old}


def _check_kept(kept: Any, teacher: PretrainedConfig) -> list[list[int]]:
    n_layers, n_heads = teacher.num_hidden_layers, teacher.num_attention_heads
    if not isinstance(kept, (list, tuple)) or len(kept) != n_layers:
        raise ValueError(
            f"kept is {kept!r}; it lists the kept heads of each layer, so it needs {n_layers} lists for this backbone."
        )
    for layer, heads in enumerate(kept):
        valid = isinstance(heads, (list, tuple)) and all(type(head) is int for head in heads)
        if not valid or list(heads) != sorted(set(heads)) or any(not 0 <= head < n_heads for head in heads):
            raise ValueError(
                f"kept[{layer}] is {heads!r}; it must list heads from 0 to {n_heads - 1}, ascending, each once."
            )
    return [list(heads) for heads in kept]


def _check_range(name: str, value: Any, allowed: tuple[int, int]) -> None:
    low, high = allowed
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name} is {value!r}; it must be a whole number from {low} to {high}.")
