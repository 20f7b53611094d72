"""`hybrid-distill recommend`: the best student of a sweep within a memory budget."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from ..lab.reporting import text_table
from ..lab.sweep.measured import UNITS, SweepResults, size_text
from ..limits import Count, check_options


@dataclass(frozen=True)
class RecommendJob:
    """Memory budget for a student of a sweep."""

    memory: str
    """Memory for the caches of all sequences: ``2MB``, ``1.5GiB``, or a number of bytes."""
    context: Count = 4096
    """Tokens per sequence."""
    batch: Count = 1
    """Sequences cached at the same time."""
    quality: Literal["retrieval", "knowledge", "perplexity"] = "retrieval"
    """Measure of quality: KV retrieval by generation, knowledge by choice, or perplexity."""


def recommend(out: Path, job: RecommendJob) -> str:
    """Return the best student within a budget, above a table of the students that fit.

    Raises ValueError for a budget that no student fits into, for a sweep without results, and if no student that fits
    is better than guessing.
    """
    check_options(job, "--")
    budget, results = n_bytes(job.memory) / job.batch, SweepResults.read(out, job.context)
    if results.students.empty:
        raise ValueError(f"no cell of {out} is finished; see hybrid-distill sweep-status {out}.")
    quality = results.quality(job.quality)
    if quality is None:
        raise ValueError(f"no finished cell has a figure for {job.quality}; pass another --quality.")
    found = results.front(quality)
    least, fits = found.iloc[0], found.loc[found.bytes <= budget]
    if fits.empty:
        raise ValueError(
            f"no student fits into {size_text(budget)} per sequence: the smallest, {least.label}, needs "
            f"{size_text(least.bytes)} ({least.bytes:,.0f} bytes) after {job.context:,} tokens; raise --memory, or "
            "lower --context or --batch."
        )
    table = results.front_table(quality, fits)
    if not fits.exceeds.any():
        best = table.iloc[-1]
        raise ValueError(
            f"no student of {out} within {size_text(budget)} a sequence is better than guessing: the best in "
            f"{job.quality}, {best.iloc[0]}, has {best.iloc[1]} % where guessing gives "
            f"{100 * results.chance(quality.name):.1f} %. Raise --memory, or extend the sweep by more heads or seeds."
        )
    table.insert(1, "seeds", fits.n_done)
    best, batch = fits.loc[fits.exceeds].iloc[-1], f" for each of {job.batch} sequences" if job.batch > 1 else ""
    lines = [f"{size_text(budget)}{batch} at {job.context:,} tokens: {best.label}", text_table(table.iloc[::-1])]
    retrieval = results.quality("retrieval")
    if retrieval is not None and not results.compared(retrieval).exceeds[best.name]:
        lines.append("Its retrieval does not exceed guessing.")
    return "\n\n".join(lines)


def n_bytes(text: str) -> int:
    """Convert a size such as ``2MB`` to bytes; MB is 1e6 bytes and MiB 2^20. Raises ValueError for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([A-Za-z]*)\s*", text)
    units = {name.lower(): size for name, size in UNITS.items()}
    if match is None or (unit := (match[2] or "B").lower()) not in units:
        raise ValueError(f"--memory is {text!r}; write a number and one of {', '.join(UNITS)}, such as 2MB.")
    return round(float(match[1]) * units[unit])


def command(path: tyro.conf.Positional[Path], /, job: tyro.conf.OmitArgPrefixes[RecommendJob]) -> None:
    """Pick the best student of a sweep within a budget of cache memory.

    Args:
        path: The folder of a sweep, finished or not.
    """
    print(recommend(path, job))
