"""The style of all figures; matplotlib is imported only when one is drawn.

Colors are those of Okabe and Ito (readable with every common color blindness) and belong to a way of choosing heads, so
that a student looks the same in every figure; markers and dashes repeat the distinction for print without color.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ...io import replacing

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes

BLACK, GREY, PALE = "#000000", "#767676", "#C8C8C8"
ORANGE, SKY, GREEN, BLUE = "#E69F00", "#56B4E9", "#009E73", "#0072B2"
VERMILION, PURPLE = "#D55E00", "#CC79A7"
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
    "random": Look(ORANGE, "D", DASHED),
    "layers": Look(GREEN, "P", DASH_DOT),
    "restoration": Look(VERMILION, "^", DOTTED),
}


def look(selection: str) -> Look:
    """Return the look of a way of choosing heads; rankings share one."""
    return _LOOK_OF.get(selection, LOOKS[0])


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


def log_ticks(axes: Axes) -> None:
    """Make the height logarithmic, with plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    bottom, top = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(10, subs=(1.0,) if top / bottom > 100 else (1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def percent_axis(axes: Axes, label: str = "") -> None:
    """Let the height run from 0 to 100 %."""
    axes.set_ylim(-3, 108)
    axes.set_yticks(range(0, 101, 25), [f"{value} %" for value in range(0, 101, 25)])
    axes.set_ylabel(label, fontsize=9)
