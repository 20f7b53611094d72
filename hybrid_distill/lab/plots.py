"""Figures of a report. Plain numbers (or head scores) in, PNG or SVG files out, as the path says.

Matplotlib is imported only when a figure is drawn.

Colours are those of Okabe and Ito (readable with every common colour blindness) and belong to a way of
choosing heads, so that a student has the same colour in every figure; marker shapes repeat the distinction
for print without colour.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ..io import replacing
from ..plan import HeadId

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap

    from ..scoring import HeadScores

BLACK, GREY, PALE = "#000000", "#767676", "#C8C8C8"
ORANGE, SKY, GREEN, BLUE = "#E69F00", "#56B4E9", "#009E73", "#0072B2"
VERMILLION, PURPLE = "#D55E00", "#CC79A7"

_LOOK = {
    "teacher": (BLACK, "s"),
    "all": (GREY, "s"),
    "none": (PURPLE, "v"),
    "random": (ORANGE, "D"),
    "top": (BLUE, "o"),
    "top_k": (BLUE, "o"),
    "student": (BLUE, "o"),
    "restoration": (VERMILLION, "^"),
}
_SPARE_LOOK = ((GREEN, "P"), (SKY, "X"))
_RC: dict[Any, Any] = {
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
    "lines.linewidth": 2.0,
    "lines.markersize": 5.5,
    "lines.solid_capstyle": "round",
    "svg.hashsalt": "hybrid-distill",  # the same figure is the same file
}


@dataclass(frozen=True)
class Series:
    """One labelled line; ``error``: a standard error per point; ``faint``: a thin line without a label."""

    label: str
    selection: str
    x: Sequence[float]
    y: Sequence[float]
    error: Sequence[float] = ()
    dashed: bool = False
    faint: bool = False


@contextmanager
def canvas(
    rows: int, columns: int, size: tuple[float, float], path: Path | Sequence[Path], **layout: Any
) -> Iterator[Any]:
    """A grid of axes (2D array) in the project's style, saved to ``path``, or to each of them, on exit."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context(_RC):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure.subplots(rows, columns, squeeze=False, **layout)
        for file in [path] if isinstance(path, Path) else path:
            kind = file.suffix.removeprefix(".")
            with replacing(file) as temporary:
                figure.savefig(temporary, format=kind, metadata={"Date": None} if kind == "svg" else None)


def look(selection: str) -> tuple[str, str]:
    """(colour, marker) of a way of choosing heads; unknown ways get a spare one, always the same."""
    return _LOOK.get(selection) or _SPARE_LOOK[sum(map(ord, selection)) % len(_SPARE_LOOK)]


def retrieval_curves(series: Sequence[Series], path: Path) -> None:
    """Accuracy of KV retrieval by generation (0..1) against the number of pairs in the dictionary."""
    sizes = sorted({int(x) for line in series for x in line.x})
    with canvas(1, 1, (7.4, 4.4), path) as grid:
        axes = grid[0, 0]
        axes.set_xscale("log", base=2)
        for line in series:
            _draw(axes, line, scale=100)
        axes.plot(sizes, [100 / n for n in sizes], color=GREY, linewidth=1.2, linestyle=(0, (1, 2)))
        labels = [(100 * line.y[-1], line.label, look(line.selection)[0]) for line in series if not line.faint]
        end_labels(axes, [*labels, (100 / sizes[-1], "chance (1 / pairs)", GREY)], low=0, high=104)
        axes.set_xticks(sizes, [str(n) for n in sizes])
        axes.minorticks_off()
        axes.set_ylim(0, 104)
        axes.set_yticks(range(0, 101, 25), [f"{y} %" for y in range(0, 101, 25)])
        axes.set_xlabel("pairs in the dictionary")
        axes.set_title("KV retrieval by generation: accuracy")


