"""Layouts of the attention modules in every model family that can become a student.

Shapes: P head dim. A block is P rows of a linear: one head's query, key or value.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

ATTENTION_NAMES = ("self_attn", "attn", "attention", "self_attention")
"""Names of the attention module in a decoder layer."""
CACHE_NAMES = ("cache", "past_key_values", "past_key_value", "layer_past")
"""Names of the cache among a forward's arguments. transformers 5.24 renamed ``past_key_values`` to ``cache``."""

Part = Literal["query", "key", "value"]
HEAD_NORMS: dict[Part, tuple[str, ...]] = {
    "query": ("q_norm", "q_layernorm"),
    "key": ("k_norm", "k_layernorm"),
}
"""Names of the norms after an attention module's query and key projections."""


class AttentionLayout(NamedTuple):
    """Names of an attention module's linears: query, key and value projections, and the output projection.

    A fused linear stores all queries, then all keys, then all values; with ``by_head``, it stores query, key and value
    head by head.
    """

    query: str
    key: str
    value: str
    output: str
    families: str
    by_head: bool = False

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the linears that read the layer's input, without duplicates."""
        return tuple(dict.fromkeys((self.query, self.key, self.value)))

    def block(self, part: Part, head: int, n_heads: int, n_kv_heads: int) -> int:
        """Return the block index, within its linear, of a head's query or a KV head's key or value."""
        if len(self.inputs) > 1:
            return head
        if self.by_head:
            return 3 * head + ("query", "key", "value").index(part)
        first = {"query": 0, "key": n_heads, "value": n_heads + n_kv_heads}
        return first[part] + head

    def blocks(
        self,
        linear: str,
        heads: Sequence[int],
        kv_heads: Sequence[int],
        n_heads: int,
        n_kv_heads: int,
    ) -> list[int]:
        """Return the block indices of these heads and KV heads in one linear, ascending."""
        heads_of: dict[Part, Sequence[int]] = {"query": heads, "key": kv_heads, "value": kv_heads}
        blocks = []
        for part, heads_of_part in heads_of.items():
            if getattr(self, part) == linear:
                blocks += [self.block(part, head, n_heads, n_kv_heads) for head in heads_of_part]
        return sorted(blocks)

    def count_kv_heads(self, attention: nn.Module, n_heads: int, head_dim: int) -> int:
        """Count the KV heads of an attention module with ``n_heads`` query heads."""
        linear: Any = attention.get_submodule(self.key)
        n_blocks = linear.out_features // head_dim
        if len(self.inputs) > 1:
            return n_blocks
        # One linear: all queries, then as many keys as values.
        return (n_blocks - n_heads) // 2


LAYOUTS = (
    AttentionLayout(
        "q_proj", "k_proj", "v_proj", "o_proj", "Llama, Qwen2, Qwen3, Mistral, OLMo-2 or OLMo-3"
    ),
    AttentionLayout("q_proj", "k_proj", "v_proj", "dense", "Phi, Phi-1.5 or Phi-2"),
    AttentionLayout("qkv_proj", "qkv_proj", "qkv_proj", "o_proj", "Phi-3"),
    AttentionLayout(
        "query_key_value", "query_key_value", "query_key_value", "dense", "GPT-NeoX", by_head=True
    ),
)


class ConfigView:
    """Config of a backbone for one attention module: overrides some fields, reads every other through."""

    def __init__(self, backbone: PretrainedConfig, **fields: Any) -> None:
        self._backbone = backbone
        self.__dict__.update(fields)

    def __getattr__(self, name: str) -> Any:
        # Copies and pickles read fields before the first is set.
        if name.startswith("__") or name == "_backbone":
            raise AttributeError(name)
        return getattr(self._backbone, name)


def find_layout(attention: nn.Module, name: str) -> AttentionLayout:
    """Return the layout of an attention module called ``name``. Raises ValueError if no layout fits."""
    linears = {part for part, child in attention.named_children() if isinstance(child, nn.Linear)}
    expected = []
    for layout in LAYOUTS:
        names = (*layout.inputs, layout.output)
        if linears.issuperset(names):
            return layout
        expected.append(f"{', '.join(names)} ({layout.families})")
    common_names = (*LAYOUTS[0].inputs, LAYOUTS[0].output)
    missing = [part for part in common_names if part not in linears]
    raise ValueError(
        f"{name} ({type(attention).__name__}) has no linear {', '.join(missing)}; "
        f"expected an attention module with {', or '.join(expected)}."
    )


def cache_argument(forward: Callable[..., Any]) -> str:
    """Return the name under which ``forward`` takes a cache.

    The signature decides, not the version of transformers: a family, or a model's remote code, may be older or newer.
    """
    parameters = inspect.signature(forward).parameters
    for name in CACHE_NAMES:
        if name in parameters:
            return name
    return CACHE_NAMES[0]


def cache_of(output: Any) -> Any:
    """Return the cache in a model's output, whatever its field is called; None if there is none."""
    # `past_key_values` of a newer output warns, so the new name is asked for first.
    for name in CACHE_NAMES[:2]:
        if hasattr(output, name):
            return getattr(output, name)
    return None


def cache_among(arguments: Mapping[str, Any]) -> Any:
    """Return the cache among keyword arguments, under any of `CACHE_NAMES`; None if there is none."""
    for name in CACHE_NAMES:
        if arguments.get(name) is not None:
            return arguments[name]
    return None


def head_norm(attention: nn.Module, part: Part) -> nn.Module | None:
    """Return the norm after an attention module's query or key projection, if it has one."""
    for name in HEAD_NORMS.get(part, ()):
        norm = getattr(attention, name, None)
        if norm is not None:
            return norm
    return None


def is_over_all_heads(norm: nn.Module | None, head_dim: int) -> bool:
    """Return True if a norm covers all heads jointly (OLMo-2, OLMo-3), so that each head depends on all others."""
    weight = getattr(norm, "weight", None)
    return weight is not None and weight.dim() == 1 and len(weight) > head_dim


def text_config(model: Any) -> Any:
    """Return the config of the language model inside ``model``."""
    return model.config.get_text_config(decoder=True)


def head_dim_of(config: Any) -> int:
    """Return a config's head dim; without one, the hidden size divided by the number of heads."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def decoder_of(model: PreTrainedModel) -> Any:
    """Return the decoder inside a causal language model; Llama-4 declares a base model that does not exist."""
    return model.model if model.base_model is model else model.base_model


def rope_frequencies(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of a model that hold RoPE's frequencies, by name; some families have several."""
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")}


def attention_name(layer: nn.Module) -> str:
    """Return the name of a decoder layer's attention module; empty if there is none."""
    children = dict(layer.named_children())
    for name in ATTENTION_NAMES:
        if name in children:
            return name
    return ""
