"""Markdown tables of a report and of a model card."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .record import Row

ABSENT = "–"


@dataclass(frozen=True)
class Column:
    """A column of a results table: the cell it shows, times ``scale``, with so many ``digits``."""

    key: str
    header: str
    scale: float = 1.0
    digits: int = 1


def results_columns(n_pairs: int) -> list[Column]:
    """Columns of the results table at one dictionary size."""
    return [
        Column("knowledge", "knowledge, %", 100),
        Column(f"kv_choice/{n_pairs}", f"KV by choice ({n_pairs} pairs), %", 100),
        Column(f"kv_generation/{n_pairs}", f"KV by generation ({n_pairs} pairs), %", 100),
        Column("perplexity", "perplexity", 1, 3),
        Column("agreement", "agreement with teacher, %", 100),
        Column("cache/128", "cache at 128, MB", 1e-6, 3),
        Column("cache/2048", "at 2048, MB", 1e-6, 3),
        Column("cache/4096", "at 4096, MB", 1e-6, 3),
        Column("conv", "convolutions, kB", 1e-3, 1),
    ]


def results_table(rows: Sequence[Row], n_pairs: int, *, n_heads: int | None = None) -> str:
    """One row a model, values with standard errors. ``n_heads``: how many heads the teacher has."""
    columns = results_columns(n_pairs)
    lines = [[row.label, _heads(row, n_heads), *(_cell(row, column) for column in columns)] for row in rows]
    return markdown_table(["model", "heads kept", *(column.header for column in columns)], lines)


def change_table(teacher: Row, rows: Sequence[Row], n_pairs: int) -> str:
    """One row a student: each number's change relative to the teacher's, in percent."""
    columns = [
        column
        for column in results_columns(n_pairs)
        if column.key in teacher.cells and column.key not in ("agreement", "conv")
    ]
    lines = [[row.label, *(_change(row, teacher, column.key) for column in columns)] for row in rows]
    headers = [column.header.rsplit(",", 1)[0] for column in columns]
    return markdown_table(["change to the teacher", *headers], lines)


def size_table(rows: Sequence[Row], name: str) -> str:
    """Accuracy in percent (``kv_generation`` or ``kv_choice``): a row a model, a column a dictionary size."""
    sizes = sorted({size for row in rows for size, _ in row.by_size(name)})
    columns = [Column(f"{name}/{size}", f"{size} pairs", 100) for size in sizes]
    lines = [[row.label, *(_cell(row, column) for column in columns)] for row in rows]
    lines.append(["chance (1 / pairs)", *(f"{100 / size:.1f}" for size in sizes)])
    return markdown_table(["model", *(column.header for column in columns)], lines)


def _heads(row: Row, n_heads: int | None) -> str:
    k = n_heads if row.selection == "teacher" else row.k
    if k is None:
        return ABSENT
    return str(k) if n_heads is None else f"{k} of {n_heads}"


def _cell(row: Row, column: Column) -> str:
    cell = row.cells.get(column.key)
    return (
        ABSENT
        if cell is None
        else with_error(column.scale * cell.value, column.scale * cell.error, column.digits)
    )


def _change(row: Row, teacher: Row, key: str) -> str:
    if key not in row.cells or not teacher.cells[key].value:
        return ABSENT
    return f"{signed(100 * (row.cells[key].value / teacher.cells[key].value - 1))} %"


def signed(value: float, digits: int = 1) -> str:
    """+1.2, −1.2, and +0.0 for what rounds to nothing."""
    return f"{round(value, digits) + 0.0:+.{digits}f}".replace("-", "\N{MINUS SIGN}")


def with_error(value: float, error: float, digits: int) -> str:
    """ "97.3 ± 1.4", without an error that is zero."""
    return f"{value:.{digits}f} ± {error:.{digits}f}" if error else f"{value:.{digits}f}"


def markdown_table(headers: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table whose first column is text, the others numbers."""
    rule = ["---", *["---:"] * (len(headers) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [headers, rule, *lines])
