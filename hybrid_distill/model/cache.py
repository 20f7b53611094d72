"""Cache of a hybrid: keys and values of kept heads, states of recurrent heads.

Shapes: B batch, L length, P head dim, C conv channels, K conv width (minus 1 in a state), R recurrent heads, N state
size.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from .local_attention import Reach
from .prefix import Prefix, write_prefix
from .ring import RingStep, TokenRing
from .rows import static

KV_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CROPS_TO_LENGTH = "max_length" in inspect.signature(Cache.crop).parameters
"""Older versions of transformers pass `Cache.crop` the number of tokens to leave, newer ones, negated, to remove."""
STATES = ("keys", "values", "conv_state", "ssm_state")
"""Tensors of a layer, beside those of its ring."""
RING = "ring."
"""Beginning of the names of a ring's tensors."""


class LayerSnapshot(NamedTuple):
    """State of one layer's cache after ``n_tokens`` tokens."""

    n_tokens: Any
    tensors: dict[str, Tensor]
    ring: tuple[int, int] | None = None
    """Window and sinks of the layer's ring, if it has one."""
    forwards: tuple[Forward, ...] = ()
    """Records of the forward passes before, which `crop` may still undo."""


class CacheSnapshot(NamedTuple):
    """State of a cache: of each layer, and the prompt that it holds."""

    layers: list[LayerSnapshot]
    prefix: Prefix | None


