"""Data frames as tables in Markdown, HTML and plain text, and numbers as text."""

from __future__ import annotations

import math

import pandas as pd

ABSENT = "–"
MINUS = "\N{MINUS SIGN}"


def markdown_table(frame: pd.DataFrame, *, text_columns: int = 1) -> str:
    """Render a frame without its index; the first ``text_columns`` are aligned left, the others right.

    A group of columns (the upper of two levels) goes before the header: "group: column".
    """
    headers = [": ".join(filter(None, name)) if isinstance(name, tuple) else str(name) for name in frame.columns]
    rule = ["---" if place < text_columns else "---:" for place in range(len(headers))]
    return "\n".join(f"| {' | '.join(line)} |" for line in [headers, rule, *_cells(frame)])


def html_table(frame: pd.DataFrame, *, text_columns: int = 1) -> str:
    """Render a frame without its index; groups of columns span what they head."""
    shown = pd.DataFrame(_cells(frame), columns=frame.columns)
    return shown.to_html(index=False, border=0, classes=f"text-{text_columns}")


def text_table(frame: pd.DataFrame) -> str:
    """Render a frame without its index for a terminal, the first column aligned left."""
    lines = [[str(name) for name in frame.columns], *_cells(frame)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    padded = ([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])] for first, *others in lines)
    return "\n".join("  ".join(line).rstrip() for line in padded)


def _cells(frame: pd.DataFrame) -> list[list[str]]:
    rows = frame.itertuples(index=False, name=None)
    return [[ABSENT if pd.isna(cell) else str(cell) for cell in row] for row in rows]


def with_error(value: float | None, error: float | None = None, digits: int = 1, *, scale: float = 1.0) -> str:
    """Format ``value ± error`` ("97.3 ± 1.4"); None or NaN is absent."""
    if value is None or math.isnan(value):
        return ABSENT
    text = f"{scale * value:.{digits}f}"
    return text if error is None or math.isnan(error) else f"{text} ± {scale * error:.{digits}f}"


def signed(value: float, digits: int = 1) -> str:
    """Format with a sign: +1.2, −1.2, and +0.0 for what rounds to zero."""
    return f"{round(value, digits) + 0.0:+.{digits}f}".replace("-", MINUS)


def percent_change(ratio: float | None) -> str:
    """Format a ratio as a change: 0.9 as "−10.0 %"; None or NaN is absent."""
    return ABSENT if ratio is None or math.isnan(ratio) else f"{signed(100 * (ratio - 1))} %"
