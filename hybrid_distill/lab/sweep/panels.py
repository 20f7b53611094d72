"""Figures of a sweep's report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from ..reporting.document import Column, Figure
from ..reporting.figures import (
    GREY,
    LOOKS,
    PanelRow,
    as_block,
    draw_lines,
    figure,
    has_matplotlib,
    legend,
    look,
    name_points,
    percent_axis,
)
from .grid import ALL, NONE
from .measured import LOWER_IS_BETTER, Estimate, SweepResults, size_text, without
from .results import TEACHER

NAMES = {
    "top": "top, by score",
    "restoration": "restoration",
    "layers": "whole layers",
    "random": "random",
}
WORDS = {"heads": "{} heads", "replacement": "state {}"}
"""How a value of a column is written."""
AXES = {"heads": "heads kept", "d_state": "state size of the recurrent heads"}
BARS = "bars: 95 % intervals of the mean over seeds"
LABEL_DISTANCE = 1.4
"""Ratio of the sizes of two labeled points of a front, so that their labels do not overlap."""


class SweepFigures(NamedTuple):
    """Figures of the report's sections; empty where there are no results."""

    coverage: Sequence[Figure]
    heads: Sequence[Figure]
    states: Sequence[Figure]
    selection: Sequence[Figure]
    pareto: Sequence[Figure]


def draw_figures(
    results: SweepResults, folder: Path, *, knowledge: str, retrieval: str
) -> SweepFigures:
    """Draw the figures for which there are results.

    ``knowledge`` and ``retrieval`` name the groups of tasks.
    """
    qualities = []
    for name in ("retrieval", "perplexity"):
        quality = results.quality(name)
        if quality is not None:
            qualities.append(quality)
    rows = [_row(results, quality) for quality in qualities]
    percent_rows = [row for row in rows if row.percent]

    groups: dict[str, list[str]] = {}
    if "knowledge" in results.rows:
        groups[knowledge] = ["knowledge"]
    if results.pair_sizes:
        groups[retrieval] = [f"kv_generation_{n}" for n in results.pair_sizes]
    covered: list[PanelRow] = []
    selection = ""
    if TEACHER in results.settings.index and groups:
        selection, covered = _coverage(results, groups)
    by_state: list[PanelRow] = []
    # A point of this figure is a state size alone: students with windows have no place in it.
    if not results.rows.window.any():
        by_state = _with_several(percent_rows, "d_state")
    return SweepFigures(
        coverage=_panels(
            folder / "coverage.png",
            f"Coverage, student over teacher, by group of tasks; heads: {selection}",
            covered,
            panel="replacement",
            line="group",
            x="heads",
        ),
        heads=_panels(
            folder / "heads.png",
            "Against heads kept, by how they are chosen",
            _with_several(rows, "heads"),
            panel="selection",
            line="replacement",
            x="heads",
        ),
        states=_panels(
            folder / "states.png",
            "Retrieval against state size, by heads kept",
            by_state,
            panel="selection",
            line="heads",
            x="d_state",
        ),
        selection=_panels(
            folder / "selection.png",
            "How heads are chosen",
            _with_several(percent_rows, "selection"),
            panel="replacement",
            line="selection",
            x="heads",
        ),
        pareto=_pareto(results, qualities, folder / "pareto.png"),
    )


def _with_several(rows: Sequence[PanelRow], column: str) -> list[PanelRow]:
    """Return the rows whose points differ in a column."""
    return [row for row in rows if row.points[column].nunique() > 1]


def _row(results: SweepResults, quality: Column) -> PanelRow:
    """Return a row of panels for one measure, with levels for the teacher and for guessing."""
    means, margins = results.figures
    levels: dict[str, float] = {}
    chance = results.chance(quality.name)
    if not math.isnan(chance):
        levels["guessing"] = quality.scale * chance
    if TEACHER in means.index:
        teacher_value = means.loc[TEACHER][quality.name].iloc[0]
        if not math.isnan(teacher_value):
            levels["teacher"] = quality.scale * teacher_value
    label = quality.header.removesuffix(", %")
    is_share = quality.name not in LOWER_IS_BETTER
    if not is_share:
        label += " (lower is better)"
    points = _points(results, (means, margins), quality.name, quality.scale)
    return PanelRow(points, label, is_share, levels)


def _coverage(results: SweepResults, groups: dict[str, list[str]]) -> tuple[str, list[PanelRow]]:
    """Return the selection that is shown, and its coverage of the teacher by group of tasks."""
    parts = []
    for group, names in groups.items():
        ratios = results.against_teacher(names)
        parts.append(_points(results, ratios, "all", 100).assign(group=group))
    points = pd.concat(parts)
    selection = points.selection.iloc[0] if len(points) else ""
    points = points.loc[points.selection == selection]
    return selection, [PanelRow(points, "student, of what the teacher has", True, {"teacher": 100})]


