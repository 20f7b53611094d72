"""Windows in an ONNX graph: which keys a token attends to, and which keys the next call needs.

ONNX Runtime's own attention with a window (``GroupQueryAttention``) has no sinks, so windows are a masked
``Attention`` over few keys. Each layer stores the keys and values of a row's first S tokens, then of its last W - 1,
in order. A prompt is read in one piece, so memory grows with the square of its length.

Shapes: B batch, L length, W window, S first tokens (sinks), N = W - 1 latest tokens, R = S + N stored keys,
T = R + L keys of a call, C channels of the keys or values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from onnx_ir import Value


END = 2**62
"""End of a slice up to the last token: larger than any length."""


class WindowValues(NamedTuple):
    """Values of a call that the windows of all layers share."""

    attends_B1LT: Value
    """Attention mask: stored keys come first, then those of this call."""
    next_BR1: Value
    """Columns of this call's keys that are stored for the next one."""


class _Counts(NamedTuple):
    """Counts of a call's tokens, and ranges over the stored keys."""

    n_before_B1: Value
    """Tokens of each row before this call; ``n_after_B1`` includes its ``n_new_B1`` tokens."""
    n_new_B1: Value
    n_after_B1: Value
    length: Value
    """L of the call, padding included."""
    sink_1S: Value
    """Positions of the first tokens, 0 ... S - 1."""
    latest_1N: Value
    """Places of the latest tokens, 0 ... N - 1."""


class WindowGraph:
    """Windows of all layers: the values that they share, and the extension of their stored keys."""

    def __init__(self, op: Any, window: int, sinks: int) -> None:
        self.op = op
        self.window = window
        self.sinks = sinks
        self.n_stored = sinks + window - 1

    def build(self, mask_BS: Value, token_BL: Value, position_BL: Value) -> WindowValues:
        """Build the values of a call.

        ``token_BL`` is 0 at padding, which is on the left, and ``position_BL`` counts from the first
        token.
        """
        counts = self._counts(mask_BS, token_BL)
        attends_B1LT = self._mask(counts, token_BL, position_BL)
        next_BR1 = self._columns_to_store(counts)
        return WindowValues(attends_B1LT, next_BR1)

    def _counts(self, mask_BS: Value, token_BL: Value) -> _Counts:
        op = self.op
        n_after_B1 = op.ReduceSum(mask_BS, [1], keepdims=1)
        n_new_B1 = op.ReduceSum(token_BL, [1], keepdims=1)
        return _Counts(
            n_before_B1=op.Sub(n_after_B1, n_new_B1),
            n_new_B1=n_new_B1,
            n_after_B1=n_after_B1,
            length=op.Shape(token_BL, start=1),
            sink_1S=op.Unsqueeze(op.Range(0, self.sinks, 1), [0]),
            latest_1N=op.Unsqueeze(op.Range(0, self.window - 1, 1), [0]),
        )

    def _mask(self, counts: _Counts, token_BL: Value, position_BL: Value) -> Value:
        """Build the attention mask, [B, 1, L, T]."""
        op = self.op
        begin_B1 = op.Sub(counts.n_before_B1, self.window - 1)
        # Position of each key; -1 where there is none. A sink that is also a latest token, or that is yet to come,
        # must not be read in the columns of the sinks.
        is_far_BS = op.Less(counts.sink_1S, begin_B1)
        sink_BS = op.Where(is_far_BS, counts.sink_1S, -1)
        latest_BN = op.Add(begin_B1, counts.latest_1N)
        is_padding_BL = op.Equal(token_BL, 0)
        new_BL = op.Where(is_padding_BL, -1, position_BL)
        key_BT = op.Concat(sink_BS, latest_BN, new_BL, axis=1)
        key_B1T = op.Unsqueeze(key_BT, [1])
        query_BL1 = op.Unsqueeze(position_BL, [2])
        distance_BLT = op.Sub(query_BL1, key_B1T)
        is_in_window_BLT = op.Less(distance_BLT, self.window)
        is_sink_B1T = op.Less(key_B1T, self.sinks)
        attends_BLT = op.Or(is_in_window_BLT, is_sink_B1T)
        is_causal_BLT = op.GreaterOrEqual(distance_BLT, 0)
        is_token_B1T = op.GreaterOrEqual(key_B1T, 0)
        attends_BLT = op.And(attends_BLT, is_causal_BLT)
        attends_BLT = op.And(attends_BLT, is_token_B1T)
        # Padding attends to itself, because a softmax over nothing is NaN, which would spread.
        n_columns = op.Shape(key_BT, start=1)
        column_T = op.Range(0, op.Squeeze(n_columns), 1)
        own_L = op.Slice(column_T, [self.n_stored], [END], [0])
        own_L1 = op.Unsqueeze(own_L, [1])
        is_own_LT = op.Equal(own_L1, column_T)
        attends_BLT = op.Or(attends_BLT, is_own_LT)
        return op.Unsqueeze(attends_BLT, [1])

    def _columns_to_store(self, counts: _Counts) -> Value:
        """Build the columns of the keys to store, [B, R, 1]."""
        op = self.op
        n_columns = op.Add(counts.length, self.n_stored)
        # A new token at position p of a row is in column T - n_after + p.
        first_column_B1 = op.Sub(n_columns, counts.n_after_B1)
        column_BS = op.Add(first_column_B1, counts.sink_1S)
        # Any column will do for a sink that is yet to come: it is never read.
        last_column = op.Sub(n_columns, 1)
        column_BS = op.Min(column_BS, last_column)
        is_stored_BS = op.Less(counts.sink_1S, counts.n_before_B1)
        sink_BS = op.Where(is_stored_BS, counts.sink_1S, column_BS)
        # The latest tokens that stay come first, moved to the left by the new ones.
        moved_BN = op.Add(counts.latest_1N, counts.n_new_B1)
        stays_BN = op.Less(moved_BN, self.window - 1)
        new_BN = op.Add(counts.latest_1N, counts.length)
        latest_BN = op.Where(stays_BN, moved_BN, new_BN)
        latest_BN = op.Add(latest_BN, self.sinks)
        next_BR = op.Concat(sink_BS, latest_BN, axis=1)
        return op.Unsqueeze(next_BR, [2])

    def extend(self, past_BRC: Value, new_BLC: Value, next_BR1: Value) -> tuple[Value, Value]:
        """Return the keys or values of a call, [B, T, C], and those to store, [B, R, C]."""
        all_BTC = self.op.Concat(past_BRC, new_BLC, axis=1)
        stored_BRC = self.op.GatherND(all_BTC, next_BR1, batch_dims=1)
        return all_BTC, stored_BRC
