"""Multiple-choice questions about facts that a model can only know by heart."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..assets import facts_path
from . import Example, check_counts

Item = TypeVar("Item")


@dataclass(frozen=True)
class Knowledge:
    """Questions of a JSON-lines file, one ``{"prompt", "answer", "choices"}`` a line.

    ``path`` defaults to the facts that the embedded teacher was taught. Raises ValueError for a file that
    cannot be read as such, naming the line.
    """

    path: str | Path | None = None

    @property
    def chance(self) -> float:
        """Accuracy of guessing, 0 to 1."""
        examples = self.examples()
        return sum(1 / len(example.choices) for example in examples) / len(examples)

    def examples(self, n: int | None = None) -> list[Example]:
        """Return the first ``n`` questions in the file's order; all of them by default."""
        if n is not None:
            check_counts(n=n)
        return read_json_lines(self._file, _as_example, '{"prompt": ..., "answer": ..., "choices": [...]}')[:n]

    @property
    def _file(self) -> Path:
        return facts_path() if self.path is None else Path(self.path)

    def describe(self) -> dict[str, object]:
        """Return the file's name and hash."""
        digest = hashlib.sha256(_text(self._file).encode()).hexdigest()[:16]
        return {"name": "knowledge", "file": self._file.name, "sha256": digest}


def _as_example(record: dict[str, Any]) -> Example:
    return Example(record["prompt"], record["answer"], tuple(record["choices"]))


def read_json_lines(file: Path, read: Callable[[dict[str, Any]], Item], expected: str) -> list[Item]:
    """Read the questions of a file, one a line. Raises ValueError naming the first bad line and what is expected."""
    found = []
    for number, line in enumerate(_text(file).splitlines(), start=1):
        try:
            if line.strip():
                found.append(read(json.loads(line)))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"line {number} of {file} is not a question ({error}); write {expected}.") from error
    return found


def _text(file: Path) -> str:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the questions {file} cannot be read ({error}); pass a file of JSON lines.") from error
    if not text.strip():
        raise ValueError(f"{file} holds no questions; write one a line.")
    return text
