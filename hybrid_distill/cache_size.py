"""Size of a student's cache, from its plan. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .plan import HeadPlan

BF16_BYTES = 2
STATE_BYTES = 4
"""Bytes per element of a recurrent state: caches keep these long sums in float32."""
INDEX_BYTES = 4
"""Bytes per slot of a ring: where a full cache stores its token."""


@dataclass(frozen=True)
class CacheBytes:
    """Cache size in bytes: keys and values, rings of windows, SSM states, convolution states."""

    kv: int
    window: int
    ssm: int
    conv: int

    @property
    def total(self) -> int:
        """All but the small convolution states, which are reported separately."""
        return self.kv + self.window + self.ssm


def cache_bytes(
    plan: HeadPlan,
    *,
    length: int,
    head_dim: int,
    d_state: int,
    bytes_per_element: int = BF16_BYTES,
    state_bytes: int = STATE_BYTES,
    batch: int = 1,
    conv_width: int = 4,
    window: int = 0,
    sinks: int = 0,
    layer_windows: Sequence[int | None] | None = None,
) -> CacheBytes:
    """Count the bytes of a hybrid's cache after ``length`` tokens; a plan with every head kept
    gives the teacher's.

        bytes(L) = 2 H_kv P L b + 2 H_ring P (W + S) b + H_ssm P N s

    H_kv is the number of stored KV heads (kept heads of one group share a K and a V), H_ssm the
    number of recurrent heads, P the head dim, N the state size, b the bytes per element, and s the
    bytes per element of a state (published tables use 2). H_ring is the number of KV heads that no
    kept head stores whole, where replaced heads have a ``window`` W and ``sinks`` S; each slot of a
    layer's ring also has an index of 4 bytes, and a shorter text has fewer slots. ``layer_windows``
    holds each layer's own sliding window, None for full attention (`model.layer_windows`): the
    layer's full cache holds the latest tokens that fit in it, but for the current one.
    """
    if layer_windows is None:
        layer_windows = [None] * plan.n_layers
    # A key and a value of one head.
    token_bytes = 2 * head_dim * bytes_per_element
    kv_bytes = 0
    ring_bytes = 0
    for layer, layer_window in zip(range(plan.n_layers), layer_windows, strict=True):
        n_whole = len(plan.kv_groups_in(layer))
        n_stored = length
        n_seen = length
        if layer_window is not None:
            # The layer's window includes the token that reads it.
            n_stored = min(length, layer_window - 1)
            n_seen = min(length, layer_window)
        kv_bytes += n_whole * n_stored * token_bytes
        if window and plan.replaced_in(layer):
            n_slots = sinks + min(window, n_seen)
            n_in_ring = plan.n_kv_heads - n_whole
            ring_bytes += n_slots * (n_in_ring * token_bytes + INDEX_BYTES)
    # Without a state, replaced heads have no convolution either.
    n_recurrent = 0
    if d_state:
        n_recurrent = plan.n_layers * plan.n_heads - plan.k
    # x, B and C of each head pass through the convolution.
    conv_channels = head_dim + 2 * d_state
    return CacheBytes(
        kv=kv_bytes * batch,
        window=ring_bytes * batch,
        ssm=n_recurrent * head_dim * d_state * batch * state_bytes,
        conv=n_recurrent * conv_channels * (conv_width - 1) * batch * bytes_per_element,
    )


def falcon_h1_cache_bytes(
    plan: HeadPlan,
    *,
    length: int,
    head_dim: int,
    d_state: int,
    bytes_per_element: int = BF16_BYTES,
) -> int:
    """Count the bytes of the plan's cache in a Falcon-H1, whose layers are all as large as the
    largest.

    Counts as `cache_bytes` does, without convolution states. Each layer has at least one head of
    each kind.
    """
    layers = range(plan.n_layers)
    # Falcon-H1 cannot have a layer without attention or without an SSM.
    n_kv_heads = max(1, *(len(plan.kv_groups_in(layer)) for layer in layers))
    n_ssm_heads = max(1, *(len(plan.replaced_in(layer)) for layer in layers))
    kv = 2 * n_kv_heads * head_dim * length * bytes_per_element
    ssm = n_ssm_heads * head_dim * d_state * STATE_BYTES
    return plan.n_layers * (kv + ssm)
