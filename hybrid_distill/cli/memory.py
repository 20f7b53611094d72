"""`hybrid-distill memory`: cache sizes by kept heads, state size and context, before training.

    bytes(L) = 2 H_kv P L b + 2 H_ring P (W + S) b + H_ssm P N s        (`cache_size.cache_bytes`)

In a layer with a window of its own, L is at most that window less the token that reads it. The number of KV heads
that k kept heads need depends on their positions: heads of one group share a K and a V. A scores.json gives the
positions; without one, the table shows both extremes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Literal, NamedTuple

import pandas as pd
import tyro

from ..cache_size import cache_bytes
from ..lab.reporting import text_table
from ..model import layer_windows
from ..model.field_rules import OWN_RULES, check_field, check_windows
from ..plan import HeadId, HeadPlan
from ..scoring import HeadScores
from ..student.teachers import check_teacher
from ..teacher import head_dim_of, load_config
from ..validation import MB, CountOrZero, check_options, numbers

BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
SETTING = ["kept", "kv_heads", "d_state", "window"]
COLUMNS = [*SETTING, "length", "kv_bytes", "window_bytes", "ssm_bytes", "conv_bytes"]


@dataclass(frozen=True)
class MemoryJob:
    """Configurations to tabulate."""

    model: str = "16x32x8x64"
    """Checkpoint (folder, hub id, ``tiny``), or shape: layers x query heads x KV heads x head
    dim. The default is Llama-3.2-1B's."""
    heads: str = "0,10,20,40,all"
    """Numbers of attention heads to keep."""
    d_state: str = "8,64"
    """State sizes of the recurrent heads; 0 for windows alone."""
    window: str = "0"
    """Windows of the replaced heads, in tokens: ``0,44``."""
    sinks: CountOrZero = 0
    """First tokens of a document that replaced heads see beside each window."""
    lengths: str = "128,2048,4096,32768"
    """Context lengths, in tokens."""
    dtype: Literal["float32", "bfloat16", "int8"] = "bfloat16"
    """Dtype of keys, values and convolution states; int8 is counted without its scales."""
    state_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    """Dtype of recurrent states: this package's caches hold float32, published tables count
    bfloat16."""
    scores: Path | None = None
    """Path to a scores.json; its top heads are kept, which determines how many share keys and
    values."""

    def __post_init__(self) -> None:
        check_options(self, "--")

    def replacements(self) -> list[tuple[int, int]]:
        """Return the pairs of state size and window that can stand in place of a head."""
        d_states = numbers("d-state", self.d_state, least=0)
        windows = numbers("window", self.window, least=0)
        for d_state in d_states:
            check_field("--d-state", d_state, OWN_RULES["d_state"])
        names = {"window": "--window", "sinks": "--sinks", "d_state": "--d-state"}
        # Heads without a window have no sinks either.
        longer = [window for window in windows if window]
        for window in longer or [0]:
            check_windows(window, self.sinks, max(d_states), recurrence="discrete", names=names)
        return [pair for pair in product(d_states, windows) if any(pair)]


class ModelShape(NamedTuple):
    """Numbers of a model that decide the size of its cache."""

    plan: HeadPlan
    """Plan without kept heads."""
    head_dim: int
    layer_windows: Sequence[int | None]
    """Sliding window of each layer, in tokens; None for full attention."""


def memory_table(job: MemoryJob) -> str:
    """Return the table as text. Raises ValueError for invalid numbers."""
    shape = model_shape(job.model)
    sizes = cache_sizes(job)
    sizes["total"] = sizes.kv_bytes + sizes.window_bytes + sizes.ssm_bytes
    rows = []
    for _, case in sizes.groupby(SETTING, sort=False):
        first = case.iloc[0]
        row = {"kept": first.kept, "KV heads": first.kv_heads, "state": first.d_state or "-"}
        if sizes.window.any():
            row["window"] = first.window or "-"
        for length, total in zip(case.length, case.total):
            row[f"L={length}"] = f"{total / MB:,.2f}"
        row["conv state"] = f"{first.conv_bytes / MB:,.2f}"
        rows.append(row)
    table = text_table(pd.DataFrame(rows))
    note = "The convolution state does not grow and is not in the other columns."
    return f"{_title(job, shape)}\n{table}\n{note}"


