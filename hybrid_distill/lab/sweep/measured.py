"""results.csv of a sweep as data frames (docs/sweeps.md has its columns).

A setting is a way to make a student: a selection, a number of heads and a state size. Its cells differ in the seed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from ...io import Record, read_json
from ...limits import COUNT
from ..reporting.tables import with_error
from .grid import ALL
from .record import FILE as SWEEP
from .results import FILE, TEACHER

CONTEXT = 4096
DEFAULT_PAIRS = 16
NONE = "none"
SETTING = ["selection", "heads", "d_state"]


class Quality(NamedTuple):
    """A number that students are compared by."""

    column: str
    label: str
    scale: float = 100.0
    unit: str = " %"
    digits: int = 1
    higher_is_better: bool = True

    def text(self, value: float, margin: float | None = None) -> str:
        """Format a value: 97.3 %, 97.3 ± 1.2 %, 4.830."""
        return with_error(value, margin, self.digits, scale=self.scale) + self.unit


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

        Raises ValueError for one without results.csv or with another kind of table, and for a context at which memory
        cannot be told from the measured sizes.
        """
        COUNT.check("the context", context)
        table, record = Path(out) / FILE, Path(out) / SWEEP
        try:
            # "none" is a selection, not a missing value.
            rows = pd.read_csv(table, keep_default_na=False, na_values=[""]).replace([np.inf, -np.inf], np.nan)
            rows[["heads", "d_state"]] = rows[["heads", "d_state"]].fillna(0).astype(int)
            rows = rows.sort_values("selection", key=lambda names: names != TEACHER, kind="stable")
            is_done = rows["state"] == "done"
        except OSError as error:
            raise ValueError(f"{table} cannot be read ({error.strerror}); pass the folder of a sweep.") from error
        except (KeyError, ValueError) as error:
            raise ValueError(f"{table} is not a table of a sweep ({error}); docs/sweeps.md has its columns.") from error
        try:
            found = read_json(record) if record.exists() else {}
        except ValueError as error:
            raise ValueError(f"{error} Delete it, and the report does without.") from error
        return cls(Path(out).resolve().name, rows.assign(bytes=_bytes(rows, context, is_done.any())), context, found)

    @property
    def done(self) -> pd.DataFrame:
        """Rows of the teacher and of finished cells."""
        return self.rows.loc[self.rows.state == "done"]

    @property
    def students(self) -> pd.DataFrame:
        """Rows of finished cells."""
        return self.done.loc[self.done.selection != TEACHER]

    @property
    def settings(self) -> pd.DataFrame:
        """Teacher and finished settings: finished seeds and all of them, most bytes of a seed, seconds, a label."""
        grouped = self.rows.groupby(SETTING, sort=False)
        table = grouped.agg(n_done=("state", lambda states: (states == "done").sum()), n=("seed", "size"))
        table["bytes"] = grouped["bytes"].max()
        table["label"] = [setting_label(*setting) for setting in table.index]
        return table.loc[table.n_done > 0]

    @property
    def pair_sizes(self) -> list[int]:
        """Dictionary sizes measured by generation."""
        prefix = "kv_generation_"
        return sorted(int(name.removeprefix(prefix)) for name in self.rows if name.startswith(prefix))

    @property
    def n_pairs(self) -> int:
        """Dictionary size that one figure stands for: the recipe's, else 16 pairs, else the largest."""
        config = self.record.get("config", {})
        stated = config.get("evaluation", {}).get("stated_pairs") or config.get("scoring", {}).get("n_pairs")
        return next((n for n in (stated, DEFAULT_PAIRS) if n in self.pair_sizes), max(self.pair_sizes, default=0))

    def n_questions(self, column: str) -> float:
        """Return how many questions of one seed stand behind a figure (tokens, of those on plain text), else NaN."""
        if not column.startswith("kv_"):
            return self._behind("n_knowledge" if column == "knowledge" else "n_text_tokens")
        asked = self.record.get("config", {}).get("evaluation", {}).get("n_examples", math.nan)
        found = self._behind("n_examples")
        return asked if math.isnan(found) else found

    def chance(self, column: str) -> float:
        """Return what guessing gives: of a dictionary, one of its values; NaN where that is not known."""
        if match := re.fullmatch(r"kv_(choice|generation)_([1-9]\d*)", column):
            return 1 / int(match[2])
        return self._behind("knowledge_chance") if column == "knowledge" else math.nan

    def _behind(self, name: str) -> float:
        """Return a number that is the same for all who were measured."""
        return self.done[name].max() if name in self.rows else math.nan

    def quality(self, name: str) -> Quality | None:
        """Return a quality: retrieval, knowledge or perplexity; None where no finished cell has it."""
        retrieval = f"kv_generation_{self.n_pairs}"
        found = {
            "retrieval": Quality(retrieval, f"KV retrieval by generation, {self.n_pairs} pairs"),
            "knowledge": Quality("knowledge", "knowledge by choice"),
            "perplexity": Quality("perplexity", "perplexity", 1.0, "", 3, higher_is_better=False),
        }[name]
        return found if found.column in self.rows and self.students[found.column].notna().any() else None

    def estimate(self, column: str, *, is_share: bool = True) -> pd.DataFrame:
        """Return the mean over seeds of every setting, and its margin (`_estimate`)."""
        return _estimate(self.done, column, is_share=is_share)

    def against_teacher(self, columns: Sequence[str]) -> pd.DataFrame:
        """Compare students with the teacher of their seed: a ratio, its mean over columns, an estimate over seeds."""
        students, columns = self.students, list(columns)
        teachers = self.done[self.done.selection == TEACHER].set_index("seed")[columns].replace(0, math.nan)
        ratio = (students.set_index("seed")[columns] / teachers.reindex(students.seed)).mean(axis=1, skipna=False)
        return _estimate(students.assign(ratio=ratio.to_numpy()), "ratio")


