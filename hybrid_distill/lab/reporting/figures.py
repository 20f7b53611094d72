"""Style of all figures; matplotlib is imported only when one is drawn.

Colors are Okabe and Ito's (readable with every common color blindness). Each stands for a way of
choosing heads, so a student looks the same in every figure; markers and dashes repeat the
distinction for printing without color.
"""

from __future__ import annotations

import io
import logging
import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import pandas as pd

from ...io import replacing
from .document import Figure

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

BLACK = "#000000"
GREY = "#767676"
PALE = "#C8C8C8"
ORANGE = "#E69F00"
SKY = "#56B4E9"
GREEN = "#009E73"
BLUE = "#0072B2"
VERMILION = "#D55E00"
PURPLE = "#CC79A7"
SVG = "http://www.w3.org/2000/svg"
TITLE = "; title: "
"""Separator before each point's title in an artist's id, which matplotlib writes to the SVG."""
DODGE = 0.04
"""Horizontal offset between the error bars of lines, in ticks."""
# matplotlib's dashes: offset, then the lengths of strokes and gaps.
DOTTED = (0, (1, 1.4))
DASHED = (0, (4, 1.5))
DASH_DOT = (0, (6, 1.5, 1, 1.5))

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
    "font.sans-serif": ["DejaVu Sans"],
    "svg.hashsalt": "hybrid-distill",  # the same figure gives the same file
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
"""Looks, in order, of lines that do not stand for a way of choosing heads."""
_LOOK_OF = {
    "teacher": Look(BLACK, "s"),
    "all": Look(GREY, "s"),
    "none": Look(PURPLE, "v"),
    "guessing": Look(GREY, "", DOTTED),
    "random": Look(ORANGE, "D", DASHED),
    "layers": Look(GREEN, "P", DASH_DOT),
    "restoration": Look(VERMILION, "^", DOTTED),
}


def look(selection: str) -> Look:
    """Return the look of a way of choosing heads; rankings share one."""
    return _LOOK_OF.get(selection, LOOKS[0])


def shades_of(n: int) -> list[Look]:
    """Return the looks of lines that stand for layers, from black to copper."""
    looks = []
    for i in range(n):
        red = 255 * i // n
        green = 199 * i // n
        blue = 127 * i // n
        looks.append(Look(f"#{red:02x}{green:02x}{blue:02x}", ""))
    return looks


def has_matplotlib() -> bool:
    return find_spec("matplotlib") is not None


def log_no_figures() -> None:
    log.info("no figures: matplotlib is not installed (pip install 'hybrid-distill[plot]')")


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
    """Yield a 2D array of axes in the project's style; save to ``path`` (PNG, SVG) at the end."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Drawing

    with rc_context(STYLE):
        drawing = Drawing(figsize=size, layout="constrained")
        yield drawing.subplots(rows, columns, squeeze=False, sharex=sharex, sharey=sharey)
        with replacing(path) as temporary:
            drawing.savefig(temporary, format=path.suffix[1:])


def name_points(artist: Artist, titles: Iterable[str]) -> None:
    """Give each point of a line or scatter plot a title, which browsers show on hover."""
    artist.set_gid("".join(TITLE + title for title in titles))


def as_block(path: Path, caption: str, grid: np.ndarray) -> Figure:
    """Return a saved figure for a report, with an SVG on one line that has its points' titles."""
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({**STYLE, "svg.fonttype": "none"}):
        # Without a date or a version, the same figure gives the same file.
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        grid[0, 0].figure.savefig(buffer, format="svg", metadata=no_metadata)
    ET.register_namespace("", SVG)
    ET.register_namespace("xlink", "http://www.w3.org/1999/xlink")
    # Hundredths of a point are enough.
    svg = re.sub(r"(\.\d\d)\d{3,}", r"\1", buffer.getvalue())
    root = ET.fromstring(svg)
    for group in root.iter(f"{{{SVG}}}g"):
        titles = group.attrib.pop("id", "").split(TITLE)[1:]
        for point, title in zip(group.iter(f"{{{SVG}}}use"), titles):
            ET.SubElement(point, f"{{{SVG}}}title").text = title
    on_one_line = re.sub(r"\s*\n\s*", "", ET.tostring(root, encoding="unicode"))
    return Figure(path.name, caption, on_one_line)


@dataclass(frozen=True)
class PanelRow:
    """Row of panels: points with columns ``panel``, ``line``, ``x``, ``y``, optionally ``error``.

    ``percent`` sets the y axis to 0 to 100 %. ``levels`` are horizontal lines.
    """

    points: pd.DataFrame
    label: str = ""
    percent: bool = False
    levels: Mapping[str, float] = field(default_factory=dict)


