"""Ring of the keys and values that windowed heads still see while they decode.

Shapes: B batch, L length, G KV heads, P head dim, W window, S sinks, R = S + W slots, X slots written by a token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .local_attention import Reach, seen_in_ring
from .rows import pick_tokens, static


class RingStep(NamedTuple):
    """Effect of one more token per row on a ring, the same in all layers with one reach: the first computes it."""

    n_tokens_B: Tensor
    """Number of tokens in each row, this one included."""
    n_new_B: Tensor
    """0 where the token is padding, else 1."""
    is_new_B: Tensor | None
    """False where the token is padding; None if no token is."""
    n_columns: int
    """Number of columns of all rows so far, the token's included."""
    column_B1: Tensor
    row_B1: Tensor
    slot_BX: Tensor
    seen_BR: Tensor
    """Slots that the token sees, its own included."""


class TokenRing:
    """First S and last W tokens of each row: their keys and values, and where a full cache stores them.

    Slot m < S holds the token at place m, slot S + r the latest token whose place is r modulo W. Places count the
    tokens of a row from 0, without padding, so that rows of a padded batch differ in their number of tokens but not in
    the shape of their rings. Until a row has W columns, there are as many slots of the window as columns; a static
    ring has all of them from the start.
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

    def write(
        self,
        key_BGLP: Tensor,
        value_BGLP: Tensor,
        column_BL: Tensor,
        n_new_B: Tensor,
        n_columns: int,
    ) -> None:
        """Store the first ``n_new_B`` tokens of each row; what follows them is padding.

        ``n_columns`` counts the columns of all rows so far, these included.
        """
        if self.n_tokens_B is None:
            self._allocate(key_BGLP, value_BGLP, n_new_B)
        self._grow(n_columns)
        assert self.n_tokens_B is not None
        self._set("n_tokens_B", self.n_tokens_B + n_new_B)
        self._replace_slots(key_BGLP, value_BGLP, column_BL, n_new_B)

    def step(
        self, column_B1: Tensor, token_mask_B1: Tensor | None, n_columns: int, reach: Reach
    ) -> RingStep:
        """Compute the effect of one more token per row, and add its slot. Requires a ring that holds tokens."""
        self._grow(n_columns)
        assert self.n_tokens_B is not None
        if token_mask_B1 is None:
            is_new_B = None
            n_new_B = torch.ones_like(self.n_tokens_B)
        else:
            is_new_B = token_mask_B1[:, 0] != 0
            n_new_B = is_new_B.long()
        n_tokens_B = self.n_tokens_B + n_new_B
        # A row of padding alone has no token yet. Padding is given the output of the last token, which nobody reads.
        place_B1 = (n_tokens_B.unsqueeze(1) - 1).clamp_min(0)
        slot_BX = self.sinks + place_B1 % self.window
        if self.sinks:
            # A token beyond the sinks is written into the same slot twice: fewer steps than to ask.
            sink_B1 = torch.where(place_B1 < self.sinks, place_B1, slot_BX)
            slot_BX = torch.cat([sink_B1, slot_BX], dim=1)
        row_B = torch.arange(len(place_B1), device=place_B1.device)
        return RingStep(
            n_tokens_B=n_tokens_B,
            n_new_B=n_new_B,
            is_new_B=is_new_B,
            n_columns=n_columns,
            column_B1=column_B1.to(torch.int32),
            row_B1=row_B.unsqueeze(1),
            slot_BX=slot_BX,
            seen_BR=seen_in_ring(self._places_BR(n_tokens_B), place_B1, reach),
        )

    def write_step(self, step: RingStep, key_BG1P: Tensor, value_BG1P: Tensor) -> None:
        """Store the token of a step.

        It is written into its slots alone: a decoding model would else copy the ring for each token.
        """
        self._grow(step.n_columns)
        assert self.column_BR is not None and self.keys is not None and self.values is not None
        self._set("n_tokens_B", step.n_tokens_B)
        if not self._is_writable(key_BG1P):
            self._replace_slots(key_BG1P, value_BG1P, step.column_B1, step.n_new_B)
            return
        slots = (step.row_B1, step.slot_BX)
        slots_of_heads = (step.row_B1, slice(None), step.slot_BX)
        _put(self.column_BR, slots, step.column_B1, step.is_new_B)
        _put(self.keys, slots_of_heads, key_BG1P.transpose(1, 2), step.is_new_B)
        _put(self.values, slots_of_heads, value_BG1P.transpose(1, 2), step.is_new_B)

    def last_slots(self, n: int) -> Tensor:
        """Return the slots of each row's last n tokens in their order, [B, n]; meaningless before its first token."""
        assert self.n_tokens_B is not None
        n_tokens_B1 = self.n_tokens_B.unsqueeze(1)
        place_BN = n_tokens_B1 - n + torch.arange(n, device=n_tokens_B1.device)
        # Places before the first token may have no slot.
        return self.sinks + place_BN.clamp_min(0) % self.window

    def _is_writable(self, key_BG1P: Tensor) -> bool:
        """Return True if slots can be written in place."""
        assert self.keys is not None
        # Autograd may need what an attention has read before, and cannot know that two slots hold one token.
        if key_BG1P.requires_grad or self.keys.requires_grad:
            return False
        # Tensors of inference mode can only be written there. torch.compile cannot ask.
        if torch.compiler.is_compiling():
            return True
        return not self.keys.is_inference() or torch.is_inference_mode_enabled()

    def _replace_slots(
        self, key_BGLP: Tensor, value_BGLP: Tensor, column_BL: Tensor, n_new_B: Tensor
    ) -> None:
        """Let each slot pick its token of the row, if it has one there; the ring counts them already."""
        assert self.n_tokens_B is not None and self.column_BR is not None
        assert self.keys is not None and self.values is not None
        # Taken after counting: a static ring counts in place.
        n_before_B = self.n_tokens_B - n_new_B
        source_BR = self._places_BR(self.n_tokens_B) - n_before_B.unsqueeze(1)
        is_new_BR = (source_BR >= 0) & (source_BR < n_new_B.unsqueeze(1))
        source_BR = source_BR.clamp(0, column_BL.shape[1] - 1)
        is_new_B1R1 = is_new_BR[:, None, :, None]
        columns_BR = column_BL.gather(1, source_BR).to(self.column_BR.dtype)
        keys = pick_tokens(key_BGLP, source_BR).to(self.keys.dtype)
        values = pick_tokens(value_BGLP, source_BR).to(self.values.dtype)
        self._set("column_BR", torch.where(is_new_BR, columns_BR, self.column_BR))
        self._set("keys", torch.where(is_new_B1R1, keys, self.keys))
        self._set("values", torch.where(is_new_B1R1, values, self.values))

    def _places_BR(self, n_tokens_B: Tensor) -> Tensor:
        """Return the place of the token in each slot when a row has so many; negative for an empty slot of the window.

        A sink that the row has not reached yet has its future place.
        """
        device = n_tokens_B.device
        last_B1 = n_tokens_B.unsqueeze(1) - 1
        slot_W = torch.arange(self.n_near, device=device)
        # The largest place up to the last one that is r modulo W.
        age_BW = (last_B1 - slot_W) % self.window
        near_BW = last_B1 - age_BW
        sink_S = torch.arange(self.sinks, device=device)
        sink_BS = sink_S.expand(len(last_B1), -1)
        return torch.cat([sink_BS, near_BW], dim=1)

    def _allocate(self, key_BGLP: Tensor, value_BGLP: Tensor, n_new_B: Tensor) -> None:
        batch, n_groups, _, width = key_BGLP.shape
        n_slots = self._n_slots(0)
        shape = (batch, n_groups, n_slots, width)
        self.keys = self._owned(key_BGLP.new_zeros(shape))
        self.values = self._owned(value_BGLP.new_zeros(shape))
        # int32: columns are stored per layer, and should not cost as much as keys.
        self.column_BR = self._owned(n_new_B.new_zeros((batch, n_slots), dtype=torch.int32))
        self.n_tokens_B = self._owned(n_new_B.new_zeros(batch))

    def _grow(self, n_columns: int) -> None:
        """Add slots for tokens up to this number of columns."""
        assert self.keys is not None and self.values is not None and self.column_BR is not None
        n_more = self._n_slots(n_columns) - self.keys.shape[2]
        if n_more > 0:
            self.keys = F.pad(self.keys, (0, 0, 0, n_more))
            self.values = F.pad(self.values, (0, 0, 0, n_more))
            self.column_BR = F.pad(self.column_BR, (0, n_more))

    def _n_slots(self, n_columns: int) -> int:
        if self.is_static:
            return self.sinks + self.window
        return self.sinks + min(self.window, n_columns)

    def _owned(self, tensor: Tensor) -> Tensor:
        if self.is_static:
            return static(tensor)
        return tensor

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
        tensors = {}
        for name in ("keys", "values", "column_BR", "n_tokens_B"):
            tensor = getattr(self, name)
            if tensor is not None:
                tensors[name] = tensor
        return tensors

    def nbytes(self) -> int:
        """Count the bytes of keys, values and columns."""
        tensors = (self.keys, self.values, self.column_BR)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def _put(stored: Tensor, slots: Any, new: Tensor, is_new_B: Tensor | None) -> None:
    """Write ``new`` [B, 1, ...] into the ``slots`` of a tensor, in rows that are new."""
    new = new.to(stored.dtype)
    if is_new_B is not None:
        other_dims = [1] * (new.dim() - 1)
        new = torch.where(is_new_B.view(-1, *other_dims), new, stored[slots])
    # Not scatter_, which takes a hundred times as long on a CPU.
    stored[slots] = new
