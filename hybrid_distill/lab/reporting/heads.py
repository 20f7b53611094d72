"""Figure and table of head scores."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from torch import Tensor

from ...plan import HeadId
from ...scoring import HeadScores
from .document import Figure, with_error
from .figures import (
    BLUE,
    GREEN,
    GREY,
    SKY,
    VERMILION,
    as_block,
    figure,
    has_matplotlib,
    name_points,
)

FEW = 16
"""Number of heads or layers up to which an axis names each. Cells of so few heads have room for a number."""


class Measure(NamedTuple):
    """Measure of every head, and its format."""

    drop_of: Callable[[HeadScores], Tensor | None]
    error_of: Callable[[HeadScores], Tensor | None]
    title: str
    unit: str
    header: str
    color: str
    digits: int
    scale: float = 1.0

    def is_in(self, scores: HeadScores) -> bool:
        return self.drop_of(scores) is not None

    def drop_LH(self, scores: HeadScores) -> np.ndarray:
        return self._scaled(self.drop_of(scores))

    def error_LH(self, scores: HeadScores) -> np.ndarray:
        """Return the standard error of every drop."""
        return self._scaled(self.error_of(scores))

    def _scaled(self, table_LH: Tensor | None) -> np.ndarray:
        assert table_LH is not None, "the scores lack this measure"
        return self.scale * table_LH.numpy()


ACCURACY = Measure(
    drop_of=lambda scores: scores.accuracy_drop_LH,
    error_of=lambda scores: scores.accuracy_se_LH,
    title="Accuracy lost",
    unit="points",
    header="accuracy, points",
    color=BLUE,
    digits=1,
    scale=100.0,
)
LOGPROB = Measure(
    drop_of=lambda scores: scores.logprob_drop_LH,
    error_of=lambda scores: scores.logprob_se_LH,
    title="Log-probability lost",
    unit="nats",
    header="answer's log-probability, nats",
    color=SKY,
    digits=3,
)
CONTROL = Measure(
    drop_of=lambda scores: scores.control_drop_LH,
    error_of=lambda scores: scores.control_se_LH,
    title="Control: plain text",
    unit="nats per token",
    header="plain text, nats per token",
    color=GREEN,
    digits=4,
)


def score_table(
    scores: HeadScores, *, top: int = 10, kept: Collection[HeadId] = ()
) -> pd.DataFrame:
    """Return the ``top`` heads of the ranking, each number with its standard error."""
    heads = scores.ranking()[:top]
    table = pd.DataFrame({"rank": range(1, len(heads) + 1), "head": map(str, heads)})
    table["kept"] = ["yes" if head in kept else "" for head in heads]
    for measure in (ACCURACY, LOGPROB, CONTROL):
        if not measure.is_in(scores):
            continue
        drop_LH = measure.drop_LH(scores)
        error_LH = measure.error_LH(scores)
        cells = []
        for head in heads:
            cells.append(with_error(drop_LH[head], error_LH[head] or None, measure.digits))
        table[measure.header] = cells
    return table


def score_map(
    scores: HeadScores,
    path: Path,
    *,
    kept: Collection[tuple[int, int]] = (),
    label: str = "kept heads",
) -> list[Figure]:
    """Draw heat maps of layers (rows) by heads (columns): retrieval, and the plain-text control.

    Outlines the heads in ``kept``. Returns the figure, or nothing without matplotlib.
    """
    if not has_matplotlib():
        return []
    worth = LOGPROB if scores.is_additive else ACCURACY
    panels = [measure for measure in (worth, CONTROL) if measure.is_in(scores)]
    cell = _cell_size(scores)
    size = (len(panels) * (scores.n_heads * cell + 1.3), scores.n_layers * cell + 1.3)
    notes = [f"outlined: {label}"] if kept else []
    caption = "; ".join(["What each head is worth, for KV retrieval and for plain text", *notes])
    if scores.value_LH().isnan().any():
        notes.append("grey: no attention head")
    with figure(path, 1, len(panels), size=size) as grid:
        for axes, measure in zip(grid[0], panels):
            _draw_measure(axes, scores, measure, kept)
        color = VERMILION if kept else GREY
        grid[0, 0].figure.supxlabel("; ".join(notes), fontsize=9, color=color)
    return [as_block(path, f"{caption}.", grid)]


def _cell_size(scores: HeadScores) -> float:
    """Return the width of a cell in inches."""
    return 0.44 if scores.n_heads <= FEW else 0.19


def _draw_measure(
    axes: Any, scores: HeadScores, measure: Measure, kept: Collection[tuple[int, int]]
) -> None:
    """Draw one measure of all heads."""
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.patches import Rectangle

    has_numbers = scores.n_heads <= FEW
    value_LH = measure.drop_LH(scores)
    top = max(np.nanmax(value_LH, initial=0.0), 1e-9)
    colors = LinearSegmentedColormap.from_list(measure.title, ["#FFFFFF", measure.color])
    colors = colors.with_extremes(bad="#DDDDDD")
    image = axes.imshow(value_LH, cmap=colors, vmin=0, vmax=top, aspect="equal")
    axes.grid(False)
    axes.set(xlabel="head", ylabel="layer", title=measure.title)
    axes.set_xticks(range(0, scores.n_heads, 1 if has_numbers else 4))
    axes.set_yticks(range(0, scores.n_layers, 1 if scores.n_layers <= FEW else 4))
    digits = 0 if measure is ACCURACY else 2
    titles = []
    for (layer, head), value in np.ndenumerate(value_LH):
        titles.append(f"{HeadId(layer, head)}: {value:.{measure.digits}f} {measure.unit}")
        if has_numbers and not np.isnan(value):
            text = f"{round(value, digits) + 0.0:.{digits}f}"  # + 0.0: no "-0"
            color = "white" if value > 0.6 * top else "#444444"
            axes.text(head, layer, text, color=color, fontsize=7, ha="center", va="center")
    # Invisible points, whose titles browsers show: an image has none of its own.
    layers, heads = np.indices(value_LH.shape)
    area = (60 * _cell_size(scores)) ** 2
    points = axes.scatter(heads, layers, s=area, marker="s", alpha=0, linewidths=0)
    name_points(points, titles)
    for layer, head in kept:
        corner = (head - 0.5, layer - 0.5)
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=VERMILION, linewidth=2))
    axes.figure.colorbar(image, ax=axes, shrink=0.9, label=measure.unit)
