"""Questions in local files: ``DIR/TASK/SPLIT.jsonl``, for a task with parts ``DIR/TASK/PART/SPLIT.jsonl``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ...io import write_text

SUFFIXES = (".jsonl", ".json", ".parquet")

Rows = list[dict[str, Any]]


def find_split(folder: Path, split: str) -> Path | None:
    """The file of a split, None where there is none."""
    return next((path for suffix in SUFFIXES if (path := folder / f"{split}{suffix}").is_file()), None)


def read_rows(path: Path) -> Rows:
    """The rows of a file. Raises ValueError for what cannot be read, naming file and line."""
    if path.suffix == ".parquet":
        return _read_parquet(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read ({error}).") from error
    if path.suffix == ".json" and text.lstrip().startswith("["):
        return _checked(path, _parse(path, 1, text))
    # Not splitlines: it also cuts at separators that stand inside JSON strings.
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    return _checked(path, [_parse(path, number, line) for number, line in lines])


def _read_parquet(path: Path) -> Rows:
    import pyarrow
    import pyarrow.parquet

    try:
        return _checked(path, pyarrow.parquet.read_table(path).to_pylist())
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise ValueError(f"{path} is no parquet file that can be read ({error}).") from error


def _parse(path: Path, number: int, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"line {number} of {path} is no JSON ({error}); expected one object a line.") from error


def _checked(path: Path, rows: Any) -> Rows:
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path} holds no questions; expected one JSON object a line, a question each.")
    return rows


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    """Write rows as JSON lines, whole or not at all; how many there are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    write_text(path, "".join(f"{line}\n" for line in lines))
    return len(lines)


def missing_fields(rows: Rows, fields: Sequence[str]) -> list[str]:
    """The fields that the first row lacks; a field's name ends at the first space."""
    names = [field.split(" ")[0] for field in fields]
    return [name for name in names if name not in rows[0]]
