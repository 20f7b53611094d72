"""The table of an experiment: a row per variant of a model, a column per task, changes beside the figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev

import pandas as pd

from ...io import write_text
from ..reporting import markdown_table, percent_change, text_table, with_error


@dataclass(frozen=True)
class Column:
    """A measure and its unit ("" for none). ``chance`` is what guessing gives."""

    name: str
    unit: str = "%"
    chance: float | None = None
    digits: int = 1

    @property
    def header(self) -> str:
        return f"{self.name}, {self.unit}" if self.unit else self.name


@dataclass(frozen=True)
class Row:
    """One variant: a number for each column, and ``spreads``, standard deviations, where it is a mean of several.

    ``group`` and ``x`` are its line in a figure, and its place there.
    """

    label: str
    values: tuple[float, ...]
    group: str = ""
    x: float = 0
    spreads: tuple[float, ...] = ()

    @classmethod
    def mean(cls, label: str, several: Sequence[Sequence[float]], group: str = "", x: float = 0) -> Row:
        """Average a variant that was drawn several times."""
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

    def ratio(self, row: Row, column: int) -> float:
        """Value relative to the first row's; NaN for that row itself, and where it is 0."""
        base = self.rows[0].values[column]
        return math.nan if not self.compared or row is self.rows[0] or base == 0 else row.values[column] / base

    def frame(self) -> pd.DataFrame:
        """Cells as text; a last row for guessing."""
        cells = {self.label: [row.label for row in self.rows]}
        for index, column in enumerate(self.columns):
            cells[column.header] = [self._cell(row, index) for row in self.rows]
        if any(column.chance is not None for column in self.columns):
            guessed = ["guessing", *("" if c.chance is None else f"{c.chance:.1f}" for c in self.columns)]
            for name, cell in zip(cells, guessed, strict=True):
                cells[name].append(cell)
        return pd.DataFrame(cells)

    def _cell(self, row: Row, index: int) -> str:
        spread = row.spreads[index] if row.spreads else 0
        value = with_error(row.values[index], spread or None, self.columns[index].digits)
        ratio = self.ratio(row, index)
        return value if math.isnan(ratio) else f"{value} ({percent_change(ratio)})"

    def text(self) -> str:
        """Render plain text, for a terminal."""
        return f"{self.title}\n{text_table(self.frame())}"

    def csv(self) -> str:
        """Render full numbers, with a column each for the change in percent and the standard deviation."""
        numbers: dict[str, list[object]] = {self.label: [row.label for row in self.rows]}
        for index, column in enumerate(self.columns):
            numbers[column.name] = [row.values[index] for row in self.rows]
            if self.compared:
                changes = [100 * (self.ratio(row, index) - 1) for row in self.rows]
                numbers[f"{column.name}_change_percent"] = list(changes)
                numbers[f"{column.name}_sd"] = [row.spreads[index] if row.spreads else None for row in self.rows]
        return pd.DataFrame(numbers).to_csv(index=False, lineterminator="\n")

    def save(self, folder: Path, name: str) -> None:
        """Write FOLDER/NAME.md and NAME.csv."""
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / f"{name}.md", f"{self.title}\n\n{markdown_table(self.frame())}\n")
        write_text(folder / f"{name}.csv", self.csv())
