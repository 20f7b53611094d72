"""The one way to write a file that somebody reads later: it is there whole, or as it was before."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a name beside ``path``; the file that is written there takes its place, synced, when the block ends well.

    The name is always the same: what a killed process has left is overwritten by the next one.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, record: Mapping[str, Any], *, indent: int | None = 2) -> None:
    """Write a JSON file, whole or not at all."""
    write_text(path, json.dumps(record, indent=indent) + "\n")


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
