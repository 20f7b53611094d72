"""`hybrid-distill recommend`: the best student under a budget of cache memory, measured and predicted."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from .settings import Estimate, Quality, Setting, SweepResults, cache_line, estimate
from .surrogate import Prediction, Surface, TooFewCells

UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
PREDICTABLE = ("top", "restoration", "layers")
"""Selections that keep the first heads of a ranking, so that between two numbers of heads nothing jumps."""


@dataclass(frozen=True)
class RecommendJob:
    """Which sweep, and what its student may cost."""

    memory: str
    """What the caches of all sequences may hold: ``2MB``, ``1.5GiB``, or a number of bytes."""
    context: int = 4096
    """Tokens of a sequence."""
    batch: int = 1
    """Sequences at the same time."""
    quality: Literal["retrieval", "knowledge", "perplexity"] = "retrieval"
    """What best means: KV retrieval by generation, knowledge by choice, or perplexity."""


class Measured(NamedTuple):
    """A finished setting under a budget."""

    setting: Setting
    quality: Estimate
    n_bytes: float


class Predicted(NamedTuple):
    """A setting that was not run. ``n_bytes`` is the most that it can hold."""

    setting: Setting
    quality: Prediction
    n_bytes: float


def n_bytes(text: str) -> int:
    """``2MB`` as bytes; MB is 1e6 bytes and MiB 2^20. Raises ValueError for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = {name.lower(): size for name, size in UNITS.items()}.get((match[2] or "B").lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"--memory is {text!r}; write a number and one of {', '.join(UNITS)}, such as 2MB.")
    return round(float(match[1]) * unit)


def size_text(size: float) -> str:
    """1.28 MB, 25.1 kB, 804 B."""
    for unit in ("GB", "MB", "kB"):
        if (number := size / UNITS[unit]) >= 1:
            digits = max(0, 2 - int(math.log10(number)))
            return f"{number:,.{digits}f} {unit}"
    return f"{size:.0f} B"


