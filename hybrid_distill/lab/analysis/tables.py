"""Tables of experiments: a row per variant of a model, a column per measure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd

from ..reporting import percent_change, with_error


class Column(NamedTuple):
    """Measure and its unit ("" for none). ``chance`` is the accuracy of guessing."""

    name: str
    unit: str = "%"
    chance: float | None = None
    digits: int = 1

    @property
    def header(self) -> str:
        return f"{self.name}, {self.unit}" if self.unit else self.name


class Row(NamedTuple):
    """One variant: a number per column, with standard deviations if it is a mean over several
    draws.

    ``group`` and ``x`` are its line in a figure and its position there.
    """

    label: str
    values: tuple[float, ...]
    group: str = ""
    x: float = 0
    spreads: tuple[float, ...] = ()

    def spread(self, index: int) -> float:
        """Return the standard deviation in a column; NaN for a single draw."""
        return self.spreads[index] if self.spreads else math.nan


class Table(NamedTuple):
    """Rows under a title.

    Unless ``compared`` is off, all are compared with the first, the intact model.
    """

    title: str
    label: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    compared: bool = True

    def frames(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Return cells as text, with guessing as the last row, and the numbers behind them."""
        cells = pd.DataFrame({self.label: [row.label for row in self.rows]})
        numbers = cells.copy()
        for index, column in enumerate(self.columns):
            values = pd.Series([row.values[index] for row in self.rows], dtype=float)
            spreads = pd.Series([row.spread(index) for row in self.rows])
            texts = [with_error(v, sd or None, column.digits) for v, sd in zip(values, spreads)]
            numbers[column.name] = values
            if self.compared:
                # A change from 0 has no percentage.
                intact = values[0] or math.nan
                ratios = (values / intact).where(values.index > 0)
                texts = [text + _change_text(ratio) for text, ratio in zip(texts, ratios)]
                numbers[f"{column.name}_change_percent"] = 100 * (ratios - 1)
                numbers[f"{column.name}_sd"] = spreads
            cells[column.header] = texts
        chances = []
        for column in self.columns:
            chances.append("" if column.chance is None else f"{column.chance:.1f}")
        if any(chances):
            cells.loc[len(cells)] = ["guessing", *chances]
        return cells, numbers


def _change_text(ratio: float) -> str:
    return "" if math.isnan(ratio) else f" ({percent_change(ratio)})"


def shortened(table: Table, most: int) -> Table:
    """Keep the first ``most`` rows and those that belong to a group."""
    rows = [row for number, row in enumerate(table.rows) if number < most or row.group]
    n_left_out = len(table.rows) - len(rows)
    title = f"{table.title} ({n_left_out} more in the file)" if n_left_out else table.title
    return table._replace(title=title, rows=rows)
