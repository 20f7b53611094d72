"""`hybrid-distill plan`: the heads to keep, from scores."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import tyro

from ..lab.reporting import text_table
from ..limits import Count, CountOrZero, Positive, check_options
from ..plan import HeadPlan, cache_bytes, container_bytes
from ..scoring import HeadScores
from ..teacher import head_dim_of, load_config


@dataclass(frozen=True)
class PlanJob:
    """Choice of heads, and the cache that it is shown for."""

    k: CountOrZero = 6
    """Heads kept, over all layers."""
    container_friendly: bool = False
    """Spread the heads over the layers, for a small cache as a Falcon-H1 (docs/export.md): the fewest KV heads in each
    layer that serve k heads, or as many as ``--max-mb`` holds."""
    max_mb: Positive | None = None
    """Largest cache as a Falcon-H1, in MB."""
    length: Count = 4096
    """Tokens in the cache that is shown."""
    d_state: Count = 16
    """State size of the recurrent heads."""
    model: str | None = None
    """Teacher, whose config says how wide a head is; by default the one that was scored."""
    to: Path = Path("plan.json")
    """File for the plan, which a run follows with ``--plan.selection file --plan.file``."""


def make_plan(path: Path, job: PlanJob) -> str:
    """Write the plan; return a table of the plans that were to choose from. Raises ValueError where none fits."""
    check_options(job, "--")
    scores = HeadScores.load(path)
    config = load_config(job.model or str(scores.provenance.get("model"))).get_text_config(decoder=True)
    sizes: dict[str, Any] = {"length": job.length, "head_dim": head_dim_of(config), "d_state": job.d_state}
    plans = {"any": HeadPlan.top_k(scores, job.k)}
    fewest = max(1, math.ceil(job.k * scores.n_kv_heads / (scores.n_layers * scores.n_heads)))
    for kv_heads in range(fewest, scores.n_kv_heads + 1) if job.container_friendly else ():
        plans[str(kv_heads)] = HeadPlan.container_friendly(scores, job.k, kv_heads)
    in_mb = {name: container_bytes(plan, **sizes) / 1e6 for name, plan in plans.items()}
    fitting = [name for name in plans if job.max_mb is None or in_mb[name] <= job.max_mb]
    if not fitting:
        raise ValueError(f"no plan fits into --max-mb {job.max_mb:g}: the smallest needs {min(in_mb.values()):.3f} MB.")
    # Without a limit the smallest; within one, the plan of greatest score.
    chosen = fitting[0] if not job.container_friendly else fitting[-1] if job.max_mb else str(fewest)
    value_LH = scores.value_LH()
    worth = {name: sum(value_LH[head].item() for head in plan.kept) for name, plan in plans.items()}
    rows = [
        {
            "KV heads a layer": name,
            "accuracy drops kept": f"{worth[name]:.3f}",
            "MB": f"{cache_bytes(plan, **sizes).total / 1e6:.3f}",
            "MB as a Falcon-H1": f"{in_mb[name]:.3f}",
            "heads": " ".join(map(str, plan.kept)),
            "": "written" if name == chosen else "",
        }
        for name, plan in plans.items()
    ]
    plans[chosen].save(job.to)
    return f"{text_table(pd.DataFrame(rows))}\nCache of {job.length:,} tokens, state {job.d_state}. plan: {job.to}"


def command(path: tyro.conf.Positional[Path], /, job: tyro.conf.OmitArgPrefixes[PlanJob] = PlanJob()) -> None:
    """Choose the heads to keep, from scores; writes plan.json.

    Args:
        path: A scores.json.
    """
    print(make_plan(path, job))
