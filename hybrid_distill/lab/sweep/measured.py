"""Data frames of a sweep's results.csv (docs/sweeps.md lists its columns), by setting.

A setting is a selection, a number of heads and a state size. Its cells differ only in the seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from ...io import Record, read_json, refused
from ..reporting.document import Column, pairs_of, sizes, with_error
from .folder import FILE as SWEEP
from .grid import ALL, NONE
from .results import FILE, TEACHER

CONTEXT = 4096
FEW_QUESTIONS = 64
"""Number of questions assumed if no file records it."""
SETTING = ["selection", "heads", "d_state"]
NO_SHARES = ["perplexity", "kl_to_teacher"]
UNITS = {"GB": 10**9, "MB": 10**6, "kB": 10**3}


Estimate = tuple[pd.DataFrame, pd.DataFrame]
"""Means over seeds, and half-widths of their 95 % intervals: one row per setting, one column per figure."""


@dataclass(frozen=True)
class SweepResults:
    """A sweep's table, the teacher first; ``bytes`` is memory after ``context`` tokens. ``record`` is sweep.json."""

    name: str
    rows: pd.DataFrame
    context: int = CONTEXT
    record: Record = field(default_factory=dict)

    @classmethod
    def read(cls, out: str | Path, context: int = CONTEXT) -> SweepResults:
        """Read a sweep's folder.

        Raises ValueError for one without results.csv or with another kind of table, and for a context whose memory
        cannot be computed from the measured sizes.
        """
        table, record = Path(out) / FILE, Path(out) / SWEEP
        if not table.is_file():
            raise ValueError(f"{out} is not the folder of a sweep: it has no {FILE}. Pass the --out of a sweep.")
        with refused(f"{table} is not a table of a sweep", "docs/sweeps.md has its columns"):
            # "none" is a selection, not a missing value.
            rows = pd.read_csv(table, keep_default_na=False, na_values=[""]).replace([np.inf, -np.inf], np.nan)
            rows[["heads", "d_state"]] = rows[["heads", "d_state"]].fillna(0).astype(int)
            rows = rows.sort_values("selection", key=lambda names: names != TEACHER, kind="stable")
            is_done = rows["state"] == "done"
        held = _bytes(rows, context) if is_done.any() else math.nan
        found = read_json(record) if record.exists() else {}
        return cls(Path(out).resolve().name, rows.assign(bytes=held), context, found)

    @property
    def done(self) -> pd.DataFrame:
        """Rows of the teacher and of finished cells."""
        return self.rows.loc[self.rows.state == "done"]

    @property
    def students(self) -> pd.DataFrame:
        """Rows of finished cells."""
        return self.done.loc[self.done.selection != TEACHER]

    @cached_property
    def settings(self) -> pd.DataFrame:
        """Teacher and finished settings: numbers of finished and of all seeds, largest bytes over seeds, label."""
        grouped = self.rows.groupby(SETTING, sort=False)
        table = grouped.agg(n_done=("state", lambda states: (states == "done").sum()), n=("seed", "size"))
        table = table.assign(bytes=grouped["bytes"].max(), label=[_label(*setting) for setting in table.index])
        return table.loc[table.n_done > 0]

    @cached_property
    def figures(self) -> Estimate:
        """Every figure of every setting."""
        return _estimate(self.done, [name for name in self.done.select_dtypes("number") if name not in SETTING])

    def against_teacher(self, columns: Sequence[str]) -> Estimate:
        """Compare students with the teacher of their seed: the ratio of every figure, and their mean as ``all``."""
        students, columns = self.students, list(columns)
        teachers = self.done[self.done.selection == TEACHER].set_index("seed")[columns].replace(0, math.nan)
        ratio = students[columns] / teachers.reindex(students.seed).set_axis(students.index)
        ratio["all"] = ratio.mean(axis=1, skipna=False)
        return _estimate(students[SETTING].join(ratio), [*columns, "all"])

    @property
    def pair_sizes(self) -> list[int]:
        """Dictionary sizes measured by generation."""
        return sizes(self.rows, "kv_generation")

    @property
    def n_pairs(self) -> int:
        """Dictionary size that one figure stands for: the recipe's, else 16 pairs, else the largest."""
        config = self.record.get("config", {})
        stated = config.get("evaluation", {}).get("stated_pairs") or config.get("scoring", {}).get("n_pairs")
        return pairs_of(self.rows, stated)

    def questions(self, column: str) -> float:
        """Return the number of questions per seed behind a figure (tokens for plain text), NaN if unknown."""
        if column.startswith("kv_"):
            asked = self.record.get("config", {}).get("evaluation", {}).get("n_examples", math.nan)
            return asked if math.isnan(found := self._behind("n_examples")) else found
        return self._behind("n_knowledge" if column == "knowledge" else "n_text_tokens")

    def chance(self, column: str) -> float:
        """Return the accuracy of guessing (for a dictionary, one of its values); NaN if unknown."""
        if column.startswith("kv_"):
            return 1 / int(column.rpartition("_")[2])
        return self._behind("knowledge_chance") if column == "knowledge" else math.nan

    def _behind(self, name: str) -> float:
        return self.done[name].max() if name in self.done else math.nan

    def quality(self, name: str) -> Column | None:
        """Return the column to compare students by: retrieval, knowledge or perplexity; None if no cell has it."""
        n = self.n_pairs
        found = {
            "retrieval": Column(f"kv_generation_{n}", f"KV retrieval by generation, {n} pairs, %"),
            "knowledge": Column("knowledge", "knowledge by choice, %"),
            "perplexity": Column("perplexity", "perplexity", 1.0, 3),
        }[name]
        return found if found.name in self.rows and self.students[found.name].notna().any() else None

    def compared(self, quality: Column) -> pd.DataFrame:
        """Return the settings with ``mean``, ``margin`` and ``exceeds``: above guessing, by the interval over seeds and
        by the binomial interval of the questions. If the accuracy of guessing is unknown, all exceed it."""
        mean, margin = (frame[quality.name] for frame in self.figures)
        found = self.settings.assign(mean=mean, margin=margin).dropna(subset=["mean"])
        chance, asked = self.chance(quality.name), self.questions(quality.name)
        if math.isnan(chance):
            return found.assign(exceeds=True)
        questions = found.n_done * (FEW_QUESTIONS if math.isnan(asked) else int(asked))
        low = np.array([stats.binomtest(round(x * n), n).proportion_ci().low for x, n in zip(found["mean"], questions)])
        return found.assign(exceeds=(low > chance) & (found["mean"] - found.margin.fillna(0) > chance))

    def front(self, quality: Column) -> pd.DataFrame:
        """Return the Pareto front of settings, by quality and bytes, smallest first. The teacher takes part unless a
        student keeps all heads."""
        found = self.compared(quality)
        found = without(found, TEACHER) if ALL in found.index else found
        better = -found["mean"] if quality.name in NO_SHARES else found["mean"]
        found = found.assign(better=better).sort_values(["bytes", "better"], ascending=[True, False], kind="stable")
        return found.loc[found.better > found.better.cummax().shift(fill_value=-math.inf)]

    def front_table(self, quality: Column, found: pd.DataFrame) -> pd.DataFrame:
        """Format the settings of a front as a table."""
        shown = [with_error(x, m, quality.digits, scale=quality.scale) for x, m in zip(found["mean"], found.margin)]
        table = {
            "student": found.label,
            quality.header: shown,
            f"memory at {self.context:,}": map(size_text, found.bytes),
        }
        chance = self.chance(quality.name)
        if not math.isnan(chance):
            table[f"above guessing ({100 * chance:.1f} %)"] = found.exceeds.map({True: "yes", False: "no"})
        return pd.DataFrame(table)


