"""What a sweep shows, as sentences computed from its numbers, whatever they are, beside what was published."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import fmean

from ..report.tables import signed
from ..sweep.grid import ALL
from .recommend import PREDICTABLE, size_text
from .settings import NONE, Estimate, Quality, Setting, SweepResults, estimate, mean_of

COVERED = 0.95  # of the teacher's retrieval: nothing worth mentioning is lost
NEEDED = 0.90  # of the teacher's retrieval, by which selections are compared
SOON = 0.80  # of the gain that half of the heads bring when the rest adds little
LITTLE = 0.10  # of the teacher's retrieval: too little to lose
SEVERAL = 3  # times as many heads
PERPLEXITY = "perplexity"


def headline(results: SweepResults, context: int) -> str:
    """The smallest student that keeps the teacher's retrieval, or that there is none."""
    if not results.done:
        return "No cell is finished yet."
    if not (measured := results.qualities("retrieval")):
        return "Nothing can be concluded: no student's retrieval was measured."
    quality = measured[0]
    if reason := results.says_nothing(quality):
        return f"Nothing can be concluded on retrieval: {reason}."
    students = [s for s in results.done if s.selection != ALL and s.values(quality.column)]
    found = [(s, coverage) for s in students if (coverage := results.against_teacher(s, [quality.column]))]
    if not found:
        return "Nothing can be concluded: there is no student beside a teacher measured with the same seed."
    covered = [(s, coverage) for s, coverage in found if coverage.mean >= COVERED]
    if not covered:
        best, coverage = max(found, key=lambda pair: pair[1].mean)
        return (
            f"No student keeps {100 * COVERED:.0f} % of the teacher's retrieval; the best, {best.label}, keeps "
            f"{_percent(coverage)} ({quality.label})."
        )
    best, coverage = min(covered, key=lambda pair: pair[0].bytes_at(context))
    memory = ""
    if results.teacher.rows:
        share = best.bytes_at(context) / results.teacher.bytes_at(context)
        memory = f" in {100 * share:.0f} % of its memory at {context:,} tokens ({size_text(best.bytes_at(context))})"
    of = f" of {results.n_heads}" if results.n_heads else ""
    chosen = "" if best.selection == NONE else f"{best.selection}, "
    heads = f"{best.heads}{of} head{'s' * (best.heads != 1)} ({chosen}state {best.d_state})"
    return (
        f"With {heads} a student keeps {_percent(coverage)} of the teacher's retrieval{memory}: the smallest that "
        f"keeps {100 * COVERED:.0f} % ({quality.label}).{_left_open(coverage)}"
    )


def _left_open(coverage: Estimate) -> str:
    """What so few seeds do not rule out."""
    if coverage.margin is None:
        return " It is one seed's figure."
    least = max(coverage.mean - coverage.margin, 0.0)
    return "" if least >= NEEDED else f" {coverage.n} seeds do not rule out that it is only {100 * least:.0f} %."


def findings(results: SweepResults) -> Iterator[str]:
    """One sentence each on heads, states, selections and knowledge, where there are cells to speak of."""
    ranked = [name for name in PREDICTABLE if any(s.selection == name for s in results.done)]
    for quality in results.qualities("retrieval") if ranked else []:
        if results.says_nothing(quality):
            continue
        state = results.states()[-1]
        yield from _on_heads(results, quality, ranked[0], state)
        yield from _on_states(results, quality, ranked[0])
        yield from _on_selections(results, quality, ranked[0], state)
    yield from _on_knowledge(results)


