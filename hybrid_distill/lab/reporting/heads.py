"""Figure and table of head scores."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from ...plan import HeadId
from ...scoring import HeadScores
from .document import Figure, with_error
from .figures import BLUE, GREEN, GREY, SKY, VERMILION, as_block, figure, has_matplotlib, name_points


class Measure(NamedTuple):
    """Measure of every head: its prefix in `HeadScores`, and its format."""

    name: str
    title: str
    unit: str
    header: str
    color: str
    digits: int
    scale: float = 1.0

    def of(self, scores: HeadScores, part: str) -> np.ndarray:
        """Return a table of the scores: ``drop_LH`` or ``se_LH``."""
        return self.scale * getattr(scores, f"{self.name}_{part}").numpy()

    def is_in(self, scores: HeadScores) -> bool:
        return getattr(scores, f"{self.name}_drop_LH") is not None


ACCURACY = Measure("accuracy", "Accuracy lost", "points", "accuracy, points", BLUE, 1, 100.0)
LOGPROB = Measure("logprob", "Log-probability lost", "nats", "answer's log-probability, nats", SKY, 3)
CONTROL = Measure("control", "Control: plain text", "nats per token", "plain text, nats per token", GREEN, 4)


def score_table(scores: HeadScores, *, top: int = 10, kept: Collection[HeadId] = ()) -> pd.DataFrame:
    """Return the ``top`` heads of the ranking, each number with its standard error."""
    heads = scores.ranking()[:top]
    table = pd.DataFrame({"rank": range(1, len(heads) + 1), "head": map(str, heads)})
    table["kept"] = ["yes" if head in kept else "" for head in heads]
    for measure in (ACCURACY, LOGPROB, CONTROL):
        if measure.is_in(scores):
            drop_LH, error_LH = measure.of(scores, "drop_LH"), measure.of(scores, "se_LH")
            cells = [with_error(drop_LH[head], error_LH[head] or None, measure.digits) for head in heads]
            table[measure.header] = cells
    return table


def score_map(
    scores: HeadScores, path: Path, *, kept: Collection[tuple[int, int]] = (), label: str = "kept heads"
) -> list[Figure]:
    """Draw heat maps of layers (rows) by heads (columns): retrieval, and the plain-text control. Outlines ``kept``.

    Returns the figure, or nothing without matplotlib.
    """
    if not has_matplotlib():
        return []
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.patches import Rectangle

    panels = [measure for measure in (ACCURACY, CONTROL) if measure.is_in(scores)]
    is_small, n_heads = scores.n_heads <= 16, scores.n_heads
    cell = 0.44 if is_small else 0.19
    size = (len(panels) * (n_heads * cell + 1.3), scores.n_layers * cell + 1.3)
    with figure(path, 1, len(panels), size=size) as grid:
        for axes, measure in zip(grid[0], panels):
            value_LH = measure.of(scores, "drop_LH")
            top = max(np.nanmax(value_LH, initial=0.0), 1e-9)
            colors = LinearSegmentedColormap.from_list(measure.name, ["#FFFFFF", measure.color])
            image = axes.imshow(value_LH, cmap=colors.with_extremes(bad="#DDDDDD"), vmin=0, vmax=top, aspect="equal")
            axes.grid(False)
            axes.set(xlabel="head", ylabel="layer", title=measure.title)
            axes.set_xticks(range(0, n_heads, 1 if is_small else 4))
            axes.set_yticks(range(0, scores.n_layers, 1 if scores.n_layers <= 16 else 4))
            for (layer, head), value in np.ndenumerate(value_LH) if is_small else ():
                digits, color = 0 if measure is ACCURACY else 2, "white" if value > 0.6 * top else "#444444"
                text = "" if np.isnan(value) else f"{round(value, digits) + 0.0:.{digits}f}"
                axes.text(head, layer, text, color=color, fontsize=7, ha="center", va="center")
            places = list(np.ndindex(value_LH.shape))
            layers, heads = zip(*places)
            points = axes.scatter(heads, layers, s=(60 * cell) ** 2, marker="s", alpha=0, linewidths=0)
            titles = (f"{HeadId(*p)}: {value_LH[p]:.{measure.digits}f} {measure.unit}" for p in places)
            name_points(points, titles)
            for layer, head in kept:
                axes.add_patch(Rectangle((head - 0.5, layer - 0.5), 1, 1, fill=False, edgecolor=VERMILION, linewidth=2))
            axes.figure.colorbar(image, ax=axes, shrink=0.9, label=measure.unit)
        outlined = [f"outlined: {label}"] if kept else []
        notes = [*outlined, *(["grey: no attention head"] if scores.accuracy_drop_LH.isnan().any() else [])]
        grid[0, 0].figure.supxlabel("; ".join(notes), fontsize=9, color=VERMILION if kept else GREY)
    worth = "What each head is worth, for KV retrieval and for plain text"
    return [as_block(path, "; ".join([worth, *outlined]) + ".", grid)]
