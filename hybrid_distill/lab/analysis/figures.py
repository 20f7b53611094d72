"""Figures of experiments: lines, bars and matrices, in the style of the reporting kit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..reporting import BLUE, GREEN, GREY, LOOKS, ORANGE, PALE, VERMILION, figure
from .experiment import Column, Row, Table
from .mixing import HeadMix
from .patterns import MarkedPrompt, row_shares

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes

INTACT = "the intact model"
MOST_COLUMNS, MOST_TOKENS = 6, 128  # of a figure
DOTTED = (0, (1, 2))


def draw_lines(table: Table, path: Path, x_label: str) -> None:
    """Draw a line for each group of rows; dashed is the intact model, dotted is guessing."""
    groups = list(dict.fromkeys(row.group for row in table.rows if row.group))
    n_columns = len(table.columns)
    with figure(path, 1, n_columns, size=(3.1 * n_columns + 0.4, 3.3)) as grid:
        for index, (axes, column) in enumerate(zip(grid[0], table.columns, strict=True)):
            for group, look in zip(groups, LOOKS):
                rows = [row for row in table.rows if row.group == group]
                x, y = [row.x for row in rows], [row.values[index] for row in rows]
                axes.plot(x, y, color=look.color, marker=look.marker, label=group)
                if any(errors := [row.spreads[index] if row.spreads else 0 for row in rows]):
                    axes.errorbar(x, y, yerr=errors, fmt="none", ecolor=look.color, elinewidth=1.2, capsize=2)
            _references(axes, column, table.rows[0], index, across=True)
            ticks = sorted({row.x for row in table.rows if row.group})
            axes.set(xticks=ticks, xlabel=x_label, title=column.header)
        if len(groups) > 1:
            grid[0, 0].legend(fontsize=8)
        _note(grid, f"dashed: {INTACT}; dotted: guessing")


def draw_together(table: Table, path: Path, x_label: str) -> None:
    """Draw a line for each column, in one panel: the first row at 0, then those of the first group."""
    first, *others = table.rows
    rows = [first, *(row for row in others if row.group == others[0].group)]
    x = [0, *(row.x for row in rows[1:])]
    with figure(path, size=(5.6, 3.6)) as grid:
        axes = grid[0, 0]
        for index, (column, look) in enumerate(zip(table.columns, LOOKS)):
            axes.plot(x, [row.values[index] for row in rows], color=look.color, marker=look.marker, label=column.name)
            if column.chance is not None:
                axes.axhline(column.chance, color=look.color, linewidth=1.2, linestyle=DOTTED)
        axes.set(ylim=(0, 104), xticks=x, xlabel=f"{x_label} (dotted: guessing)", title="answered right, %")
        axes.legend(fontsize=8)


def draw_bars(table: Table, path: Path, *, first: str = INTACT) -> None:
    """Draw a bar for each row; recurrent heads' are orange.

    Where rows are compared, dashed is the first row, named in the note, and dotted is guessing.
    """
    rows = table.rows
    colors = [ORANGE if row.label.endswith(" ssm") else BLUE for row in rows]
    if table.compared:
        colors[0] = PALE
    size = (2.7 * len(table.columns) + 1.2, 0.3 * len(rows) + 1.5)
    with figure(path, 1, len(table.columns), size=size, sharey=True) as grid:
        for index, (axes, column) in enumerate(zip(grid[0], table.columns, strict=True)):
            axes.barh(range(len(rows)), [row.values[index] for row in rows], height=0.7, color=colors)
            if table.compared:
                _references(axes, column, rows[0], index, across=False)
            axes.grid(False)
            axes.grid(True, axis="x")
            axes.set_title(column.header)
        grid[0, 0].set_yticks(range(len(rows)), [row.label for row in rows], fontsize=8)
        grid[0, 0].set_ylim(len(rows) - 0.4, -0.6)
        if table.compared:
            _note(grid, f"dashed: {first}; dotted: guessing")


def _references(axes: Axes, column: Column, intact: Row, index: int, *, across: bool) -> None:
    line = axes.axhline if across else axes.axvline
    line(intact.values[index], color=GREY, linewidth=1.2, linestyle="--")
    if column.chance is not None:
        line(column.chance, color=GREY, linewidth=1.2, linestyle=DOTTED)
    if column.unit == "%":
        (axes.set_ylim if across else axes.set_xlim)(0, 104)


def _note(grid: np.ndarray, text: str) -> None:
    grid[0, 0].figure.supxlabel(text, fontsize=9, color="#444444")


def draw_maps(panels: Sequence[tuple[str, HeadMix]], prompt: MarkedPrompt, path: Path, *, n_columns: int) -> None:
    """Draw matrices, rows in shares, under their titles, with the tokens beside them: the latest of a long prompt.

    Boxes: where a gather head looks, from a segment's summary to its content. Triangles below the last row: what an
    aggregate head looks at, filled for the answer.
    """
    n_columns = min(n_columns, len(panels), MOST_COLUMNS)
    n_rows = math.ceil(len(panels) / n_columns)
    n_shown = min(len(prompt.ids), MOST_TOKENS)
    labels = [label.replace("$", r"\$") for label in prompt.labels[-n_shown:]]  # two of them would be a formula
    side = min(max(2.6, 0.115 * n_shown), 7.0)
    size = min(7.0, 62 * side / n_shown)
    with figure(path, n_rows, n_columns, size=((side + 0.7) * n_columns, (side + 0.9) * n_rows + 0.3)) as grid:
        for place, (axes, (title, mix)) in enumerate(zip(grid.flat, panels)):
            _draw_map(axes, mix, prompt, n_shown)
            axes.set_title(title, fontsize=9)
            if place % n_columns == 0:
                axes.set_yticks(range(n_shown), labels, fontsize=size)
            if place + n_columns >= len(panels):
                axes.set_xticks(range(n_shown), labels, fontsize=size, rotation=90)
        for axes in grid.flat[len(panels) :]:
            axes.set_axis_off()
        note = "boxes: gather, from the end of a segment to its content; triangles: summaries, filled for the answer"
        _note(grid, note)


def _draw_map(axes: Axes, mix: HeadMix, prompt: MarkedPrompt, n_shown: int) -> None:
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.patches import Rectangle

    start = len(prompt.ids) - n_shown
    colors = LinearSegmentedColormap.from_list("share", ["#FFFFFF", BLUE if mix.kind == "attention" else ORANGE])
    share_TS = row_shares(mix.matrix_TS)[start:, start:]
    axes.imshow(share_TS.tolist(), cmap=colors, vmin=0, vmax=1, aspect="equal", interpolation="nearest")
    axes.grid(False)
    axes.set(xticks=[], yticks=[])
    axes.tick_params(length=0, pad=1)
    for index, (content, summary) in enumerate(prompt.segments):
        rows, columns = ([i - start for i in places if i >= start] for places in (summary, content))
        if rows and columns:
            corner, width, height = (columns[0] - 0.5, rows[0] - 0.5), columns[-1] - columns[0] + 1, len(rows)
            axes.add_patch(Rectangle(corner, width, height, fill=False, edgecolor=VERMILION, linewidth=0.8))
        face = GREEN if index == prompt.answer else "none"
        axes.scatter(rows, [n_shown + 0.2] * len(rows), 12, marker="^", facecolors=face, edgecolors=GREEN)
    axes.set_ylim(n_shown + 0.9, -0.5)
