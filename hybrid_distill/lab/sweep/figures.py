"""Figures of a sweep: lines over heads or states, a panel each for the other, and quality against memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ..reporting.figures import BLACK, GREY, LOOKS, Look, figure, look, percent_axis
from .grid import ALL
from .measured import NONE, Quality, SweepResults, without
from .recommend import front, size_text
from .results import TEACHER

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAMES = {"top": "top, by score", "restoration": "restoration", "layers": "whole layers", "random": "random"}
DODGE = 0.04
"""Distance between the whiskers of lines, in ticks."""


def draw(results: SweepResults, folder: Path) -> dict[str, str]:
    """Draw what the results have numbers for; return the caption of each figure by name."""
    several = results.settings.n_done.max() > 1
    bars = "bars: 95 % intervals of the mean over seeds" if several else "one seed, so there are no intervals"
    found = [results.quality(name) for name in ("retrieval", "perplexity")]
    qualities = [quality for quality in found if quality is not None]
    points = [(quality, _points(results, results.estimate(quality.column))) for quality in qualities]
    captions = {}
    if TEACHER in results.settings.index and (coverage := _coverage(results)) is not None:
        first = coverage.selection.iloc[0]
        _panels(folder / "coverage.png", [(None, coverage)], "d_state", "group", "heads", results)
        captions["coverage"] = (
            f"Coverage, student over teacher, by group of tasks; heads: {NAMES[first]}; {bars}. "
            "The method predicts that knowledge stays where it is, and that retrieval comes back with the heads."
        )
    if points and points[0][1].heads.nunique() > 1:
        _panels(folder / "heads.png", points, "selection", "d_state", "heads", results)
        captions["heads"] = f"Against heads kept, by how they are chosen; {bars}."
    if points and qualities[0].unit:
        if points[0][1].d_state.nunique() > 1:
            _panels(folder / "states.png", points[:1], "selection", "heads", "d_state", results)
            captions["states"] = f"Retrieval against state size, by heads kept; {bars}."
        if points[0][1].selection.nunique() > 1:
            _panels(folder / "selection.png", points[:1], "d_state", "selection", "heads", results)
            captions["selection"] = f"How heads are chosen; {bars}."
    if qualities:
        _pareto(results, qualities, folder / "pareto.png")
        captions["pareto"] = (
            f"Quality against the memory of one sequence after {results.context:,} tokens: keys, values, states and "
            "convolutions. On the line are the settings that none beats in one without losing in the other; labels: "
            "heads / state."
        )
    return captions


def _points(results: SweepResults, found: pd.DataFrame) -> pd.DataFrame:
    """Return students with recurrent heads as rows; those without kept heads belong to every selection."""
    rows = found.dropna(subset=["mean"]).reset_index()
    present = [name for name in NAMES if (rows.selection == name).any()] or ["top"]
    without = rows[rows.selection == NONE]
    parts = [pd.concat([without, rows[rows.selection == name]]).assign(selection=name) for name in present]
    return pd.concat(parts).sort_values("heads", kind="stable")


def _coverage(results: SweepResults) -> pd.DataFrame | None:
    """Return both groups of tasks against the teacher, for the first selection; None without numbers."""
    groups = {"knowledge-focused": ["knowledge"]} if "knowledge" in results.rows else {}
    groups |= {"retrieval-heavy": [f"kv_generation_{n}" for n in results.pair_sizes]} if results.pair_sizes else {}
    parts = [_points(results, results.against_teacher(names)).assign(group=group) for group, names in groups.items()]
    if not parts or (points := pd.concat(parts)).empty:
        return None
    return points.loc[points.selection == points.selection.iloc[0]]


def _panels(
    path: Path,
    rows: Sequence[tuple[Quality | None, pd.DataFrame]],
    panel: str,
    line: str,
    x: str,
    results: SweepResults,
) -> None:
    """Draw a row of panels for each quality (None: coverage): a panel and a line for each value of a column."""
    panels, ticks = rows[0][1][panel].drop_duplicates(), sorted(rows[0][1][x].unique())
    panels = sorted(panels) if panel == "d_state" else list(panels)
    values = list(rows[0][1][line].drop_duplicates().sort_values() if line != "selection" else NAMES)
    size = (max(2.9 * len(panels) + 0.9, 5.4), 2.9 * len(rows) + 0.7)
    with figure(path, len(rows), len(panels), size=size, sharex=True, sharey="row") as grid:
        for (quality, points), axes_row in zip(rows, grid):
            scale = quality.scale if quality else 100.0
            for name, axes in zip(panels, axes_row):
                for number, (value, found) in enumerate(points.loc[points[panel] == name].groupby(line, sort=False)):
                    style = look(str(value)) if line == "selection" else LOOKS[values.index(value) % len(LOOKS)]
                    _line(axes, found, [ticks.index(each) + DODGE * number for each in found[x]], style, scale)
                    axes.lines[-1].set_label(_label(line, value))
                axes.set_xticks(range(len(ticks)), [str(tick) for tick in ticks])
                axes.set_title(_label(panel, name) if points is rows[0][1] else "")
                _levels(axes, quality, results)
            label = "student, of what the teacher has" if quality is None else quality.label
            if quality is None or quality.unit:
                percent_axis(axes_row[0], label)
            else:
                axes_row[0].set_ylabel(f"{label} (lower is better)", fontsize=9)
        names = {"heads": "heads kept", "d_state": "state size of the recurrent heads"}
        _legend(grid)
        grid[0, 0].figure.supxlabel(names[x], fontsize=10)


def _line(axes: Axes, found: pd.DataFrame, x: list[float], style: Look, scale: float) -> None:
    mean, margin = scale * found["mean"].to_numpy(), scale * found["margin"].fillna(0).to_numpy()
    low, high = mean - margin, mean + margin
    if scale == 100:
        low, high = np.clip(low, 0, None), np.clip(high, None, 100)
    axes.vlines(x, low, high, color=style.color, linewidth=1.0, alpha=0.45)
    axes.plot(x, mean, color=style.color, marker=style.marker, linestyle=style.dash, zorder=3)


def _label(column: str, value: str | int) -> str:
    if column == "heads":
        return f"{value} head{'s' * (value != 1)}"
    return f"state {value}" if column == "d_state" else NAMES.get(str(value), str(value))


def _levels(axes: Axes, quality: Quality | None, results: SweepResults) -> None:
    """Mark what the teacher has, and what guessing gives."""
    if quality is None:
        axes.axhline(100, color=BLACK, linewidth=0.9, zorder=1)
        return
    if TEACHER in results.settings.index:
        teacher = results.estimate(quality.column).loc[TEACHER]["mean"].iloc[0]
        axes.axhline(quality.scale * teacher, color=BLACK, linewidth=0.9, zorder=1, label="teacher")
    chance = quality.scale * results.chance(quality.column)
    if not math.isnan(chance):
        axes.axhline(chance, color=GREY, linewidth=0.9, linestyle=":", zorder=1, label="guessing")


def _legend(grid: np.ndarray) -> None:
    handles, labels = grid[0, 0].get_legend_handles_labels()
    entries = dict(zip(labels, handles))
    grid[0, 0].figure.legend(entries.values(), entries, loc="outside upper left", ncols=min(len(entries), 7))


def _pareto(results: SweepResults, qualities: list[Quality], path: Path) -> None:
    """Draw quality against bytes: the settings, and the line that none of them beats."""
    with figure(path, 1, len(qualities), size=(4.9 * len(qualities) + 0.6, 4.5)) as grid:
        for quality, axes in zip(qualities, grid[0]):
            every, best = results.settings.join(results.estimate(quality.column)), front(results, quality)
            every = (without(every, TEACHER) if ALL in every.index else every).dropna(subset=["mean"])
            steps = quality.scale * best["mean"]
            axes.plot(best.bytes, steps, drawstyle="steps-post", color=GREY, linewidth=1.3, label="front")
            for setting, size, value in zip(every.index, every.bytes, quality.scale * every["mean"]):
                color, marker, _ = look(setting[0])
                face = color if setting in best.index else "white"
                axes.plot(
                    size, value, marker=marker, linestyle="none", color=color, markerfacecolor=face, zorder=3,
                    label=NAMES.get(setting[0], "no heads" if setting[0] == NONE else "teacher"),
                )  # fmt: skip
            axes.set_xscale("log")
            axes.margins(x=0.12, y=0.1)
            axes.xaxis.set_major_formatter(lambda value, _: size_text(value).replace(".00", "").replace(".0", ""))
            axes.set_title(quality.label + ("" if quality.higher_is_better else " (lower is better)"), fontsize=10)
            if quality.unit:
                percent_axis(axes)
            _front_labels(axes, best, quality)
        _legend(grid)
        grid[0, 0].figure.supxlabel(f"held by one sequence after {results.context:,} tokens", fontsize=10)


def _front_labels(axes: Axes, best: pd.DataFrame, quality: Quality) -> None:
    """Write heads / state beside the settings of a front, the best first; leave out what would overlap."""
    to_axes, taken = axes.transData + axes.transAxes.inverted(), np.empty((0, 2))
    for setting, size, value in reversed(list(zip(best.index, best.bytes, quality.scale * best["mean"]))):
        place = to_axes.transform((size, value))
        if (abs(taken - place) < (0.14, 0.055)).all(axis=1).any():
            continue
        taken = np.vstack([taken, place])
        text = "all" if setting[0] in (ALL, TEACHER) else f"{setting[1]} / {setting[2]}"
        axes.annotate(
            text, tuple(place), xycoords="axes fraction", xytext=(-5, 6 if quality.higher_is_better else -7),
            textcoords="offset points", fontsize=8, ha="right", va="center", color="#222222",
        )  # fmt: skip
