"""results.csv as settings: a setting is a way to make a student, and its cells differ in the seed alone."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal, NamedTuple

from ..sweep.grid import ALL
from ..sweep.record import FILE as SWEEP
from ..sweep.results import FILE, TEACHER

DEFAULT_PAIRS = 16
NONE = "none"
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t, 97.5 %, for 1 to 10 degrees of freedom."""
GUESSING = 2.0
FEW_QUESTIONS = 64  # where no file tells how many were asked
WORDS = ("cell", "state", "selection", "heads", "d_state", "seed", "dir", "error")
"""Columns that are no figures."""


class Estimate(NamedTuple):
    """A mean over ``n`` seeds and its standard error, which one seed does not have."""

    mean: float
    error: float | None = None
    n: int = 1

    @property
    def margin(self) -> float | None:
        """Half the width of the mean's 95 % interval, by Student's t."""
        return None if self.error is None else t_95(self.n - 1) * self.error

    @property
    def share_margin(self) -> float | None:
        """The same of a share, no wider than reaches 0 and 1: what two or three seeds leave open may be all."""
        return None if self.margin is None else min(self.margin, max(self.mean, abs(1 - self.mean)))


def estimate(values: Sequence[float]) -> Estimate | None:
    """The mean of what seeds gave; None without values."""
    n = len(values)
    return Estimate(fmean(values), stdev(values) / math.sqrt(n) if n > 1 else None, n) if n else None


def t_95(degrees: int) -> float:
    """Student's t, 97.5 %; beyond the table by its expansion in 1 / degrees, right to 0.001."""
    if degrees <= len(T_95):
        return T_95[degrees - 1]
    return 1.95996 + 2.37227 / degrees + 2.82250 / degrees**2 + 2.55585 / degrees**3


