"""Files of a local data source: those of a folder that hold text, among all else that people's folders hold."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".parquet")

log = logging.getLogger(__name__)


@dataclass
class Contents:
    """Contents of a folder: its files, and the names of what is left out."""

    files: list[Path] = field(default_factory=list)
    hidden: list[str] = field(default_factory=list)
    """Files and folders: copies that notebooks, caches and version control keep, the ``._`` files of macOS."""
    again: list[str] = field(default_factory=list)
    """Links to folders that are read already, or that lead back to a folder above them."""
    broken: list[str] = field(default_factory=list)
    """Links to nothing."""

    def left_out(self) -> list[str]:
        """Count what is not read, by kind, each with its first name."""
        others = [file.name for file in self.files if not file.name.endswith(SUFFIXES)]
        kinds = {
            "hidden files or folders": self.hidden,
            "links to folders read already": self.again,
            "broken links": self.broken,
        }
        counts = [_counted(kind, names) for kind, names in kinds.items() if names]
        if others:
            counts.insert(0, f"{_counted('files', others)}; only {', '.join(SUFFIXES)} are read")
        return counts


def source_files(source: str) -> list[Path]:
    """Return the files of a local source, sorted; linked folders are read too. Raises ValueError if there are none.

    One line counts what a folder holds besides. A hidden file or folder that is itself the source is read: somebody
    has named it.
    """
    path = Path(source).expanduser()
    if not path.exists():
        raise _unreadable(source, "does not exist")
    contents = contents_of(path) if path.is_dir() else Contents([path])
    files = sorted(file for file in contents.files if file.name.endswith(SUFFIXES))
    left_out = contents.left_out() if path.is_dir() else []
    if not files:
        besides = f" ({', '.join(left_out)})" if left_out else ""
        raise _unreadable(source, f"holds no {', '.join(SUFFIXES)} file{besides}")
    if left_out:
        _log_once(f"{path}: {'; '.join(left_out)}")
    return files


def _unreadable(source: str, problem: str) -> ValueError:
    return ValueError(
        f"data source {source!r} {problem}; pass files or folders of {', '.join(SUFFIXES)}, folders that "
        "`hybrid-distill prepare-data` has written, hf:repo:config:split, or tiny."
    )


def contents_of(top: Path) -> Contents:
    """Look through a folder and the folders in it, through links too; each folder is read once."""
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
                # Links come last: a folder is read at its own path, if that is among those to read.
                pending.append(path)
            else:
                pending.appendleft(path)
    return contents


def _counted(what: str, names: Sequence[str]) -> str:
    more = " ..." if len(names) > 1 else ""
    return f"{len(names)} {what} left out ({min(names)}{more})"


@cache
def _log_once(line: str) -> None:
    """Log a line the first time: a run looks through its sources several times."""
    log.info("%s", line)
