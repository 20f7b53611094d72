"""File access: atomic writes, after which a reader finds the old or the new file, and strict JSON."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

Record: TypeAlias = dict[str, Any]
"""JSON object."""
BYTE_ORDER_MARK = "\ufeff"
LARGEST_JSON = 2**28
"""Bytes: ten times the tokenizer of the largest vocabularies."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name ``path`` in an OSError that names no file: that of a full disk, for one."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path; after the block, sync the file there and move it to ``path``.

    If the block raises, the file is deleted. The temporary name is fixed, so that the next writer
    overwrites the leftovers of a killed process.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with naming(path):
            yield temporary
            sync(temporary)
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def refused(what: str, fix: str) -> Iterator[None]:
    """Turn an error from reading a missing, damaged or foreign file into a ValueError.

    Its message is "WHAT (the error); FIX."
    """
    try:
        yield
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        # The message of a KeyError is the key alone.
        reason = f"it has no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{what} ({reason}); {fix}.") from error


def check_out(path: Path, name: str = "out") -> None:
    """Raise ValueError for a folder that cannot be made, because it or a parent is a file; ``name`` is its option's."""
    for place in (path, *path.parents):
        if place.exists():
            if not place.is_dir():
                raise ValueError(f"{name} is {path}, and {place} is a file; pass a folder.")
            return


def text_lines(file: TextIO) -> Iterator[str]:
    """Yield the lines of a text file without byte-order marks, which editors write at its start.

    Files that were joined have more of them inside. A mark is text to a tokenizer, and an error to
    a JSON parser.
    """
    for line in file:
        yield line.removeprefix(BYTE_ORDER_MARK)


def whole_text(text: str) -> str:
    """Return a text that UTF-8 can hold.

    Halves of surrogate pairs are joined, or become U+FFFD where one is alone. JSON can hold such
    halves (``\\ud83d``), and tokenizers refuse them.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        # Through UTF-16, where two halves side by side are one character.
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def whole_strings(value: object) -> Any:
    """Apply `whole_text` to every string in a JSON value."""
    if isinstance(value, str):
        return whole_text(value)
    if isinstance(value, list):
        return [whole_strings(item) for item in value]
    if isinstance(value, dict):
        return {name: whole_strings(item) for name, item in value.items()}
    return value


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, record: Mapping[str, object], *, indent: int | None = 2) -> None:
    """Write a JSON file atomically."""
    write_text(path, json.dumps(record, indent=indent) + "\n")


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file atomically, with the permissions of the user's umask.

    Raises OSError, for example if the disk is full.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with replacing(path) as temporary:
        # safetensors itself makes files that only their owner can read. The umask can only be read
        # by changing it, for all threads; a new file shows what it gives.
        temporary.unlink(missing_ok=True)
        temporary.touch()
        mode = temporary.stat().st_mode
        # transformers refuses other formats.
        try:
            save_file(dict(tensors), temporary, metadata={"format": "pt"})
        except SafetensorError as error:
            # A full disk is one, and a bug to callers that know what OSError means.
            raise OSError(errno.EIO, str(error), str(path)) from error
        temporary.chmod(mode)


def read_json(path: Path) -> Record:
    """Read a JSON object from a file.

    Raises ValueError for anything else, for NaN, and for duplicate keys.
    """
    if not path.is_file():
        raise ValueError(f"{path} is missing; copy the whole folder again.")
    size = path.stat().st_size
    if size > LARGEST_JSON:
        raise ValueError(
            f"{path} has {size} bytes; such a file has at most {LARGEST_JSON}. Copy it again."
        )
    return parse_json(path.read_bytes(), str(path))


def parse_json(text: bytes, where: str) -> Record:
    """Parse a JSON object as `read_json` does; error messages name it ``where``."""
    try:
        record = json.loads(
            text.decode("utf-8"), object_pairs_hook=_unique_keys, parse_constant=_without_nan
        )
    except RecursionError as error:
        raise ValueError(
            f"{where} is not valid JSON (nested too deeply); copy it again."
        ) from error
    except ValueError as error:
        raise ValueError(f"{where} is not valid JSON ({error}); copy it again.") from error
    if not isinstance(record, dict):
        raise ValueError(
            f"{where} holds a {type(record).__name__}; it must be a JSON object. Copy it again."
        )
    return record


def _unique_keys(pairs: list[tuple[str, object]]) -> Record:
    record = {}
    for name, value in pairs:
        if name in record:
            raise ValueError(f"the key {name!r} is duplicated")
        record[name] = value
    return record


def _without_nan(name: str) -> float:
    if name == "NaN":
        raise ValueError("NaN is not a number")
    return float(name)  # Infinity: some families have it in their config.json


def differences(before: Record, now: Record, prefix: str = "") -> list[str]:
    """List the settings in which two records differ: ``align.steps (2 there, 3 here)``."""
    lines = []
    for name, here in now.items():
        there = before.get(name)
        if there == here:
            continue
        if isinstance(here, dict) and isinstance(there, dict):
            lines += differences(there, here, prefix=f"{prefix}{name}.")
        else:
            lines.append(f"{prefix}{name} ({there!r} there, {here!r} here)")
    return lines


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
