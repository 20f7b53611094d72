"""`hybrid-distill memory`: cache sizes by kept heads, state size and context, before training.

    bytes(L) = 2 H_kv P L b + H_ssm P N s        (`plan.cache_bytes`; L is at most the window in layers that have one)

The number of KV heads that k kept heads need depends on their positions: heads of one group share a K and a V. A
scores.json gives the positions; without one, the table shows both extremes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import pandas as pd
import tyro

from ..io import write_text
from ..lab.reporting import text_table
from ..model import layer_windows
from ..plan import HeadId, HeadPlan, cache_bytes
from ..scoring import HeadScores
from ..student.teachers import check_teacher
from ..teacher import head_dim_of, load_config
from ..validation import Count, check_options, numbers

MB = 1e6
BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}


@dataclass(frozen=True)
class MemoryJob:
    """Configurations to tabulate."""

    model: str = "16x32x8x64"
    """Checkpoint (folder, hub id, ``tiny``), or shape: layers x query heads x KV heads x head dim. The default is
    Llama-3.2-1B's."""
    heads: str = "0,10,20,40,all"
    """Numbers of attention heads to keep."""
    d_state: str = "8,64"
    """State sizes of the recurrent heads."""
    lengths: str = "128,2048,4096,32768"
    """Context lengths, in tokens."""
    dtype: Literal["float32", "bfloat16", "int8"] = "bfloat16"
    """Dtype of keys, values and convolution states; int8 is counted without its scales."""
    state_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    """Dtype of recurrent states: this package's caches hold float32, published tables count bfloat16."""
    batch: Count = 1
    """Sequences cached at the same time."""
    conv_width: Count = 4
    scores: Path | None = None
    """Path to a scores.json; its top heads are kept, which determines how many share keys and values."""
    csv: Path | None = None
    """Path of a CSV file for the table, in bytes."""


def memory_table(job: MemoryJob) -> str:
    """Return the table as text; write ``csv``. Raises ValueError for invalid numbers."""
    check_options(job, "--")
    shape, head_dim, windows = model_shape(job.model)
    rows = cache_sizes(job)
    if job.csv is not None:
        job.csv.parent.mkdir(parents=True, exist_ok=True)
        write_text(job.csv, rows.to_csv(index=False, lineterminator="\n"))
    title = f"{job.model}: {shape.n_layers} layers, {shape.n_heads} heads, {shape.n_kv_heads} KV heads, {head_dim} wide"
    if limited := [window for window in windows if window is not None]:
        title += f", {len(limited)} layers see {max(limited):,} tokens"
    unit = f"MB (1e6 bytes) in {job.dtype}, states in {job.state_dtype}, batch {job.batch}"
    of_case = rows.assign(total=rows.kv_bytes + rows.ssm_bytes).groupby(["kept", "kv_heads", "d_state"], sort=False)
    table = [
        {"kept": case.kept.iloc[0], "KV heads": case.kv_heads.iloc[0], "state": case.d_state.iloc[0] or "-"}
        | {f"L={length}": f"{size / MB:,.2f}" for length, size in zip(case.length, case.total)}
        | {"conv state": f"{case.conv_bytes.iloc[0] / MB:,.2f}"}
        for _, case in of_case
    ]
    note = "The convolution state does not grow and is not in the other columns."
    return f"{title}; {unit}\n{text_table(pd.DataFrame(table))}\n{note}"


def model_shape(model: str) -> tuple[HeadPlan, int, list[int | None]]:
    """Return an empty plan with a model's shape, its head dim and the windows of its layers.

    Raises ValueError for a name that is neither a model nor a shape.
    """
    parts = model.lower().split("x")
    if len(parts) == 4 and all(part.isdigit() for part in parts):
        *shape, head_dim = map(int, parts)
        return HeadPlan(*shape, kept=()), head_dim, [None] * shape[0]
    config = load_config(model)
    check_teacher(config, name=model)
    config = config.get_text_config(decoder=True)
    return HeadPlan.none(config), head_dim_of(config), layer_windows(config)


def cache_sizes(job: MemoryJob) -> pd.DataFrame:
    """Return one row per placement of heads, state size (0 where all heads are kept) and length."""
    shape, head_dim, windows = model_shape(job.model)
    n_bytes = partial(
        cache_bytes, head_dim=head_dim, windows=windows, batch=job.batch, conv_width=job.conv_width,
        bytes_per_element=BYTES[job.dtype], state_bytes=BYTES[job.state_dtype],
    )  # fmt: skip
    scores = None if job.scores is None else HeadScores.load(job.scores)
    d_states, lengths = numbers("d-state", job.d_state, least=1), numbers("lengths", job.lengths, least=1)
    total, rows = shape.n_layers * shape.n_heads, []
    for k in numbers("heads", job.heads, least=0, named={"all": total}):
        HeadPlan.check_k(shape, k)
        for name, plan in _placements(shape, k, windows, scores).items():
            for d_state in d_states if k < total else [0]:
                for length in lengths:
                    size = n_bytes(plan, length=length, d_state=d_state)
                    rows.append((name, plan.n_stored_kv_heads, d_state, length, size.kv, size.ssm, size.conv))
    columns = ["kept", "kv_heads", "d_state", "length", "kv_bytes", "ssm_bytes", "conv_bytes"]
    return pd.DataFrame(rows, columns=columns)


def _placements(
    shape: HeadPlan, k: int, windows: Sequence[int | None], scores: HeadScores | None
) -> dict[str, HeadPlan]:
    """Return a plan of the top ``k`` heads; without scores, of ``k`` heads with the largest and smallest cache."""
    if scores is not None:
        plan = HeadPlan.top_k(scores, k)
        plan.check_fits(shape)  # the scores may be of another model
        return {f"first {k}": plan}
    reach = [math.inf if window is None else window for window in windows]
    heads = [HeadId(layer, head) for layer in range(shape.n_layers) for head in range(shape.n_heads)]
    group_size = shape.n_heads // shape.n_kv_heads
    together = HeadPlan.from_pairs(shape, sorted(heads, key=lambda h: reach[h.layer])[:k])
    if k == len(heads):
        return {"all heads": together}
    if k == 0 or (group_size == 1 and len(set(reach)) == 1):
        return {f"{k} heads": together}
    apart = sorted(heads, key=lambda h: (h.head % group_size, -reach[h.layer]))
    return {f"{k} heads, apart": HeadPlan.from_pairs(shape, apart[:k]), f"{k} heads, groups together": together}


def command(job: tyro.conf.OmitArgPrefixes[MemoryJob] = MemoryJob()) -> None:
    """Tabulate cache sizes by kept heads, state size and context, before training."""
    print(memory_table(job))
