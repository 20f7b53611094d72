"""The style of all figures; matplotlib is imported only when one is drawn.

Colors are those of Okabe and Ito (readable with every common color blindness) and belong to a way of choosing heads, so
that a student looks the same in every figure; markers and dashes repeat the distinction for print without color.
"""

from __future__ import annotations

import importlib.util
import io
import logging
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import pandas as pd

from ...io import replacing

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes

BLACK, GREY, PALE = "#000000", "#767676", "#C8C8C8"
ORANGE, SKY, GREEN, BLUE = "#E69F00", "#56B4E9", "#009E73", "#0072B2"
VERMILION, PURPLE = "#D55E00", "#CC79A7"
SVG = "http://www.w3.org/2000/svg"
DODGE = 0.04
"""Distance between the error bars of lines, in ticks."""
DOTTED, DASHED, DASH_DOT = (0, (1, 1.4)), (0, (4, 1.5)), (0, (6, 1.5, 1, 1.5))

STYLE: dict[Any, Any] = {
    "figure.dpi": 100,
    "savefig.dpi": 200,
    "savefig.bbox": "tight",
    "savefig.pad_inches": 0.12,
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.edgecolor": "#444444",
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.8,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 2.0,
    "lines.markersize": 5.5,
    "lines.solid_capstyle": "round",
    "svg.hashsalt": "hybrid-distill",  # the same figure is the same file
}

log = logging.getLogger(__name__)


class Look(NamedTuple):
    """Color, marker and dash of a line."""

    color: str
    marker: str
    dash: str | tuple[float, tuple[float, ...]] = "solid"


LOOKS = (
    Look(BLUE, "o"),
    Look(ORANGE, "D", DASHED),
    Look(GREEN, "s", DASH_DOT),
    Look(PURPLE, "v", DOTTED),
    Look(VERMILION, "^"),
    Look(SKY, "P", DASHED),
    Look(GREY, "X", DOTTED),
)
"""Looks of lines that stand for no way of choosing heads, in order."""
_LOOK_OF = {
    "teacher": Look(BLACK, "s"),
    "all": Look(GREY, "s"),
    "none": Look(PURPLE, "v"),
    "guessing": Look(GREY, "", DOTTED),
    "random": Look(ORANGE, "D", DASHED),
    "layers": Look(GREEN, "P", DASH_DOT),
    "restoration": Look(VERMILION, "^", DOTTED),
}


def look(selection: str, *, hollow: bool = False) -> Look:
    """Return the look of a way of choosing heads; rankings share one, and a control is dashed."""
    found = _LOOK_OF.get(selection, LOOKS[0])
    return found._replace(dash=DASHED) if hollow else found


def shades_of(n: int) -> list[Look]:
    """Return the looks of lines that stand for layers, from dark to light."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [Look(to_hex(colormaps["copper"](place / n)), "") for place in range(n)]


def can_draw() -> bool:
    """Return whether matplotlib is installed; log a line where it is not."""
    if importlib.util.find_spec("matplotlib") is None:
        log.info("no figures: matplotlib is not installed (pip install 'hybrid-distill[plot]')")
        return False
    return True


@contextmanager
def figure(
    path: Path,
    rows: int = 1,
    columns: int = 1,
    *,
    size: tuple[float, float],
    sharex: bool = False,
    sharey: bool | Literal["row"] = False,
) -> Iterator[np.ndarray]:
    """Yield a 2D array of axes in the project's style; save it to ``path`` (PNG, SVG) when the block ends."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    kind = path.suffix.removeprefix(".")
    with rc_context(STYLE):
        drawing = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(drawing)
        yield drawing.subplots(rows, columns, squeeze=False, sharex=sharex, sharey=sharey)
        with replacing(path) as temporary:
            drawing.savefig(temporary, format=kind, metadata={"Date": None} if kind == "svg" else None)


