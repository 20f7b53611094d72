"""Figures of tables, in the style of ``plots.py``: a panel for each task. Without matplotlib none is drawn."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..plots import BLUE, GREY, ORANGE, PALE, canvas
from .tables import Column, Row, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOOKS = ((BLUE, "o"), (ORANGE, "D"))

log = logging.getLogger(__name__)


def can_draw() -> bool:
    """Whether matplotlib is installed; says so where it is not."""
    if importlib.util.find_spec("matplotlib") is None:
        log.info("no figures: matplotlib is not installed (pip install hybrid-distill[plot])")
        return False
    return True


def draw_lines(table: Table, path: Path, x_label: str) -> None:
    """A line for each group of rows; dashed is the intact model, dotted is guessing."""
    if not can_draw():
        return
    groups = list(dict.fromkeys(row.group for row in table.rows if row.group))
    with canvas(1, len(table.columns), (3.1 * len(table.columns) + 0.4, 3.3), path) as grid:
        for index, (axes, column) in enumerate(zip(grid[0], table.columns, strict=True)):
            for group, (colour, marker) in zip(groups, LOOKS):
                rows = [row for row in table.rows if row.group == group]
                x, y = [row.x for row in rows], [row.values[index] for row in rows]
                axes.plot(x, y, color=colour, marker=marker, label=group)
                errors = [row.spreads[index] if row.spreads else 0 for row in rows]
                if any(errors):
                    axes.errorbar(x, y, yerr=errors, fmt="none", ecolor=colour, elinewidth=1.2, capsize=2)
            _references(axes, column, table.rows[0], index, across=True)
            axes.set_xticks(sorted({row.x for row in table.rows if row.group}), minor=False)
            axes.set_xlabel(x_label)
            axes.set_title(column.header)
        if len(groups) > 1:
            grid[0, 0].legend(frameon=False, fontsize=8)
        _note(grid)


def draw_bars(table: Table, path: Path) -> None:
    """A bar for each row; dashed is the intact model, dotted is guessing."""
    if not can_draw():
        return
    rows = table.rows
    size = (2.7 * len(table.columns) + 1.2, 0.3 * len(rows) + 1.5)
    with canvas(1, len(table.columns), size, path, sharey=True) as grid:
        for index, (axes, column) in enumerate(zip(grid[0], table.columns, strict=True)):
            colours = [PALE if row is rows[0] else BLUE for row in rows]
            axes.barh(range(len(rows)), [row.values[index] for row in rows], height=0.7, color=colours)
            _references(axes, column, rows[0], index, across=False)
            axes.grid(False)
            axes.grid(True, axis="x")
            axes.set_title(column.header)
        grid[0, 0].set_yticks(range(len(rows)), [row.label for row in rows], fontsize=8)
        grid[0, 0].set_ylim(len(rows) - 0.4, -0.6)
        _note(grid)


def _references(axes: Axes, column: Column, intact: Row, index: int, *, across: bool) -> None:
    line = axes.axhline if across else axes.axvline
    line(intact.values[index], color=GREY, linewidth=1.2, linestyle="--")
    if column.chance is not None:
        line(column.chance, color=GREY, linewidth=1.2, linestyle=(0, (1, 2)))
    if column.unit == "%":
        (axes.set_ylim if across else axes.set_xlim)(0, 104)


def _note(grid: Any) -> None:
    grid[0, 0].figure.supxlabel("dashed: the intact model; dotted: guessing", fontsize=9, color="#444444")