@dataclass(frozen=True)
class Advisor:
    """Answers for one sweep, quality and context. Raises ValueError when nothing was measured."""

    results: SweepResults
    quality: Quality
    context: int

    @cached_property
    def measured(self) -> list[Measured]:
        """Finished settings that no other beats, smallest first."""
        front = self.results.front(self.quality, self.context)
        estimates = [(setting, setting.estimate(self.quality.column)) for setting in front]
        return [Measured(s, e, s.bytes_at(self.context)) for s, e in estimates if e is not None]

    def best_measured(self, budget: float) -> Measured:
        """The best that fits. Raises ValueError, with the smallest, when none does."""
        fitting = [choice for choice in self.measured if choice.n_bytes <= budget]
        if not fitting:
            least = self.measured[0]
            raise ValueError(
                f"nothing fits into {size_text(budget)} a sequence: the smallest, {least.setting.label}, holds "
                f"{size_text(least.n_bytes)} ({least.n_bytes:,.0f} bytes) after {self.context:,} tokens; "
                "raise --memory, or lower --context or --batch."
            )
        return fitting[-1]

    def doubt(self, choice: Measured) -> str:
        """A remark on a student that guesses; empty for others."""
        if not self.results.is_guessing(choice.setting, self.quality) or self.quality.chance is None:
            return ""
        return f", no better than guessing ({self.quality.text(self.quality.chance)})"

    def nearly_as_good(self, best: Measured) -> Measured | None:
        """The smallest setting that is worse, seed by seed, by no more than the standard error of the difference; None
        where that is the best one itself, and with one seed."""
        values = best.setting.values(self.quality.column)
        for choice in self.measured[: self.measured.index(best)]:
            others = choice.setting.values(self.quality.column)
            change = estimate([others[seed] - values[seed] for seed in sorted(values.keys() & others.keys())])
            if change is not None and change.error is not None and abs(change.mean) <= change.error:
                return choice
        return None

    def best_predicted(self, budget: float) -> Predicted | None:
        """The best setting that was not run and is sure to fit; None where none does. The smallest of equal ones."""
        fitting = [choice for choice in self.predicted if choice.n_bytes <= budget]
        sign = -1 if self.quality.higher_is_better else 1
        return min(fitting, key=lambda c: (sign * round(c.quality.value, 4), c.n_bytes), default=None)

    def better_predicted(self, budget: float) -> Predicted | None:
        """`best_predicted`, where that is better than the best that was run, to the digits that are shown."""
        found, best = self.best_predicted(budget), self.best_measured(budget).quality.mean
        if found is None or self.quality.text(found.quality.value) == self.quality.text(best):
            return None
        return found if self.quality.better(found.quality.value, best) else None

    @cached_property
    def predicted(self) -> list[Predicted]:
        """All settings inside the measured ranges that were not run, by every selection that has enough cells."""
        return [choice for selection in self.surfaces for choice in self._predictions(selection)]

    @property
    def surfaces(self) -> dict[str, Surface]:
        """By selection, where there are enough cells; `too_few` has the others."""
        return {selection: made for selection, made in self._fits.items() if isinstance(made, Surface)}

    @property
    def too_few(self) -> dict[str, str]:
        """Why there is no surface, by selection."""
        return {selection: str(made) for selection, made in self._fits.items() if isinstance(made, TooFewCells)}

    @cached_property
    def _fits(self) -> dict[str, Surface | TooFewCells]:
        made: dict[str, Surface | TooFewCells] = {}
        for selection in self._selections:
            try:
                made[selection] = self._surface(selection)
            except TooFewCells as error:
                made[selection] = error
        return made

    @property
    def _selections(self) -> list[str]:
        found = dict.fromkeys(setting.selection for setting in self.results.done)
        return [selection for selection in found if selection in PREDICTABLE]

    def _on_surface(self, selection: str) -> list[Setting]:
        """The settings that a surface goes through: the selection's own, and those without heads."""
        return [s for s in self.results.of(selection) if s.values(self.quality.column)]

    def _surface(self, selection: str) -> Surface:
        settings = self._on_surface(selection)
        seeds = sorted({seed for setting in settings for seed in setting.rows})
        value_SE = [[self._value(setting, seed) for seed in seeds] for setting in settings]
        heads_S, d_state_S = (np.array([getattr(s, name) for s in settings], float) for name in ("heads", "d_state"))
        return Surface(heads_S, d_state_S, np.array(value_SE, float), share=self._is_share)

    @property
    def _is_share(self) -> bool:
        return self.quality.name == "retrieval"

    def _value(self, setting: Setting, seed: int) -> float:
        """What the surface is made of: retrieval as a share of the teacher's, where that was measured."""
        value = setting.values(self.quality.column).get(seed, float("nan"))
        return min(value / self._unit, 1.0) if self._is_share else value

    @property
    def _unit(self) -> float:
        found = self.results.teacher.estimate(self.quality.column)
        return found.mean if self._is_share and found is not None and found.mean > 0 else 1.0

    def _predictions(self, selection: str) -> list[Predicted]:
        measured = self._on_surface(selection)
        ways = self._unrun(selection, measured)
        if not ways:
            return []
        surface = self.surfaces[selection]
        found = surface.predict([heads for heads, _ in ways], [d_state for _, d_state in ways])
        scaled = [Prediction(*(self._as_measured(value) for value in prediction)) for prediction in found]
        costs = _Costs(measured, self.context)
        return [
            Predicted(Setting(selection, *way), prediction, costs.at_most(*way))
            for way, prediction in zip(ways, scaled)
        ]

    def _as_measured(self, value: float) -> float:
        value *= self._unit
        return min(max(value, 0.0), 1.0) if self.quality.unit else value

    @staticmethod
    def _unrun(selection: str, measured: Sequence[Setting]) -> list[tuple[int, int]]:
        """(heads, state) between those that were run: any number of heads (in layers), states also powers of two."""
        run = {(s.heads, s.d_state) for s in measured}
        heads = sorted({s.heads for s in measured})
        states = sorted({s.d_state for s in measured if s.d_state is not None})
        step = math.gcd(*heads) if selection == "layers" else 1
        powers = [2**i for i in range(int(math.log2(states[-1])) + 1) if states[0] <= 2**i <= states[-1]]
        every = [(k, n) for k in range(heads[0], heads[-1] + 1, step or 1) for n in sorted({*states, *powers})]
        return [way for way in every if way not in run and way[0] > 0]

    @cached_property
    def errors(self) -> dict[str, float]:
        """How far each selection's surface is, on average, from a setting that it did not see."""
        return {selection: surface.error * self._unit for selection, surface in self.surfaces.items()}

    @property
    def error_text(self) -> str:
        """The same in words."""
        quality, points = self.quality, " points" if self.quality.unit else ""
        return "; ".join(
            f"{selection}: {quality.scale * error:.{quality.digits}f}{points} "
            f"over {len(self.surfaces[selection].heads_S)} settings"
            for selection, error in self.errors.items()
        )