def _estimate(rows: pd.DataFrame, column: str, *, is_share: bool = True) -> pd.DataFrame:
    """Return mean and margin by setting: half of the 95 % interval by Student's t, NaN with one seed.

    The margin of a share never reaches beyond 0 and 1: what two or three seeds leave open may be all.
    """
    found = rows.groupby(SETTING, sort=False)[column].agg(["mean", "sem", "count"])
    mean, n = found.loc[:, "mean"], found.loc[:, "count"]
    margin = found.loc[:, "sem"] * stats.t.ppf(0.975, n.where(n > 1) - 1)
    if is_share:
        margin = margin.clip(upper=(mean - 0.5).abs() + 0.5)
    return pd.DataFrame({"mean": mean, "margin": margin})


def without(settings: pd.DataFrame, *selections: str) -> pd.DataFrame:
    """Return settings of all other selections."""
    return settings.loc[~settings.index.isin(selections, level=0)]


def setting_label(selection: str, heads: int, d_state: int) -> str:
    """Describe a setting: ``top 4 heads, state 16``."""
    if selection in (TEACHER, ALL):
        return "the teacher" if selection == TEACHER else f"all {heads} heads"
    chosen = "" if selection == NONE else f"{selection} "
    return f"{chosen}{heads} head{'s' * (heads != 1)}, state {d_state}"


def _bytes(rows: pd.DataFrame, length: int, is_measured: bool) -> pd.Series | float:
    """Return what one sequence holds after ``length`` tokens: the line through the measured sizes, and convolutions."""
    if not is_measured:
        return math.nan
    sizes = {int(name.rpartition("_")[2]): rows[name] for name in rows if name.startswith("cache_bytes_")}
    conv = rows.get("conv_state_bytes", 0.0)
    if length in sizes:
        return sizes[length] + conv
    if len(sizes) < 2:
        known = ", ".join(map(str, sizes)) or "no length"
        raise ValueError(f"the context is {length} tokens, and the cache was measured at {known}; pass that.")
    short, long = min(sizes), max(sizes)
    return sizes[short] + (sizes[long] - sizes[short]) / (long - short) * (length - short) + conv


def is_sweep(path: str | Path) -> bool:
    """Return whether a folder holds a sweep's table."""
    return (Path(path) / FILE).is_file()
