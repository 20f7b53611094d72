"""The table of an experiment: one row per variant of a model, one column per task, changes beside the figures."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev

from ...io import write_text

MINUS = "\N{MINUS SIGN}"


@dataclass(frozen=True)
class Column:
    """What is measured, in which unit ("" for none). ``chance`` is what guessing gives."""

    name: str
    unit: str = "%"
    chance: float | None = None
    digits: int = 1

    @property
    def header(self) -> str:
        return f"{self.name}, {self.unit}" if self.unit else self.name


@dataclass(frozen=True)
class Row:
    """One variant: a number for each column; ``spreads`` are standard deviations where it is a mean of several.

    ``group`` and ``x`` place it in a figure: the line it belongs to, and where on it.
    """

    label: str
    values: tuple[float, ...]
    group: str = ""
    x: float = 0
    spreads: tuple[float, ...] = ()

    @classmethod
    def mean(cls, label: str, several: Sequence[Sequence[float]], group: str = "", x: float = 0) -> Row:
        """Of the same variant drawn several times."""
        columns = list(zip(*several, strict=True))
        spreads = tuple(map(pstdev, columns)) if len(several) > 1 else ()
        return cls(label, tuple(map(fmean, columns)), group, x, spreads)


@dataclass(frozen=True)
class Table:
    """Rows under a title; unless ``compared`` is off, all are compared with the first, the intact model."""

    title: str
    label: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    compared: bool = True

    def change(self, row: Row, column: int) -> float | None:
        """Relative to the first row, in percent; None for that row itself, and where it is 0."""
        if not self.compared:
            return None
        base = self.rows[0].values[column]
        return None if row is self.rows[0] or base == 0 else 100 * (row.values[column] / base - 1)

    def text(self) -> str:
        """Plain text, for a terminal."""
        cells = self._cells()
        widths = [max(map(len, column)) for column in zip(*cells)]
        lines = ([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])] for first, *others in cells)
        return "\n".join([self.title, *("  ".join(line).rstrip() for line in lines)])

    def markdown(self) -> str:
        header, *lines = self._cells()
        rule = ["---", *["---:"] * len(self.columns)]
        return "\n".join(f"| {' | '.join(line)} |" for line in [header, rule, *lines])

    def csv(self) -> str:
        """Numbers in full; a column each for the change in percent and the standard deviation."""
        endings = ("", "_change_percent", "_sd") if self.compared else ("",)
        names = [f"{column.name}{ending}" for column in self.columns for ending in endings]
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([self.label, *names])
        for row in self.rows:
            found: list[float | str] = []
            for index, value in enumerate(row.values):
                change = self.change(row, index)
                cells = [value, "" if change is None else change, row.spreads[index] if row.spreads else ""]
                found += cells[: len(endings)]
            writer.writerow([row.label, *found])
        return file.getvalue()

    def save(self, folder: Path, name: str) -> None:
        """Write FOLDER/NAME.md and NAME.csv."""
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / f"{name}.md", f"{self.title}\n\n{self.markdown()}\n")
        write_text(folder / f"{name}.csv", self.csv())

    def _cells(self) -> list[list[str]]:
        lines = [[self.label, *(column.header for column in self.columns)]]
        lines += [[row.label, *(self._cell(row, i) for i in range(len(self.columns)))] for row in self.rows]
        if any(column.chance is not None for column in self.columns):
            lines.append(["guessing", *("" if c.chance is None else f"{c.chance:.1f}" for c in self.columns)])
        return lines

    def _cell(self, row: Row, index: int) -> str:
        digits = self.columns[index].digits
        spread = f" ± {row.spreads[index]:.{digits}f}" if row.spreads and row.spreads[index] else ""
        change = self.change(row, index)
        beside = "" if change is None else f" ({change:+.1f} %)".replace("-", MINUS)
        value = "–" if math.isnan(row.values[index]) else f"{row.values[index]:.{digits}f}"
        return f"{value}{spread}{beside}"
