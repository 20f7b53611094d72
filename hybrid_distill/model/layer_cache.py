"""Cache of one layer of a hybrid: keys and values of kept heads, a ring of windowed heads, states of recurrent heads.

Shapes: B batch, L length, P head dim, C conv channels, K conv width (minus 1 in a state), R recurrent heads, N state
size.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from .local_attention import Reach
from .ring import RingStep, TokenRing

KV_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CROPS_TO_LENGTH = "max_length" in inspect.signature(Cache.crop).parameters
"""Older versions of transformers pass `Cache.crop` the number of tokens to leave, newer ones, negated, to remove."""
STATES = ("keys", "values", "conv_state", "ssm_state")
"""Tensors of a layer, beside those of its ring."""
RING_PREFIX = "ring."
"""Beginning of the names of a ring's tensors."""


class LayerSnapshot(NamedTuple):
    """State of one layer's cache after ``n_tokens`` tokens."""

    n_tokens: Any
    tensors: dict[str, Tensor]
    ring_size: tuple[int, int] | None = None
    """Window and sinks of the layer's ring, if it has one."""
    recorded: tuple[RecordedPass, ...] = ()
    """Forward passes before, which `crop` may still undo."""


class RecordedPass(NamedTuple):
    """Record of one forward pass over a layer, for `HybridLayerCache.crop`."""

    before: LayerSnapshot
    """Cache before it."""
    n_tokens: int
    replays: list[Callable[[HybridLayerCache, int], None]]
    """Functions by which parts of the layer read its first n tokens again. They get the cache as an argument, because
    a copy of the cache shares the functions."""

    def __deepcopy__(self, memo: dict[int, Any]) -> RecordedPass:
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
        self.recorded: list[RecordedPass] = []

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
        self.recorded = []

    def begin(self, n_tokens: int) -> None:
        """Announce new tokens: call once per forward pass, before any head has used the layer."""
        if self.record_past:
            # Without the earlier records, which the list holds anyway.
            before = self.snapshot()._replace(recorded=())
            self.recorded.append(RecordedPass(before, n_tokens, []))

    def on_replay(self, replay: Callable[[HybridLayerCache, int], None]) -> None:
        """Add how a part of the layer reads the first n tokens of this forward pass again, if it is recorded."""
        # A single token is kept or undone as a whole.
        if self.recorded and self.recorded[-1].n_tokens > 1:
            self.recorded[-1].replays.append(replay)

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
        # Layers may be on other devices than the indices.
        self._map(lambda t: t[indices.to(t.device)])

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name; those of the ring begin with `RING_PREFIX`."""
        tensors = {}
        for name in STATES:
            tensor = getattr(self, name)
            if tensor is not None:
                tensors[name] = tensor
        if self.ring is not None:
            for name, tensor in self.ring.tensors().items():
                tensors[RING_PREFIX + name] = tensor
        return tensors

    def snapshot(self) -> LayerSnapshot:
        """Return the layer's contents, for `restore`."""
        tensors = {name: _unshared(name, tensor) for name, tensor in self.tensors().items()}
        ring_size = None
        if self.ring is not None:
            ring_size = (self.ring.window, self.ring.sinks)
        return LayerSnapshot(self.seen, tensors, ring_size, tuple(self.recorded))

    def restore(self, snapshot: LayerSnapshot) -> None:
        """Go back to a snapshot, which may be used again."""
        for name in STATES:
            setattr(self, name, None)
        if self.ring is not None:
            self.ring.clear()
        if snapshot.ring_size is not None:
            # A layer that was reset has none.
            self.ring_of(*snapshot.ring_size)
        for name, tensor in snapshot.tensors.items():
            self._put(name, _unshared(name, tensor))
        self.seen = snapshot.n_tokens
        self.is_initialized = self.seen > 0
        # The current records are of tokens that are now undone.
        self.recorded = []
        if self.record_past:
            self.recorded = list(snapshot.recorded)

    def _put(self, name: str, tensor: Tensor) -> None:
        if name.startswith(RING_PREFIX):
            setattr(self.ring, name.removeprefix(RING_PREFIX), tensor)
        else:
            setattr(self, name, tensor)

    def _only_appends(self) -> bool:
        """Return True if the layer has keys and values of all tokens, and nothing else."""
        return self.sliding_window is None and {"keys", "values"} == self.tensors().keys()

    def check_room(self, n_tokens: int) -> None:
        """Raise ValueError if the layer cannot hold so many tokens; only a static one has a limit."""

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise ValueError if `crop` cannot go back so far."""
        n_left = self._n_tokens_after_crop(tokens_to_remove)
        earliest = self.seen
        if self._only_appends():
            earliest = 0
        elif self.recorded:
            earliest = self.recorded[0].before.n_tokens
        if n_left < earliest:
            raise ValueError(
                f"crop would go back to token {n_left} of {self.seen}, and recurrent states are recorded from token "
                f"{earliest} on; call cache.activate_past_recording() before the tokens to undo, or restore a "
                "cache.snapshot()."
            )

    def _n_tokens_after_crop(self, tokens_to_remove: int) -> int:
        """Return how many tokens `crop` leaves: a positive argument is that number, a negative one how many go."""
        # Older versions of transformers pass 0 to leave none, newer ones to remove none.
        leaves = tokens_to_remove > 0 or (tokens_to_remove == 0 and CROPS_TO_LENGTH)
        if leaves:
            return min(tokens_to_remove, self.seen)
        return self.seen + tokens_to_remove

    def crop(self, tokens_to_remove: int) -> None:
        """Undo the last tokens, as many as ``-tokens_to_remove``, and drop the records of earlier forward passes.

        A positive number is that of the tokens to leave. Raises ValueError if the tokens were not recorded.
        """
        self.check_crop(tokens_to_remove)
        n_left = self._n_tokens_after_crop(tokens_to_remove)
        recorded = self.recorded
        self.recorded = []
        if n_left == self.seen:
            return
        if self._only_appends():
            assert self.keys is not None and self.values is not None
            self.keys = self.keys[..., :n_left, :]
            self.values = self.values[..., :n_left, :]
            self.seen = n_left
            return
        # The first forward pass that loses a token; later ones are lost as a whole.
        undone = next(one for one in recorded if one.before.n_tokens + one.n_tokens > n_left)
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
        self.recorded = []
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