@dataclass(frozen=True)
class Setting:
    """``rows`` holds the figures of the finished cells by seed; ``unfinished`` names the others, and how they stand.

    ``d_state`` is None where there are no recurrent heads. Of the teacher, ``heads`` is 0 and says nothing.
    """

    selection: str
    heads: int
    d_state: int | None
    rows: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    unfinished: Mapping[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """In words: ``top 4 heads, state 16``."""
        if self.selection == TEACHER:
            return "the teacher"
        if self.selection == ALL:
            return f"all {self.heads} heads"
        chosen = "" if self.selection == NONE else f"{self.selection} "
        return f"{chosen}{self.heads} head{'s' * (self.heads != 1)}, state {self.d_state}"

    @property
    def n_seeds(self) -> str:
        """Seeds that are done, of those that were asked for."""
        total = len(self.rows) + len(self.unfinished)
        return f"{len(self.rows)}" if not self.unfinished else f"{len(self.rows)} of {total}"

    def values(self, column: str) -> dict[int, float]:
        """What was measured, by seed."""
        return {seed: row[column] for seed, row in self.rows.items() if column in row}

    def estimate(self, column: str) -> Estimate | None:
        """Over the seeds that are done; None where nothing was measured."""
        return estimate(list(self.values(column).values()))

    def bytes_at(self, length: int) -> float:
        """What one sequence holds after ``length`` tokens, the largest of the seeds: keys and values, states, and the
        convolutions' inputs. Raises ValueError for a length that cannot be told from those in the table."""
        return max(_bytes_at(row, length) for row in self.rows.values())


def _bytes_at(row: Mapping[str, float], length: int) -> float:
    fixed, per_token = cache_line(row, length)
    return fixed + per_token * length


def cache_line(row: Mapping[str, float], length: int) -> tuple[float, float]:
    """(bytes that do not grow, bytes per token): the line through the measured sizes, which lie on one."""
    measured = sorted(
        (int(name.rpartition("_")[2]), size) for name, size in row.items() if name.startswith("cache_bytes_")
    )
    conv = row.get("conv_state_bytes", 0.0)
    if len(measured) > 1:
        (short, low), (long, high) = measured[0], measured[-1]
        per_token = (high - low) / (long - short)
        return low - per_token * short + conv, per_token
    if not measured or measured[0][0] != length:
        known = ", ".join(str(n) for n, _ in measured) or "no length"
        raise ValueError(f"the context is {length} tokens, and the cache was measured at {known}; choose that.")
    return conv, measured[0][1] / length


@dataclass(frozen=True)
class Quality:
    """A number that students are compared by; ``scale`` and ``unit`` are for people."""

    name: Literal["retrieval", "knowledge", "perplexity"]
    column: str
    label: str
    scale: float = 100.0
    unit: str = " %"
    digits: int = 1
    higher_is_better: bool = True
    chance: float | None = None
    """What guessing gives, where that is known."""

    def text(self, value: float) -> str:
        """97.3 %, 4.83."""
        return f"{self.scale * value:.{self.digits}f}{self.unit}"

    def shown(self, value: Estimate) -> str:
        """97.3 ± 1.2 %, 4.83; without an interval where there is none."""
        margin = self.margin(value)
        spread = "" if margin is None else f" ± {self.scale * margin:.{self.digits}f}"
        return f"{self.scale * value.mean:.{self.digits}f}{spread}{self.unit}"

    def margin(self, value: Estimate) -> float | None:
        """Of a share, or of a number without bounds."""
        return value.share_margin if self.unit else value.margin

    def better(self, a: float, b: float) -> bool:
        """Whether ``a`` is better than ``b``."""
        return a > b if self.higher_is_better else a < b


@dataclass(frozen=True)
class SweepResults:
    """A sweep's table: settings in the order of the grid, the teacher apart; ``record`` is sweep.json, where there is
    one."""

    name: str
    settings: Sequence[Setting]
    teacher: Setting
    record: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, out: str | Path) -> SweepResults:
        """From a sweep's folder. Raises ValueError for one without results.csv, or with another kind of table."""
        out = Path(out)
        try:
            with (out / FILE).open(newline="") as file:
                rows = list(csv.DictReader(file))
        except OSError as error:
            raise ValueError(f"{out / FILE} cannot be read ({error.strerror}); name the folder of a sweep.") from error
        try:
            settings = _settings(rows)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{out / FILE} is no table of a sweep ({error!r}); docs/sweeps.md has its columns."
            ) from error
        teachers = [setting for setting in settings if setting.selection == TEACHER]
        students = [setting for setting in settings if setting.selection != TEACHER]
        return cls(out.resolve().name, students, (teachers or [Setting(TEACHER, 0, None)])[0], _record(out / SWEEP))

    @property
    def done(self) -> list[Setting]:
        """Settings with a finished cell."""
        return [setting for setting in self.settings if setting.rows]

    @cached_property
    def pair_sizes(self) -> list[int]:
        """Dictionary sizes that were measured, ascending."""
        columns = {name for setting in (self.teacher, *self.settings) for row in setting.rows.values() for name in row}
        return sorted(int(match[1]) for name in columns if (match := re.fullmatch(r"kv_generation_(\d+)", name)))

    @cached_property
    def n_pairs(self) -> int:
        """The dictionary size that one figure stands for: the recipe's, else 16 pairs, else the largest."""
        config = self.record.get("config", {})
        stated = config.get("evaluation", {}).get("stated_pairs") or config.get("scoring", {}).get("n_pairs")
        return next((n for n in (stated, DEFAULT_PAIRS) if n in self.pair_sizes), max(self.pair_sizes, default=0))

    @property
    def n_heads(self) -> int | None:
        """Of the teacher, where a cell with all of them tells."""
        return next((setting.heads for setting in self.settings if setting.selection == ALL), None)

    def qualities(self, *names: str) -> list[Quality]:
        """Those of the named ones that were measured."""
        retrieval = f"kv_generation_{self.n_pairs}"
        kinds = (
            Quality(
                "retrieval",
                retrieval,
                f"KV retrieval by generation, {self.n_pairs} pairs",
                chance=self.chance(retrieval),
            ),
            Quality("knowledge", "knowledge", "knowledge by choice", chance=self.chance("knowledge")),
            Quality("perplexity", "perplexity", "perplexity", 1.0, "", 3, higher_is_better=False),
        )
        asked = [kind for kind in kinds if kind.name in names]
        return [kind for kind in asked if any(setting.values(kind.column) for setting in self.done)]

    def quality(self, name: str) -> Quality:
        """One of them. Raises ValueError where no finished cell has it."""
        if not (found := self.qualities(name)):
            raise ValueError(f"no finished cell has a figure for {name}; choose another --quality.")
        return found[0]

    def chance(self, column: str) -> float | None:
        """What guessing gives: of a dictionary, one of its values; None where that is not known, or means nothing."""
        if match := re.fullmatch(r"kv_(choice|generation)_([1-9]\d*)", column):
            return 1 / int(match[2])
        return self._behind("knowledge_chance") if column == "knowledge" else None

    def n_questions(self, column: str) -> int | None:
        """How many of one seed stand behind a figure (tokens, of those on plain text); None where no file tells."""
        if column.startswith("kv_"):
            asked = self.record.get("config", {}).get("evaluation", {}).get("n_examples")
            found = self._behind("n_examples") or asked
        else:
            found = self._behind("n_knowledge" if column == "knowledge" else "n_text_tokens")
        return None if found is None else int(found)

    def _behind(self, name: str) -> float | None:
        """A number that is the same for all who were measured."""
        rows = (row for setting in (self.teacher, *self.done) for row in setting.rows.values())
        return next((row[name] for row in rows if name in row), None)

    def is_guessing(self, setting: Setting, quality: Quality) -> bool:
        """Whether the mean over seeds is not above guessing by `GUESSING` standard errors of so many guesses."""
        found = setting.estimate(quality.column)
        if found is None or quality.chance is None:
            return False
        n = (self.n_questions(quality.column) or FEW_QUESTIONS) * found.n
        return found.mean <= quality.chance + GUESSING * math.sqrt(quality.chance * (1 - quality.chance) / n)

    def says_nothing(self, quality: Quality) -> str:
        """Why students cannot be compared by a quality, without a full stop; empty where they can."""
        if quality.chance is None:
            return ""
        guessing = f"guessing gives {quality.text(quality.chance)}"
        teacher = self.teacher.estimate(quality.column)
        if teacher and self.is_guessing(self.teacher, quality):
            return f"the teacher itself is guessing ({quality.label}: {quality.shown(teacher)}, {guessing})"
        students = [s for s in self.done if s.selection != ALL and s.values(quality.column)]
        if not students or not all(self.is_guessing(student, quality) for student in students):
            return ""
        best = max(students, key=lambda student: mean_of(student, quality))
        shown = f"the best, {best.label}, answers {quality.text(mean_of(best, quality))}, and {guessing}"
        return f"all students are guessing ({quality.label}: {shown})"

    def against_teacher(
        self, setting: Setting, columns: Sequence[str], compare: Callable[[float, float], float] = lambda a, b: a / b
    ) -> Estimate | None:
        """Student against teacher, by default as a ratio: compared seed by seed, a mean over the columns, then over
        the seeds."""
        by_seed = []
        for seed, row in setting.rows.items():
            teacher = self.teacher.rows.get(seed, {})
            shared = [column for column in columns if column in row and teacher.get(column)]
            if shared and len(shared) == len(columns):
                by_seed.append(fmean(compare(row[column], teacher[column]) for column in shared))
        return estimate(by_seed)

    def of(self, selection: str, *, d_state: int | None = None, heads: int | None = None) -> list[Setting]:
        """Finished settings of one selection, those without heads among them; of one state or number of heads."""
        return [
            setting
            for setting in self.done
            if setting.selection in (selection, NONE)
            and d_state in (None, setting.d_state)
            and heads in (None, setting.heads)
        ]

    def states(self) -> list[int]:
        """State sizes of finished settings, ascending."""
        return sorted({setting.d_state for setting in self.done if setting.d_state is not None})

    def candidates(self) -> list[Setting]:
        """Finished settings, and the teacher unless the sweep has a student that is the same."""
        has_all = any(setting.selection == ALL for setting in self.done)
        return [*self.done, *([] if has_all or not self.teacher.rows else [self.teacher])]

    def front(self, quality: Quality, length: int) -> list[Setting]:
        """Settings that no other one beats, in quality or bytes, without being worse in the other; smallest first."""
        best: list[Setting] = []
        measured = [setting for setting in self.candidates() if setting.values(quality.column)]
        sign = -1 if quality.higher_is_better else 1
        for setting in sorted(measured, key=lambda s: (s.bytes_at(length), sign * mean_of(s, quality))):
            if not best or quality.better(mean_of(setting, quality), mean_of(best[-1], quality)):
                best.append(setting)
        return best


def mean_of(setting: Setting, quality: Quality) -> float:
    """The mean over seeds of a setting that has one."""
    found = setting.estimate(quality.column)
    assert found is not None
    return found.mean


def _record(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text()) if path.exists() else {}
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); delete it, and the report does without.") from error


def _settings(rows: Sequence[Mapping[str, str]]) -> list[Setting]:
    made: dict[tuple[str, int, int | None], Setting] = {}
    for row in rows:
        key = (row["selection"], int(row["heads"] or 0), int(row["d_state"] or 0) or None)
        setting = made.setdefault(key, Setting(*key, rows={}, unfinished={}))
        if row["state"] == "done":
            setting.rows[int(row["seed"])] = _figures(row)  # type: ignore[index]
        else:
            setting.unfinished[row["cell"]] = row["error"] or row["state"]  # type: ignore[index]
    return list(made.values())


def _figures(row: Mapping[str, str]) -> dict[str, float]:
    found = {name: float(text) for name, text in row.items() if name not in WORDS and text}
    return {name: value for name, value in found.items() if math.isfinite(value)}


def is_sweep(path: str | Path) -> bool:
    """Whether a folder holds a sweep's table."""
    return (Path(path) / FILE).is_file()
