"""Figures of experiments: lines, bars and matrices, in the style of the reporting kit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..reporting import BLUE, GREEN, GREY, LOOKS, ORANGE, PALE, VERMILION, figure
from .head_matrices import HeadMix
from .patterns import MarkedPrompt, row_shares
from .tables import Row, Table

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes

REFERENCES = "dashed: the first row of the table; dotted: guessing"
MOST_COLUMNS = 6
MOST_TOKENS = 128


def draw_groups(table: Table, path: Path) -> None:
    """Draw a line per group of rows, perplexity on a log scale.

    The first row is dashed, guessing is dotted.
    """
    from matplotlib.ticker import LogFormatter

    groups: dict[str, list[Row]] = {}
    for row in table.rows:
        if row.group:
            groups.setdefault(row.group, []).append(row)
    ticks = sorted({row.x for row in table.rows if row.group})
    n_columns = len(table.columns)
    with figure(path, 1, n_columns, size=(3.1 * n_columns + 0.4, 3.3)) as grid:
        for index, axes in enumerate(grid[0]):
            for (group, rows), look in zip(groups.items(), LOOKS):
                spreads = None
                if rows[0].spreads:
                    spreads = [row.spread(index) for row in rows]
                axes.errorbar(
                    [row.x for row in rows],
                    [row.values[index] for row in rows],
                    spreads,
                    color=look.color,
                    marker=look.marker,
                    elinewidth=1.2,
                    capsize=2,
                    label=group,
                )
            _references(axes, table, index, axes.axhline, axes.set_ylim)
            # Perplexities span orders of magnitude.
            if table.columns[index].unit != "%":
                axes.set_yscale("log")
                axes.yaxis.set_major_formatter(LogFormatter())
                axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
            axes.set(xticks=ticks, xlabel=table.label)
        if len(groups) > 1:
            grid[0, 0].legend(fontsize=8)
        _note(grid, REFERENCES)


def draw_bars(table: Table, path: Path) -> None:
    """Draw a bar per row, orange for recurrent heads.

    In compared tables the first is dashed, guessing is dotted.
    """
    rows = table.rows
    colors = [ORANGE if row.label.endswith(" ssm") else BLUE for row in rows]
    if table.compared:
        colors[0] = PALE
    size = (2.7 * len(table.columns) + 1.2, 0.3 * len(rows) + 1.5)
    with figure(path, 1, len(table.columns), size=size, sharey=True) as grid:
        for index, axes in enumerate(grid[0]):
            axes.barh(
                range(len(rows)), [row.values[index] for row in rows], height=0.7, color=colors
            )
            _references(axes, table, index, axes.axvline, axes.set_xlim)
            # Lines across the bars alone.
            axes.grid(False)
            axes.grid(True, axis="x")
        grid[0, 0].set_yticks(range(len(rows)), [row.label for row in rows], fontsize=8)
        grid[0, 0].set_ylim(len(rows) - 0.4, -0.6)
        if table.compared:
            _note(grid, REFERENCES)


def _references(
    axes: Axes,
    table: Table,
    index: int,
    line: Callable[..., object],
    limit: Callable[[float, float], object],
) -> None:
    column = table.columns[index]
    axes.set_title(column.header)
    if not table.compared:
        return
    line(table.rows[0].values[index], color=GREY, linewidth=1.2, linestyle="--")
    if column.chance is not None:
        line(column.chance, color=GREY, linewidth=1.2, linestyle=(0, (1, 2)))
    if column.unit == "%":
        limit(0, 104)


def _note(grid: np.ndarray, text: str) -> None:
    grid[0, 0].figure.supxlabel(text, fontsize=9, color="#444444")


def draw_maps(
    panels: Sequence[tuple[str, HeadMix]],
    prompt: MarkedPrompt,
    path: Path,
    *,
    n_columns: int,
) -> None:
    """Draw titled matrices, rows as shares, labeled with tokens: only the last ones of a long
    prompt.

    Boxes: where a gather head looks, from a segment's summary to its content. Triangles below the
    last row: where an aggregate head looks, filled for the answer.
    """
    n_columns = min(n_columns, len(panels), MOST_COLUMNS)
    n_rows = math.ceil(len(panels) / n_columns)
    n_shown = min(len(prompt.ids), MOST_TOKENS)
    # To matplotlib, a pair of dollars is a formula.
    labels = [label.replace("$", r"\$") for label in prompt.labels[-n_shown:]]
    side = min(max(2.6, 0.115 * n_shown), 7.0)
    font_size = min(7.0, 62 * side / n_shown)
    width = (side + 0.7) * n_columns
    height = (side + 0.9) * n_rows + 0.3
    with figure(path, n_rows, n_columns, size=(width, height)) as grid:
        for place, (axes, (title, mix)) in enumerate(zip(grid.flat, panels)):
            _draw_map(axes, mix, prompt, n_shown)
            axes.set_title(title, fontsize=9)
            if place % n_columns == 0:
                axes.set_yticks(range(n_shown), labels, fontsize=font_size)
            if place + n_columns >= len(panels):
                axes.set_xticks(range(n_shown), labels, fontsize=font_size, rotation=90)
        for axes in grid.flat[len(panels) :]:
            axes.set_axis_off()
        boxes = "boxes: gather, from the end of a segment to its content"
        triangles = "triangles: summaries, filled for the answer"
        _note(grid, f"{boxes}; {triangles}")


def _draw_map(
    axes: Axes,
    mix: HeadMix,
    prompt: MarkedPrompt,
    n_shown: int,
) -> None:
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.patches import Rectangle

    start = len(prompt.ids) - n_shown
    darkest = BLUE if mix.kind == "attention" else ORANGE
    colors = LinearSegmentedColormap.from_list("share", ["#FFFFFF", darkest])
    share_TS = row_shares(mix.matrix_TS)[start:, start:]
    axes.imshow(
        share_TS.tolist(),
        cmap=colors,
        vmin=0,
        vmax=1,
        aspect="equal",
        interpolation="nearest",
    )
    axes.grid(False)
    axes.set(xticks=[], yticks=[])
    axes.tick_params(length=0, pad=1)
    for index, (content, summary) in enumerate(prompt.segments):
        rows = [position - start for position in summary if position >= start]
        columns = [position - start for position in content if position >= start]
        if rows and columns:
            corner = (columns[0] - 0.5, rows[0] - 0.5)
            width = columns[-1] - columns[0] + 1
            box = Rectangle(
                corner,
                width,
                len(rows),
                fill=False,
                edgecolor=VERMILION,
                linewidth=0.8,
            )
            axes.add_patch(box)
        face = GREEN if index == prompt.answer else "none"
        below = [n_shown + 0.2] * len(rows)
        axes.scatter(rows, below, 12, marker="^", facecolors=face, edgecolors=GREEN)
    axes.set_ylim(n_shown + 0.9, -0.5)
