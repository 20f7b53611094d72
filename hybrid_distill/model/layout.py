"""Layouts of attention modules in every family that can become a student.

Shapes: P head dim. A block is P rows of a linear: one head's query, key or value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from torch import nn
from transformers import PreTrainedModel

ATTENTION_NAMES = ("self_attn", "attn", "attention", "self_attention")
"""Names of the attention module in a decoder layer."""
CACHE_NAMES = ("past_key_values", "past_key_value", "layer_past")
"""Names of the cache among the arguments of an attention module."""

Part = Literal["query", "key", "value"]
HEAD_NORMS: dict[Part, tuple[str, ...]] = {"query": ("q_norm", "q_layernorm"), "key": ("k_norm", "k_layernorm")}
"""Names of the norms behind an attention module's queries and keys."""


class AttentionLayout(NamedTuple):
    """Linears of an attention module: those that make queries, keys and values, and the one that reads the heads.

    A linear that makes all three has all queries first, then all keys, then all values; or, ``by_head``, query, key
    and value of each head side by side.
    """

    query: str
    key: str
    value: str
    output: str
    families: str
    by_head: bool = False

    @property
    def inputs(self) -> tuple[str, ...]:
        """Linears that read the layer's input, each once."""
        return tuple(dict.fromkeys((self.query, self.key, self.value)))

    def block(self, part: Part, head: int, n_heads: int, n_kv_heads: int) -> int:
        """Return the index of the block of a head's query, or a KV head's key or value, in its linear."""
        if len(self.inputs) > 1:
            return head
        if self.by_head:
            return 3 * head + ("query", "key", "value").index(part)
        return {"query": 0, "key": n_heads, "value": n_heads + n_kv_heads}[part] + head

    def blocks(
        self, linear: str, heads: Sequence[int], kv_heads: Sequence[int], n_heads: int, n_kv_heads: int
    ) -> list[int]:
        """Return the indices, ascending, of the blocks of these heads and KV heads in one linear."""
        wanted: dict[Part, Sequence[int]] = {"query": heads, "key": kv_heads, "value": kv_heads}
        return sorted(
            self.block(part, head, n_heads, n_kv_heads)
            for part, which in wanted.items()
            if getattr(self, part) == linear
            for head in which
        )

    def count_kv_heads(self, attention: nn.Module, n_heads: int, head_dim: int) -> int:
        """Count the KV heads of an attention module with ``n_heads`` query heads."""
        linear: Any = attention.get_submodule(self.key)
        n_blocks = linear.out_features // head_dim
        return n_blocks if len(self.inputs) > 1 else (n_blocks - n_heads) // 2


LAYOUTS = (
    AttentionLayout("q_proj", "k_proj", "v_proj", "o_proj", "Llama, Qwen2, Qwen3, Mistral, OLMo-2 or OLMo-3"),
    AttentionLayout("qkv_proj", "qkv_proj", "qkv_proj", "o_proj", "Phi-3"),
    AttentionLayout("query_key_value", "query_key_value", "query_key_value", "dense", "GPT-NeoX", by_head=True),
)


def find_layout(attention: nn.Module, name: str) -> AttentionLayout:
    """Return the layout of an attention module called ``name``. Raises ValueError where no layout fits."""
    linears = {part for part, child in attention.named_children() if isinstance(child, nn.Linear)}
    for layout in LAYOUTS:
        if {*layout.inputs, layout.output} <= linears:
            return layout
    missing = [part for part in (*LAYOUTS[0].inputs, LAYOUTS[0].output) if part not in linears]
    expected = ", or ".join(f"{', '.join((*layout.inputs, layout.output))} ({layout.families})" for layout in LAYOUTS)
    raise ValueError(
        f"{name} ({type(attention).__name__}) has no linear {', '.join(missing)}; "
        f"expected an attention module with {expected}."
    )


def head_norm(attention: nn.Module, part: Part) -> nn.Module | None:
    """Return the norm behind an attention module's queries or keys, if it has one."""
    norms = [getattr(attention, name, None) for name in HEAD_NORMS.get(part, ())]
    found = [norm for norm in norms if norm is not None]  # torch 2.6 compiles no next() with a default
    return found[0] if found else None


def is_over_all_heads(norm: nn.Module | None, head_dim: int) -> bool:
    """Tell whether a norm takes all heads together (OLMo-2, OLMo-3): each head then needs all the others."""
    weight = getattr(norm, "weight", None)
    return weight is not None and weight.dim() == 1 and len(weight) > head_dim


def text_config(model: Any) -> Any:
    """Return the config of the language model inside ``model``."""
    return model.config.get_text_config(decoder=True)


def head_dim_of(config: Any) -> int:
    """Return the width of an attention head; configs without it divide the hidden size among the heads."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def decoder_of(model: PreTrainedModel) -> Any:
    """Return the decoder inside a causal language model; Llama-4 names a base model that it does not have."""
    return model.model if model.base_model is model else model.base_model


def attention_name(layer: nn.Module) -> str:
    """Return the name of a decoder layer's attention module, empty if it has none."""
    children = dict(layer.named_children())
    found = [name for name in ATTENTION_NAMES if name in children]
    return found[0] if found else ""