class Forward(NamedTuple):
    """Record of one forward pass over a layer, for `HybridLayerCache.crop`."""

    before: LayerSnapshot
    """Cache before it."""
    n_tokens: int
    replays: list[Callable[[HybridLayerCache, int], None]]
    """Functions by which parts of the layer read its first n tokens again. They get the cache as an argument, because
    a copy of the cache shares the functions."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Forward:
        # Without this, a copy would be made as a pickle is.
        return self._replace(
            before=copy.deepcopy(self.before, memo), replays=copy.deepcopy(self.replays, memo)
        )

    def __reduce__(self) -> NoReturn:
        raise ValueError(
            "the cache records forward passes that it may undo, and a record refers to the student's modules, so it "
            "cannot be pickled; call cache.stop_recording() first."
        )


class HybridLayerCache(DynamicLayer):
    """Cache of one layer: keys and values of its kept heads, conv and SSM states of its recurrent heads.

    Counts its own tokens, because a layer may have no keys to count. With a ``sliding_window``, it stores only the keys
    that a later token can see. Keys and values are stored in ``kv_dtype`` (`KV_DTYPES`; default: unchanged) and
    returned in the dtype of the new keys.

    A recurrent state cannot be turned back. Once `activate_past_recording` was called, a layer therefore keeps, for
    each forward pass since the last `crop`, its state before and its inputs; `crop` restores the one and reads the
    kept tokens of the other again. Call `crop` after every few forward passes, or the records grow without end.
    """

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
        self.ring_steps: dict[tuple[Reach, torch.device], RingStep] | None = None
        """Effects on rings of this forward pass's token, shared by all layers (`HybridCache.one_forward_pass`)."""
        self.seen = 0
        self.record_past = False
        self.forwards: list[Forward] = []

    @property
    def is_croppable(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """True if `crop` may work, which takes recording unless a layer has keys and values alone."""
        return self.record_past or self._only_appends()

    def activate_past_recording(self) -> None:
        """Record forward passes from now on, so that `crop` can undo them."""
        self.record_past = True

    def stop_recording(self) -> None:
        """Drop the records, and record no more."""
        self.record_past = False
        self.forwards = []

    def begin(self, n_tokens: int) -> None:
        """Announce new tokens: call once per forward pass, before any head has used the layer."""
        if self.record_past:
            # Without the earlier records, which the list holds anyway.
            before = self.snapshot()._replace(forwards=())
            self.forwards.append(Forward(before, n_tokens, []))

    def on_replay(self, replay: Callable[[HybridLayerCache, int], None]) -> None:
        """Add how a part of the layer reads the first n tokens of this forward pass again, if it is recorded."""
        # A single token is kept or undone as a whole.
        if self.forwards and self.forwards[-1].n_tokens > 1:
            self.forwards[-1].replays.append(replay)

    def advance(self, n_tokens: int) -> None:
        """Count new tokens: call once per forward pass, after the kept heads have used the layer."""
        self.seen += n_tokens
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, stored KV heads, L, P]; return all that the new tokens can see."""
        self._record_update(key_states, value_states)
        dtype = key_states.dtype
        key_states = key_states.to(self.kv_dtype or dtype)
        value_states = value_states.to(self.kv_dtype or dtype)
        if self.keys is not None and self.values is not None:
            key_states = torch.cat([self.keys, key_states], dim=-2)
            value_states = torch.cat([self.values, value_states], dim=-2)
        self.keys = key_states
        self.values = value_states
        if self.sliding_window is not None and key_states.shape[-2] >= self.sliding_window:
            # W - 1 keys: the next token is the last one in its own window.
            first = key_states.shape[-2] - (self.sliding_window - 1)
            # Cloned: a slice would keep the whole tensor in memory.
            self.keys = key_states[..., first:, :].clone()
            self.values = value_states[..., first:, :].clone()
        return key_states.to(dtype), value_states.to(dtype)

    def _record_update(self, keys: Tensor, values: Tensor) -> None:
        def replay(layer: HybridLayerCache, n_tokens: int) -> None:
            layer.update(keys[..., :n_tokens, :], values[..., :n_tokens, :])

        self.on_replay(replay)

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
        n_stored = self.seen
        if self.sliding_window is not None:
            n_stored = min(n_stored, self.sliding_window - 1)
        return n_stored + query_length, self.seen - n_stored

    def reset(self) -> None:
        # super() would leave the states and the ring.
        self.__init__(self.sliding_window, self.kv_dtype)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda t: t.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda t: t[indices])

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name; those of the ring begin with `RING`."""
        tensors = {}
        for name in STATES:
            tensor = getattr(self, name)
            if tensor is not None:
                tensors[name] = tensor
        if self.ring is not None:
            for name, tensor in self.ring.tensors().items():
                tensors[RING + name] = tensor
        return tensors

    def snapshot(self) -> LayerSnapshot:
        """Return the layer's contents, for `restore`."""
        tensors = {name: _unshared(name, tensor) for name, tensor in self.tensors().items()}
        ring = None
        if self.ring is not None:
            ring = (self.ring.window, self.ring.sinks)
        return LayerSnapshot(self.seen, tensors, ring, tuple(self.forwards))

    def restore(self, snapshot: LayerSnapshot) -> None:
        """Go back to a snapshot, which may be used again."""
        for name in STATES:
            setattr(self, name, None)
        if self.ring is not None:
            self.ring.clear()
        if snapshot.ring is not None:
            # A layer that was reset has none.
            self.ring_of(*snapshot.ring)
        for name, tensor in snapshot.tensors.items():
            self._put(name, _unshared(name, tensor))
        self.seen = snapshot.n_tokens
        self.is_initialized = self.seen > 0
        # The current records are of tokens that are now undone.
        self.forwards = []
        if self.record_past:
            self.forwards = list(snapshot.forwards)

    def _put(self, name: str, tensor: Tensor) -> None:
        if name.startswith(RING):
            setattr(self.ring, name.removeprefix(RING), tensor)
        else:
            setattr(self, name, tensor)

    def _only_appends(self) -> bool:
        """Return True if the layer has keys and values of all tokens, and nothing else."""
        return self.sliding_window is None and {"keys", "values"} == self.tensors().keys()

    def check_crop(self, tokens_to_remove: int) -> int:
        """Return how many tokens `crop` would leave. Raises ValueError if it cannot go back so far."""
        if tokens_to_remove > 0 or (tokens_to_remove == 0 and CROPS_TO_LENGTH):
            n_left = min(tokens_to_remove, self.seen)
        else:
            n_left = self.seen + tokens_to_remove
        earliest = self.seen
        if self._only_appends():
            earliest = 0
        elif self.forwards:
            earliest = self.forwards[0].before.n_tokens
        if n_left < earliest:
            raise ValueError(
                f"crop would go back to token {n_left} of {self.seen}, and recurrent states are recorded from token "
                f"{earliest} on; call cache.activate_past_recording() before the tokens to undo, or restore a "
                "cache.snapshot()."
            )
        return n_left

    def crop(self, tokens_to_remove: int) -> None:
        """Undo the last tokens, as many as ``-tokens_to_remove``, and drop the records of earlier forward passes.

        A positive number is that of the tokens to leave. Raises ValueError if the tokens were not recorded.
        """
        n_left = self.check_crop(tokens_to_remove)
        forwards = self.forwards
        self.forwards = []
        if n_left == self.seen:
            return
        if self._only_appends():
            assert self.keys is not None and self.values is not None
            self.keys = self.keys[..., :n_left, :]
            self.values = self.values[..., :n_left, :]
            self.seen = n_left
            return
        # The first forward pass that loses a token; later ones are lost as a whole.
        undone = next(
            forward for forward in forwards if forward.before.n_tokens + forward.n_tokens > n_left
        )
        n_kept = n_left - undone.before.n_tokens
        self.restore(undone.before)
        if n_kept:
            for replay in undone.replays:
                replay(self, n_kept)
            self.advance(n_kept)

    def nbytes(self) -> dict[str, int]:
        """Count the bytes in use: ``kv``, ``window``, ``ssm``, ``conv``."""
        window = 0
        if self.ring is not None:
            window = self.ring.nbytes()
        return {
            "kv": _nbytes(self.keys) + _nbytes(self.values),
            "window": window,
            "ssm": _nbytes(self.ssm_state),
            "conv": _nbytes(self.conv_state),
        }

    def _map(self, fn: Any) -> None:
        """Change the rows of all tensors. Records of earlier forward passes hold the old rows, and are dropped."""
        self.forwards = []
        for name, tensor in self.tensors().items():
            self._put(name, fn(tensor))


