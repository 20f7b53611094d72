"""Attention of a layer in which kept heads see everything and replaced heads a window.

The backbone's own attention module computes queries, keys and values, with its norms and positions. In place of its
attention function it calls `_attend_by_call`, and that `WindowedCall.attend`, which runs kept and windowed heads
each in their own way.

Shapes: B batch, L length, H heads, G KV heads, P head dim, R slots of a ring, S source length.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_hybrid import HybridConfig
from .layer_cache import HybridLayerCache
from .layout import ConfigView
from .local_attention import (
    Earlier,
    Reach,
    Scoring,
    attend_locally,
    attend_masked,
    local_maps,
)
from .ring import RingStep, TokenRing
from .rows import TokensFirst, document_begins, pick_heads, pick_tokens
from .windows import kinds_and_windows

IMPLEMENTATION = "hybrid_distill_windows"
"""Name under which transformers finds `_attend_by_call`."""
CALL = "head_call"
"""Argument by which a mixer passes its `WindowedCall` through the backbone's attention module."""


def _attend_by_call(*module_and_inputs: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
    """Pass on what transformers gives its attention function to the `WindowedCall` among the arguments."""
    call: WindowedCall = options.pop(CALL)
    return call.attend(*module_and_inputs, **options)


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _attend_by_call)


