"""KV groups and windows of a student whose cache has a given size."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import replace
from itertools import product

from transformers import PretrainedConfig

from ..config import RunConfig, StudentConfig
from ..model import layer_windows
from ..plan import HeadPlan, cache_bytes
from ..teacher import head_dim_of
from ..validation import MB, number_of_bytes

WINDOW_SHARE = 0.55
"""Least share of the cache for windows (docs/real_models.md, "At the same cache")."""
SINKS = 4
SMALLEST_WINDOW = 8


def student_cache(
    plan: HeadPlan, teacher: PretrainedConfig, student: StudentConfig, length: int
) -> int:
    """Count the bytes of a student's cache of one sequence of ``length`` tokens, in bf16 (states fp32)."""
    return cache_bytes(
        plan,
        length=length,
        head_dim=head_dim_of(teacher),
        d_state=student.d_state,
        window=student.window,
        sinks=student.sinks,
        windows=layer_windows(teacher),
    ).total


def allowed_bytes(config: RunConfig, teacher: PretrainedConfig) -> int:
    """Return ``config.cache`` in bytes. Raises ValueError unless it is less than the teacher's cache."""
    assert config.cache is not None
    whole = student_cache(HeadPlan.all(teacher), teacher, StudentConfig(), config.context)
    allowed = number_of_bytes("cache", config.cache, whole)
    if allowed >= whole:
        raise ValueError(
            f"cache is {config.cache!r}, and the teacher's own takes {whole / MB:.4g} MB at "
            f"{config.context:,} tokens; pass less, or a longer context."
        )
    return allowed


def within_cache(config: RunConfig, teacher: PretrainedConfig) -> RunConfig:
    """Return the run with the KV groups and the window that fill ``config.cache`` at ``config.context`` tokens.

    Replaced heads get windows alone. Raises ValueError for a cache too small for the smallest window.
    """
    allowed = allowed_bytes(config, teacher)
    in_ring = replace(config.student, d_state=0, window=SMALLEST_WINDOW, sinks=SINKS)
    none = HeadPlan.none(teacher)
    least = student_cache(none, teacher, in_ring, config.context)
    if least > allowed:
        raise ValueError(
            f"cache is {config.cache!r}, and windows of {SMALLEST_WINDOW} tokens and {SINKS} sinks take "
            f"{least / MB:.4g} MB; pass at least that."
        )
    longest = _longest(config)
    per_token = least / (SMALLEST_WINDOW + SINKS)
    shortest = int(WINDOW_SHARE * allowed / per_token) - SINKS
    shortest = min(max(SMALLEST_WINDOW, shortest), longest)

    def size(k: int, window: int) -> int:
        student = replace(in_ring, window=window)
        return student_cache(_largest(teacher, k), teacher, student, config.context)

    k = none.n_layers * none.n_kv_heads
    while k > 0 and size(k, shortest) > allowed:
        k -= 1
    # What is too little for another group makes the windows longer.
    n_fitting = bisect_right(
        range(longest + 1), allowed, lo=shortest, key=lambda window: size(k, window)
    )
    return replace(
        config,
        plan=replace(config.plan, selection="top", unit="kv-group", k=k),
        student=replace(in_ring, window=n_fitting - 1),
    )


def _largest(teacher: PretrainedConfig, k: int) -> HeadPlan:
    """Keep ``k`` KV groups where they take most cache: in layers that see everything, if there are any.

    A layer whose groups are all kept needs no ring, so these come last.
    """
    none = HeadPlan.none(teacher)
    windows = layer_windows(teacher)

    def cheapness(group: tuple[int, int]) -> tuple[float, bool]:
        layer, place = group
        return -(windows[layer] or math.inf), place == none.n_kv_heads - 1

    groups = sorted(product(range(none.n_layers), range(none.n_kv_heads)), key=cheapness)
    group_size = none.n_heads // none.n_kv_heads
    heads = []
    for layer, group in groups[:k]:
        first = group * group_size
        heads += [(layer, head) for head in range(first, first + group_size)]
    return HeadPlan.from_pairs(teacher, heads)


def _longest(config: RunConfig) -> int:
    """Return the longest window that leaves something out of the shortest row that a stage trains on."""
    rows = [config.data_of(stage).seq_len for stage in config.stages]
    return min([*rows, config.context]) // 2


def check_cache(config: RunConfig, teacher: PretrainedConfig, plan: HeadPlan) -> None:
    """Raise ValueError if the student takes more than ``config.cache`` at ``config.context`` tokens."""
    if config.cache is None:
        return
    allowed = allowed_bytes(config, teacher)
    total = student_cache(plan, teacher, config.student, config.context)
    if total > allowed:
        raise ValueError(
            f"cache is {config.cache!r}, and this student takes {total / MB:.4g} MB at {config.context:,} tokens; "
            "pass fewer heads (plan.k), a shorter student.window, or a larger cache."
        )