def as_svg(grid: np.ndarray, titles: Mapping[str, Sequence[str]]) -> str:
    """Return a drawn figure as SVG, to stand inside a page. The points of artists, by their gid, get titles, which
    browsers show where the pointer is.
    """
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({**STYLE, "svg.fonttype": "none"}):
        grid[0, 0].figure.savefig(buffer, format="svg", metadata={"Date": None})
    ET.register_namespace("", SVG)
    ET.register_namespace("xlink", "http://www.w3.org/1999/xlink")
    root = ET.fromstring(buffer.getvalue())
    for group in root.iter(f"{{{SVG}}}g"):
        for point, title in zip(group.iter(f"{{{SVG}}}use"), titles.get(group.get("id", ""), ())):
            ET.SubElement(point, f"{{{SVG}}}title").text = title
    for metadata in root.findall(f"{{{SVG}}}metadata"):
        root.remove(metadata)
    return ET.tostring(root, encoding="unicode")


@dataclass(frozen=True)
class Row:
    """A row of panels: points with columns ``panel``, ``line``, ``x``, ``y`` and perhaps ``error``.

    ``percent`` lets the height run from 0 to 100 %. ``levels`` are horizontal lines.
    """

    points: pd.DataFrame
    label: str = ""
    percent: bool = False
    levels: Mapping[str, float] = field(default_factory=dict)


def draw_lines(
    path: Path, rows: Sequence[Row], looks: Mapping[str, Look], xlabel: str, *, even: bool = True, log: bool = False
) -> str:
    """Draw panels of lines that are named by ``looks``, with error bars; a name that begins with _ has no legend.

    ``even`` puts the places of x side by side, lines a little apart; ``log`` makes the height logarithmic. Returns the
    figure as SVG.
    """
    titles: dict[str, list[str]] = {}
    panels = [list(row.points.panel.unique()) for row in rows]
    n, ticks = max(map(len, panels)), sorted({x for row in rows for x in row.points.x})
    size = (max(2.9 * n + 0.9, 7.0), (2.9 if n > 1 else 3.6) * len(rows) + 0.7)
    with figure(path, len(rows), n, size=size, sharex=True, sharey="row") as grid:
        for row, names, axes_row in zip(rows, panels, grid):
            for name, axes in zip_longest(names, axes_row):
                axes.set(title=name or "", frame_on=name is not None)
                for number, (line, style) in enumerate(looks.items()):
                    found = row.points[(row.points.panel == name) & (row.points.line == line)]
                    if found.empty:
                        continue
                    x = [ticks.index(x) + DODGE * number for x in found.x] if even else list(found.x)
                    drawn = axes.errorbar(
                        x, found.y.astype(float), yerr=found["error"].astype(float) if "error" in found else None,
                        color=style.color, marker=style.marker, linestyle=style.dash, elinewidth=1.0, label=line,
                    )  # fmt: skip
                    errors = found["error"] if "error" in found else [None] * len(found)
                    titles[gid := f"points-{len(titles)}"] = [
                        f"{line}: {y:.4g}" + (f" ± {error:.2g}" if error and error > 0 else "") + f" at {x:,}"
                        for x, y, error in zip(found.x, found.y, errors)
                    ]
                    drawn[0].set_gid(gid)
                for level, height in row.levels.items():
                    color, dash = (BLACK, "solid") if level == "teacher" else (GREY, "dotted")
                    axes.axhline(height, color=color, linestyle=dash, linewidth=0.9, zorder=1, label=level)
                if even:
                    axes.set_xticks(range(len(ticks)), [f"{tick:,}" for tick in ticks])
            axes_row[0].set_ylabel(row.label, fontsize=9)
            if row.percent:
                percent_axis(axes_row[0], row.label)
            if log:
                axes_row[0].set_yscale("log")
        legend(grid)
        grid[0, 0].figure.supxlabel(xlabel, fontsize=10)
    return as_svg(grid, titles)


def legend(grid: np.ndarray) -> None:
    """Name the lines of all panels, each once, above them."""
    found = [axes.get_legend_handles_labels() for axes in grid.flat]
    entries = {label: handle for handles, labels in found for handle, label in zip(handles, labels)}
    ncols = max(1, min(len(entries), 7, 110 // (6 + max(map(len, entries)))))
    grid[0, 0].figure.legend(entries.values(), entries, loc="outside upper left", ncols=ncols)


def percent_axis(axes: Axes, label: str = "") -> None:
    """Let the height run from 0 to 100 %."""
    axes.set_ylim(-3, 108)
    axes.set_yticks(range(0, 101, 25), [f"{value} %" for value in range(0, 101, 25)])
    axes.set_ylabel(label, fontsize=9)
