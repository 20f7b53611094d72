"""Multiple-choice questions about facts that a model can only know by heart."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from . import Example, check_counts


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
        """The first ``n`` questions in the file's order; all of them by default."""
        if n is not None:
            check_counts(n=n)
        lines = self._text().splitlines()
        return [self._example(number, line) for number, line in enumerate(lines, start=1) if line.strip()][:n]

    def _example(self, number: int, line: str) -> Example:
        try:
            record = json.loads(line)
            return Example(record["prompt"], record["answer"], tuple(record["choices"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"line {number} of {self._file()} is no question ({error}); "
                'expected {"prompt": ..., "answer": ..., "choices": [...]} with the answer among the choices.'
            ) from error

    def _file(self) -> Path:
        if self.path is not None:
            return Path(self.path)
        from ..assets import facts_path

        return facts_path()

    def _text(self) -> str:
        try:
            text = self._file().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"the questions {self._file()} cannot be read ({error}).") from error
        if not text.strip():
            raise ValueError(f"{self._file()} holds no questions.")
        return text

    def describe(self) -> dict[str, object]:
        """The file by name and hash."""
        digest = hashlib.sha256(self._text().encode()).hexdigest()[:16]
        return {"name": "knowledge", "file": self._file().name, "sha256": digest}
