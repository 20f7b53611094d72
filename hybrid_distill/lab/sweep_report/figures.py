"""Figures of a sweep: PNG beside the report, SVG for the page.

Colours are Okabe and Ito's; every line also has a marker and a dash of its own, so that print in grey can be read. On
the axis of heads, 0 and "all" stand apart from the logarithmic part between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..plots import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILLION, canvas, end_labels, look
from ..sweep.grid import ALL, SELECTIONS
from ..sweep.results import TEACHER
from .recommend import Advisor, size_text
from .settings import Estimate, Quality, Setting, SweepResults, mean_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = (VERMILLION, ORANGE, GREEN, BLUE, PURPLE, SKY, GREY)
MARKERS = "vD^osPX"
DASHES: tuple[Any, ...] = ((0, (1, 1.4)), (0, (4, 1.5)), (0, (6, 1.5, 1, 1.5)), "solid", (0, (3, 1, 1, 1, 1, 1)))
NAMES = {"top": "top, by score", "random": "random", "layers": "whole layers", "restoration": "restoration"}
DODGE = 0.035  # between the whiskers of lines, in doublings


class Style(NamedTuple):
    """How a line is drawn."""

    colour: str
    marker: str
    dash: Any


@dataclass(frozen=True)
class Line:
    """Estimates along an axis."""

    label: str
    style: Style
    points: Sequence[tuple[float, Estimate]]


def style_of(number: int) -> Style:
    """Of the first, second, ... line of a figure."""
    return Style(*(looks[number % len(looks)] for looks in (COLOURS, MARKERS, DASHES)))


@dataclass(frozen=True)
class HeadAxis:
    """Where numbers of heads stand: logarithmic, with 0 one doubling before the first and "all" one after the last."""

    heads: Sequence[int]
    n_heads: int | None

    @classmethod
    def of(cls, results: SweepResults) -> HeadAxis:
        """For the numbers that were asked for."""
        return cls(sorted({s.heads for s in results.settings if s.heads and s.selection != ALL}), results.n_heads)

    def at(self, heads: int) -> float:
        """The place of a number."""
        if heads == 0:
            return (math.log2(self.heads[0]) if self.heads else 0.0) - 1.0
        if heads == self.n_heads:
            return (math.log2(self.heads[-1]) if self.heads else 0.0) + 1.0
        return math.log2(heads)

    def mark(self, axes: Axes, *, zero: bool) -> None:
        """Ticks, and a break in the axis beside the two places that are not to scale."""
        numbers = [*([0] if zero else []), *self.heads, *([self.n_heads] if self.n_heads else [])]
        places = [self.at(number) for number in numbers]
        axes.set_xticks(places, ["all" if number == self.n_heads else str(number) for number in numbers])
        axes.minorticks_off()
        axes.set_xlim(min(places) - 0.25, max(places) + 0.25)
        if zero and self.heads:
            _axis_break(axes, places[0] + 0.5)
        if self.n_heads:
            _axis_break(axes, places[-1] - 0.5)


def _axis_break(axes: Axes, x: float) -> None:
    across = axes.get_xaxis_transform()
    axes.plot([x], [0], marker="s", color="white", markersize=7, transform=across, clip_on=False, zorder=4)
    for shift in (-0.05, 0.05):
        slanted = [(-0.35, -1.0), (0.35, 1.0)]
        axes.plot(
            [x + shift], [0], marker=slanted, color="#444444", markersize=8, transform=across, clip_on=False, zorder=5
        )  # fmt: skip


def draw(results: SweepResults, context: int, folder: Path, svg_folder: Path) -> dict[str, str]:
    """Draw what the results have numbers for, each as PNG and as SVG; returns the caption of each by name."""
    drawings: tuple[tuple[str, Callable[[SweepResults, int, Sequence[Path]], str]], ...] = (
        ("coverage", _coverage),
        ("heads", _heads),
        ("states", _states),
        ("selection", _selection),
        ("pareto", _pareto),
    )
    captions = {}
    for name, drawing in drawings:
        if caption := drawing(results, context, (folder / f"{name}.png", svg_folder / f"{name}.svg")):
            captions[name] = caption
    return captions


def _whiskers(results: SweepResults) -> str:
    several = any(len(setting.rows) > 1 for setting in results.done)
    return "bars: 95 % intervals of the mean over seeds" if several else "one seed, so there are no intervals"


def _coverage(results: SweepResults, context: int, paths: Sequence[Path]) -> str:
    """Both groups of tasks against heads, for the first selection; a panel for each state size."""
    selection, states = _selections(results)[0], results.states()
    axis = replace(HeadAxis.of(results), n_heads=None)
    groups = {
        "knowledge-focused": (["knowledge"], Style(ORANGE, "D", DASHES[1])),
        "retrieval-heavy": ([f"kv_generation_{n}" for n in results.pair_sizes], Style(BLUE, "o", "solid")),
    }
    panels: dict[str, list[Line]] = {}
    for state in states:
        panels[f"state {state}"] = [
            Line(
                name,
                style,
                _along_heads(results, selection, state, axis, lambda s, c=columns: results.against_teacher(s, c)),
            )
            for name, (columns, style) in groups.items()
        ]
    if not any(line.points for lines in panels.values() for line in lines):
        return ""
    width = 2.9 * len(panels) + 0.9
    with canvas(1, len(panels), (max(width, 5.0), 3.5), paths, sharey=True) as grid:
        for axes, (title, lines) in zip(grid[0], panels.items()):
            _lines(axes, lines, scale=100)
            axes.axhline(100, color=BLACK, linewidth=0.9, zorder=1)
            axes.set_title(title)
            axis.mark(axes, zero=_has_zero(results))
        _percent_axis(grid[0, 0], "student, of what the teacher has")
        grid[0, 0].figure.supxlabel("heads kept", fontsize=10)
        _legend(grid, panels[next(iter(panels))])
    return (
        f"Coverage, student over teacher, by group of tasks; heads: {NAMES[selection]}; {_whiskers(results)}. "
        "The method predicts that knowledge stays where it is, and that retrieval comes back with the heads."
    )


def _heads(results: SweepResults, context: int, paths: Sequence[Path]) -> str:
    """Retrieval and perplexity against heads: a column of panels for each selection, a line for each state size."""
    axis, selections, states = HeadAxis.of(results), _selections(results), results.states()
    rows = results.qualities("retrieval", "perplexity")
    if not rows or not axis.heads:
        return ""
    size = (max(3.3 * len(selections) + 0.8, 5.4), 2.9 * len(rows) + 0.7)
    with canvas(len(rows), len(selections), size, paths, sharey="row", sharex=True) as grid:
        for quality, row in zip(rows, grid):
            for selection, axes in zip(selections, row):
                lines = [
                    Line(
                        f"state {state}",
                        style_of(number),
                        _along_heads(results, selection, state, axis, lambda s, q=quality: s.estimate(q.column)),
                    )
                    for number, state in enumerate(states)
                ]
                _lines(axes, lines, scale=quality.scale)
                _teacher_level(axes, results, quality, axis)
                axis.mark(axes, zero=_has_zero(results))
                if quality is rows[0]:
                    axes.set_title(NAMES[selection])
            _quality_axis(row[0], quality)
        grid[0, 0].figure.supxlabel("heads kept", fontsize=10)
        _legend(grid, [Line(f"state {state}", style_of(i), ()) for i, state in enumerate(states)], teacher=True)
    return f"Against heads kept, by how they are chosen; {_whiskers(results)}."


def _states(results: SweepResults, context: int, paths: Sequence[Path]) -> str:
    """Retrieval against state size: a panel for each selection, a line for each number of heads."""
    states, selections, heads = results.states(), _selections(results), [0, *HeadAxis.of(results).heads]
    found = results.qualities("retrieval")
    if not found or len(states) < 2:
        return ""
    quality = found[0]
    with canvas(1, len(selections), (max(3.9 * len(selections) + 0.4, 5.6), 3.9), paths, sharey=True) as grid:
        for selection, axes in zip(selections, grid[0]):
            lines = []
            for number, k in enumerate(heads):
                of_line = results.of(selection, heads=k)
                points = [(math.log2(s.d_state or 1), s.estimate(quality.column)) for s in of_line]
                kept = sorted((x, e) for x, e in points if e is not None)
                if kept:
                    lines.append(Line(f"{k} head{'s' * (k != 1)}", style_of(number), kept))
            _lines(axes, lines, scale=100)
            axes.set_xticks([math.log2(state) for state in states], [str(state) for state in states])
            axes.minorticks_off()
            axes.set_title(NAMES[selection])
            _percent_limits(axes)
            _guessing_level(axes, quality)
            teacher = results.teacher.estimate(quality.column)
            ends = [(100 * line.points[-1][1].mean, line.label, line.style.colour) for line in lines]
            if teacher is not None:
                axes.axhline(100 * teacher.mean, color=BLACK, linewidth=0.9, zorder=1)
                ends.append((100 * teacher.mean, "teacher", BLACK))
            end_labels(axes, ends, size=8.5)
        _percent_axis(grid[0, 0], quality.label)
        grid[0, 0].figure.supxlabel("state size of the recurrent heads", fontsize=10)
    return f"Retrieval against state size, by heads kept; {_whiskers(results)}."


def _selection(results: SweepResults, context: int, paths: Sequence[Path]) -> str:
    """Ways to choose heads against one another: a panel for each state size."""
    selections, states, axis = _selections(results), results.states(), HeadAxis.of(results)
    found = results.qualities("retrieval")
    if not found or len(selections) < 2 or not axis.heads:
        return ""
    quality = found[0]
    with canvas(1, len(states), (max(2.9 * len(states) + 0.9, 5.4), 3.6), paths, sharey=True) as grid:
        for state, axes in zip(states, grid[0]):
            lines = [
                Line(
                    NAMES[selection],
                    _style_of_selection(selection),
                    _along_heads(results, selection, state, axis, lambda s: s.estimate(quality.column)),
                )
                for selection in selections
            ]
            _lines(axes, lines, scale=100)
            _teacher_level(axes, results, quality, axis)
            axis.mark(axes, zero=_has_zero(results))
            axes.set_title(f"state {state}")
        _percent_axis(grid[0, 0], quality.label)
        grid[0, 0].figure.supxlabel("heads kept", fontsize=10)
        _legend(grid, [Line(NAMES[s], _style_of_selection(s), ()) for s in selections], teacher=True)
    return f"How heads are chosen; {_whiskers(results)}."


def _pareto(results: SweepResults, context: int, paths: Sequence[Path]) -> str:
    """Quality against bytes: the settings, and the line that none of them beats."""
    found = results.qualities("retrieval", "perplexity")
    if not found:
        return ""
    with canvas(1, len(found), (4.9 * len(found) + 0.6, 4.5), paths) as grid:
        for quality, axes in zip(found, grid[0]):
            _front(axes, Advisor(results, quality, context))
        grid[0, 0].figure.supxlabel(f"held by one sequence after {context:,} tokens", fontsize=10)
        lines = [Line(NAMES[s], _style_of_selection(s), ()) for s in _selections(results)]
        _legend(grid, [Line(line.label, line.style._replace(dash=""), ()) for line in lines], front=True)
    return (
        f"Quality against the memory of one sequence after {context:,} tokens: keys, values, states and convolutions. "
        "On the line are the settings that none beats in one without losing in the other; labels: heads / state."
    )


def _front(axes: Axes, advisor: Advisor) -> None:
    results, quality, context = advisor.results, advisor.quality, advisor.context
    front = [choice.setting for choice in advisor.measured]
    for setting in results.candidates():
        if not setting.values(quality.column):
            continue
        style, on_front = _style_of_selection(setting.selection), setting in front
        axes.plot(
            setting.bytes_at(context), quality.scale * mean_of(setting, quality), marker=style.marker, linestyle="none",
            color=style.colour, markerfacecolor=style.colour if on_front else "white", zorder=4 if on_front else 3,
            markersize=7 if on_front else 5, alpha=1.0 if on_front else 0.75,
        )  # fmt: skip
    axes.set_xscale("log")
    x = [choice.n_bytes for choice in advisor.measured]
    y = [quality.scale * choice.quality.mean for choice in advisor.measured]
    axes.plot(x, y, drawstyle="steps-post", color=GREY, linewidth=1.3, zorder=2)
    axes.margins(x=0.12, y=0.1)
    _byte_ticks(axes)
    axes.set_title(quality.label + ("" if quality.higher_is_better else " (lower is better)"), fontsize=10)
    if quality.unit:
        _percent_limits(axes)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0f} %")
    _front_labels(axes, list(zip(x, y, [_short_label(setting) for setting in front])), up=not quality.higher_is_better)


def _front_labels(axes: Axes, points: Sequence[tuple[float, float, str]], *, up: bool) -> None:
    """Beside a point, on the side of the front where nothing can be. Both ends come first; left out where two would
    overlap."""
    low, high = (math.log10(x) for x in axes.get_xlim())
    bottom, top = axes.get_ylim()
    taken: list[tuple[float, float]] = []
    for x, y, text in [*points[-1:], *points[:-1]]:
        place = ((math.log10(x) - low) / (high - low), (y - bottom) / (top - bottom))
        if any(abs(place[0] - a) < 0.14 and abs(place[1] - b) < 0.055 for a, b in taken):
            continue
        taken.append(place)
        axes.annotate(
            text, (x, y), xytext=(-5, -7 if up else 6), textcoords="offset points", fontsize=8, ha="right",
            va="top" if up else "bottom", color="#222222", zorder=6,
        )  # fmt: skip


def _short_label(setting: Setting) -> str:
    if setting.selection in (ALL, TEACHER):
        return "teacher" if setting.selection == TEACHER else "all"
    return f"{setting.heads} / {setting.d_state}"


def _lines(axes: Axes, lines: Sequence[Line], *, scale: float) -> None:
    """Lines with markers; whiskers stand a little apart, so that they do not hide one another."""
    for number, line in enumerate(lines):
        if not line.points:
            continue
        shift = DODGE * (number - (len(lines) - 1) / 2)
        x, y = [x + shift for x, _ in line.points], [scale * e.mean for _, e in line.points]
        colour, marker, dash = line.style
        axes.plot(x, y, color=colour, marker=marker, linestyle=dash, zorder=3)
        ends = [(scale * (e.mean - (e.margin or 0.0)), scale * (e.mean + (e.margin or 0.0))) for _, e in line.points]
        if scale == 100:
            ends = [(max(low, 0.0), min(high, 100.0)) for low, high in ends]
        axes.vlines(x, [low for low, _ in ends], [high for _, high in ends], color=colour, linewidth=1.0, alpha=0.45)


def _along_heads(
    results: SweepResults, selection: str, state: int, axis: HeadAxis, value: Callable[[Setting], Estimate | None]
) -> list[tuple[float, Estimate]]:
    """The settings of one selection and state, and the one without heads."""
    points = [(axis.at(s.heads), value(s)) for s in results.of(selection, d_state=state)]
    return sorted((x, found) for x, found in points if found is not None)


def _teacher_level(axes: Axes, results: SweepResults, quality: Quality, axis: HeadAxis) -> None:
    teacher = results.teacher.estimate(quality.column)
    if teacher is None:
        return
    axes.axhline(quality.scale * teacher.mean, color=BLACK, linewidth=0.9, zorder=1)
    _guessing_level(axes, quality)
    every = [s.estimate(quality.column) for s in results.done if s.selection == ALL]
    if axis.n_heads and every and every[0]:
        axes.plot(axis.at(axis.n_heads), quality.scale * every[0].mean, marker="s", color=BLACK, zorder=4)


def _guessing_level(axes: Axes, quality: Quality) -> None:
    if quality.chance is not None:
        axes.axhline(quality.scale * quality.chance, color=GREY, linewidth=0.9, linestyle=(0, (1, 2)), zorder=1)
        axes.text(
            0.99, quality.scale * quality.chance + 1, "guessing", transform=axes.get_yaxis_transform(), ha="right",
            va="bottom", fontsize=7.5, color=GREY,
        )  # fmt: skip


def _legend(grid: Any, lines: Sequence[Line], *, teacher: bool = False, front: bool = False) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=line.style.colour, marker=line.style.marker, linestyle=line.style.dash, label=line.label)
        for line in lines
    ]
    if teacher:
        handles.append(Line2D([], [], color=BLACK, linewidth=0.9, marker="s", label="teacher"))
    if front:
        handles.append(Line2D([], [], color=PURPLE, marker="v", linestyle="none", label="no heads"))
        handles.append(Line2D([], [], color=GREY, linewidth=1.3, label="front (filled marks)"))
    grid[0, 0].figure.legend(
        handles=handles, loc="outside upper left", ncols=len(handles), frameon=False, handlelength=2.6, fontsize=9
    )


def _quality_axis(axes: Axes, quality: Quality) -> None:
    if quality.unit:
        _percent_limits(axes)
        _percent_axis(axes, quality.label)
    else:
        axes.set_ylabel(f"{quality.label} (lower is better)", fontsize=9)


def _percent_axis(axes: Axes, label: str) -> None:
    _percent_limits(axes)
    axes.set_yticks(range(0, 101, 25), [f"{value} %" for value in range(0, 101, 25)])
    axes.set_ylabel(label, fontsize=9)


def _percent_limits(axes: Axes) -> None:
    axes.set_ylim(-3, 108)


def _byte_ticks(axes: Axes) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(10, subs=(1.0, 3.0) if high / low < 1e4 else (1.0,)))
    axes.xaxis.set_major_formatter(lambda value, _: size_text(value).replace(".00", "").replace(".0", ""))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _style_of_selection(selection: str) -> Style:
    if selection == "layers":
        return Style(GREEN, "P", DASHES[2])
    colour, marker = look(selection)
    return Style(colour, marker, {"random": DASHES[1], "restoration": DASHES[0]}.get(selection, "solid"))


def _selections(results: SweepResults) -> list[str]:
    """Those with finished cells, in the order of their description; "top" where there are only cells without heads."""
    present = {setting.selection for setting in results.done}
    ordered = ["top", "restoration", "layers", "random"]
    assert set(ordered) == set(SELECTIONS)
    return [name for name in ordered if name in present] or ["top"]


def _has_zero(results: SweepResults) -> bool:
    return any(setting.heads == 0 for setting in results.done)
