"""Read a sweep's results.csv (docs/sweeps.md lists its columns), and average it by setting.

A setting is a selection, a number of heads, and what replaces the other heads. Its cells differ only in the seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from ...io import Record, read_json, refused
from ..reporting.document import Column, pairs_of, sizes, with_error
from .grid import ALL, NONE
from .paths import SweepPaths
from .results import TEACHER

CONTEXT = 4096
FEW_QUESTIONS = 64
"""Number of questions assumed if no file records it."""
SETTING = ["selection", "heads", "replacement"]
LOWER_IS_BETTER = ["perplexity", "kl_to_teacher"]
"""Figures of which less is better. All others are shares."""
UNITS = {"GB": 10**9, "MB": 10**6, "kB": 10**3}


Estimate = tuple[pd.DataFrame, pd.DataFrame]
"""Means over seeds, and half-widths of their 95 % intervals: one row per setting, one column per figure."""


@dataclass(frozen=True)
class SweepResults:
    """A sweep's table, the teacher first; ``bytes`` is memory after ``context`` tokens.
    ``record`` is sweep.json."""

    name: str
    rows: pd.DataFrame
    context: int = CONTEXT
    record: Record = field(default_factory=dict)

    @classmethod
    def read(cls, out: str | Path, context: int = CONTEXT) -> SweepResults:
        """Read a sweep's folder.

        Raises ValueError for one without results.csv or with another kind of table, and for a
        context whose memory cannot be computed from the measured sizes.
        """
        paths = SweepPaths(Path(out))
        if not paths.table.is_file():
            raise ValueError(
                f"{out} is not the folder of a sweep: it has no {paths.table.name}. Pass the --out of a sweep."
            )
        with refused(f"{paths.table} is not a table of a sweep", "docs/sweeps.md has its columns"):
            # "none" is a selection, not a missing value.
            rows = pd.read_csv(paths.table, keep_default_na=False, na_values=[""])
            rows = rows.replace([np.inf, -np.inf], np.nan)
            numbers = ["heads", "d_state", "window"]
            rows[numbers] = rows[numbers].fillna(0).astype(int)
            rows["replacement"] = list(map(_replacement, rows.d_state, rows.window))
            # Stable: behind the teacher, cells stay in the order of the grid.
            rows = rows.sort_values("selection", key=lambda names: names != TEACHER, kind="stable")
            any_done = (rows["state"] == "done").any()
        n_bytes = _bytes(rows, context) if any_done else math.nan
        record = read_json(paths.record) if paths.record.exists() else {}
        # "." has no name, and the name is the title.
        return cls(paths.out.resolve().name, rows.assign(bytes=n_bytes), context, record)

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
        """Teacher and finished settings: numbers of finished and of all seeds, state size, largest bytes over
        seeds, label."""
        grouped = self.rows.groupby(SETTING, sort=False)
        table = grouped.agg(
            n_done=("state", lambda states: (states == "done").sum()),
            n=("seed", "size"),
            d_state=("d_state", "first"),
        )
        # Seeds keep different heads, which share more or fewer KV heads.
        table["bytes"] = grouped["bytes"].max()
        table["label"] = [_label(*setting) for setting in table.index]
        return table.loc[table.n_done > 0]

    @cached_property
    def replacements(self) -> list[str]:
        """Descriptions of what replaces heads, by state size and then by window: "4" before "16"."""
        return list(self.rows.sort_values(["d_state", "window"]).replacement.unique())

    @cached_property
    def figures(self) -> Estimate:
        """Every figure of every setting."""
        numbers = self.done.select_dtypes("number")
        return _estimate(self.done, [name for name in numbers if name not in SETTING])

    def against_teacher(self, columns: Sequence[str]) -> Estimate:
        """Compare students with the teacher of their seed: the ratio of every figure, and their mean as ``all``."""
        names = list(columns)
        students = self.students
        teachers = self.done[self.done.selection == TEACHER].set_index("seed")[names]
        # NaN: there is no ratio to a teacher that answers nothing correctly.
        teachers = teachers.replace(0, math.nan)
        teacher_of_row = teachers.reindex(students.seed).set_axis(students.index)
        ratio = students[names] / teacher_of_row
        ratio["all"] = ratio.mean(axis=1, skipna=False)
        return _estimate(students[SETTING].join(ratio), [*names, "all"])

    @property
    def pair_sizes(self) -> list[int]:
        """Dictionary sizes measured by generation."""
        return sizes(self.rows, "kv_generation")

    @property
    def n_pairs(self) -> int:
        """Dictionary size that one figure stands for: the recipe's, else 16 pairs, else the
        largest."""
        stated = self._setting("evaluation", "stated_pairs") or self._setting("scoring", "n_pairs")
        return pairs_of(self.rows, stated)

    def _setting(self, section: str, name: str) -> Any:
        """Return an option of the recipe; None if there is no sweep.json."""
        return self.record.get("config", {}).get(section, {}).get(name)

    def questions(self, column: str) -> float:
        """Return the number of questions per seed behind a figure (tokens for plain text), NaN
        if unknown."""
        if column.startswith("kv_"):
            measured = self._largest("n_examples")
            if math.isnan(measured):
                return self._setting("evaluation", "n_examples") or math.nan
            return measured
        if column == "knowledge":
            return self._largest("n_knowledge")
        return self._largest("n_text_tokens")

    def chance(self, column: str) -> float:
        """Return the accuracy of guessing (for a dictionary, one of its values); NaN if unknown."""
        if column.startswith("kv_"):
            return 1 / int(column.rpartition("_")[2])
        return self._largest("knowledge_chance") if column == "knowledge" else math.nan

    def _largest(self, name: str) -> float:
        return self.done[name].max() if name in self.done else math.nan

    def quality(self, name: str) -> Column | None:
        """Return the column to compare students by: retrieval, knowledge or perplexity; None if
        no cell has it."""
        n = self.n_pairs
        columns = {
            "retrieval": Column(f"kv_generation_{n}", f"KV retrieval by generation, {n} pairs, %"),
            "knowledge": Column("knowledge", "knowledge by choice, %"),
            "perplexity": Column("perplexity", "perplexity", 1.0, 3),
        }
        column = columns[name]
        if column.name not in self.rows or self.students[column.name].isna().all():
            return None
        return column

    def compared(self, quality: Column) -> pd.DataFrame:
        """Return the settings with ``mean``, ``margin`` and ``exceeds``.

        The last is true for accuracies above guessing by the interval over seeds and by the
        binomial interval of the questions, and for all if the accuracy of guessing is unknown.
        """
        means, margins = self.figures
        settings = self.settings.assign(mean=means[quality.name], margin=margins[quality.name])
        settings = settings.dropna(subset=["mean"])
        chance = self.chance(quality.name)
        if math.isnan(chance):
            return settings.assign(exceeds=True)
        n_questions = self.questions(quality.name)
        if math.isnan(n_questions):
            n_questions = FEW_QUESTIONS
        lows = []
        for mean, n_done in zip(settings["mean"], settings.n_done):
            n = n_done * int(n_questions)
            lows.append(stats.binomtest(round(mean * n), n).proportion_ci().low)
        over_seeds = settings["mean"] - settings.margin.fillna(0) > chance
        over_questions = np.array(lows) > chance
        return settings.assign(exceeds=over_questions & over_seeds)

    def front(self, quality: Column) -> pd.DataFrame:
        """Return the Pareto front of settings, by quality and bytes, smallest first.

        The teacher is one of them, unless a student keeps all heads.
        """
        settings = self.compared(quality)
        if ALL in settings.index:
            settings = without(settings, TEACHER)
        better = settings["mean"]
        if quality.name in LOWER_IS_BETTER:
            better = -better
        settings = settings.assign(better=better)
        settings = settings.sort_values(["bytes", "better"], ascending=[True, False], kind="stable")
        best_of_smaller = settings.better.cummax().shift(fill_value=-math.inf)
        return settings.loc[settings.better > best_of_smaller]

    def front_table(self, quality: Column, front: pd.DataFrame) -> pd.DataFrame:
        """Format the settings of a front as a table."""
        values = []
        for mean, margin in zip(front["mean"], front.margin):
            values.append(with_error(mean, margin, quality.digits, scale=quality.scale))
        table = {
            "student": front.label,
            quality.header: values,
            f"memory at {self.context:,}": map(size_text, front.bytes),
        }
        chance = self.chance(quality.name)
        if not math.isnan(chance):
            header = f"above guessing ({100 * chance:.1f} %)"
            table[header] = front.exceeds.map({True: "yes", False: "no"})
        return pd.DataFrame(table)


def _estimate(rows: pd.DataFrame, columns: list[str]) -> Estimate:
    """Return means by setting, and half-widths of their 95 % intervals by Student's t (NaN with one seed).

    The half-width of a share is at most its distance to the farther of 0 and 1: with two or three seeds, t may give
    more.
    """
    grouped = rows.groupby(SETTING, sort=False)[columns]
    mean = pd.DataFrame(grouped.mean())
    n_seeds = pd.DataFrame(grouped.count())
    quantile = stats.t.ppf(0.975, n_seeds.where(n_seeds > 1) - 1)
    margin = pd.DataFrame(grouped.sem()) * quantile
    farther_end = (mean - 0.5).abs() + 0.5
    farther_end[[name for name in LOWER_IS_BETTER if name in farther_end]] = math.inf
    return mean, margin.clip(upper=farther_end)


def without(settings: pd.DataFrame, *selections: str) -> pd.DataFrame:
    """Return settings of all other selections."""
    return settings.loc[~settings.index.isin(selections, level=0)]


def _replacement(d_state: int, window: int) -> str:
    """Describe what replaces a head: "16", or "16, window 32"; empty for students that keep all heads."""
    if window:
        return f"{d_state}, window {window}"
    return str(d_state) if d_state else ""


def _label(selection: str, heads: int, replacement: str) -> str:
    """Describe a setting: ``top 4 heads, state 16``."""
    if selection == TEACHER:
        return "the teacher"
    if selection == ALL:
        return f"all {heads} heads"
    chosen = "" if selection == NONE else f"{selection} "
    return f"{chosen}{heads} head{'s' * (heads != 1)}, state {replacement}"


def _bytes(rows: pd.DataFrame, length: int) -> pd.Series:
    """Return bytes of a sequence after ``length`` tokens: a line through the two nearest measured sizes, plus
    convolutions.

    Beyond the longest it is exact for windows up to the second longest.
    """
    lengths = sizes(rows, "cache_bytes")
    conv = rows.get("conv_state_bytes", 0.0)
    if length in lengths:
        return rows[f"cache_bytes_{length}"] + conv
    if len(lengths) < 2:
        raise ValueError(
            f"the context is {length} tokens, and the cache was measured at {lengths}; pass that."
        )
    n_shorter = sum(measured < length for measured in lengths)
    first = min(max(n_shorter - 1, 0), len(lengths) - 2)
    short, long = lengths[first : first + 2]
    at_short = rows[f"cache_bytes_{short}"]
    slope = (rows[f"cache_bytes_{long}"] - at_short) / (long - short)
    return at_short + slope * (length - short) + conv


def size_text(size: float) -> str:
    """Format bytes: 1.28 MB, 25.1 kB, 804 B."""
    for unit, n_bytes in UNITS.items():
        number = size / n_bytes
        if number >= 1:
            # Three digits.
            n_decimals = max(0, 2 - int(math.log10(number)))
            return f"{number:,.{n_decimals}f} {unit}"
    return f"{size:.0f} B"