def _on_heads(results: SweepResults, quality: Quality, selection: str, state: int) -> Iterator[str]:
    """Up sharply, then flat?"""
    estimates = {s.heads: e for s, e in _line(results, quality, selection, state)}
    line = {heads: found.mean for heads, found in estimates.items()}
    if len(line) < 3:
        return
    first, most = min(line), max(line)
    shown = ", ".join(f"{heads}: {quality.shown(found)}" for heads, found in sorted(estimates.items()))
    gain = line[most] - line[first]
    n_seeds = min(found.n for found in estimates.values())
    text = f"**Heads** ({selection}, state {state}, {n_seeds} seed{'s' * (n_seeds != 1)}): {shown}."
    if gain < LITTLE:
        yield f"{text} There is no rise to speak of, unlike in the published results."
        return
    half = max((heads for heads in line if heads <= most / 2), default=first)
    share = (line[half] - line[first]) / gain
    verdict = (
        "sharply up, then flat, as published" if share >= SOON else "not yet flat, unlike in the published results"
    )
    yield f"{text} The first {half} of {most} heads bring {100 * share:.0f} % of the rise: {verdict}."


def _on_states(results: SweepResults, quality: Quality, selection: str) -> Iterator[str]:
    """Does a small state cost less when the heads are there?"""
    heads = sorted({s.heads for s in results.of(selection)})
    ends = {k: found for k in heads if (found := _largest_and_smallest_state(results, quality, selection, k))}
    if len(ends) < 2:
        return
    fewest, most = min(ends), max(ends)
    large, small = ends[most]
    start = mean_of(ends[fewest][0], quality)
    costs = {k: (_costs(*ends[k], quality.column), _costs(*ends[k], PERPLEXITY)) for k in (fewest, most)}
    parts = [f"with {k} heads {_shown_costs(*costs[k])}" for k in (fewest, most)]
    if start < LITTLE:
        parts[0] += " (of retrieval there is next to nothing to lose)"
    by, index = ("retrieval", 0) if start >= LITTLE else (PERPLEXITY, 1)
    verdict = _verdict_on_states(by, costs[fewest][index], costs[most][index])
    yield f"**States** ({selection}), from {large.d_state} to {small.d_state}: {'; '.join(parts)}.{verdict}"


def _largest_and_smallest_state(
    results: SweepResults, quality: Quality, selection: str, heads: int
) -> tuple[Setting, Setting] | None:
    found = [s for s in results.of(selection, heads=heads) if s.values(quality.column)]
    ordered = sorted(found, key=lambda s: s.d_state or 0)
    return (ordered[-1], ordered[0]) if len(ordered) > 1 else None


def _costs(large: Setting, small: Setting, column: str) -> dict[int, float]:
    """What the small state costs, by seed: a difference of shares, or of perplexity a ratio; above 0 it is worse."""
    pairs = large.values(column), small.values(column)
    both = sorted(pairs[0].keys() & pairs[1].keys())
    if column == PERPLEXITY:
        return {seed: pairs[1][seed] / pairs[0][seed] - 1 for seed in both}
    return {seed: pairs[0][seed] - pairs[1][seed] for seed in both}


def _shown_costs(retrieval: Mapping[int, float], perplexity: Mapping[int, float]) -> str:
    parts = []
    if lost := estimate(list(retrieval.values())):
        parts.append(f"retrieval {_signed(-100 * lost.mean, lost)} points")
    if rise := estimate(list(perplexity.values())):
        parts.append(f"perplexity {_signed(100 * rise.mean, rise)} %")
    return " and ".join(parts)


def _signed(shown: float, of: Estimate) -> str:
    """-3.1 ± 0.4, in hundredths."""
    return signed(shown) + ("" if of.margin is None else f" ± {100 * of.margin:.1f}")


def _verdict_on_states(by: str, without: Mapping[int, float], with_heads: Mapping[int, float]) -> str:
    """Of the costs with few heads and with many, seed by seed; a difference within its standard error is none."""
    spared = estimate([without[seed] - with_heads[seed] for seed in sorted(without.keys() & with_heads.keys())])
    if spared is None:
        return ""
    if spared.error is None:
        return f" By {by}, one seed cannot tell whether a small state costs less once the heads are there."
    if fmean(without.values()) <= 0:
        return (
            f" By {by}, a small state costs nothing here even with the fewest heads, unlike in the published results."
        )
    if abs(spared.mean) <= spared.error:
        return f" By {by}, these seeds cannot tell whether a small state costs less once the heads are there."
    less = "less once the heads are there, as published" if spared.mean > 0 else "no less once the heads are there"
    return f" By {by}, a small state costs {less}" + ("." if spared.mean > 0 else ", unlike in the published results.")


