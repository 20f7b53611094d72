"""What a plan costs, and the best plan that a budget allows.

Which heads to keep is a knapsack problem: a head has a value, the kept heads of one KV group share the cost of one KV
head, and a head that is not kept costs a recurrent state. The parts of a plan (KV groups, or layers where each has to
follow a rule) do not depend on one another, so its best choices are built up part by part: of all ways to choose
among the parts so far, only those stay that no other way beats in value at the same weight or less (Nemhauser and
Ullmann, 1969). What comes out is the optimum, not an approximation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from .plan import HeadId, HeadPlan, Valued

BF16_BYTES = 2
STATE_BYTES = 4
"""Of an element of a recurrent state: a cache keeps these long sums in float32, whatever the model's dtype."""
TIE_BREAK = 1e-6  # what a nat of log-probability counts beside a whole accuracy: only where accuracy is equal

PerLayer = Literal["uniform", "power_of_two"]


@dataclass(frozen=True)
class CacheBytes:
    """Bytes held after some tokens: keys and values, SSM states, convolution states."""

    kv: int
    ssm: int
    conv: int

    @property
    def total(self) -> int:
        """Keys, values and SSM states; the convolution state, which is small, is reported beside it."""
        return self.kv + self.ssm


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
    windows: Sequence[int | None] | None = None,
) -> CacheBytes:
    """Memory of a hybrid's cache after ``length`` tokens; with every head kept, of the teacher's.

        bytes(L) = 2 H_kv P L b + H_ssm P N s

    H_kv counts stored KV heads: kept heads of one group share a K and a V. H_ssm counts recurrent heads, P is
    the head dim, N the state size, b the bytes per element, s those of a state's element (published tables take 2).
    ``windows`` of the layers (`layer_windows`; none by default): a layer that sees W tokens holds the W - 1 latest,
    all that a later token can see.
    """
    kv_tokens = 0
    for layer, window in zip(range(plan.n_layers), windows or [None] * plan.n_layers, strict=True):
        kv_tokens += len(plan.kv_groups_in(layer)) * (length if window is None else min(length, window - 1))
    n_recurrent = plan.n_layers * plan.n_heads - plan.k
    unit = batch * bytes_per_element
    return CacheBytes(
        kv=2 * kv_tokens * head_dim * unit,
        ssm=n_recurrent * head_dim * d_state * batch * state_bytes,
        conv=n_recurrent * (head_dim + 2 * d_state) * (conv_width - 1) * unit,
    )


def best_plan(
    scores: Valued,
    *,
    heads: int | None = None,
    kv_heads: int | None = None,
    cache: int | None = None,
    context: int | None = None,
    head_dim: int | None = None,
    d_state: int | None = None,
    bytes_per_element: int = BF16_BYTES,
    windows: Sequence[int | None] | None = None,
    per_layer: PerLayer | None = None,
    by: str = "retrieval",
) -> HeadPlan:
    """`HeadPlan.under_budget`, which says what the arguments mean."""
    budgets = {"heads": heads, "kv_heads": kv_heads, "cache_bytes": cache}
    given = {name: value for name, value in budgets.items() if value is not None}
    if len(given) != 1:
        raise ValueError(f"budgets given: {', '.join(given) or 'none'}; give one of {', '.join(budgets)}.")
    if per_layer not in (None, "uniform", "power_of_two"):
        raise ValueError(f"per_layer is {per_layer!r}; layers are 'uniform', 'power_of_two', or free (None).")
    (name, capacity), group_size = given.popitem(), scores.n_heads // scores.n_kv_heads
    if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 0:
        raise ValueError(f"{name} is {capacity!r}; a budget is a whole number of at least 0.")

    def weight(n_kept: int, window: int | None) -> int:
        """Of one KV group with this many kept heads, in the budget's unit."""
        if heads is not None:
            return n_kept
        if kv_heads is not None:
            return int(n_kept > 0)
        if context is None or head_dim is None or d_state is None:
            raise ValueError("a budget in cache bytes needs context, head_dim and d_state as well.")
        group = HeadPlan(1, group_size, 1, kept=tuple(HeadId(0, head) for head in range(n_kept)))
        sizes = {"length": context, "head_dim": head_dim, "d_state": d_state}
        return cache_bytes(group, **sizes, bytes_per_element=bytes_per_element, windows=[window]).total

    windows = windows or [None] * scores.n_layers
    weights = [[weight(n_kept, window) for n_kept in range(group_size + 1)] for window in windows]
    return HeadPlan.from_pairs(scores, _best_heads(_values(scores, by), weights, capacity, per_layer))


def _values(scores: Valued, by: str) -> np.ndarray[Any, Any]:
    """[layer, head]: what each head counts for; log-probability decides between heads of equal accuracy."""
    value_LH = np.asarray(scores.value_LH(by).tolist(), dtype=np.float64)
    return value_LH + TIE_BREAK * np.asarray(scores.logprob_drop_LH.tolist(), dtype=np.float64)


@dataclass(frozen=True, eq=False)
class _Choices:
    """Ways to choose, lightest first, each more valuable than the one before; heads as bits of an integer."""

    weight: np.ndarray[Any, Any]
    value: np.ndarray[Any, Any]
    heads: np.ndarray[Any, Any]

    @property
    def possible(self) -> bool:
        return len(self.weight) > 0