def head_scores(
    retrieval_LH: Sequence[Sequence[float]],
    control_LH: Sequence[Sequence[float]] | None,
    kept: Collection[tuple[int, int]],
    path: Path,
    *,
    kept_label: str = "kept heads",
) -> None:
    """Heat maps, layer down and head across: what a head is worth for retrieval, and for plain text.

    ``retrieval_LH`` is a difference of accuracies, shown in points; ``control_LH`` is in nats per token; NaN where a
    layer has no such head. ``kept`` heads are outlined.
    """
    n_layers, n_heads = len(retrieval_LH), len(retrieval_LH[0])
    cell = 0.44 if n_heads <= 16 else 0.19
    shown_LH = [[100 * value for value in row] for row in retrieval_LH]
    panels = [(shown_LH, "Retrieval", "points of accuracy", BLUE, "{:.0f}")]
    if control_LH is not None:
        panels.append(([list(row) for row in control_LH], "Control: plain text", "nats per token", GREEN, "{:.2f}"))
    size = (len(panels) * (n_heads * cell + 1.3), n_layers * cell + (1.3 if kept else 1.05))
    with canvas(1, len(panels), size, path) as grid:
        for axes, (values_LH, title, unit, hue, number) in zip(grid[0], panels, strict=True):
            _heat_map(axes, values_LH, kept, hue=hue, number=number if n_heads <= 16 else "", unit=unit)
            axes.set_title(title)
        absent = any(math.isnan(value) for row in retrieval_LH for value in row)
        notes = [*([f"outlined: {kept_label}"] if kept else []), *(["grey: no attention head"] if absent else [])]
        if notes:
            grid[0, 0].figure.supxlabel("; ".join(notes), fontsize=9, color=VERMILLION if kept else GREY)


def score_map(scores: HeadScores, path: Path, *, kept: Collection[tuple[int, int]] = ()) -> None:
    """`head_scores` of one scoring."""
    control_LH = None if scores.control_drop_LH is None else scores.control_drop_LH.tolist()
    head_scores(scores.accuracy_drop_LH.tolist(), control_LH, kept, path)


def score_bars(scores: HeadScores, path: Path, *, top: int = 30, k: int | None = None, by: str = "retrieval") -> None:
    """The ``top`` heads of a ranking, best first, with what each is worth and its 95 % interval.

    One panel each for accuracy, log-probability and, where measured, plain text. The first ``k`` heads are the dark
    ones. Without intervals in the scores, 1.96 standard errors to each side stand for them.
    """
    ranking = scores.ranking(by)[:top]
    accuracy = [[100 * x for x in entry] for entry in _with_interval(scores, "accuracy", ranking)]
    panels = [
        ("Accuracy lost", "points", BLUE, accuracy),
        ("Log-probability lost", "nats of the answer", SKY, _with_interval(scores, "logprob", ranking)),
    ]
    if scores.control_drop_LH is not None:
        panels.append(("Control: plain text", "nats per token", GREEN, _with_interval(scores, "control", ranking)))
    n_kept = len(ranking) if k is None else min(k, len(ranking))
    size = (2.9 * len(panels) + 0.6, 0.21 * len(ranking) + 1.5)
    with canvas(1, len(panels), size, path, sharey=True) as grid:
        for axes, (title, unit, hue, entries) in zip(grid[0], panels, strict=True):
            _bars(axes, entries, n_kept, hue)
            axes.set_title(title)
            axes.set_xlabel(unit)
        axes = grid[0, 0]
        axes.set_yticks(range(len(ranking)), [str(head) for head in ranking], fontsize=8)
        axes.set_ylim(len(ranking) - 0.4, -0.6)
        note = "lines: 95 % intervals"
        if n_kept < len(ranking):
            note = f"above the dashed line: the first {n_kept} heads; {note}"
        axes.figure.supxlabel(note, fontsize=9, color="#444444")


