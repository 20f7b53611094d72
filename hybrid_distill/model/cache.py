"""Cache of a hybrid: keys and values of kept heads, states of recurrent heads.

Shapes: B batch, L length, P head dim, C conv channels, K conv width (minus 1 in a state), R recurrent heads, N state
size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from .ring import TokenRing
from .rows import static

KV_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class HybridLayerCache(DynamicLayer):
    """Cache of one layer: keys and values of its kept heads, conv and SSM states of its recurrent heads.

    Counts its own tokens, because a layer may have no keys to count. With a ``sliding_window``, it stores only the keys
    that a later token can see. Keys and values are stored in ``kv_dtype`` (`KV_DTYPES`; default: unchanged) and
    returned in the dtype of the new keys.
    """

    is_croppable = False

    def __init__(
        self, sliding_window: int | None = None, kv_dtype: torch.dtype | None = None
    ) -> None:
        if kv_dtype not in (None, *KV_DTYPES):
            raise ValueError(
                f"kv_dtype is {kv_dtype}; keys are stored in one of {', '.join(map(str, KV_DTYPES))}."
            )
        super().__init__()
        self.kv_dtype = kv_dtype
        self.sliding_window = sliding_window
        self.is_sliding = sliding_window is not None
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.conv_state: Tensor | None = None
        self.ssm_state: Tensor | None = None
        self.ring: TokenRing | None = None
        self.seen = 0

    def advance(self, n_tokens: int) -> None:
        """Count new tokens: call once per forward pass, after the kept heads have used the layer."""
        self.seen += n_tokens
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, stored KV heads, L, P]; return all that the new tokens can see."""
        dtype = key_states.dtype
        key_states = key_states.to(self.kv_dtype or dtype)
        value_states = value_states.to(self.kv_dtype or dtype)
        if self.keys is not None and self.values is not None:
            key_states = torch.cat([self.keys, key_states], dim=-2)
            value_states = torch.cat([self.values, value_states], dim=-2)
        self.keys = key_states
        self.values = value_states
        if self.sliding_window is not None and key_states.shape[-2] >= self.sliding_window:
            first = key_states.shape[-2] - (self.sliding_window - 1)
            # Cloned: a slice would keep the whole tensor in memory.
            self.keys = key_states[..., first:, :].clone()
            self.values = value_states[..., first:, :].clone()
        return key_states.to(dtype), value_states.to(dtype)

    def remember(
        self, *, conv_state: Tensor | None = None, ssm_state: Tensor | None = None
    ) -> None:
        """Store copies of the states [B, C, K - 1] and [B, R, P, N], because they are slices of larger tensors."""
        if conv_state is not None:
            self.conv_state = conv_state.clone(memory_format=torch.contiguous_format)
        if ssm_state is not None:
            self.ssm_state = ssm_state.clone(memory_format=torch.contiguous_format)

    def ring_of(self, window: int, sinks: int) -> TokenRing:
        """Return the ring of the windowed heads; the first call makes an empty one."""
        if self.ring is None:
            self.ring = TokenRing(window, sinks, is_static=self.is_compileable)
        return self.ring

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Return (length, offset) of the keys that `update` will return."""
        # transformers before 5.5 passes the positions of the new tokens.
        if isinstance(query_length, Tensor):
            query_length = query_length.shape[0]
        held = self.seen if self.sliding_window is None else min(self.seen, self.sliding_window - 1)
        return held + query_length, self.seen - held

    def reset(self) -> None:
        self.__init__(self.sliding_window, self.kv_dtype)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda t: t.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda t: t[indices])

    def crop(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError(
            "a recurrent state cannot be rolled back; copy the cache before the tokens to try out."
        )

    def nbytes(self) -> dict[str, int]:
        """Count the bytes in use: ``kv``, ``window``, ``ssm``, ``conv``."""
        return {
            "kv": _nbytes(self.keys) + _nbytes(self.values),
            "window": 0 if self.ring is None else self.ring.nbytes(),
            "ssm": _nbytes(self.ssm_state),
            "conv": _nbytes(self.conv_state),
        }

    def _map(self, fn: Any) -> None:
        for name in ("keys", "values", "conv_state", "ssm_state"):
            if getattr(self, name) is not None:
                setattr(self, name, fn(getattr(self, name)))
        if self.ring is not None:
            for name, tensor in self.ring.tensors().items():
                setattr(self.ring, name, fn(tensor))


def _nbytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.nbytes


class StaticLayerCache(HybridLayerCache):
    """Layer cache for ``max_length`` tokens with static tensor addresses, so that a CUDA graph can replay a step.

    Layers with a window store all tokens too; the mask hides tokens outside the window.
    """

    is_compileable = True

    def __init__(self, max_length: int, kv_dtype: torch.dtype | None = None) -> None:
        super().__init__(kv_dtype=kv_dtype)
        self.max_length = max_length
        # On the device: a Python int would become a constant of the graph.
        self.n_seen: Tensor | None = None

    def advance(self, n_tokens: int) -> None:
        if self.n_seen is None:
            held = [self.keys, self.ssm_state]
            if self.ring is not None:
                held.append(self.ring.keys)
            device = next(t.device for t in held if t is not None)
            self.n_seen = static(torch.zeros((), dtype=torch.long, device=device))
        self.n_seen += n_tokens
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, stored KV heads, L, P] after the earlier ones; return all, 0 if unwritten."""
        dtype = key_states.dtype
        if self.keys is None or self.values is None:
            batch, heads, _, width = key_states.shape
            shape = (batch, heads, self.max_length, width)
            stored = self.kv_dtype or dtype
            self.keys = static(key_states.new_zeros(shape, dtype=stored))
            self.values = static(key_states.new_zeros(shape, dtype=stored))
        place_L = torch.arange(key_states.shape[2], device=key_states.device)
        if self.n_seen is not None:
            place_L = place_L + self.n_seen
        self.keys.index_copy_(2, place_L, key_states.to(self.keys.dtype))
        self.values.index_copy_(2, place_L, value_states.to(self.values.dtype))
        return self.keys.to(dtype), self.values.to(dtype)

    def remember(
        self, *, conv_state: Tensor | None = None, ssm_state: Tensor | None = None
    ) -> None:
        for name, new in (("conv_state", conv_state), ("ssm_state", ssm_state)):
            if new is not None and getattr(self, name) is not None:
                getattr(self, name).copy_(new)
            elif new is not None:
                setattr(self, name, static(new.clone(memory_format=torch.contiguous_format)))

    def get_seq_length(self) -> Any:
        return 0 if self.n_seen is None else self.n_seen

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        return self.max_length, 0

    def reset(self) -> None:
        """Forget all tokens in place: a compiled step goes on using the same addresses."""
        for name in ("keys", "values", "conv_state", "ssm_state", "n_seen"):
            held = getattr(self, name)
            if held is not None:
                held.zero_()
        if self.ring is not None:
            for tensor in self.ring.tensors().values():
                tensor.zero_()
        self.is_initialized = False


class HybridCache(Cache):
    """Cache of all layers; create it with ``model.new_cache()``."""

    def __init__(self, layers: Sequence[HybridLayerCache]) -> None:
        super().__init__(layers=[*layers])

    def layer(self, index: int) -> HybridLayerCache:
        """Return the cache of one layer."""
        return cast(HybridLayerCache, self.layers[index])

    def nbytes(self) -> dict[str, int]:
        """Count the bytes in use by all layers: ``kv``, ``window``, ``ssm``, ``conv``."""
        layers = [self.layer(index).nbytes() for index in range(len(self.layers))]
        return {name: sum(layer[name] for layer in layers) for name in layers[0]}
