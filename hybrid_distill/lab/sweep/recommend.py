"""`hybrid-distill recommend`: the best measured student under a budget of cache memory."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pandas as pd

from ...limits import Count, check_options
from .grid import ALL
from .measured import SETTING, Quality, SweepResults, without
from .results import TEACHER

UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
GUESSING = 2.0
"""Standard errors above chance below which a student is called guessing."""
FEW_QUESTIONS = 64
"""Questions assumed where no file tells how many were asked."""


@dataclass(frozen=True)
class RecommendJob:
    """A budget of memory for the student of a sweep."""

    memory: str
    """Memory for the caches of all sequences: ``2MB``, ``1.5GiB``, or a number of bytes."""
    context: Count = 4096
    """Tokens of a sequence."""
    batch: Count = 1
    """Sequences at the same time."""
    quality: Literal["retrieval", "knowledge", "perplexity"] = "retrieval"
    """Measure of the best: KV retrieval by generation, knowledge by choice, or perplexity."""


def recommend(out: Path, job: RecommendJob) -> str:
    """Answer as text. Raises ValueError for a budget that nothing fits into and for a sweep without results."""
    check_options(job, "--")
    budget, results = n_bytes(job.memory) / job.batch, SweepResults.read(out, job.context)
    if results.students.empty:
        raise ValueError(f"no cell of {out} is finished; see hybrid-distill sweep-status {out}.")
    quality = results.quality(job.quality)
    if quality is None:
        raise ValueError(f"no finished cell has a figure for {job.quality}; pass another --quality.")
    found = front(results, quality)
    least = found.iloc[0]
    if least.bytes > budget:
        raise ValueError(
            f"nothing fits into {size_text(budget)} a sequence: the smallest, {least.label}, holds "
            f"{size_text(least.bytes)} ({least.bytes:,.0f} bytes) after {job.context:,} tokens; raise --memory, or "
            "lower --context or --batch."
        )
    best = best_under(found, budget)
    batch = f" for each of {job.batch} sequences" if job.batch > 1 else ""
    lines = [f"{size_text(budget)}{batch} at {job.context:,} tokens, best {quality.label}:", ""]
    lines.append(f"measured   {measured_text(results, quality, best)}")
    cheaper = nearly_as_good(results, quality, found, best)
    if cheaper is not None:
        lines.append(f"  nearly as good and smaller: {measured_text(results, quality, cheaper)}")
    return "\n".join(lines)


def front(results: SweepResults, quality: Quality) -> pd.DataFrame:
    """Return settings that no other one beats, in quality or bytes, without being worse in the other; smallest first.

    The teacher is among them unless the sweep has a student that is the same.
    """
    found = results.settings.join(results.estimate(quality.column, is_share=bool(quality.unit))).dropna(subset=["mean"])
    if ALL in found.index:
        found = without(found, TEACHER)
    better = found["mean"] if quality.higher_is_better else -found["mean"]
    found = found.assign(better=better).sort_values(["bytes", "better"], ascending=[True, False], kind="stable")
    return found.loc[found.better > found.better.cummax().shift(fill_value=-math.inf)]


def best_under(found: pd.DataFrame, budget: float) -> pd.Series:
    """Return the best setting of a front that fits."""
    return found[found.bytes <= budget].iloc[-1]


def nearly_as_good(results: SweepResults, quality: Quality, found: pd.DataFrame, best: pd.Series) -> pd.Series | None:
    """Return the smallest setting that is worse, seed by seed, by no more than the standard error of the difference;
    None where that is the best one itself, and with one seed."""
    by_seed = results.done.pivot_table(quality.column, "seed", SETTING)
    for setting, row in found[found.bytes < best.bytes].iterrows():
        change = (by_seed[setting] - by_seed[best.name]).dropna()
        if abs(change.mean()) <= change.sem():
            return row
    return None


def measured_text(results: SweepResults, quality: Quality, setting: pd.Series) -> str:
    """Describe a setting: ``top 4 heads, state 16: 97.1 % ± 3.2 (3 seeds), 1.28 MB``; name one that guesses."""
    mean, n_seeds, chance = setting.loc["mean"], setting.n_done, results.chance(quality.column)
    spread = "" if math.isnan(setting.margin) else f" ± {quality.scale * setting.margin:.{quality.digits}f}"
    seeds = f"{n_seeds} seeds" if n_seeds > 1 else "one seed, so no interval"
    text = f"{setting.label}: {quality.text(mean)}{spread} ({seeds}), {size_text(setting.bytes)}"
    asked = results.n_questions(quality.column)
    n = n_seeds * (FEW_QUESTIONS if math.isnan(asked) else asked)
    guesses = mean <= chance + GUESSING * math.sqrt(chance * (1 - chance) / n)  # not where chance is not known
    return f"{text}, no better than guessing ({quality.text(chance)})" if guesses else text


def n_bytes(text: str) -> int:
    """Read ``2MB`` as bytes; MB is 1e6 bytes and MiB 2^20. Raises ValueError for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = {name.lower(): size for name, size in UNITS.items()}.get((match[2] or "B").lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"--memory is {text!r}; write a number and one of {', '.join(UNITS)}, such as 2MB.")
    return round(float(match[1]) * unit)


def size_text(size: float) -> str:
    """Format bytes: 1.28 MB, 25.1 kB, 804 B."""
    for unit in ("GB", "MB", "kB"):
        if (number := size / UNITS[unit]) >= 1:
            return f"{number:,.{max(0, 2 - int(math.log10(number)))}f} {unit}"
    return f"{size:.0f} B"
