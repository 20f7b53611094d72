"""Reading a prompt once: a cache from which many texts go on, in memory or from a file.

Shapes: B batch, L length.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from .cache import HybridCache
from .prefix import Prefix, prompt_state_fingerprint, read_prefix
from .pretrained import HybridPreTrainedModel


class HybridPrefill(HybridPreTrainedModel):
    """Model that reads prompts into caches."""

    _longrope_switch: int | None
    """Length beyond which `generate` with LongRoPE reads all tokens again; None if it never does."""

    @torch.no_grad()
    def prefill(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: HybridCache | None = None,
        chunk_size: int | None = None,
    ) -> HybridCache:
        """Read a prompt into a cache, from which `generate` goes on if its input begins with this prompt.

        ``input_ids`` [B, L]; ``attention_mask`` [B, L] is 0 at padding, which must be on the left. ``chunk_size`` reads
        that many tokens at a time, which takes less memory. With a ``cache``, these tokens follow those it holds, whose
        columns ``attention_mask`` then covers too. `HybridCache.copy` and ``repeat`` make several of one,
        ``save`` writes it for `load_cache`. Raises ValueError for sizes that do not fit.
        """
        if cache is None:
            cache = self.new_cache()
        past = _prompt_of(cache, n_rows=len(input_ids))
        n_past = 0
        ids = input_ids
        if past is not None:
            n_past = past.n_columns
            ids = torch.cat([past.ids_BL, input_ids], dim=1)
        n_all = ids.shape[1]
        mask = _mask_of_all(past, input_ids, attention_mask)
        self._check_pieces(n_past, n_all, chunk_size)
        cache.layer(0).check_room(n_all)
        # Positions count tokens, as `generate` counts them.
        position_ids = (mask.long().cumsum(-1) - 1).clamp_min(0)
        has_padding = not bool((mask != 0).all())
        stride = chunk_size or n_all - n_past
        for begin in range(n_past, n_all, stride):
            end = min(begin + stride, n_all)
            mask_so_far = mask[:, :end] if has_padding else None
            self.model(
                input_ids=ids[:, begin:end],
                attention_mask=mask_so_far,
                position_ids=position_ids[:, begin:end],
                cache=cache,
            )
        cache.prefix = self._as_prefix(ids, mask)
        return cache

    def _check_pieces(self, n_past: int, n_all: int, chunk_size: int | None) -> None:
        """Raise ValueError if the tokens after ``n_past`` cannot be read, at once or ``chunk_size`` at a time."""
        length = n_all - n_past
        if length < 1 or (chunk_size is not None and chunk_size < 1):
            raise ValueError(
                f"{length} tokens are to be read in pieces of {chunk_size}; both must be 1 or more."
            )
        switch = self._longrope_switch
        in_pieces = n_past > 0 or chunk_size is not None
        if switch is not None and n_all > switch and in_pieces:
            raise ValueError(
                f"LongRoPE changes at {switch} tokens, so {n_all} cannot be read in pieces; pass all "
                "tokens at once, without chunk_size."
            )

    def load_cache(
        self, path: str | Path, input_ids: Tensor, attention_mask: Tensor | None = None
    ) -> HybridCache:
        """Load what `HybridCache.save` has written for this student and this prompt, [B, L].

        Raises ValueError for a damaged file, another prompt or mask, another student or another dtype.
        """
        mask = _mask_of_all(None, input_ids, attention_mask)
        prefix = self._as_prefix(input_ids, mask)
        tensors = read_prefix(Path(path), prefix)
        cache = self.new_cache()
        for mixer in self.mixers_with("window"):
            assert mixer.windowed is not None
            reach = mixer.windowed.reach
            cache.layer(mixer.layer).ring_of(reach.window, reach.sinks)
        on_device = {}
        for name, tensor in tensors.items():
            layer, _, _ = name.partition(".")
            on_device[name] = tensor.to(self._device_of(int(layer), input_ids))
        cache.fill(prefix, on_device)
        return cache

    def _device_of(self, layer: int, input_ids: Tensor) -> torch.device:
        """Return where a layer runs: an offloaded one, where its input is."""
        device = next(self.mixers()[layer].parameters()).device
        if device.type == "meta":
            return input_ids.device
        return device

    def _as_prefix(self, ids_BL: Tensor, mask_BL: Tensor) -> Prefix:
        """Describe a prompt that this student reads, by which its cache is recognized."""
        return Prefix(
            ids_BL, mask_BL, prompt_state_fingerprint(self, ids_BL, mask_BL), str(self.dtype)
        )


def _prompt_of(cache: HybridCache, n_rows: int) -> Prefix | None:
    """Return the prompt that a cache holds, None if it is empty. Raises ValueError for other rows or tokens."""
    n_past = int(cache.get_seq_length())
    if not n_past:
        return None
    prompt = cache.prefix
    if prompt is None or prompt.n_columns != n_past or len(prompt.ids_BL) != n_rows:
        raise ValueError(
            f"the cache holds {n_past} tokens that are not one prefill of {n_rows} rows; pass the cache of a "
            "prefill, or none."
        )
    return prompt


def _mask_of_all(past: Prefix | None, ids_BL: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mask of past and new tokens; new ones without a mask are no padding. Raises ValueError for a shape."""
    n_rows, n_all = ids_BL.shape
    if past is not None:
        n_all += past.n_columns
    if mask is None:
        mask = torch.ones_like(ids_BL)
        if past is not None:
            mask = torch.cat([past.mask_BL, mask], dim=1)
    if mask.shape != (n_rows, n_all):
        raise ValueError(
            f"attention_mask is {tuple(mask.shape)}; pass one for all tokens of the cache, "
            f"{(n_rows, n_all)}."
        )
    return mask
