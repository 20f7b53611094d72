"""Cache of one layer whose tensors keep their addresses, for CUDA graphs.

Shapes: B batch, L length, P head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .layer_cache import HybridLayerCache, LayerSnapshot
from .rows import static


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
            # On the device of any part: which of them a layer has depends on its heads.
            candidates = [self.keys, self.ssm_state]
            if self.ring is not None:
                candidates.append(self.ring.keys)
            device = next(tensor.device for tensor in candidates if tensor is not None)
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
        # Indices on the device: the bounds of a slice would be constants of the graph.
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
            if new is None:
                continue
            stored = getattr(self, name)
            if stored is not None:
                stored.copy_(new)
            else:
                new = new.clone(memory_format=torch.contiguous_format)
                setattr(self, name, static(new))

    def get_seq_length(self) -> Any:
        if self.n_seen is None:
            return 0
        return self.n_seen

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        return self.max_length, 0

    def reset(self) -> None:
        """Forget all tokens in place: a compiled step goes on using the same addresses."""
        for tensor in self.tensors().values():
            tensor.zero_()
        if self.n_seen is not None:
            self.n_seen.zero_()
        self.is_initialized = False

    def activate_past_recording(self) -> None:
        raise ValueError(
            "a static cache cannot record states, and speculation undoes tokens; leave cache_implementation out."
        )

    def snapshot(self) -> LayerSnapshot:
        """Return the layer's contents, for `restore` of this layer. No keys: later tokens do not overwrite them."""
        tensors = {}
        for name, tensor in self.tensors().items():
            if name not in ("keys", "values"):
                tensors[name] = tensor.clone()
        n_tokens: Any = 0
        if self.n_seen is not None:
            n_tokens = self.n_seen.clone()
        # No ring size and no recorded passes: `restore` fills the ring in place, and nothing is recorded.
        return LayerSnapshot(n_tokens, tensors)

    def restore(self, snapshot: LayerSnapshot) -> None:
        """Go back to a snapshot in place."""
        for name, tensor in self.tensors().items():
            if name in snapshot.tensors:
                tensor.copy_(snapshot.tensors[name])
            elif name not in ("keys", "values"):
                tensor.zero_()
        if self.n_seen is not None:
            self.n_seen.fill_(snapshot.n_tokens)

    def check_room(self, n_tokens: int) -> None:
        if n_tokens > self.max_length:
            raise ValueError(
                f"the static cache holds {self.max_length} tokens and {n_tokens} may come; pass "
                f"model.new_cache(max_length={n_tokens}), or fewer new tokens."
            )

    def check_crop(self, tokens_to_remove: int) -> None:
        raise ValueError(
            "a static cache cannot be cropped; call cache.restore(snapshot) with an earlier cache.snapshot()."
        )
