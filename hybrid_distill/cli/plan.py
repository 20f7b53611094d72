"""`hybrid-distill plan`: the heads to keep, from scores."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pandas as pd
import tyro

from ..lab.reporting import text_table
from ..limits import Count, CountOrZero, Positive, check_options
from ..plan import HeadPlan, cache_bytes, container_bytes
from ..scoring import HeadScores
from ..teacher import head_dim_of, load_config


@dataclass(frozen=True)
class PlanJob:
    """Number of heads to keep, and the cache for which to show sizes."""

    k: CountOrZero = 6
    """Heads to keep, over all layers; with ``--container-friendly`` at least this many."""
    container_friendly: bool = False
    """Keep the same number of whole KV heads in every layer, for the smallest cache as a Falcon-H1 (docs/export.md):
    the fewest that hold k heads, or as many as fit in ``--max-mb``."""
    max_mb: Positive | None = None
    """Largest cache as a Falcon-H1, in MB."""
    length: Count = 4096
    """Context length, in tokens, of the cache sizes shown."""
    d_state: Count = 16
    """State size of the recurrent heads."""
    model: str | None = None
    """Teacher, whose config gives the head dim; by default the model that was scored."""
    to: Path = Path("plan.json")
    """File for the plan; a run uses it with ``--plan.selection file --plan.file``."""


def make_plan(path: Path, job: PlanJob) -> str:
    """Write the plan; return a table of the candidate plans. Raises ValueError if none fits."""
    check_options(job, "--")
    scores = HeadScores.load(path)
    config = load_config(job.model or str(scores.provenance.get("model"))).get_text_config(decoder=True)
    sizes = {"length": job.length, "head_dim": head_dim_of(config), "d_state": job.d_state}
    cache, container = partial(cache_bytes, **sizes), partial(container_bytes, **sizes)
    plans = {"any": HeadPlan.top_k(scores, job.k)}
    if job.container_friendly:
        kv_heads = range(1, scores.n_kv_heads + 1)
        plans |= {str(n): HeadPlan.container_friendly(scores, n) for n in kv_heads}
    offered = [name for name in plans if name != "any" or not job.container_friendly]
    fitting = [name for name in offered if job.max_mb is None or container(plans[name]) <= job.max_mb * 1e6]
    if not fitting:
        smallest = container(plans[offered[0]]) / 1e6
        raise ValueError(f"no plan fits into --max-mb {job.max_mb:g}: the smallest needs {smallest:.3f} MB.")
    enough = [name for name in fitting if plans[name].k >= job.k]
    chosen = fitting[-1] if job.max_mb else enough[0]
    value_LH = scores.value_LH()
    worth = {name: sum(value_LH[head].item() for head in plan.kept) for name, plan in plans.items()}
    rows = [
        {
            "KV heads a layer": name,
            "heads kept": plan.k,
            "accuracy drops kept": f"{worth[name]:.3f}",
            "MB": f"{cache(plan).total / 1e6:.3f}",
            "MB as a Falcon-H1": f"{container(plan) / 1e6:.3f}",
            "": "written" if name == chosen else "",
        }
        for name, plan in plans.items()
    ]
    plans[chosen].save(job.to)
    heads = " ".join(map(str, plans[chosen].kept))
    made_for = f"Cache of {job.length:,} tokens, state {job.d_state}."
    return f"{text_table(pd.DataFrame(rows))}\n{made_for} Written to {job.to}: {heads}"


def command(path: tyro.conf.Positional[Path], /, job: tyro.conf.OmitArgPrefixes[PlanJob] = PlanJob()) -> None:
    """Choose the heads to keep from scores; writes plan.json.

    Args:
        path: A scores.json.
    """
    print(make_plan(path, job))
