"""Atomic writes: a reader finds the whole new file, or the one that was there before."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a name beside ``path``; the file written there replaces it, synced, when the block ends without an error.

    The name is always the same, so that the next writer overwrites what a killed process has left.
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


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file, whole or not at all, with the mode that the user's umask gives to new files.

    safetensors itself leaves a file that only its owner can read. ``metadata`` is by default ``{"format": "pt"}``,
    without which transformers refuses the file. Raises SafetensorError or OSError, on a full disk for example.
    """
    from safetensors.torch import save_file

    with replacing(path) as temporary:
        temporary.unlink(missing_ok=True)
        temporary.touch()
        mode = temporary.stat().st_mode
        save_file(dict(tensors), temporary, metadata={"format": "pt", **(metadata or {})})
        temporary.chmod(mode)


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
