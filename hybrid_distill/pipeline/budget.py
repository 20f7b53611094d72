"""KV groups and windows of a student whose cache has a given size."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import replace
from functools import partial

from transformers import PretrainedConfig

from ..cache_size import cache_bytes
from ..config import RunConfig, StudentConfig
from ..model import layer_windows
from ..plan import HeadPlan, Shape, UnitId, heads_of_units
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
        layer_windows=layer_windows(teacher),
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


def within_cache(
    config: RunConfig, teacher: PretrainedConfig, *, d_state: int = 0, sinks: int = SINKS
) -> RunConfig:
    """Return the run with the KV groups and the window that fill ``config.cache`` at ``config.context`` tokens.

    Replaced heads get windows, and states of ``d_state`` beside them. Raises ValueError for a cache too small for the
    smallest window.
    """
    allowed = allowed_bytes(config, teacher)
    smallest = max(SMALLEST_WINDOW, sinks)
    windowed = replace(config.student, d_state=d_state, window=smallest, sinks=sinks)

    def size(k: int, window: int) -> int:
        student = replace(windowed, window=window)
        return student_cache(_most_expensive_groups(teacher, k), teacher, student, config.context)

    least = size(0, smallest)
    if least > allowed:
        raise ValueError(
            f"cache is {config.cache!r}, and windows of {smallest} tokens, {sinks} sinks and states of {d_state} take "
            f"{least / MB:.4g} MB; pass at least that."
        )
    bytes_per_token = max(1, size(0, smallest + 1) - least)
    # Rows may be too short for a window of its full share.
    longest = longest_window(config)
    shortest = min(_shortest_window(allowed, least, bytes_per_token, windowed), longest)
    k = len(Shape.of(teacher).units("kv-group"))
    while k > 0 and size(k, shortest) > allowed:
        k -= 1
    # What is too little for another group makes the windows longer.
    first_too_large = bisect_right(range(longest + 1), allowed, lo=shortest, key=partial(size, k))
    return replace(
        config,
        plan=replace(config.plan, selection="top", unit="kv-group", k=k),
        student=replace(windowed, window=first_too_large - 1),
    )


def _shortest_window(allowed: int, least: int, bytes_per_token: int, student: StudentConfig) -> int:
    """Return the shortest window to choose: one that takes `WINDOW_SHARE` of the allowed bytes, if it is not too short.

    ``least`` is the cache of the ``student``, whose window is the smallest, without a kept head. States come first:
    the share is of what they leave.
    """
    state_bytes = max(0, least - bytes_per_token * (student.window + student.sinks))
    window = int(WINDOW_SHARE * (allowed - state_bytes) / bytes_per_token) - student.sinks
    return max(student.window, window)


def _most_expensive_groups(teacher: PretrainedConfig, k: int) -> HeadPlan:
    """Keep ``k`` KV groups where they take most cache: in layers that see everything, if there are any.

    A layer whose groups are all kept needs no ring, so these come last.
    """
    shape = Shape.of(teacher)
    windows = layer_windows(teacher)

    def costliest_first(group: UnitId) -> tuple[float, bool]:
        layer, number = group
        reach = windows[layer] or math.inf
        is_last_of_layer = number == shape.n_kv_heads - 1
        return -reach, is_last_of_layer

    groups = sorted(shape.units("kv-group"), key=costliest_first)
    heads = heads_of_units(groups[:k], shape.unit_size("kv-group"))
    return HeadPlan.from_pairs(teacher, heads)


def longest_window(config: RunConfig) -> int:
    """Return the longest window that leaves something out of the shortest row that a stage trains on."""
    row_lengths = [config.data_of(stage).seq_len for stage in config.stages]
    return min([*row_lengths, config.context]) // 2


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