def _unshared(name: str, tensor: Tensor) -> Tensor:
    """Copy a tensor of a layer that is written in place; keys and values are replaced, never written into."""
    if name in ("keys", "values"):
        return tensor
    return tensor.clone()


def _nbytes(tensor: Tensor | None) -> int:
    if tensor is None:
        return 0
    return tensor.nbytes


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
        # Without ring and forwards: `restore` fills the ring in place, and a static layer records nothing.
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

    def check_crop(self, tokens_to_remove: int) -> int:
        raise ValueError(
            "a static cache cannot be cropped; call cache.restore(snapshot) with an earlier cache.snapshot()."
        )


class HybridCache(Cache):
    """Cache of all layers; create it with ``model.new_cache()`` or ``model.prefill(...)``."""

    def __init__(self, layers: Sequence[HybridLayerCache]) -> None:
        super().__init__(layers=[*layers])
        self.prefix: Prefix | None = None
        """The prompt that ``model.prefill`` has read into this cache, as long as its rows are the same or repeated."""

    def layer(self, index: int) -> HybridLayerCache:
        """Return the cache of one layer."""
        return cast(HybridLayerCache, self.layers[index])

    @contextmanager
    def one_forward_pass(self) -> Iterator[None]:
        """Let the layers share what a token does to their rings, as all of them read the same tokens."""
        # Static layers are compiled as one graph, which computes nothing twice, or replayed one by one.
        steps = None if self.is_compileable else {}
        for layer in self._layers():
            layer.ring_steps = steps
        try:
            yield
        finally:
            for layer in self._layers():
                layer.ring_steps = None

    def nbytes(self) -> dict[str, int]:
        """Count the bytes in use by all layers: ``kv``, ``window``, ``ssm``, ``conv``."""
        totals: dict[str, int] = {}
        for layer in self._layers():
            for name, n_bytes in layer.nbytes().items():
                totals[name] = totals.get(name, 0) + n_bytes
        return totals

    def copy(self) -> HybridCache:
        """Return an independent copy: what is generated from one leaves the other alone.

        Raises ValueError for a cache that was filled with gradients on.
        """
        for layer in self._layers():
            if any(tensor.grad_fn is not None for tensor in layer.tensors().values()):
                raise ValueError(
                    "the cache was filled with gradients on, and a copy would have none; fill it under "
                    "torch.no_grad(), as model.prefill does."
                )
        return copy.deepcopy(self)

    def repeat(self, n: int) -> HybridCache:
        """Return a copy with each row n times, for n continuations of it in one batch."""
        if n < 1:
            raise ValueError(f"repeat is given {n}; pass how many rows to make of each, 1 or more.")
        repeated = self.copy()
        repeated.batch_repeat_interleave(n)
        return repeated

    def snapshot(self) -> CacheSnapshot:
        """Return the cache's contents, for `restore`; costs a copy of the states and no copy of the keys.

        ``restore`` undoes later tokens, as often as needed.
        """
        return CacheSnapshot([layer.snapshot() for layer in self._layers()], self.prefix)

    def restore(self, snapshot: CacheSnapshot) -> None:
        """Go back to a snapshot of this cache."""
        for layer, before in zip(self._layers(), snapshot.layers, strict=True):
            layer.restore(before)
        self.prefix = snapshot.prefix

    def save(self, path: str | Path) -> None:
        """Write the cache that ``model.prefill`` returned to a safetensors file, for ``model.load_cache``.

        Raises ValueError if the cache holds something else than the prompt that prefill has read.
        """
        if self.is_compileable:
            raise ValueError("a static cache cannot be saved; prefill without max_length.")
        if self.prefix is None or self.prefix.n_columns != self.get_seq_length():
            raise ValueError(
                f"the cache holds {self.get_seq_length()} tokens a row, which are not those of one prefill; save a "
                "copy that was made before anything was generated from it."
            )
        tensors = {}
        for index, layer in enumerate(self._layers()):
            for name, tensor in layer.tensors().items():
                tensors[f"{index}.{name}"] = tensor.detach().contiguous()
        write_prefix(Path(path), self.prefix, tensors)

    def fill(self, prefix: Prefix, tensors: dict[str, Tensor]) -> None:
        """Fill an empty cache from the tensors of `save`; layers with windows have their rings already."""
        for full_name, tensor in tensors.items():
            index, _, name = full_name.partition(".")
            layer = self.layer(int(index))
            layer._put(name, tensor)
            if name.endswith("keys"):
                # Later keys are joined to these, so they must be stored in the same dtype.
                layer.kv_dtype = tensor.dtype
        for layer in self._layers():
            layer.seen = prefix.n_columns
            layer.is_initialized = True
        self.prefix = prefix

    def activate_past_recording(self) -> None:
        """Record forward passes from now on, so that `crop` can undo them; see `HybridLayerCache`."""
        for layer in self._layers():
            layer.activate_past_recording()

    def stop_recording(self) -> None:
        """Drop the records, and record no more."""
        for layer in self._layers():
            layer.stop_recording()

    def crop(self, tokens_to_remove: int) -> None:
        """Undo the last ``-tokens_to_remove`` tokens of all layers; see `HybridLayerCache.crop`."""
        # Before any layer is cropped: a layer with nothing but keys always can be.
        for layer in self._layers():
            layer.check_crop(tokens_to_remove)
        super().crop(tokens_to_remove)
        if self.prefix is not None and self.get_seq_length() < self.prefix.n_columns:
            self.prefix = None

    def reset(self) -> None:
        self.prefix = None
        super().reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.prefix = None
        super().reorder_cache(cast(Any, beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.prefix is not None:
            self.prefix = self.prefix.repeated(repeats)
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.prefix = None
        super().batch_select_indices(indices)

    def _layers(self) -> list[HybridLayerCache]:
        return [self.layer(index) for index in range(len(self.layers))]
