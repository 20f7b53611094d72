"""Mixer that replaces a teacher's attention: kept and replaced heads, in the teacher's head order.

Shapes: B batch, L length, S source length, H heads, P head dim, D model width, R replaced heads.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from .cache import HybridCache
from .configuration_hybrid import HybridConfig
from .layer_cache import HybridLayerCache
from .layout import (
    CACHE_NAMES,
    ConfigView,
    Part,
    cache_among,
    cache_argument,
    find_layout,
    head_norm,
    is_over_all_heads,
)
from .recurrent_heads import SSMHeads
from .rows import pick_heads
from .windowed_heads import CALL, WindowedAttention, WindowedCall, kv_index_of

ROW_ARGUMENTS = ("token_mask", "seq_idx")
"""Arguments of mixers that attention modules do not accept."""
# Not an attribute of the mixer: servers run one model in many threads.
current_row = threading.local()
"""``arguments``: `ROW_ARGUMENTS` of the decoder layer that this thread runs."""
HeadPart = Literal["recurrence", "window"]
"""Parts that a replaced head sums."""


class _KVStore:
    """Cache adapter for kept attention: stores each KV head once and repeats it for every head that reads it."""

    def __init__(self, layer: HybridLayerCache | None, kv_index: list[int] | None) -> None:
        self.layer = layer
        self.kv_index = kv_index

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self.layer is not None:
            key_states, value_states = self.layer.update(key_states, value_states)
        if self.kv_index is None:
            return key_states, value_states
        return pick_heads(key_states, self.kv_index), pick_heads(value_states, self.kv_index)

    def get_seq_length(self, *args: Any) -> int:
        if self.layer is None:
            return 0
        return self.layer.get_seq_length()


def _pick_blocks(
    heads: list[int], head_dim: int, norm: nn.Module, args: Any, out_BLC: Tensor
) -> Tensor:
    """Pick heads from the output of a norm over all heads (forward hook)."""
    picked = []
    for head in heads:
        begin = head * head_dim
        picked.append(out_BLC[..., begin : begin + head_dim])
    return torch.cat(picked, dim=-1)


def _unprojected(t_BLD: Tensor) -> Tensor:
    """Replace the output projection in kept attention. Not a module: LoRA would match it by name."""
    return t_BLD


def _refuse_split_rows(kwargs: dict[str, Any]) -> None:
    """Raise ValueError if accelerate splits rows over devices."""
    # From a hook of accelerate on attention modules: a decoder does not pass it on.
    if "is_causal" in kwargs:
        raise ValueError(
            "is_causal was put into the mixer's arguments, as accelerate's context parallelism does, which gives "
            "each device a part of the row. Replaced heads need the whole row: use no context parallelism; "
            "set_segment_len saves memory on long rows."
        )


class HybridMixer(nn.Module):
    """Replacement for the attention module of a layer, with the same inputs and kind of output.

    ``attention`` is the backbone's attention module without its output projection. It is reduced to the kept heads
    (None if no head is kept); if replaced heads have a window, it is whole, and ``windowed`` limits what they see.
    ``ssm`` holds the recurrent heads (None if all heads are kept, or if windows stand alone). If queries and keys are
    normalized over all heads, their projections stay whole and the kept heads are picked after the norm.
    """

    def __init__(self, attention: Any, config: HybridConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.n_heads: int = config.num_attention_heads
        self.kept: tuple[int, ...] = tuple(config.kept[layer])
        self.replaced = config.replaced_in(layer)
        self.layout = find_layout(attention, f"the attention of layer {layer}")
        self.o_proj: nn.Linear = getattr(attention, self.layout.output)
        self.head_dim = self.o_proj.in_features // self.n_heads
        self.group_size: int = self.n_heads // config.num_key_value_heads
        self.kv_groups = tuple(sorted({head // self.group_size for head in self.kept}))
        # Decoders of some transformers versions read these.
        for name in ("attention_type", "is_sliding"):
            if hasattr(attention, name):
                setattr(self, name, getattr(attention, name))
        self._cache_argument = cache_argument(attention.forward)
        # Stored KV head of each kept head; None if the backbone repeats KV heads itself.
        self.kv_index: list[int] | None = None
        self.zeroed_parts: frozenset[HeadPart] = frozenset()
        """Parts of replaced heads that are zeroed (`zero_part`)."""
        self.windowed: WindowedAttention | None = None
        self.attention: Any = None
        delattr(attention, self.layout.output)
        setattr(attention, self.layout.output, _unprojected)
        if self.replaced and config.window:
            self.attention = attention
            self.windowed = WindowedAttention(attention, config, layer)
        elif self.kept:
            self.attention = self._cut_down(attention)
        self.ssm: SSMHeads | None = None
        if self.replaced and config.d_state:
            self.ssm = SSMHeads(
                config.hidden_size,
                len(self.replaced),
                self.head_dim,
                config.d_state,
                config.conv_width,
                config.conv_bias,
                config.recurrence,
                starts_closed=config.window > 0,
            )

    def _cut_down(self, attention: Any) -> nn.Module:
        """Shrink the backbone's attention projections to the kept heads; the builder fills in their weights."""
        n_kept = len(self.kept)
        n_stored = len(self.kv_groups)
        self._cut_projections(attention)
        # None: the backbone repeats KV heads itself, because all are read equally often, in order.
        self.kv_index = kv_index_of(list(self.kept), list(self.kv_groups), self.group_size)
        n_repeats = 1
        if self.kv_index is None:
            n_repeats = n_kept // n_stored
        # Head counts that forwards read, under the names that the families use.
        counts = {
            "num_heads": n_kept,
            "num_attention_heads": n_kept,
            "num_key_value_heads": n_stored,
            "num_key_value_groups": n_repeats,
        }
        for name, count in counts.items():
            if hasattr(attention, name):
                setattr(attention, name, count)
        attention.config = ConfigView(
            attention.config, num_attention_heads=n_kept, num_key_value_heads=n_stored
        )
        return attention

    def _cut_projections(self, attention: Any) -> None:
        """Replace projections by empty ones of the kept heads, except those before a norm that spans all heads."""
        n_kv_heads = self.n_heads // self.group_size
        whole = self._pick_after_norms(attention)
        for name in self.layout.inputs:
            if name in whole:
                continue
            full = getattr(attention, name)
            blocks = self.layout.blocks(name, self.kept, self.kv_groups, self.n_heads, n_kv_heads)
            n_rows = len(blocks) * self.head_dim
            cut = nn.Linear(full.in_features, n_rows, bias=full.bias is not None)
            setattr(attention, name, cut)

    def _pick_after_norms(self, attention: Any) -> set[str]:
        """Pick the kept heads after each norm that spans all heads; return the projections before these norms, which
        stay whole."""
        kept: dict[Part, tuple[int, ...]] = {"query": self.kept, "key": self.kv_groups}
        n_all: dict[Part, int] = {"query": self.n_heads, "key": self.n_heads // self.group_size}
        whole = set()
        for part, heads in kept.items():
            norm = head_norm(attention, part)
            if norm is not None and is_over_all_heads(norm, self.head_dim):
                whole.add(getattr(self.layout, part))
                if len(heads) < n_all[part]:
                    norm.register_forward_hook(partial(_pick_blocks, list(heads), self.head_dim))
        return whole

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """Return (out_BLD, None): the output projection of all heads. See `heads` for the arguments."""
        y_BLHP = self.heads(hidden_states, *args, **kwargs)
        return self.o_proj(y_BLHP.flatten(-2)), None

    def heads(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        cache: HybridCache | None = None,
        *,
        token_mask: Tensor | None = None,
        seq_idx: Tensor | None = None,
        kept_outputs: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Compute the outputs y_BLHP of all heads in the teacher's head order, before the output projection.

        ``token_mask`` [B, L] is 0 at padding, ``seq_idx`` [B, L] numbers packed documents; only the replaced heads
        read them. Kept heads read the backbone's ``attention_mask``; they do not run if ``kept_outputs`` is given.
        Attention receives all other keyword arguments. The cache may come under any of `CACHE_NAMES`. Raises
        ValueError for a row that is split over devices.
        """
        if self.replaced:
            _refuse_split_rows(kwargs)
        if cache is None:
            cache = cache_among(kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name not in CACHE_NAMES}
        # The decoder layer's own forward may have dropped them.
        from_layer = getattr(current_row, "arguments", {})
        if token_mask is None:
            token_mask = from_layer.get("token_mask")
        if seq_idx is None:
            seq_idx = from_layer.get("seq_idx")
        layer_cache = None
        length = hidden_states.shape[1]
        if cache is not None:
            layer_cache = cache.layer(self.layer)
            layer_cache.begin(length)

        inputs = {"position_embeddings": position_embeddings, "attention_mask": attention_mask}
        inputs |= kwargs
        kept_BLHP, windowed_BLRP = self._attention_parts(
            hidden_states, kept_outputs, layer_cache, token_mask, seq_idx, inputs
        )
        parts = []
        if windowed_BLRP is not None and "window" not in self.zeroed_parts:
            parts.append(windowed_BLRP)
        if self.ssm is not None and "recurrence" not in self.zeroed_parts:
            parts.append(self.ssm(hidden_states, token_mask, seq_idx, layer_cache))
        if layer_cache is not None:
            layer_cache.advance(length)
        return self._in_teacher_order(kept_BLHP, self._sum(parts, hidden_states))

    def _attention_parts(
        self,
        hidden_states: Tensor,
        kept_outputs: Tensor | None,
        layer_cache: HybridLayerCache | None,
        token_mask: Tensor | None,
        seq_idx: Tensor | None,
        inputs: dict[str, Any],
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the outputs of the kept heads and, with a window, of the replaced heads.

        If ``kept_outputs`` holds the former, they are not computed again.
        """
        if self.windowed is None:
            if self.attention is not None and kept_outputs is None:
                kept_outputs = self._attend(hidden_states, self._store(layer_cache), inputs)
            return kept_outputs, None
        runs_kept = kept_outputs is None
        call = WindowedCall(self.windowed, layer_cache, token_mask, seq_idx, runs_kept)
        # Without a store: the call caches keys itself, in full or in a ring.
        y_BLHP = self._attend(hidden_states, None, {**inputs, CALL: call})
        call.check_used(self.attention)
        if kept_outputs is not None:
            return kept_outputs, y_BLHP
        # Kept heads come first.
        n_kept = len(self.kept)
        return y_BLHP[:, :, :n_kept], y_BLHP[:, :, n_kept:]

    def _attend(
        self, hidden_states: Tensor, store: _KVStore | None, inputs: dict[str, Any]
    ) -> Tensor:
        """Run the attention module on a store; return the outputs of its heads, [B, L, heads, P]."""
        y_BLD, _ = self.attention(hidden_states, **{self._cache_argument: store}, **inputs)
        return y_BLD.unflatten(-1, (-1, self.head_dim))

    def _store(self, layer_cache: HybridLayerCache | None) -> _KVStore | None:
        """Return the cache of the kept attention, if it needs one: also to repeat KV heads without a cache."""
        if layer_cache is None and self.kv_index is None:
            return None
        return _KVStore(layer_cache, self.kv_index)

    def _sum(self, parts: list[Tensor], hidden_states: Tensor) -> Tensor | None:
        """Sum the parts of the replaced heads, [B, L, R, P]: zeros without a part, None without heads."""
        if parts:
            return sum(parts[1:], start=parts[0])
        if not self.replaced:
            return None
        shape = (*hidden_states.shape[:2], len(self.replaced), self.head_dim)
        return hidden_states.new_zeros(shape)

    def mixing_matrices(self, hidden_states: Tensor, seq_idx_BL: Tensor | None = None) -> Tensor:
        """Return T_BRLS of the recurrent heads, D included: the counterpart of attention maps."""
        if self.ssm is None:
            raise ValueError(
                f"layer {self.layer} has no recurrent heads; only these have mixing matrices."
            )
        return self.ssm.mixing_matrices(hidden_states, seq_idx_BL)

    def _in_teacher_order(
        self, kept_outputs: Tensor | None, replaced_outputs: Tensor | None
    ) -> Tensor:
        """Merge [B, L, kept, P] and [B, L, R, P] by runs of consecutive heads of one kind."""
        if not self.replaced:
            return cast(Tensor, kept_outputs)
        if not self.kept:
            return cast(Tensor, replaced_outputs)
        assert kept_outputs is not None and replaced_outputs is not None
        # Runs, because a slice per head would be many small copies, and an index tensor one more transfer to the
        # device. A list, because torch 2.9 cannot compile groupby of a generator.
        is_kept = [head in self.kept for head in range(self.n_heads)]
        n_kept = 0
        n_replaced = 0
        runs = []
        for kept, run in itertools.groupby(is_kept):
            length = len(list(run))
            if kept:
                runs.append(kept_outputs.narrow(2, n_kept, length))
                n_kept += length
            else:
                runs.append(replaced_outputs.narrow(2, n_replaced, length))
                n_replaced += length
        return torch.cat(runs, dim=2)


@contextmanager
def zero_part(mixers: list[HybridMixer], part: HeadPart) -> Iterator[None]:
    """Zero one part of all replaced heads, so that the other part, or neither, computes alone."""
    before = [mixer.zeroed_parts for mixer in mixers]
    try:
        for mixer in mixers:
            mixer.zeroed_parts = frozenset({*mixer.zeroed_parts, part})
        yield
    finally:
        for mixer, parts in zip(mixers, before, strict=True):
            mixer.zeroed_parts = parts
