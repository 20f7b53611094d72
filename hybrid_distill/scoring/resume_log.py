"""Save measurements to a file, from which a stopped call resumes."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

from ..distributed import agree_on, rank_and_world
from ..io import Record, write_json

FORMAT = "hybrid-distill/head-scores-partial/3"

log = logging.getLogger(__name__)


class ResumeLog:
    """Steps measured so far, in order; in scoring, a step is a layer's heads in one round.

    Without a path, nothing is read or written. Steps from another model, task or version are
    ignored with a warning.
    """

    def __init__(self, path: str | Path | None, provenance: Record) -> None:
        self.path = None if path is None else Path(path)
        # The date is that of this call; everything else has to match.
        task = {name: value for name, value in provenance.items() if name != "date"}
        # Through JSON, as the file was: tuples have become lists there.
        self.task = json.loads(json.dumps(task))
        # All processes use what the main process reads: other machines may not have the file.
        self.steps: list[Record] = agree_on(self._read)
        self.n_used = 0

    def next(self, measure: Callable[[], Record]) -> Record:
        """Return the next step from the file; if missing, measure it and add it atomically."""
        if self.n_used == len(self.steps):
            self.steps.append(measure())
            self._write()
        self.n_used += 1
        return self.steps[self.n_used - 1]

    def _write(self) -> None:
        # Results are shared, so one process writes for all.
        if self.path is None or rank_and_world()[0] != 0:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        record = {
            "format": FORMAT,
            "provenance": self.task,
            "steps": self.steps,
        }
        # On one line: the file is rewritten after every layer.
        write_json(self.path, record, indent=None)

    def _read(self) -> list[Record]:
        if self.path is None or not self.path.exists():
            return []
        try:
            record = json.loads(self.path.read_text())
            if (record["format"], record["provenance"]) == (FORMAT, self.task):
                return record["steps"]
            reason = "they are from another model, task or version"
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            reason = f"they cannot be read: {error}"
        log.warning("measurements in %s are not used (%s); starting over", self.path, reason)
        return []
