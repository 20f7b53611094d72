"""Ring of the keys and values that windowed heads still see while they decode.

Shapes: B batch, L length, G KV heads, P head dim, W window, S sinks, R = S + W slots.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .rows import pick_tokens, static


class TokenRing:
    """First S and last W tokens of each row: their keys and values, and where a full cache stores them.

    Slot m < S holds the token at place m, slot S + r the latest token whose place is r modulo W. Places
    count the tokens of a row from 0, without padding, so that rows of a padded batch differ in their
    number of tokens but not in the shape of their rings. Until a row has W columns, there are as many
    slots of the window as columns; a static ring has all of them from the start.
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

    @property
    def n_near(self) -> int:
        """Number of slots of the window."""
        assert self.column_BR is not None
        return self.column_BR.shape[1] - self.sinks

    def places_BR(self) -> Tensor:
        """Return the place of the token in each slot; negative for an empty slot of the window.

        A sink that the row has not reached yet has its future place.
        """
        assert self.n_tokens_B is not None
        device = self.n_tokens_B.device
        last_B1 = self.n_tokens_B.unsqueeze(1) - 1
        # The largest place up to the last one that is r modulo W.
        near_BW = last_B1 - (last_B1 - torch.arange(self.n_near, device=device)) % self.window
        sink_S = torch.arange(self.sinks, device=device)
        return torch.cat([sink_S.expand(len(last_B1), -1), near_BW], dim=1)

    def write(
        self,
        key_BGLP: Tensor,
        value_BGLP: Tensor,
        column_BL: Tensor,
        n_new_B: Tensor,
        n_columns: int,
        is_padded: bool,
    ) -> None:
        """Store the first ``n_new_B`` tokens of each row; what follows them is padding, if the row ``is_padded``.

        ``n_columns`` counts the columns of all rows so far, these included.
        """
        if self.n_tokens_B is None:
            self._allocate(key_BGLP, value_BGLP, n_new_B, n_columns)
        else:
            self._grow(n_columns)
        assert self.n_tokens_B is not None and self.keys is not None
        self._set("n_tokens_B", self.n_tokens_B + n_new_B)
        # Autograd may need what an attention has read before, and cannot know that two slots hold one token.
        is_fixed = key_BGLP.requires_grad or self.keys.requires_grad
        # Tensors of inference mode can only be written there. torch.compile cannot ask.
        if not torch.compiler.is_compiling():
            is_fixed |= self.keys.is_inference() and not torch.is_inference_mode_enabled()
        if column_BL.shape[1] == 1 and not is_fixed:
            self._write_one(key_BGLP, value_BGLP, column_BL, n_new_B > 0 if is_padded else None)
        else:
            self._write_many(key_BGLP, value_BGLP, column_BL, n_new_B)

    def _write_many(
        self, key_BGLP: Tensor, value_BGLP: Tensor, column_BL: Tensor, n_new_B: Tensor
    ) -> None:
        """Let each slot pick its token of the row, if it has one there."""
        assert self.n_tokens_B is not None and self.column_BR is not None
        assert self.keys is not None and self.values is not None
        # Taken after counting: a static ring counts in place.
        n_before_B = self.n_tokens_B - n_new_B
        source_BR = self.places_BR() - n_before_B.unsqueeze(1)
        is_new_BR = (source_BR >= 0) & (source_BR < n_new_B.unsqueeze(1))
        source_BR = source_BR.clamp(0, column_BL.shape[1] - 1)
        is_new_B1R1 = is_new_BR[:, None, :, None]
        columns_BR = column_BL.gather(1, source_BR).to(self.column_BR.dtype)
        keys = pick_tokens(key_BGLP, source_BR).to(self.keys.dtype)
        values = pick_tokens(value_BGLP, source_BR).to(self.values.dtype)
        self._set("column_BR", torch.where(is_new_BR, columns_BR, self.column_BR))
        self._set("keys", torch.where(is_new_B1R1, keys, self.keys))
        self._set("values", torch.where(is_new_B1R1, values, self.values))

    def _write_one(
        self,
        key_BG1P: Tensor,
        value_BG1P: Tensor,
        column_B1: Tensor,
        is_new_B: Tensor | None,
    ) -> None:
        """Write one token a row into its slots alone: a decoding model would else copy the ring for each token.

        Rows whose token is padding are not ``is_new_B``; None if there are none.
        """
        assert self.n_tokens_B is not None and self.column_BR is not None
        assert self.keys is not None and self.values is not None
        # A row of padding alone has no token yet.
        place_B1 = (self.n_tokens_B.unsqueeze(1) - 1).clamp_min(0)
        slot_BX = self.sinks + place_B1 % self.window
        if self.sinks:
            # A token beyond the sinks is written into the same slot twice: fewer steps than to ask.
            sink_B1 = torch.where(place_B1 < self.sinks, place_B1, slot_BX)
            slot_BX = torch.cat([sink_B1, slot_BX], dim=1)
        row_B1 = torch.arange(len(place_B1), device=place_B1.device).unsqueeze(1)
        of_heads = (row_B1, slice(None), slot_BX)
        _put(self.column_BR, (row_B1, slot_BX), column_B1, is_new_B)
        _put(self.keys, of_heads, key_BG1P.transpose(1, 2), is_new_B)
        _put(self.values, of_heads, value_BG1P.transpose(1, 2), is_new_B)

    def _n_slots(self, n_columns: int) -> int:
        if self.is_static:
            return self.sinks + self.window
        return self.sinks + min(self.window, n_columns)

    def _grow(self, n_columns: int) -> None:
        """Add slots for tokens up to this number of columns."""
        assert self.keys is not None and self.values is not None and self.column_BR is not None
        n_more = self._n_slots(n_columns) - self.keys.shape[2]
        if n_more > 0:
            self.keys = F.pad(self.keys, (0, 0, 0, n_more))
            self.values = F.pad(self.values, (0, 0, 0, n_more))
            self.column_BR = F.pad(self.column_BR, (0, n_more))

    def _allocate(
        self, key_BGLP: Tensor, value_BGLP: Tensor, n_new_B: Tensor, n_columns: int
    ) -> None:
        batch, n_groups, _, width = key_BGLP.shape
        n_slots = self._n_slots(n_columns)
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


def _put(held: Tensor, slots: Any, new: Tensor, is_new_B: Tensor | None) -> None:
    """Write ``new`` [B, 1, ...] into the ``slots`` of a tensor, in rows that are new."""
    new = new.to(held.dtype)
    if is_new_B is not None:
        new = torch.where(is_new_B.view(-1, *[1] * (new.dim() - 1)), new, held[slots])
    # Not scatter_, which takes a hundred times as long on a CPU.
    held[slots] = new
