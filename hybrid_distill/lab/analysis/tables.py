"""The table of an experiment: a row per variant of a model, a column per task, changes beside the figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import NamedTuple

import pandas as pd

from ...io import write_text
from ..reporting import markdown_table, percent_change, text_table, with_error


class Column(NamedTuple):
    """A measure and its unit ("" for none). ``chance`` is what guessing gives."""

    name: str
    unit: str = "%"
    chance: float | None = None
    digits: int = 1

    @property
    def header(self) -> str:
        return f"{self.name}, {self.unit}" if self.unit else self.name


class Row(NamedTuple):
    """One variant: a number for each column, and standard deviations where it is a mean of several.

    ``group`` and ``x`` are its line in a figure, and its place there.
    """

    label: str
    values: tuple[float, ...]
    group: str = ""
    x: float = 0
    spreads: tuple[float, ...] = ()

    @classmethod
    def mean(cls, rows: Sequence[Row]) -> Row:
        """Average a variant that was drawn several times."""
        columns = list(zip(*(row.values for row in rows)))
        spreads = tuple(map(pstdev, columns)) if len(rows) > 1 else ()
        return rows[0]._replace(values=tuple(map(fmean, columns)), spreads=spreads)


class Table(NamedTuple):
    """Rows under a title; unless ``compared`` is off, all are compared with the first, the intact model."""

    title: str
    label: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    compared: bool = True

    def frames(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Return the cells as text, guessing in the last row, and full numbers with changes and standard deviations."""
        labels = [row.label for row in self.rows]
        cells: dict[str, list[str]] = {self.label: [*labels, "guessing"]}
        numbers: dict[str, Sequence[object]] = {self.label: labels}
        for index, column in enumerate(self.columns):
            values = [row.values[index] for row in self.rows]
            spreads = [row.spreads[index] if row.spreads else None for row in self.rows]
            base = values[0] if self.compared else 0
            ratios = [value / base if base and place else math.nan for place, value in enumerate(values)]
            chance = "" if column.chance is None else f"{column.chance:.1f}"
            texts = [with_error(value, sd or None, column.digits) for value, sd in zip(values, spreads)]
            changes = ["" if math.isnan(ratio) else f" ({percent_change(ratio)})" for ratio in ratios]
            cells[column.header] = [*map("".join, zip(texts, changes)), chance]
            numbers[column.name] = values
            if self.compared:
                numbers[f"{column.name}_change_percent"] = [100 * (ratio - 1) for ratio in ratios]
                numbers[f"{column.name}_sd"] = spreads
        shown = len(labels) + any(column.chance is not None for column in self.columns)
        return pd.DataFrame(cells).head(shown), pd.DataFrame(numbers)

    def text(self) -> str:
        """Render plain text, for a terminal."""
        return f"{self.title}\n{text_table(self.frames()[0])}"

    def save(self, folder: Path, name: str) -> None:
        """Write FOLDER/NAME.md and NAME.csv."""
        folder.mkdir(parents=True, exist_ok=True)
        cells, numbers = self.frames()
        write_text(folder / f"{name}.md", f"{self.title}\n\n{markdown_table(cells)}\n")
        write_text(folder / f"{name}.csv", numbers.to_csv(index=False, lineterminator="\n"))
