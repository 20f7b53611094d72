"""Ring of the keys and values that windowed heads still see while they decode.

Shapes: B batch, L length, G KV heads, P head dim, W window, S sinks, R = S + W slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .rows import pick_tokens, static


class TokenRing:
    """First S and last W tokens of each row: their keys and values, and where a full cache stores them.

    Slot m < S holds the token at place m, slot S + r the latest token whose place is r modulo W. Places
    count the tokens of a row from 0, without padding, so that rows of a padded batch differ in their
    number of tokens but not in the shape of their rings.
    """

    def __init__(self, window: int, sinks: int, is_static: bool = False) -> None:
        self.window = window
        self.sinks = sinks
        self.is_static = is_static
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.column_BR: Tensor | None = None
        """Column of each slot's token among all columns of the row so far, padding included."""
        self.n_tokens_B: Tensor | None = None

    def places_BR(self) -> Tensor:
        """Return the place of the token in each slot; negative for an empty slot of the window.

        A sink that the row has not reached yet has its future place.
        """
        assert self.n_tokens_B is not None
        device = self.n_tokens_B.device
        last_B1 = self.n_tokens_B.unsqueeze(1) - 1
        # The largest place up to the last one that is r modulo W.
        near_BW = last_B1 - (last_B1 - torch.arange(self.window, device=device)) % self.window
        sink_S = torch.arange(self.sinks, device=device)
        return torch.cat([sink_S.expand(len(last_B1), -1), near_BW], dim=1)

    def write(
        self, key_BGLP: Tensor, value_BGLP: Tensor, column_BL: Tensor, n_new_B: Tensor
    ) -> None:
        """Store the first ``n_new_B`` tokens of each row; what follows them is padding."""
        if self.n_tokens_B is None:
            self._allocate(key_BGLP, value_BGLP, n_new_B)
        assert self.n_tokens_B is not None and self.column_BR is not None
        assert self.keys is not None and self.values is not None
        self._set("n_tokens_B", self.n_tokens_B + n_new_B)
        # Taken after counting: a static ring counts in place.
        n_before_B = self.n_tokens_B - n_new_B
        source_BR = self.places_BR() - n_before_B.unsqueeze(1)
        is_new_BR = (source_BR >= 0) & (source_BR < n_new_B.unsqueeze(1))
        # While a model decodes, every slot would pick the same token: it is broadcast instead.
        if column_BL.shape[1] > 1:
            source_BR = source_BR.clamp(0, column_BL.shape[1] - 1)
            column_BL = column_BL.gather(1, source_BR)
            key_BGLP = pick_tokens(key_BGLP, source_BR)
            value_BGLP = pick_tokens(value_BGLP, source_BR)
        is_new_B1R1 = is_new_BR[:, None, :, None]
        columns = column_BL.to(self.column_BR.dtype)
        self._set("column_BR", torch.where(is_new_BR, columns, self.column_BR))
        self._set("keys", torch.where(is_new_B1R1, key_BGLP.to(self.keys.dtype), self.keys))
        self._set("values", torch.where(is_new_B1R1, value_BGLP.to(self.values.dtype), self.values))

    def _allocate(self, key_BGLP: Tensor, value_BGLP: Tensor, n_new_B: Tensor) -> None:
        batch, n_groups, _, width = key_BGLP.shape
        n_slots = self.sinks + self.window
        shape = (batch, n_groups, n_slots, width)
        self.keys = self._owned(key_BGLP.new_zeros(shape))
        self.values = self._owned(value_BGLP.new_zeros(shape))
        # int32: columns are stored per layer, and should not cost as much as keys.
        self.column_BR = self._owned(n_new_B.new_zeros((batch, n_slots), dtype=torch.int32))
        self.n_tokens_B = self._owned(n_new_B.new_zeros(batch))

    def _owned(self, tensor: Tensor) -> Tensor:
        return static(tensor) if self.is_static else tensor

    def _set(self, name: str, tensor: Tensor) -> None:
        if self.is_static:
            getattr(self, name).copy_(tensor)
        else:
            setattr(self, name, tensor)

    def clear(self) -> None:
        """Forget all tokens."""
        self.keys = None
        self.values = None
        self.column_BR = None
        self.n_tokens_B = None

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name; empty before the first token."""
        named = {}
        for name in ("keys", "values", "column_BR", "n_tokens_B"):
            tensor = getattr(self, name)
            if tensor is not None:
                named[name] = tensor
        return named

    def nbytes(self) -> int:
        """Count the bytes of keys, values and columns."""
        tensors = (self.keys, self.values, self.column_BR)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)