def _estimate(rows: pd.DataFrame, columns: list[str]) -> Estimate:
    """Return means and half-widths of the 95 % intervals by Student's t (NaN with one seed), by setting.

    The margin of a share is limited to the range from 0 to 1, all of which two or three seeds may leave open.
    """
    grouped = rows.groupby(SETTING, sort=False)[columns]
    mean, n = pd.DataFrame(grouped.mean()), pd.DataFrame(grouped.count())
    margin = pd.DataFrame(grouped.sem()) * stats.t.ppf(0.975, n.where(n > 1) - 1)
    most = (mean - 0.5).abs() + 0.5
    most[[name for name in NO_SHARES if name in most]] = math.inf
    return mean, margin.clip(upper=most)


def without(settings: pd.DataFrame, *selections: str) -> pd.DataFrame:
    """Return settings of all other selections."""
    return settings.loc[~settings.index.isin(selections, level=0)]


def _label(selection: str, heads: int, d_state: int) -> str:
    """Describe a setting: ``top 4 heads, state 16``."""
    if selection in (TEACHER, ALL):
        return "the teacher" if selection == TEACHER else f"all {heads} heads"
    chosen = "" if selection == NONE else f"{selection} "
    return f"{chosen}{heads} head{'s' * (heads != 1)}, state {d_state}"


def _bytes(rows: pd.DataFrame, length: int) -> pd.Series:
    """Return bytes of a sequence after ``length`` tokens: a line through the measured sizes, plus convolutions."""
    found = {n: rows[f"cache_bytes_{n}"] for n in sizes(rows, "cache_bytes")}
    conv = rows.get("conv_state_bytes", 0.0)
    if length in found:
        return found[length] + conv
    if len(found) < 2:
        raise ValueError(f"the context is {length} tokens, and the cache was measured at {[*found]}; pass that.")
    short, long = min(found), max(found)
    return found[short] + (found[long] - found[short]) / (long - short) * (length - short) + conv


def size_text(size: float) -> str:
    """Format bytes: 1.28 MB, 25.1 kB, 804 B."""
    for unit, n_bytes in UNITS.items():
        if (number := size / n_bytes) >= 1:
            return f"{number:,.{max(0, 2 - int(math.log10(number)))}f} {unit}"
    return f"{size:.0f} B"
