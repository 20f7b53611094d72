"""Sealed records: JSON files that mark a folder as complete, and show later changes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from ..io import Record, file_hash, write_json

SEAL = "seal"


class CorruptCheckpoint(ValueError):
    """A checkpoint's files do not match their records."""


class SaveFailed(OSError):
    """A write failed; earlier saves are untouched."""


def write_sealed(path: Path, record: Record) -> None:
    """Write the record that marks a folder, or a share of it, as complete, with its own hash."""
    write_json(path, {**record, SEAL: _seal(record)})


def read_sealed(path: Path, expected: str) -> Record:
    """Read a record that `write_sealed` wrote, of the ``expected`` format.

    Raises CorruptCheckpoint for any other.
    """
    try:
        record = json.loads(path.read_text())
        stored_format = record.get("format")
    except (OSError, ValueError, AttributeError) as error:
        raise CorruptCheckpoint(f"{path} cannot be read ({error}).") from error
    if stored_format != expected:
        raise CorruptCheckpoint(f"{path} has format {stored_format!r}, expected {expected!r}.")
    # Removed before the rest is hashed: a seal does not cover itself.
    seal = record.pop(SEAL, None)
    if seal != _seal(record):
        raise CorruptCheckpoint(
            f"{path} was changed after it was written; undo that, or delete {path.parent}."
        )
    return record


def check_files(folder: Path, hashes: Mapping[str, str]) -> None:
    """Raise CorruptCheckpoint naming the first file that is missing or does not match its hash."""
    for name, expected in hashes.items():
        path = folder / name
        if not path.exists():
            raise CorruptCheckpoint(f"{path} is missing.")
        actual = file_hash(path)
        if actual != expected:
            raise CorruptCheckpoint(
                f"{path} is corrupt: its hash is {actual[:12]}, the manifest says {expected[:12]}."
            )


def _seal(record: Record) -> str:
    # Sorted: a JSON file that another program has written back may have another order.
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