def _with_interval(scores: HeadScores, name: str, heads: Sequence[HeadId]) -> list[list[float]]:
    """(low, drop, high) of each head."""
    drop_LH, error_LH = getattr(scores, f"{name}_drop_LH"), getattr(scores, f"{name}_se_LH")
    interval_LH2 = getattr(scores, f"{name}_interval_LH2")
    entries = []
    for head in heads:
        drop = drop_LH[head].item()
        low, high = drop - 1.96 * error_LH[head].item(), drop + 1.96 * error_LH[head].item()
        if interval_LH2 is not None:
            low, high = interval_LH2[head].tolist()
        entries.append([low, drop, high])
    return entries


def _bars(axes: Axes, entries: Sequence[Sequence[float]], n_kept: int, hue: str) -> None:
    """Horizontal bars (low, value, high), downwards; those after ``n_kept`` pale, below a dashed line."""
    rows = range(len(entries))
    colours = [hue if row < n_kept else PALE for row in rows]
    axes.barh(rows, [value for _, value, _ in entries], height=0.72, color=colours)
    lows, highs = [low for low, _, _ in entries], [high for _, _, high in entries]
    axes.hlines(rows, lows, highs, color="white", linewidth=1.9, alpha=0.6)  # dark lines on dark bars
    axes.hlines(rows, lows, highs, color=BLACK, linewidth=1.1)
    axes.axvline(0, color="#444444", linewidth=0.8)
    if n_kept < len(entries):
        axes.axhline(n_kept - 0.5, color=VERMILLION, linewidth=1.2, linestyle="--")
    axes.grid(False)
    axes.grid(True, axis="x")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def layer_losses(panels: Mapping[str, Mapping[int, Sequence[tuple[float, float]]]], path: Path) -> None:
    """Alignment loss, one panel a student, one line a layer: ``panels[student][layer] = [(step, loss)]``."""
    columns = min(math.ceil(math.sqrt(len(panels))), 3)
    rows = math.ceil(len(panels) / columns)
    n_layers = max(len(layers) for layers in panels.values())
    with canvas(rows, columns, (3.5 * columns + 0.9, 2.7 * rows + 0.5), path, sharex=True, sharey=True) as grid:
        all_ends = []
        for axes, (student, layers) in zip(grid.flat, panels.items(), strict=False):
            ends = []
            for depth, (layer, points) in enumerate(layers.items()):
                x, y = zip(*points, strict=True)
                colour = _depth_colours()(depth / max(n_layers - 1, 1))
                smooth = _running_mean(y)
                axes.plot(x, smooth, color=colour, linewidth=1.5)
                ends.append((smooth[-1], layer, colour))
            axes.set_title(student)
            all_ends.append((axes, ends))
        _log_ticks(grid[0, 0])
        for axes, ends in all_ends if n_layers <= 8 else []:
            end_labels(axes, [(y, f"layer {layer}", colour) for y, layer, colour in ends], size=7.5)
        for axes in grid.flat[len(panels) :]:
            axes.set_axis_off()
        for axes in grid.flat[max(len(panels) - columns, 0) : len(panels)]:
            axes.xaxis.set_tick_params(labelbottom=True)
        if n_layers > 8:
            _depth_bar(grid, n_layers)
        grid[0, 0].figure.supxlabel("optimiser step", fontsize=10)
        grid[0, 0].figure.supylabel("alignment loss", fontsize=10)


def training_losses(series: Sequence[Series], path: Path) -> None:
    """Loss of the distillation stage against step, one line a student."""
    with canvas(1, 1, (7.4, 3.8), path) as grid:
        axes = grid[0, 0]
        labels = []
        for line in series:
            colour, _ = look(line.selection)
            smooth = _running_mean(line.y)
            axes.plot(line.x, line.y, color=colour, alpha=0.22, linewidth=0.8)
            axes.plot(line.x, smooth, color=colour, linestyle="--" if line.dashed else "-")
            labels.append((smooth[-1], line.label, colour))
        _log_ticks(axes)
        end_labels(axes, labels)
        axes.set_xlabel("optimiser step")
        axes.set_title("Distillation loss (running mean; faint: every logged step)")


