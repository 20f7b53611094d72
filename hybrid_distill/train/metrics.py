"""Metrics of a stage on disk: one JSON line for each logged step."""

from __future__ import annotations

import json
from pathlib import Path

from ..io import Record, naming, write_text

METRICS = "metrics.jsonl"
NO_LOSS: Record = {"loss": None, "grad_norm": None, "per_layer": {}}
"""Metrics of a step that has no loss, or one that JSON cannot hold."""


def append_metrics(folder: Path, metrics: Record) -> None:
    """Add a step's line; a skipped step has no loss there."""
    if "skipped" in metrics:
        # Its loss may be NaN or infinite, which JSON lacks.
        metrics = metrics | NO_LOSS
    path = folder / METRICS
    with naming(path), path.open("a") as file:
        file.write(json.dumps(metrics) + "\n")


def cut_metrics(folder: Path, step: int) -> None:
    """Drop the lines of steps after ``step``, which will be run again.

    Drop an incomplete last line too.
    """
    path = folder / METRICS
    if not path.exists():
        return
    remaining: list[str] = []
    for line in path.read_text().splitlines():
        try:
            line_step = json.loads(line)["step"]
        except (ValueError, KeyError):
            # A process that was killed may leave half a line.
            continue
        if line_step <= step:
            remaining.append(line + "\n")
    write_text(path, "".join(remaining))