class _Costs:
    """Bytes of settings that were not run, from those that were. ``settings``: of one ranking."""

    def __init__(self, settings: Sequence[Setting], context: int) -> None:
        self.context = context
        rows = [(s, row, *cache_line(row, context)) for s in settings for row in s.rows.values()]
        # What does not grow is (H - k) (a + b N): linear in 1, N, k, k N, so the fit is exact.
        terms = np.array([self._terms(s.heads, s.d_state or 0) for s, *_ in rows])
        self.weights = np.linalg.lstsq(terms, np.array([fixed for _, _, fixed, _ in rows]), rcond=None)[0]
        self.per_token: dict[int, float] = {}
        for setting, _, _, slope in rows:
            heads = setting.heads
            self.per_token[heads] = max(slope, self.per_token.get(heads, 0.0))
        self.per_kv_head = max(
            (slope / row["kv_heads"] for _, row, _, slope in rows if row.get("kv_heads")), default=0.0
        )

    @staticmethod
    def _terms(heads: int, d_state: int) -> list[float]:
        return [1.0, d_state, heads, heads * d_state]

    def at_most(self, heads: int, d_state: int) -> float:
        """One more head of a ranking needs one more KV head or none, and never more than a longer list of heads."""
        below = max(k for k in self.per_token if k <= heads)
        above = min(k for k in self.per_token if k >= heads)
        per_token = min(self.per_token[below] + (heads - below) * self.per_kv_head, self.per_token[above])
        return float(np.dot(self._terms(heads, d_state), self.weights)) + per_token * self.context


def recommend(out: Path, job: RecommendJob) -> str:
    """The answer as text. Raises ValueError for a budget that nothing fits into and for a sweep without results."""
    if job.context < 1 or job.batch < 1:
        raise ValueError(f"--context is {job.context} and --batch is {job.batch}; both are at least 1.")
    budget = n_bytes(job.memory) / job.batch
    results = SweepResults.read(out)
    if not results.done:
        raise ValueError(f"no cell of {out} is finished; see hybrid-distill sweep --status {out}.")
    advisor = Advisor(results, results.quality(job.quality), job.context)
    best = advisor.best_measured(budget)
    batch = f" for each of {job.batch} sequences" if job.batch > 1 else ""
    lines = [f"{size_text(budget)}{batch} at {job.context:,} tokens, best {advisor.quality.label}:", ""]
    if reason := results.says_nothing(advisor.quality):
        lines += [f"nothing can be recommended by this quality: {reason}.", ""]
    lines += [f"measured   {measured_text(best, advisor.quality)}{advisor.doubt(best)}"]
    if cheaper := advisor.nearly_as_good(best):
        lines.append(f"  nearly as good and smaller: {measured_text(cheaper, advisor.quality)}")
    return "\n".join([*lines, *_predicted_lines(advisor, best, budget)])


def measured_text(choice: Measured, quality: Quality) -> str:
    """``top 4 heads, state 16: 97.1 % ± 3.2 (3 seeds), 1.28 MB``."""
    mean, margin, n = choice.quality.mean, quality.margin(choice.quality), choice.quality.n
    spread = "" if margin is None else f" ± {quality.scale * margin:.{quality.digits}f}"
    seeds = f"{n} seeds" if n > 1 else "one seed, so no interval"
    return f"{choice.setting.label}: {quality.text(mean)}{spread} ({seeds}), {size_text(choice.n_bytes)}"


def predicted_text(choice: Predicted, quality: Quality) -> str:
    """``top 5 heads, state 16: 98.0 % (95 % interval 92.1 % to 99.8 %), at most 1.41 MB``."""
    value, low, high = map(quality.text, choice.quality)
    return f"{choice.setting.label}: {value} (95 % interval {low} to {high}), at most {size_text(choice.n_bytes)}"


def _predicted_lines(advisor: Advisor, best: Measured, budget: float) -> list[str]:
    reasons = [f"predicted  none for {selection}: {reason}" for selection, reason in advisor.too_few.items()]
    if not advisor.surfaces:
        return reasons or ["predicted  none: no heads were chosen by a ranking (top, restoration, layers)."]
    judged = f"  error of prediction, leaving out one setting at a time: {advisor.error_text}"
    choice, quality = advisor.best_predicted(budget), advisor.quality
    if choice is None:
        return [*reasons, "predicted  nothing that was not run is sure to fit.", judged]
    text = predicted_text(choice, quality)
    if advisor.better_predicted(budget) is None:
        return [*reasons, f"predicted  nothing better that was not run; the best of those: {text}", judged]
    setting = choice.setting
    lines = [*reasons, f"predicted  {text}", judged]
    if abs(choice.quality.value - best.quality.mean) < advisor.errors[setting.selection]:
        lines.append("  the gain is smaller than that error: run it before you rely on it")
    return [*lines, f"  to run it, add to the sweep's command: --heads {setting.heads} --d-state {setting.d_state}"]