def cache_curves(series: Sequence[Series], path: Path) -> None:
    """Bytes of the cache of one sequence against its length; straight lines through the measured lengths."""
    largest = max(max(line.y) for line in series)
    unit, divisor = ("MB", 1e6) if largest >= 1e6 else ("kB", 1e3)
    with canvas(1, 1, (7.4, 4.0), path) as grid:
        axes = grid[0, 0]
        for line in series:
            _draw(axes, line, scale=1 / divisor)
        labels = [(line.y[-1] / divisor, line.label, look(line.selection)[0]) for line in series]
        end_labels(axes, labels, low=0, high=1.06 * largest / divisor)
        axes.set_ylim(0, 1.06 * largest / divisor)
        axes.set_xlim(left=0)
        lengths = sorted({int(x) for line in series for x in line.x})
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axes.set_xlabel("tokens in the context")
        axes.set_title(f"Cache of one sequence, {unit} (16-bit keys and values, 32-bit states)")


def _draw(axes: Axes, line: Series, *, scale: float) -> None:
    colour, marker = look(line.selection)
    y = [scale * value for value in line.y]
    if line.faint:
        axes.plot(line.x, y, color=colour, linewidth=0.9, alpha=0.5)
        return
    style = "--" if line.dashed else "-"
    face = "white" if line.dashed else colour
    axes.plot(line.x, y, color=colour, marker=marker, linestyle=style, markerfacecolor=face, zorder=3)
    if line.error:
        error = [scale * value for value in line.error]
        axes.errorbar(line.x, y, yerr=error, fmt="none", ecolor=colour, elinewidth=1.2, capsize=2, alpha=0.8)


def end_labels(
    axes: Axes,
    labels: Sequence[tuple[float, str, Any]],
    *,
    low: float | None = None,
    high: float | None = None,
    size: float = 9,
) -> None:
    """Write each (y, text, colour) right of the axes at its height, pushed apart where they would overlap."""
    if low is not None:
        axes.set_ylim(low, high)
    bottom, top = axes.get_ylim()
    logarithmic = axes.get_yscale() == "log"

    def height(y: float) -> float:
        if logarithmic:
            return (math.log(y) - math.log(bottom)) / (math.log(top) - math.log(bottom))
        return (y - bottom) / (top - bottom)

    figure = axes.figure
    rows = axes.get_subplotspec().get_gridspec().nrows  # type: ignore[union-attr]
    gap = 1.25 * size / 72 / (0.78 * figure.get_size_inches()[1] / rows)  # type: ignore[union-attr]
    ordered = sorted(labels, key=lambda label: label[0])
    placed = spread([height(y) for y, _, _ in ordered], gap)
    for (y, text, colour), position in zip(ordered, placed, strict=True):
        axes.annotate(
            text,
            xy=(1.0, height(y)),
            xytext=(1.035, position),
            xycoords="axes fraction",
            textcoords="axes fraction",
            color=colour,
            fontsize=size,
            va="center",
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.6,
                "shrinkA": 1,
                "relpos": (0, 0.5),
            },
        )


def spread(positions: Sequence[float], gap: float) -> list[float]:
    """Ascending positions, moved as little as needed (least squares) to be at least ``gap`` apart.

    Pool adjacent violators on ``position - index * gap``: blocks that would overlap are centred on their
    mean.
    """
    blocks: list[list[float]] = []
    for index, position in enumerate(positions):
        blocks.append([position - index * gap])
        while len(blocks) > 1 and fmean(blocks[-2]) > fmean(blocks[-1]):
            last = blocks.pop()
            blocks[-1].extend(last)
    level = [fmean(block) for block in blocks for _ in block]
    return [value + index * gap for index, value in enumerate(level)]