def _title(job: MemoryJob, shape: ModelShape) -> str:
    plan = shape.plan
    parts = [
        f"{job.model}: {plan.n_layers} layers",
        f"{plan.n_heads} heads",
        f"{plan.n_kv_heads} KV heads",
        f"{shape.head_dim} wide",
    ]
    limited = [window for window in shape.layer_windows if window is not None]
    if limited:
        parts.append(f"{len(limited)} layers see {max(limited):,} tokens")
    unit = f"MB (1e6 bytes) of one sequence in {job.dtype}, states in {job.state_dtype}"
    return f"{', '.join(parts)}; {unit}"


def model_shape(model: str) -> ModelShape:
    """Return the shape of a checkpoint, or the one that ``model`` spells.

    Raises ValueError for a name that is neither a model nor a shape.
    """
    parts = model.lower().split("x")
    if len(parts) == 4 and all(part.isdigit() for part in parts):
        n_layers, n_heads, n_kv_heads, head_dim = map(int, parts)
        plan = HeadPlan(n_layers, n_heads, n_kv_heads, kept=())
        return ModelShape(plan, head_dim, [None] * n_layers)
    config = load_config(model)
    check_teacher(config, name=model)
    config = config.get_text_config(decoder=True)
    return ModelShape(HeadPlan.none(config), head_dim_of(config), layer_windows(config))


def cache_sizes(job: MemoryJob) -> pd.DataFrame:
    """Return one row per placement of heads, state size and window (0 where all heads are kept),
    and length."""
    shape = model_shape(job.model)
    n_bytes = partial(
        cache_bytes,
        head_dim=shape.head_dim,
        layer_windows=shape.layer_windows,
        bytes_per_element=BYTES[job.dtype],
        state_bytes=BYTES[job.state_dtype],
    )
    replacements = job.replacements()
    lengths = numbers("lengths", job.lengths, least=1)
    rows = []
    for name, plan in _plans(job, shape).items():
        sizes_of_replaced = [(0, 0)] if plan.keeps_all else replacements
        for (d_state, window), length in product(sizes_of_replaced, lengths):
            sinks = min(job.sinks, window)
            size = n_bytes(plan, length=length, d_state=d_state, window=window, sinks=sinks)
            setting = (name, plan.n_stored_kv_heads, d_state, window, length)
            rows.append((*setting, size.kv, size.window, size.ssm, size.conv))
    return pd.DataFrame(rows, columns=COLUMNS)


def _plans(job: MemoryJob, shape: ModelShape) -> dict[str, HeadPlan]:
    """Return the plans of all numbers of heads, by the names of their rows."""
    scores = None if job.scores is None else HeadScores.load(job.scores)
    n_every_head = shape.plan.n_layers * shape.plan.n_heads
    plans: dict[str, HeadPlan] = {}
    for k in numbers("heads", job.heads, least=0, named={"all": n_every_head}):
        HeadPlan.check_k(shape.plan, k, "--heads")
        plans |= _placements(shape, k, scores)
    return plans


def _placements(shape: ModelShape, k: int, scores: HeadScores | None) -> dict[str, HeadPlan]:
    """Return a plan of the top ``k`` heads; without scores, of ``k`` heads with the largest and
    smallest cache."""
    empty = shape.plan
    if scores is not None:
        plan = HeadPlan.top_k(scores, k)
        # The scores may be of another model.
        plan.check_fits(empty)
        return {f"first {k}": plan}
    reach = [math.inf if window is None else window for window in shape.layer_windows]
    heads = HeadPlan.all(empty).kept
    group_size = empty.n_heads // empty.n_kv_heads

    def by_short_windows(head: HeadId) -> float:
        return reach[head.layer]

    def by_groups_and_long_windows(head: HeadId) -> tuple[float, float]:
        return head.head % group_size, -reach[head.layer]

    # Both sorts are stable: with equal windows, heads stay in groups that share keys and values.
    together = HeadPlan.from_pairs(empty, sorted(heads, key=by_short_windows)[:k])
    if k == len(heads):
        return {"all heads": together}
    if k == 0 or (group_size == 1 and len(set(reach)) == 1):
        return {f"{k} heads": together}
    apart = HeadPlan.from_pairs(empty, sorted(heads, key=by_groups_and_long_windows)[:k])
    return {f"{k} heads, apart": apart, f"{k} heads, groups together": together}


def command(job: tyro.conf.OmitArgPrefixes[MemoryJob] = MemoryJob()) -> None:
    """Tabulate cache sizes by kept heads, state size and context, before training."""
    print(memory_table(job))