class _KeptAttention:
    """Attention module as the attention functions of transformers see it, with the kept heads alone."""

    def __init__(self, module: nn.Module, config: PretrainedConfig, n_repeats: int) -> None:
        self._module = module
        self.config = config
        self.num_key_value_groups = n_repeats

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class WindowedAttention:
    """Heads of a layer by what they see, and how each reads keys. Not a module: it has no weights."""

    def __init__(self, attention: Any, config: HybridConfig, layer: int) -> None:
        n_heads = config.num_attention_heads
        group_size = n_heads // config.num_key_value_heads
        kind, limit = kinds_and_windows(config)[layer]
        if kind == "chunked_attention":
            raise ValueError(
                f"{type(attention).__name__} attends in chunks, within which a window would end; "
                "pass window 0 for this family."
            )
        window = config.window
        if limit is not None:
            window = min(window, limit)
        self.reach = Reach(window, config.sinks, limit)
        self.kept = list(config.kept[layer])
        self.replaced = list(config.replaced_in(layer))
        self.kept_groups = sorted({head // group_size for head in self.kept})
        # The cache stores KV heads of kept heads whole; the ring holds the others.
        all_groups = range(config.num_key_value_heads)
        self.ring_groups = [group for group in all_groups if group not in self.kept_groups]
        self.kv_index = kv_index_of(self.kept, self.kept_groups, group_size)
        kv_head_of_each = [head // group_size for head in self.replaced]
        # KV heads that the windowed heads read.
        self.window_groups = sorted(set(kv_head_of_each))
        if kv_index_of(self.replaced, self.window_groups, group_size) is not None:
            # Repeating each equally often would mix up the order: every head gets one of its own.
            self.window_groups = kv_head_of_each
        self.backbone_config: PretrainedConfig = attention.config
        # Each family has an eager attention function of its own, beside its module's class.
        namespace = inspect.unwrap(type(attention).forward).__globals__
        self._eager: Any = namespace.get("eager_attention_forward")
        attention.config = ConfigView(attention.config, _attn_implementation=IMPLEMENTATION)

    def attend_kept(
        self,
        attention: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend with the backbone's own attention function, [B, L, kept, P]; eager also returns its maps."""
        n_repeats = len(self.kept) // len(self.kept_groups)
        if self.kv_index is not None:
            key = pick_heads(key, self.kv_index)
            value = pick_heads(value, self.kv_index)
            n_repeats = 1
        implementation: Any = self.backbone_config._attn_implementation
        backbone_function = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, self._eager)
        module: Any = _KeptAttention(attention, self.backbone_config, n_repeats)
        return backbone_function(module, query, key, value, mask, **options)


def kv_index_of(heads: list[int], groups: list[int], group_size: int) -> list[int] | None:
    """Return, for each head, the index of its KV head in ``groups``.

    None if repeating each KV head equally often gives the same order.
    """
    index = [groups.index(head // group_size) for head in heads]
    n_repeats = len(heads) // max(1, len(groups))
    repeated = [position // n_repeats for position in range(len(groups) * n_repeats)]
    if index == repeated:
        return None
    return index


class FullKeys(NamedTuple):
    """Keys and values of the kept heads [B, kept KV heads, S, P], and the column of the first."""

    keys: Tensor
    values: Tensor
    offset: Any


class WindowedCall:
    """One call of an attention module: its cache, its rows, and whether kept heads run."""

    def __init__(
        self,
        heads: WindowedAttention,
        cache: HybridLayerCache | None,
        token_mask_BL: Tensor | None,
        seq_idx_BL: Tensor | None,
        runs_kept: bool,
    ) -> None:
        self.heads = heads
        self.cache = cache
        self.token_mask_BL = token_mask_BL
        self.seq_idx_BL = seq_idx_BL
        self.runs_kept = runs_kept and bool(heads.kept)
        self._was_used = False

    def check_used(self, attention: nn.Module) -> None:
        """Raise ValueError if the attention module computed its heads without this call."""
        if not self._was_used:
            raise ValueError(
                f"{type(attention).__name__} does not pass its arguments to the attention "
                "function, so its heads cannot be limited to a window; pass window 0 for this family."
            )

    def attend(
        self,
        attention: nn.Module,
        query_BHLP: Tensor,
        key_BGLP: Tensor,
        value_BGLP: Tensor,
        mask: Any,
        scaling: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the kept heads, if they run, then the replaced ones, [B, L, H, P].

        With eager attention, also returns the maps of the kept heads and, where a row is evaluated without a cache,
        of the replaced ones after them, [B, H, L, S].
        """
        self._was_used = True
        heads = self.heads
        outputs = []
        maps = []
        # Also if kept heads do not run: later tokens read their keys.
        full = self._full_keys(key_BGLP, value_BGLP)
        if self.runs_kept and full is not None:
            # Only families that cap scores have attention functions with this argument.
            if softcap is not None:
                options["softcap"] = softcap
            options |= {"scaling": scaling, "dropout": dropout}
            kept_query = pick_heads(query_BHLP, heads.kept)
            kept_BLHP, kept_maps = heads.attend_kept(
                attention, kept_query, full.keys, full.values, mask, **options
            )
            outputs.append(kept_BLHP)
            if kept_maps is not None:
                maps.append(kept_maps)
        scoring = Scoring(scaling, softcap, dropout)
        windowed_query = pick_heads(query_BHLP, heads.replaced)
        windowed_BHLP = self._attend_windowed(windowed_query, key_BGLP, value_BGLP, full, scoring)
        outputs.append(windowed_BHLP.transpose(1, 2))
        output_BLHP = torch.cat(outputs, dim=2)
        if heads.backbone_config._attn_implementation != "eager":
            return output_BLHP, None
        if self.cache is None and not attention.training:
            maps.append(self._windowed_maps(windowed_query, key_BGLP, scoring))
        if not maps:
            # Not None: eager attention returns a tensor, whose shape its callers read.
            batch, _, length, _ = query_BHLP.shape
            maps.append(query_BHLP.new_zeros((batch, 0, length, length)))
        return output_BLHP, _joined(maps)

    def _full_keys(self, key_BGLP: Tensor, value_BGLP: Tensor) -> FullKeys | None:
        """Store keys and values of the kept heads, and return all that they read; None if nothing reads them."""
        heads = self.heads
        if not heads.kept or not (self.runs_kept or self.cache is not None):
            return None
        keys = pick_heads(key_BGLP, heads.kept_groups)
        values = pick_heads(value_BGLP, heads.kept_groups)
        offset = 0
        if self.cache is not None and self.cache.keys is None and heads.ring_groups:
            # The cache stores them, and a slice would keep the other KV heads in memory.
            keys = keys.clone()
            values = values.clone()
        if self.cache is not None:
            _, offset = self.cache.get_mask_sizes(keys.shape[2])
            keys, values = self.cache.update(keys, values)
        return FullKeys(keys, values, offset)

    def _windowed_maps(self, query_BHLP: Tensor, key_BGLP: Tensor, scoring: Scoring) -> Tensor:
        """Return the attention maps of the windowed heads, for analysis. Padding counts as tokens."""
        heads = self.heads
        key_BHLP = pick_heads(key_BGLP, heads.window_groups)
        begin_BL = self._begins(query_BHLP, None)
        return local_maps(query_BHLP, key_BHLP, begin_BL, heads.reach, scoring)

    def _attend_windowed(
        self,
        query_BHLP: Tensor,
        key_BGLP: Tensor,
        value_BGLP: Tensor,
        full: FullKeys | None,
        scoring: Scoring,
    ) -> Tensor:
        """Compute the windowed heads, [B, H, L, P], and store the keys that later tokens will see."""
        heads = self.heads
        length = query_BHLP.shape[2]
        rows = None
        if self.token_mask_BL is not None and length > 1:
            rows = TokensFirst.of(self.token_mask_BL)
            query_BHLP = _reordered(query_BHLP, rows.apply)
            key_BGLP = _reordered(key_BGLP, rows.apply)
            value_BGLP = _reordered(value_BGLP, rows.apply)

        earlier = None
        if self.cache is not None:
            ring = self.cache.ring_of(heads.reach.window, heads.reach.sinks)
            has_tokens = ring.n_tokens_B is not None
            if has_tokens and length == 1:
                return self._decode(ring, query_BHLP, key_BGLP, value_BGLP, full, scoring)
            if has_tokens:
                # Before the row overwrites the oldest of them.
                earlier = self._earlier(ring, full, key_BGLP.dtype)
            self._store(ring, key_BGLP, value_BGLP, rows)
        near_keys = pick_heads(key_BGLP, heads.window_groups)
        near_values = pick_heads(value_BGLP, heads.window_groups)
        begin_BL = self._begins(query_BHLP, rows)
        out_BHLP = attend_locally(
            query_BHLP, near_keys, near_values, begin_BL, heads.reach, scoring, earlier
        )
        if rows is None:
            return out_BHLP
        return _reordered(out_BHLP, rows.undo)

    def _begins(self, query_BHLP: Tensor, rows: TokensFirst | None) -> Tensor:
        """Return the index of the first token of each token's document, in the order of ``rows``."""
        batch, _, length, _ = query_BHLP.shape
        seq_idx_BL = self.seq_idx_BL
        if seq_idx_BL is None:
            return torch.zeros(batch, length, dtype=torch.long, device=query_BHLP.device)
        if rows is not None:
            seq_idx_BL = rows.documents(seq_idx_BL)
        return document_begins(seq_idx_BL)

    def _store(
        self, ring: TokenRing, key_BGLP: Tensor, value_BGLP: Tensor, rows: TokensFirst | None
    ) -> None:
        """Write the row's tokens, already in the order of ``rows``, into the ring."""
        assert self.cache is not None
        batch, _, length, _ = key_BGLP.shape
        device = key_BGLP.device
        column_BL = self._columns(batch, length, device)
        token_mask_BL = self.token_mask_BL
        if rows is not None:
            column_BL = rows.apply(column_BL)
        ring_keys = self._stored(key_BGLP)
        ring_values = self._stored(value_BGLP)

        def write(layer: HybridLayerCache, n_tokens: int) -> None:
            """Store the tokens of the first n columns; ``rows`` has put a row's tokens first."""
            if token_mask_BL is None:
                n_new_B = torch.full((batch,), n_tokens, device=device)
            else:
                n_new_B = (token_mask_BL[:, :n_tokens] != 0).sum(dim=1)
            # The argument's ring, not this one: a copy of the cache replays with these functions too.
            own_ring = layer.ring_of(ring.window, ring.sinks)
            # Not get_seq_length: a static layer's is on the device, and its ring has all slots.
            n_columns = layer.seen + n_tokens
            own_ring.write(ring_keys, ring_values, column_BL, n_new_B, n_columns)

        write(self.cache, length)
        self.cache.on_replay(write)

    def _columns(self, batch: int, length: int, device: torch.device) -> Tensor:
        """Return the column of each new token among all columns of its row, [B, L]."""
        assert self.cache is not None
        column_L = torch.arange(length, device=device) + self.cache.get_seq_length()
        return column_L.expand(batch, -1)

    def _stored(self, t_BGLP: Tensor) -> Tensor:
        """Return the KV heads that the ring stores, in its dtype."""
        assert self.cache is not None
        return pick_heads(t_BGLP, self.heads.ring_groups).to(self.cache.kv_dtype or t_BGLP.dtype)

    def _decode(
        self,
        ring: TokenRing,
        query_BH1P: Tensor,
        key_BG1P: Tensor,
        value_BG1P: Tensor,
        full: FullKeys | None,
        scoring: Scoring,
    ) -> Tensor:
        """Store one token per row, and compute the windowed heads for it, [B, H, 1, P]."""
        step = self._ring_step(ring)
        ring.write_step(step, self._stored(key_BG1P), self._stored(value_BG1P))
        key_BHRP, value_BHRP = self._ring_keys(ring, full, query_BH1P.dtype)
        return attend_masked(query_BH1P, key_BHRP, value_BHRP, step.seen_BR.unsqueeze(1), scoring)

    def _ring_step(self, ring: TokenRing) -> RingStep:
        """Return what this token does to the ring; within a forward pass, only the first layer computes it."""
        assert self.cache is not None and ring.n_tokens_B is not None
        reach = self.heads.reach
        device = ring.n_tokens_B.device
        steps = self.cache.ring_steps
        if steps is not None and (reach, device) in steps:
            return steps[reach, device]
        column_B1 = self._columns(len(ring.n_tokens_B), 1, device)
        step = ring.step(column_B1, self.token_mask_BL, self.cache.seen + 1, reach)
        if steps is not None:
            steps[reach, device] = step
        return step

    def _earlier(self, ring: TokenRing, full: FullKeys | None, dtype: torch.dtype) -> Earlier:
        """Return the tokens before a row of several tokens, in their order and in its ``dtype``."""
        assert ring.n_tokens_B is not None
        key_BHRP, value_BHRP = self._ring_keys(ring, full, dtype)
        slot_BN = ring.last_slots(min(ring.window - 1, ring.n_near))
        return Earlier(
            near_keys=pick_tokens(key_BHRP, slot_BN),
            near_values=pick_tokens(value_BHRP, slot_BN),
            # Copies: a static ring is written and counts on in place.
            sink_keys=key_BHRP[:, :, : ring.sinks].clone(),
            sink_values=value_BHRP[:, :, : ring.sinks].clone(),
            n_tokens_B=ring.n_tokens_B.clone(),
        )

    def _ring_keys(
        self, ring: TokenRing, full: FullKeys | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values of all slots, for each windowed head or each KV head that they read.

        KV heads that a kept head stores whole have none in the ring: they are read from there.
        """
        heads = self.heads
        assert ring.keys is not None and ring.values is not None and ring.column_BR is not None
        keys = [ring.keys.to(dtype)]
        values = [ring.values.to(dtype)]
        groups = list(heads.ring_groups)
        if full is not None:
            index_BR = (ring.column_BR.long() - full.offset).clamp_min(0)
            keys.append(pick_tokens(full.keys, index_BR))
            values.append(pick_tokens(full.values, index_BR))
            groups += heads.kept_groups
        order = [groups.index(group) for group in heads.window_groups]
        return pick_heads(_joined(keys), order), pick_heads(_joined(values), order)


def _joined(parts: list[Tensor]) -> Tensor:
    """Concatenate heads; a single part is not copied."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, dim=1)


def _reordered(t_BHLP: Tensor, order: Callable[[Tensor], Tensor]) -> Tensor:
    """Reorder the tokens of [B, H, L, P]."""
    return order(t_BHLP.transpose(1, 2)).transpose(1, 2)
