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


def source_files(source: str) -> list[Path]:
    """Return the files of a local source, sorted; linked folders are read too. Raises ValueError if there are none.

    One line counts what a folder holds besides. A hidden file or folder that is itself the source is read: somebody
    has named it.
    """
    path = Path(source).expanduser()
    contents = contents_of(path) if path.is_dir() else Contents([path])
    files = sorted(file for file in contents.files if file.name.endswith(SUFFIXES))
    others = [file.name for file in contents.files if not file.name.endswith(SUFFIXES)]
    left_out = [f"{_counted('files', others)}; only {', '.join(SUFFIXES)} are read"] if others else []
    for kind in ("hidden", "again", "broken"):
        if names := getattr(contents, kind):
            left_out.append(_counted(_KINDS[kind], names))
    if not path.exists() or not files:
        problem = f"holds no {', '.join(SUFFIXES)} file" if path.exists() else "does not exist"
        besides = f" ({', '.join(left_out)})" if left_out and path.exists() and path.is_dir() else ""
        raise ValueError(
            f"data source {source!r} {problem}{besides}; pass files or folders of {', '.join(SUFFIXES)}, folders that "
            "`hybrid-distill prepare-data` has written, hf:repo:config:split, or tiny."
        )
    if left_out:
        _log_once(f"{path}: {'; '.join(left_out)}")
    return files


_KINDS = {"hidden": "hidden files or folders", "again": "links to folders read already", "broken": "broken links"}


def contents_of(top: Path) -> Contents:
    """Look through a folder and the folders in it, through links too; each folder is read once."""
    found, seen = Contents(), set[str]()
    pending = deque([top])
    while pending:
        folder = pending.popleft()
        if (real := os.path.realpath(folder)) in seen:
            found.again.append(folder.name)
            continue
        seen.add(real)
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.name.startswith("."):
                    found.hidden.append(entry.name)
                elif entry.is_file():
                    found.files.append(Path(entry.path))
                elif not entry.is_dir():
                    found.broken.append(entry.name)
                elif entry.is_symlink():  # last: a folder has its own path, if it is among those to read
                    pending.append(Path(entry.path))
                else:
                    pending.appendleft(Path(entry.path))
    return found


def _counted(what: str, names: Sequence[str]) -> str:
    more = " ..." if len(names) > 1 else ""
    return f"{len(names)} {what} left out ({min(names)}{more})"


@cache
def _log_once(line: str) -> None:
    """Log a line the first time: a run looks through its sources several times."""
    log.info("%s", line)
