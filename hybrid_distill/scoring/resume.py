"""A file of the measurements of an interrupted scoring, from which the same call continues."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

from ..distributed import compute_everywhere, rank_and_world
from ..io import write_json
from .head_scores import Record

PARTIAL_FORMAT = "hybrid-distill/head-scores-partial/2"

log = logging.getLogger(__name__)


class Steps:
    """Measurements step by step: a step is one layer's heads on one round's examples.

    Without a path nothing is read or written. Steps of another model, probe or version are not used, which is logged.
    """

    def __init__(self, path: str | Path | None, provenance: Record) -> None:
        self.path = None if path is None else Path(path)
        self.task = json.loads(json.dumps({name: value for name, value in provenance.items() if name != "date"}))
        # All processes use what the first one reads: not all machines may see the file.
        self.measured: list[Record] = compute_everywhere(self._read)[0]
        self.n_used = 0

    def next(self, measure: Callable[[], Record]) -> Record:
        """Return the next step: read from the file, or else measured and added to it, whole or not at all."""
        if self.n_used == len(self.measured):
            self.measured.append(measure())
            if self.path is not None and rank_and_world()[0] == 0:
                record = {"format": PARTIAL_FORMAT, "provenance": self.task, "steps": self.measured}
                write_json(self.path, record, indent=None)
        self.n_used += 1
        return self.measured[self.n_used - 1]

    def _read(self) -> list[Record]:
        if self.path is None or not self.path.exists():
            return []
        try:
            record = json.loads(self.path.read_text())
            record["provenance"].pop("date", None)  # as earlier versions wrote it
            if (record["format"], record["provenance"]) == (PARTIAL_FORMAT, self.task):
                return record["steps"]
            reason = "they are of another model, probe or version"
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            reason = f"they cannot be read: {error}"
        log.warning("partial scores in %s are not used (%s); scoring starts again", self.path, reason)
        return []
