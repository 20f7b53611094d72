"""Find the files of a local data source: those of a folder that hold text, among everything else in it."""

from __future__ import annotations

import logging
import os
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".parquet")

log = logging.getLogger(__name__)


@dataclass
class Contents:
    """Contents of a folder: its files, and the names of everything that is not read."""

    files: list[Path] = field(default_factory=list)
    hidden: list[str] = field(default_factory=list)
    """Files and folders: copies made by notebooks, caches and version control, the ``._`` files of macOS."""
    again: list[str] = field(default_factory=list)
    """Links to folders that are read already, or that lead back to a folder above them."""
    broken: list[str] = field(default_factory=list)
    """Links without a target."""

    def left_out(self) -> list[str]:
        """Count what is not read, by kind, each with its first name."""
        counts = []
        others = [file.name for file in self.files if not file.name.endswith(SUFFIXES)]
        if others:
            counts.append(f"{_counted('files', others)}; only {', '.join(SUFFIXES)} are read")
        kinds = {
            "hidden files or folders": self.hidden,
            "links to folders read already": self.again,
            "broken links": self.broken,
        }
        for kind, names in kinds.items():
            if names:
                counts.append(_counted(kind, names))
        return counts


def source_files(source: str) -> list[Path]:
    """Return the files of a local source, sorted; linked folders are read too. Raises ValueError if there are none.

    Logs a line with the counts of everything else in a folder. A source that is itself hidden is read: the user has
    named it.
    """
    path = Path(source).expanduser()
    if not path.exists():
        raise _unreadable(source, "does not exist")
    contents = Contents([path])
    left_out = []
    if path.is_dir():
        contents = contents_of(path)
        left_out = contents.left_out()
    files = sorted(file for file in contents.files if file.name.endswith(SUFFIXES))
    if not files:
        besides = f" ({', '.join(left_out)})" if left_out else ""
        raise _unreadable(source, f"holds no {', '.join(SUFFIXES)} file{besides}")
    if left_out:
        _log_once(f"{path}: {'; '.join(left_out)}")
    return files


def _unreadable(source: str, problem: str) -> ValueError:
    return ValueError(
        f"data source {source!r} {problem}; pass files or folders of {', '.join(SUFFIXES)}, folders that "
        "`hybrid-distill prepare-data` or `generate-data` (the teacher's own text) has written, "
        "hf:repo:config:split, or tiny."
    )


def contents_of(top: Path) -> Contents:
    """List a folder recursively, also through links; each folder is read once."""
    contents = Contents()
    seen: set[str] = set()
    pending = deque([top])
    while pending:
        folder = pending.popleft()
        # A link may lead back to a folder above it.
        real_path = os.path.realpath(folder)
        if real_path in seen:
            contents.again.append(folder.name)
            continue
        seen.add(real_path)
        for path in sorted(folder.iterdir()):
            if path.name.startswith("."):
                contents.hidden.append(path.name)
            elif path.is_file():
                contents.files.append(path)
            elif not path.is_dir():
                contents.broken.append(path.name)
            elif path.is_symlink():
                # Last in the queue: a folder is read at its own path, if that is below ``top`` too.
                pending.append(path)
            else:
                pending.appendleft(path)
    return contents


def _counted(kind: str, names: Sequence[str]) -> str:
    """Count names, and give the first: ``3 broken links left out (a.txt ...)``."""
    more = " ..." if len(names) > 1 else ""
    if len(names) == 1:
        kind = re.sub(r"s\b", "", kind)
    return f"{len(names)} {kind} left out ({min(names)}{more})"


@cache
def _log_once(line: str) -> None:
    """Log a line the first time only: a run lists its sources several times."""
    log.info("%s", line)