def _choices(weights: Sequence[int], values: Sequence[float], heads: Sequence[int]) -> _Choices:
    return _Choices(np.array(weights, dtype=np.int64), np.array(values, float), np.array(heads, dtype=object))


NOTHING, IMPOSSIBLE = _choices([0], [0.0], [0]), _choices([], [], [])


def _best_heads(
    value_LH: np.ndarray[Any, Any], weights: Sequence[Sequence[int]], capacity: int, per_layer: PerLayer | None
) -> list[HeadId]:
    """The heads of greatest total value, where a KV group of a layer with n kept heads weighs ``weights[layer][n]``."""
    n_layers, n_heads = value_LH.shape
    n_kv_heads = n_heads // (len(weights[0]) - 1)
    ids_LGH = np.array([1 << i for i in range(value_LH.size)], dtype=object).reshape(n_layers, n_kv_heads, -1)
    value_LGH = value_LH.reshape(ids_LGH.shape)
    groups = [
        [_group(value_H, id_H, weights_N) for value_H, id_H in zip(value_GH, ids_GH)]
        for value_GH, ids_GH, weights_N in zip(value_LGH, ids_LGH, weights, strict=True)
    ]
    found = [_combine(parts, capacity) for parts in _shapes(groups, per_layer)]
    possible = [choices for choices in found if choices.possible]
    if not possible:
        least = min(sum(_least(part) for part in parts) for parts in _shapes(groups, per_layer))
        raise ValueError(f"no plan fits into {capacity:,}: the smallest needs {least:,}; raise the budget.")
    best = max(possible, key=lambda choices: choices.value[-1])
    return [HeadId(*divmod(i, n_heads)) for i in range(value_LH.size) if best.heads[-1] >> i & 1]


def _group(
    value_H: np.ndarray[Any, Any], id_H: np.ndarray[Any, Any], weights: Sequence[int]
) -> tuple[_Choices, _Choices]:
    """Ways to treat one KV group: keep none of its heads, or its best one, two, ..."""
    order = [i for i in np.argsort(-value_H, kind="stable") if not math.isnan(value_H[i])]
    values, heads = np.cumsum(value_H[order]).tolist(), np.cumsum(id_H[order]).tolist()
    idle, kept = _choices(weights[:1], [0.0], [0]), _choices(weights[1 : len(order) + 1], values, heads)
    return idle, _undominated(kept)


def _shapes(groups: list[list[tuple[_Choices, _Choices]]], per_layer: PerLayer | None) -> list[list[_Choices]]:
    """Lists of independent parts; a plan takes one way of every part of one list."""
    if per_layer is None:
        return [[_either(idle, kept) for layer in groups for idle, kept in layer]]
    layers = [_by_count(layer) for layer in groups]
    counts = range(len(layers[0]))
    if per_layer == "power_of_two":
        return [[_either(*(layer[n] for n in counts if n & (n - 1) == 0)) for layer in layers]]
    return [[layer[n] if layer[1].possible else layer[0] for layer in layers] for n in counts]


def _by_count(groups: list[tuple[_Choices, _Choices]]) -> list[_Choices]:
    """Ways to treat a layer, by the number of KV heads it keeps. A layer without heads can keep none."""
    counts = [NOTHING]
    for idle, kept in groups:
        without, with_one_more = [*counts, IMPOSSIBLE], [IMPOSSIBLE, *counts]
        counts = [_either(_both(a, idle), _both(b, kept)) for a, b in zip(without, with_one_more)]
    return counts


def _combine(parts: list[_Choices], capacity: int) -> _Choices:
    """Ways to choose in all parts within the capacity."""
    rest = sum(_least(part) for part in parts)
    chosen = NOTHING
    for part in parts:
        rest -= _least(part)
        chosen = _both(chosen, part, capacity - rest)
    return chosen


def _least(part: _Choices) -> int:
    return int(part.weight[0]) if part.possible else 0


def _both(a: _Choices, b: _Choices, capacity: float = math.inf) -> _Choices:
    """A way of ``a`` together with a way of ``b``."""
    weight, value = np.add.outer(a.weight, b.weight).ravel(), np.add.outer(a.value, b.value).ravel()
    light = np.flatnonzero(weight <= capacity)
    best = light[_undominated_order(weight[light], value[light])]
    of_a, of_b = np.divmod(best, max(len(b.weight), 1))
    return _Choices(weight[best], value[best], a.heads[of_a] | b.heads[of_b])


def _either(*several: _Choices) -> _Choices:
    columns = ([getattr(c, name) for c in several] for name in ("weight", "value", "heads"))
    return _undominated(_Choices(*map(np.concatenate, columns)))


def _undominated(choices: _Choices) -> _Choices:
    best = _undominated_order(choices.weight, choices.value)
    return _Choices(choices.weight[best], choices.value[best], choices.heads[best])


def _undominated_order(weight: np.ndarray[Any, Any], value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Indices, by weight, of the entries that are worth more than every lighter one."""
    order = np.lexsort((-value, weight))
    before = np.maximum.accumulate(np.concatenate([[-np.inf], value[order]]))[:-1]
    return order[value[order] > before]