def _on_selections(results: SweepResults, quality: Quality, selection: str, state: int) -> Iterator[str]:
    """How many heads does each way to choose them need?"""
    others = [s for s in ("restoration", "layers", "random") if s != selection]
    present = [s for s in others if any(setting.selection == s for setting in results.done)]
    reference = heads_needed(results, quality, selection, state)
    if not present:
        return
    if reference is None:
        percent = f"{100 * NEEDED:.0f} %"
        yield f"**Selections** (state {state}): {selection} does not reach {percent} of the teacher's retrieval."
        return
    parts, factors = [f"{selection} {reference}{_kept_by(results, quality, selection, state, reference)}"], {}
    for other in present:
        needed = heads_needed(results, quality, other, state)
        most = max((s.heads for s in results.done if s.selection == other), default=0)
        there = _kept_by(results, quality, other, state, most if needed is None else needed)
        text = f"{other} {needed}" if needed is not None else f"{other} more than {most}, the most that was run"
        parts.append(f"{text}{there}")
        factors[other] = ((needed or most) / max(reference, 1), needed is None)
    factors.pop("restoration", None)
    yield (
        f"**Selections** (state {state}), fewest heads run that keep {100 * NEEDED:.0f} % of the teacher's retrieval: "
        f"{', '.join(parts)}.{_verdict_on_baselines(factors)}"
    )


def _kept_by(results: SweepResults, quality: Quality, selection: str, state: int, heads: int) -> str:
    """What so many heads keep of the teacher's retrieval, in brackets."""
    found = [s for s, _ in _line(results, quality, selection, state) if s.heads == heads]
    kept = results.against_teacher(found[0], [quality.column]) if found else None
    return "" if kept is None else f" ({_percent(kept)})"


def _verdict_on_baselines(factors: Mapping[str, tuple[float, bool]]) -> str:
    """``factors``: times as many heads as the ranking, and whether that is only a lower bound."""
    if not factors:
        return ""
    name, (least, open_end) = min(factors.items(), key=lambda item: item[1])
    times = f"{least:.1f}".removesuffix(".0")
    if least >= SEVERAL:
        return f" That is {times} times as many or more, as published."
    if open_end:
        return f" How many times as many {name} needs cannot be told: the grid ends too early."
    return f" That is only {times} times as many for {name}, where the published factor is several times."


def _on_knowledge(results: SweepResults) -> Iterator[str]:
    for quality in results.qualities("knowledge"):
        if reason := results.says_nothing(quality):
            yield f"**Knowledge** says nothing: {reason}."
            return
    changes = [
        (found, setting)
        for setting in results.done
        if (found := results.against_teacher(setting, ["knowledge"], lambda a, b: a - b))
    ]
    if changes:
        change, setting = max(changes, key=lambda pair: abs(pair[0].mean))
        yield (
            f"**Knowledge**: the student farthest from the teacher, {setting.label}, is "
            f"{_signed(100 * change.mean, change)} points away from it; published students stay where the teacher is, "
            "heads or not."
        )


def heads_needed(results: SweepResults, quality: Quality, selection: str, state: int) -> int | None:
    """The fewest heads that were run with ``NEEDED`` of the teacher's retrieval; None where none has it."""
    of_line = [s for s, _ in _line(results, quality, selection, state)]
    kept = [(s.heads, results.against_teacher(s, [quality.column])) for s in of_line]
    return min((heads for heads, coverage in kept if coverage and coverage.mean >= NEEDED), default=None)


def _line(results: SweepResults, quality: Quality, selection: str, state: int) -> list[tuple[Setting, Estimate]]:
    settings = results.of(selection, d_state=state)
    return [(s, found) for s in settings if (found := s.estimate(quality.column))]


def _percent(value: Estimate) -> str:
    margin = "" if value.share_margin is None else f" ± {100 * value.share_margin:.1f}"
    return f"{100 * value.mean:.1f}{margin} %"