def draw_lines(
    path: Path,
    caption: str,
    rows: Sequence[PanelRow],
    looks: Mapping[str, Look],
    xlabel: str,
    *,
    evenly_spaced: bool = True,
    log_scale: bool = False,
) -> list[Figure]:
    """Draw panels of the lines named in ``looks``, with error bars.

    ``evenly_spaced`` places the x values at equal distances and offsets the lines slightly;
    ``log_scale`` is for the y axis. Returns the figure, or nothing without points or without matplotlib.
    """
    rows = [row for row in rows if len(row.points)]
    if not rows or not has_matplotlib():
        return []
    panels = [list(row.points.panel.unique()) for row in rows]
    n_columns = max(map(len, panels))
    ticks = sorted(set(pd.concat([row.points.x for row in rows])))
    places = ticks if evenly_spaced else None
    height = 2.9 if n_columns > 1 else 3.6
    size = (max(2.9 * n_columns + 0.9, 7.0), height * len(rows) + 0.7)
    with figure(path, len(rows), n_columns, size=size, sharex=True, sharey="row") as grid:
        for row, names, axes_row in zip(rows, panels, grid):
            for name, axes in zip_longest(names, axes_row):
                axes.set(title=name or "", frame_on=name is not None)
                if evenly_spaced and len(ticks) == 1:
                    axes.set(xlim=(-0.5, 0.5))  # else offset lines would be far apart
                of_panel = row.points.loc[row.points.panel == name]
                _draw_panel(axes, of_panel, looks, places)
                _draw_levels(axes, row.levels)
                if evenly_spaced:
                    axes.set_xticks(range(len(ticks)), [f"{tick:,}" for tick in ticks])
            first = axes_row[0]
            first.set_ylabel(row.label, fontsize=9)
            if row.percent:
                percent_axis(first)
            if log_scale:
                first.set_yscale("log")
                first.yaxis.set_major_formatter("{x:g}")
                first.yaxis.set_minor_formatter("{x:g}")
        legend(grid)
        grid[0, 0].figure.supxlabel(xlabel, fontsize=10)
    return [as_block(path, caption, grid)]


def _draw_levels(axes: Axes, levels: Mapping[str, float]) -> None:
    """Draw horizontal lines: the teacher's solid, the others dotted."""
    for level, value in levels.items():
        color = GREY
        dash = "dotted"
        if level == "teacher":
            color = BLACK
            dash = "solid"
        axes.axhline(value, color=color, linestyle=dash, linewidth=0.9, zorder=1, label=level)


def _draw_panel(
    axes: Axes, points: pd.DataFrame, looks: Mapping[str, Look], ticks: list[float] | None
) -> None:
    """Draw the lines of a panel; with ``ticks``, at their places instead of at their values."""
    points = points.assign(error=points.get("error", math.nan))
    points = points.astype({"y": float, "error": float})
    for number, (line, style) in enumerate(looks.items()):
        of_line = points[points.line == line]
        if of_line.empty:
            continue
        places = list(of_line.x)
        if ticks is not None:
            places = [ticks.index(x) + DODGE * number for x in of_line.x]
        drawn = axes.errorbar(
            places,
            of_line.y,
            yerr=of_line.error if of_line.error.notna().any() else None,
            elinewidth=1.0,
            label=line,
            color=style.color,
            marker=style.marker,
            linestyle=style.dash,
        )
        titles = []
        for x, y, error in zip(of_line.x, of_line.y, of_line.error):
            margin = f" ± {error:.2g}" if error > 0 else ""
            titles.append(f"{line}: {y:.4g}{margin} at {x:,}")
        name_points(drawn[0], titles)


def legend(grid: np.ndarray) -> None:
    """Draw one legend above all panels, with each line once."""
    handle_of = {}
    for axes in grid.flat:
        for handle, label in zip(*axes.get_legend_handles_labels()):
            handle_of[label] = handle
    widest = max(map(len, handle_of))
    # A line of the legend has room for about 110 characters; each handle takes six.
    n_fitting = 110 // (6 + widest)
    ncols = max(1, min(len(handle_of), 7, n_fitting))
    grid[0, 0].figure.legend(handle_of.values(), handle_of, loc="outside upper left", ncols=ncols)


def percent_axis(axes: Axes) -> None:
    """Set the y axis to 0 to 100 %."""
    axes.set_ylim(-3, 108)
    axes.set_yticks(range(0, 101, 25), [f"{value} %" for value in range(0, 101, 25)])
