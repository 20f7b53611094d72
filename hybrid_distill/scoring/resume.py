"""A file that says what an interrupted scoring has measured, so that the same call can go on from there."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from ..io import write_json
from .ranks import rank_and_world, together

PARTIAL_FORMAT = "hybrid-distill/head-scores-partial/2"

log = logging.getLogger(__name__)


class Steps:
    """What was measured step by step: a step is one layer's heads on one round's examples.

    Without a path nothing is read or written. Steps of another model, probe or version are not used, which the log
    says.
    """

    def __init__(self, path: str | Path | None, provenance: dict[str, Any]) -> None:
        self.path, self.provenance = None if path is None else Path(path), provenance
        # What the first process reads counts: not all machines may see the file.
        self.measured: list[dict[str, Any]] = together(self._read)[0]
        self.replayed = 0

    def next(self) -> dict[str, Any] | None:
        """The next step, if it was measured before."""
        if self.replayed == len(self.measured):
            return None
        self.replayed += 1
        return self.measured[self.replayed - 1]

    def add(self, step: dict[str, Any]) -> None:
        """Keep a new step; on disk it is there whole or not at all."""
        self.measured.append(step)
        self.replayed += 1
        if self.path is not None and rank_and_world()[0] == 0:
            record = {"format": PARTIAL_FORMAT, "provenance": self.provenance, "steps": self.measured}
            write_json(self.path, record, indent=None)

    def describe(self) -> str:
        """What can be gone on from, for the log of an interrupted run."""
        if self.path is None:
            return "nothing is kept of it; give a resume_path to go on from where it stops"
        return f"the layers measured so far ({len(self.measured)}) are in {self.path}: the same call goes on from there"

    def _read(self) -> list[dict[str, Any]]:
        if self.path is None or not self.path.exists():
            return []
        try:
            record = json.loads(self.path.read_text())
            if record["format"] == PARTIAL_FORMAT and _undated(record["provenance"]) == _undated(self.provenance):
                return record["steps"]
            reason = "they are of another model, probe or version"
        except (KeyError, TypeError, ValueError) as error:
            reason = f"they cannot be read: {error}"
        log.warning("partial scores in %s are not used (%s); scoring starts again", self.path, reason)
        return []


def _undated(provenance: dict[str, Any]) -> dict[str, Any]:
    """As it is read back from JSON, without what differs between runs of the same task."""
    kept = {name: value for name, value in provenance.items() if name != "date"}
    return json.loads(json.dumps(kept))