def _points(results: SweepResults, estimate: Estimate, name: str, scale: float) -> pd.DataFrame:
    """Return students with recurrent heads as points; those without kept heads belong to every selection."""
    means, margins = estimate
    rows = pd.DataFrame({"y": scale * means[name], "error": scale * margins[name]})
    rows = rows.join(results.settings.d_state)
    rows = rows.dropna(subset=["y"]).reset_index()
    without_heads = rows[rows.selection == NONE]
    present = [selection for selection in NAMES if (rows.selection == selection).any()]
    parts = []
    for selection in present or ["top"]:
        own = pd.concat([without_heads, rows[rows.selection == selection]])
        parts.append(own.assign(selection=NAMES[selection]))
    points = pd.concat(parts)
    # Panels and lines stand in the order of these lists.
    selections = pd.CategoricalDtype(list(NAMES.values()), ordered=True)
    replacements = pd.CategoricalDtype(results.replacements, ordered=True)
    points = points.astype({"selection": selections, "replacement": replacements})
    return points.sort_values("heads", kind="stable")


def _panels(
    path: Path, caption: str, rows: Sequence[PanelRow], *, panel: str, line: str, x: str
) -> list[Figure]:
    """Draw rows of panels: one panel per value of ``panel``, one line per value of ``line``."""
    look_of_selection = {text: look(selection) for selection, text in NAMES.items()}
    drawn = []
    looks: dict[str, Any] = {}
    for row in rows:
        points = row.points.sort_values([panel, x], kind="stable")
        texts = {
            "panel": [_text(panel, value) for value in points[panel]],
            "line": [_text(line, value) for value in points[line]],
        }
        drawn.append(replace(row, points=points.assign(x=points[x], **texts)))
        for value in points[line].sort_values().unique():
            next_look = LOOKS[len(looks) % len(LOOKS)]
            looks.setdefault(_text(line, value), look_of_selection.get(value, next_look))
    return draw_lines(path, f"{caption}; {BARS}.", drawn, looks, AXES[x])


def _text(column: str, value: object) -> str:
    return WORDS.get(column, "{}").format(value)


def _pareto(results: SweepResults, qualities: Sequence[Column], path: Path) -> list[Figure]:
    """Draw quality against bytes: the settings, and their Pareto front."""
    if not qualities or not has_matplotlib():
        return []
    size = (4.9 * len(qualities) + 0.6, 4.5)
    with figure(path, 1, len(qualities), size=size) as grid:
        for quality, axes in zip(qualities, grid[0]):
            _draw_front(axes, results, quality)
        legend(grid)
        grid[0, 0].figure.supxlabel(
            f"held by one sequence after {results.context:,} tokens", fontsize=10
        )
    caption = (
        f"Quality against the memory of one sequence after {results.context:,} tokens: keys, values, states and "
        "convolutions. On the line are the settings that none beats in one without losing in the other; labels: "
        "heads / state."
    )
    return [as_block(path, caption, grid)]


def _draw_front(axes: Any, results: SweepResults, quality: Column) -> None:
    front = results.front(quality)
    front = front.assign(y=quality.scale * front["mean"])
    axes.plot(
        front.bytes, front.y, drawstyle="steps-post", color=GREY, linewidth=1.3, label="front"
    )
    _draw_settings(axes, results, quality)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: _short_size(value))
    title = quality.header
    if quality.name in LOWER_IS_BETTER:
        title += " (lower is better)"
    else:
        percent_axis(axes)
    axes.set_title(title, fontsize=10)
    last_labeled = 0.0
    for setting, n_bytes, y in zip(front.index, front.bytes, front.y):
        if n_bytes > LABEL_DISTANCE * last_labeled:
            axes.annotate(
                _heads_and_replacement(setting),
                (n_bytes, y),
                (-5, 6),
                textcoords="offset points",
                fontsize=8,
                ha="right",
            )
            last_labeled = n_bytes


def _draw_settings(axes: Any, results: SweepResults, quality: Column) -> None:
    """Draw every setting as a point that shows its name."""
    settings = results.compared(quality)
    if ALL in settings.index:
        # The student that keeps all heads is the teacher.
        settings = without(settings, TEACHER)
    settings = settings.assign(y=quality.scale * settings["mean"])
    for selection, own in settings.groupby(level=0, sort=False):
        other = "no heads" if selection == NONE else "teacher"
        name = NAMES.get(str(selection), other)
        color, marker, _ = look(str(selection))
        points = axes.scatter(own.bytes, own.y, color=color, marker=marker, zorder=3, label=name)
        titles = []
        for setting, n_bytes, y in zip(own.index, own.bytes, own.y):
            heads = _heads_and_replacement(setting)
            titles.append(f"{name}: {heads}, {size_text(n_bytes)}, {y:.4g}")
        name_points(points, titles)


def _heads_and_replacement(setting: tuple[str, int, str]) -> str:
    """Describe a setting briefly: "4 / 16"; "all" if it keeps all heads."""
    selection, heads, replacement = setting
    if selection in (ALL, TEACHER):
        return "all"
    return f"{heads} / {replacement}"


def _short_size(n_bytes: float) -> str:
    return size_text(n_bytes).replace(".00", "").replace(".0", "")