def _heat_map(
    axes: Axes,
    values_LH: Sequence[Sequence[float]],
    kept: Collection[tuple[int, int]],
    *,
    hue: str,
    number: str,
    unit: str,
    lowest_is_best: bool = False,
) -> None:
    """Darkest is best: the highest of the values, or of ranks the first, 1."""
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.patches import Rectangle

    top = max((value for row in values_LH for value in row if not math.isnan(value)), default=0)
    top = top if top > 0 else 1.0
    ends = [hue, "#FFFFFF"] if lowest_is_best else ["#FFFFFF", hue]
    colours = LinearSegmentedColormap.from_list(unit, ends).with_extremes(bad="#DDDDDD")
    image = axes.imshow(values_LH, cmap=colours, vmin=int(lowest_is_best), vmax=top, aspect="equal")
    n_layers, n_heads = len(values_LH), len(values_LH[0])
    axes.grid(False)
    axes.set_xticks([h - 0.5 for h in range(1, n_heads)], minor=True)
    axes.set_yticks([layer - 0.5 for layer in range(1, n_layers)], minor=True)
    axes.grid(True, which="minor", axis="both", color="#EEEEEE", linewidth=0.8)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)
    axes.set_xticks(range(0, n_heads, 1 if n_heads <= 16 else 4))
    axes.set_yticks(range(0, n_layers, 1 if n_layers <= 16 else 4))
    axes.set_xlabel("head")
    axes.set_ylabel("layer")
    if number:
        for layer, row in enumerate(values_LH):
            for head, value in enumerate(row):
                if math.isnan(value):
                    continue
                dark = value < 0.4 * top if lowest_is_best else value > 0.6 * top
                colour = "white" if dark else "#444444"
                axes.text(head, layer, _short(number, value), color=colour, fontsize=7, ha="center", va="center")
    for layer, head in kept:
        box = Rectangle((head - 0.5, layer - 0.5), 1, 1, fill=False, edgecolor=VERMILLION, linewidth=2, zorder=5)
        box.set_clip_on(False)
        axes.add_patch(box)
    bar = axes.figure.colorbar(image, cax=axes.inset_axes((1.03, 0, 0.13 / (0.45 * n_heads), 1)))
    bar.set_label(unit, fontsize=9)
    bar.outline.set_visible(False)  # type: ignore[operator]
    bar.ax.tick_params(labelsize=8, length=2)


def _short(number: str, value: float) -> str:
    """A number for a small cell: no zero before the point, no minus before a zero."""
    text = number.format(value)
    if float(text) == 0:
        text = text.lstrip("-")
    return text.replace("0.", ".").replace("-", "\N{MINUS SIGN}")


def _depth_colours() -> Colormap:
    """From the first layer to the last: the part of viridis that is dark enough to read on white."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    return ListedColormap(colormaps["viridis"]([0.78 * i / 255 for i in range(256)]))


def _log_ticks(axes: Axes) -> None:
    """Logarithmic height with plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    bottom, top = axes.get_ylim()
    subs = (1.0,) if top / bottom > 100 else (1.0, 2.0, 5.0)
    axes.yaxis.set_major_locator(LogLocator(10, subs=subs))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _depth_bar(grid: Any, n_layers: int) -> None:
    """A colour bar in place of labels where a panel has too many layers to name each."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    mapping = ScalarMappable(Normalize(0, n_layers - 1), _depth_colours())
    ticks = range(0, n_layers, math.ceil(n_layers / 8))
    bar = grid[0, 0].figure.colorbar(mapping, ax=list(grid.flat), ticks=ticks, shrink=0.8, aspect=25, pad=0.02)
    bar.set_label("layer")
    bar.outline.set_visible(False)


def _running_mean(values: Sequence[float]) -> list[float]:
    """Mean over a window of a fortieth of the curve or 5 points, whichever is longer, cut at the ends."""
    half = max(len(values) // 80, min(2, len(values) // 10))
    return [fmean(values[max(i - half, 0) : i + half + 1]) for i in range(len(values))]
