"""Figures and table of head scores."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd

from ...plan import HeadId
from ...scoring import HeadScores
from .figures import BLACK, BLUE, GREEN, GREY, PALE, SKY, VERMILION, figure
from .tables import with_error

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Measure(NamedTuple):
    """A number of every head: its prefix in `HeadScores`, and how it is shown."""

    name: str
    title: str
    unit: str
    header: str
    color: str
    digits: int
    scale: float = 1.0

    def drop_LH(self, scores: HeadScores) -> np.ndarray:
        return self.scale * getattr(scores, f"{self.name}_drop_LH").numpy()

    def error_LH(self, scores: HeadScores) -> np.ndarray:
        return self.scale * getattr(scores, f"{self.name}_se_LH").numpy()

    def interval_LH2(self, scores: HeadScores) -> np.ndarray:
        """Return measured intervals, else 1.96 standard errors to each side."""
        found = getattr(scores, f"{self.name}_interval_LH2")
        if found is not None:
            return self.scale * found.numpy()
        margin_LH = 1.96 * self.error_LH(scores)
        return np.stack([self.drop_LH(scores) - margin_LH, self.drop_LH(scores) + margin_LH], axis=-1)


ACCURACY = Measure("accuracy", "Accuracy lost", "points", "KV accuracy, points", BLUE, 1, 100.0)
LOGPROB = Measure("logprob", "Log-probability lost", "nats", "answer's log-probability, nats", SKY, 3)
CONTROL = Measure("control", "Control: plain text", "nats per token", "plain text, nats per token", GREEN, 4)


def _measured(scores: HeadScores, *measures: Measure) -> list[Measure]:
    return [measure for measure in measures if getattr(scores, f"{measure.name}_drop_LH") is not None]


def score_table(scores: HeadScores, *, top: int = 10, kept: Collection[HeadId] = ()) -> pd.DataFrame:
    """Return the ``top`` heads of the ranking, each number with its standard error."""
    heads = scores.ranking()[:top]
    table = pd.DataFrame({"rank": range(1, len(heads) + 1), "head": map(str, heads)})
    table["kept"] = ["yes" if head in kept else "" for head in heads]
    for measure in (ACCURACY, LOGPROB, CONTROL):
        table[measure.header] = None
        if measure in _measured(scores, measure):
            drop_LH, error_LH = measure.drop_LH(scores), measure.error_LH(scores)
            cells = [with_error(drop_LH[head], error_LH[head] or None, measure.digits) for head in heads]
            table[measure.header] = cells
    return table


def score_map(
    scores: HeadScores, path: Path, *, kept: Collection[tuple[int, int]] = (), label: str = "kept heads"
) -> None:
    """Draw heat maps, layer down and head across: retrieval, and the control on plain text. ``kept`` is outlined."""
    panels, cell = _measured(scores, ACCURACY, CONTROL), 0.44 if scores.n_heads <= 16 else 0.19
    size = (len(panels) * (scores.n_heads * cell + 1.3), scores.n_layers * cell + 1.3)
    with figure(path, 1, len(panels), size=size) as grid:
        for axes, measure in zip(grid[0], panels):
            _heat_map(axes, measure, measure.drop_LH(scores), kept)
        notes = [f"outlined: {label}"] if kept else []
        notes += ["grey: no attention head"] if scores.accuracy_drop_LH.isnan().any() else []
        grid[0, 0].figure.supxlabel("; ".join(notes), fontsize=9, color=VERMILION if kept else GREY)


def _heat_map(axes: Axes, measure: Measure, value_LH: np.ndarray, kept: Collection[tuple[int, int]]) -> None:
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.patches import Rectangle

    n_layers, n_heads = value_LH.shape
    top = max(np.nanmax(value_LH, initial=0.0), 1e-9)
    colors = LinearSegmentedColormap.from_list(measure.name, ["#FFFFFF", measure.color]).with_extremes(bad="#DDDDDD")
    image = axes.imshow(value_LH, cmap=colors, vmin=0, vmax=top, aspect="equal")
    axes.grid(False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xticks(range(0, n_heads, 1 if n_heads <= 16 else 4))
    axes.set_yticks(range(0, n_layers, 1 if n_layers <= 16 else 4))
    axes.set(xlabel="head", ylabel="layer", title=measure.title)
    if n_heads <= 16:
        for (layer, head), value in np.ndenumerate(value_LH):
            if not np.isnan(value):
                digits, color = 0 if measure is ACCURACY else 2, "white" if value > 0.6 * top else "#444444"
                text = f"{round(value, digits) + 0.0:.{digits}f}"
                axes.text(head, layer, text, color=color, fontsize=7, ha="center", va="center")
    for layer, head in kept:
        box = Rectangle((head - 0.5, layer - 0.5), 1, 1, fill=False, edgecolor=VERMILION, linewidth=2, clip_on=False)
        axes.add_patch(box)
    bar = axes.figure.colorbar(image, cax=axes.inset_axes((1.03, 0, 0.13 / (0.45 * n_heads), 1)))
    bar.set_label(measure.unit, fontsize=9)


def score_bars(scores: HeadScores, path: Path, *, top: int = 30, k: int | None = None, by: str = "retrieval") -> None:
    """Draw the ``top`` heads of a ranking, best first, with 95 % intervals; the first ``k`` heads are the dark ones."""
    heads, panels = scores.ranking(by)[:top], _measured(scores, ACCURACY, LOGPROB, CONTROL)
    layers, columns = zip(*heads)
    rows, n_kept = np.arange(len(heads)), len(heads) if k is None else min(k, len(heads))
    with figure(path, 1, len(panels), size=(2.9 * len(panels) + 0.6, 0.21 * len(heads) + 1.5), sharey=True) as grid:
        for axes, measure in zip(grid[0], panels):
            low, high = measure.interval_LH2(scores)[layers, columns].T
            colors = [measure.color if row < n_kept else PALE for row in rows]
            axes.barh(rows, measure.drop_LH(scores)[layers, columns], height=0.72, color=colors)
            axes.hlines(rows, low, high, color="white", linewidth=1.9, alpha=0.6)  # dark lines on dark bars
            axes.hlines(rows, low, high, color=BLACK, linewidth=1.1)
            axes.axvline(0, color="#444444", linewidth=0.8)
            if n_kept < len(heads):
                axes.axhline(n_kept - 0.5, color=VERMILION, linewidth=1.2, linestyle="--")
            axes.grid(False)
            axes.grid(True, axis="x")
            axes.set(title=measure.title, xlabel=measure.unit)
        grid[0, 0].set_yticks(rows, [str(head) for head in heads], fontsize=8)
        grid[0, 0].set_ylim(len(heads) - 0.4, -0.6)
        note = f"above the dashed line: the first {n_kept} heads; " if n_kept < len(heads) else ""
        grid[0, 0].figure.supxlabel(f"{note}lines: 95 % intervals", fontsize=9, color="#444444")
