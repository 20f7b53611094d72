"""Cache of a hybrid: one `HybridLayerCache` for each layer, and the prompt that they hold."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

from torch import Tensor
from transformers.cache_utils import Cache

from .layer_cache import HybridLayerCache, LayerSnapshot
from .prefix import Prefix, write_prefix


class CacheSnapshot(NamedTuple):
    """State of a cache: of each layer, and the prompt that it holds."""

    layers: list[LayerSnapshot]
    prefix: Prefix | None


class HybridCache(Cache):
    """Cache of all layers; create it with ``model.new_cache()`` or ``model.prefill(...)``."""

    def __init__(self, layers: Sequence[HybridLayerCache]) -> None:
        super().__init__(layers=[*layers])
        self.prefix: Prefix | None = None
        """The prompt that ``model.prefill`` has read into this cache, as long as its rows are the same or repeated."""
        self.mask_BL: Tensor | None = None
        """Which columns `generate` has read as tokens; None if something else has filled the cache."""

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
        written = set()
        for index, layer in enumerate(self._layers()):
            for name, tensor in layer.tensors().items():
                tensor = tensor.detach().contiguous()
                # After a single token, the rings of all layers share its count of tokens; a file does not.
                if tensor.data_ptr() in written:
                    tensor = tensor.clone()
                written.add(tensor.data_ptr())
                tensors[f"{index}.{name}"] = tensor
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
        self.mask_BL = None
        super().reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.prefix = None
        self._pick_mask(beam_idx)
        super().reorder_cache(cast(Any, beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.prefix is not None:
            self.prefix = self.prefix.repeated(repeats)
        if self.mask_BL is not None:
            self.mask_BL = self.mask_BL.repeat_interleave(repeats, dim=0)
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.prefix = None
        self._pick_mask(indices)
        super().batch_select_indices(indices)

    def _pick_mask(self, row_B: Tensor) -> None:
        if self.mask_BL is not None:
            self.mask_BL = self.mask_BL[row_B.to(self.mask_BL.device)]

    def _layers(self) -> list[HybridLayerCache]:
        return [self.layer(index) for index in range(len(self.layers))]
