"""Choose what the figures of a report show, and have them drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import plots
from .record import HeadMap, Record, Row

Point = tuple[float, float]
Losses = Mapping[str, Sequence[Mapping[str, Any]]]


@dataclass(frozen=True)
class Figure:
    """A PNG beside the report, the section it stands in, and what it shows."""

    file: str
    section: str
    caption: str


def draw_figures(record: Record, directory: Path) -> list[Figure]:
    """Draw every figure that the record has numbers for; without matplotlib none, which is noted."""
    try:
        drawn = [
            _retrieval(record, directory),
            *(_heads(head_map, directory) for head_map in record.head_maps),
        ]
        drawn += [_alignment(record, directory), _distillation(record, directory), _cache(record, directory)]
    except ImportError as error:
        record.missing.append(f"the figures ({error}; `pip install matplotlib`)")
        return []
    return [figure for figure in drawn if figure is not None]


def heads_section(head_map: HeadMap) -> str:
    """Title of the section about one file of head scores."""
    return "Head scores" if head_map.name == "scores" else f"Head scores: {head_map.name}"


def _retrieval(record: Record, directory: Path) -> Figure | None:
    series = _by_size(record.rows, "kv_generation")
    if not series:
        return None
    plots.retrieval_curves(series, directory / "kv_retrieval.png")
    caption = "Accuracy by generation, by the number of pairs in the dictionary; bars: one standard error."
    return Figure("kv_retrieval.png", "Retrieval by dictionary size", caption)


def _heads(head_map: HeadMap, directory: Path) -> Figure:
    file = "heads.png" if head_map.name == "scores" else f"heads_{head_map.name}.png"
    scores = head_map.scores
    control_LH = None if scores.control_drop_LH is None else scores.control_drop_LH.tolist()
    plots.head_scores(
        scores.accuracy_drop_LH.tolist(),
        control_LH,
        head_map.kept,
        directory / file,
        kept_label=head_map.label,
    )
    outlined = f"; outlined: {head_map.label}." if head_map.kept else "."
    return Figure(
        file,
        heads_section(head_map),
        f"What each head is worth, for KV retrieval and for plain text{outlined}",
    )


def _alignment(record: Record, directory: Path) -> Figure | None:
    panels = {"all heads, once for every student": _layer_curves(record.shared_losses)}
    panels |= {row.label: _layer_curves(row.losses) for row in record.students}
    panels = {label: curves for label, curves in panels.items() if curves}
    if not panels:
        return None
    plots.layer_losses(panels, directory / "alignment_loss.png")
    caption = "Layer-to-layer alignment: each layer's loss on the teacher's own inputs (running mean)."
    return Figure("alignment_loss.png", "Training", caption)


def _distillation(record: Record, directory: Path) -> Figure | None:
    series = []
    for row in record.students:
        points = _points(_stage(row.losses, "distill"), lambda metric: metric.get("loss"))
        if points:
            steps, losses = zip(*points, strict=True)
            series.append(plots.Series(row.label, row.selection, steps, losses, dashed=bool(row.data)))
    if not series:
        return None
    plots.training_losses(series, directory / "distillation_loss.png")
    return Figure(
        "distillation_loss.png",
        "Training",
        "End-to-end distillation: loss against the teacher's predictions.",
    )


def _cache(record: Record, directory: Path) -> Figure | None:
    series = [line for line in _by_size(record.rows, "cache") if not (line.faint or line.dashed)]
    if not series:
        return None
    plots.cache_curves(series, directory / "cache.png")
    return Figure(
        "cache.png", "Memory", "Bytes that the cache of one sequence takes, by the length of the context."
    )


def _by_size(rows: Iterable[Row], name: str) -> list[plots.Series]:
    """One line a model over sizes; random draws stand faintly behind their mean."""
    rows = [row for row in rows if row.by_size(name)]
    averaged = {(row.k, row.data) for row in rows if row.draws > 1}
    series = []
    for row in rows:
        sizes, cells = zip(*row.by_size(name), strict=True)
        values, errors = zip(*cells, strict=True)
        faint = row.selection == "random" and row.draws == 1 and (row.k, row.data) in averaged
        shown = errors if name.startswith("kv") and any(errors) else ()
        series.append(
            plots.Series(row.label, row.selection, sizes, values, shown, dashed=bool(row.data), faint=faint)
        )
    return series


def _stage(losses: Losses, word: str) -> list[Mapping[str, Any]]:
    return [metric for stage, metrics in losses.items() if word in stage for metric in metrics]


def _layer_curves(losses: Losses) -> dict[int, list[Point]]:
    """Loss of each layer over the steps of the alignment stage; the metrics name layers "layer.3"."""
    metrics = _stage(losses, "align")
    names = {name for metric in metrics for name in metric.get("per_layer", {})}
    curves = {}
    for name in sorted(names, key=_layer_number):
        points = _points(metrics, lambda metric, name=name: metric.get("per_layer", {}).get(name))
        if points:
            curves[_layer_number(name)] = points
    return curves


def _layer_number(name: str) -> int:
    return int(name.rpartition(".")[2])


def _points(metrics: Iterable[Mapping[str, Any]], value: Callable[[Mapping[str, Any]], Any]) -> list[Point]:
    """(step, value) of positive, finite values; a step repeated after a resume counts once, the last time."""
    points = {metric["step"]: value(metric) for metric in metrics if "step" in metric}
    return [
        (step, float(y))
        for step, y in sorted(points.items())
        if isinstance(y, int | float) and 0 < y < math.inf
    ]
