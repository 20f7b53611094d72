"""Tables from data frames, and reports as sections, rendered by the templates next to this file."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import jinja2
import pandas as pd
from markupsafe import Markup, escape

from ...evaluation.result import size_shown
from ...io import write_text
from ...model.mixer import HeadPart

ABSENT = "–"
MINUS = "\N{MINUS SIGN}"
NO_FIGURES = "the figures: matplotlib is not installed (`pip install matplotlib`)"


@dataclass(frozen=True)
class Figure:
    """Image file in the report's folder, its caption, and an SVG with titles of points, for HTML."""

    file: str
    caption: str
    svg: str


Block = str | Sequence[str] | pd.DataFrame | Figure


@dataclass(frozen=True)
class Section:
    """Title (empty for the part above all sections), and paragraphs, lists, tables, figures."""

    title: str
    blocks: Sequence[Block]
    text_columns: int = 1
    """Number of text columns in its tables, from the left."""


class Column(NamedTuple):
    """Measured figure, by its name in a frame, and its format in tables."""

    name: str
    header: str
    scale: float = 100.0
    digits: int = 1
    group: str = ""


def value_table(
    names: pd.DataFrame, columns: Sequence[Column], values: pd.DataFrame, errors: pd.DataFrame
) -> pd.DataFrame:
    """Return one row per model: its ``names`` and its measured figures, grouped."""
    table = names.copy()
    errors = errors.reindex(index=values.index, columns=values.columns)
    for column in columns:
        if column.name in values and values[column.name].notna().any():
            cells = []
            for value, error in zip(values[column.name], errors[column.name]):
                cells.append(with_error(value, error, column.digits, scale=column.scale))
            table[column.group, column.header] = cells
    return table


def change_table(
    names: pd.DataFrame, columns: Sequence[Column], ratios: pd.DataFrame
) -> pd.DataFrame:
    """Return one row per model: its ``names`` and its figures' changes relative to the teacher."""
    table = names.copy()
    for column in columns:
        if column.name in ratios:
            group = f"{column.group}, change" if column.group else ""
            header, *_unit = column.header.rsplit(",", 1)
            table[group, header] = list(map(percent_change, ratios[column.name]))
    return table


def render(title: str, sections: Sequence[Section], markup: Literal["md", "html"] = "md") -> str:
    """Render a report; sections without blocks are left out.

    The only Markdown in paragraphs is `code` and **bold**. HTML embeds the figures and needs no
    network.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__ or "", "."),
        autoescape=markup == "html",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {
        "kind": _kind,
        "inline": _inline,
        "anchor": _anchor,
        "markdown_table": markdown_table,
        "html_table": _safe_html_table,
        "svg": Markup,
    }
    shown = [section for section in sections if section.blocks]
    template = environment.get_template(f"report.{markup}.jinja")
    return template.render(title=title, sections=shown)


def write_report_files(folder: Path, title: str, sections: Sequence[Section]) -> Path:
    """Write report.md and report.html; return the path of report.html, the one to open."""
    write_text(folder / "report.html", render(title, sections, "html"))
    write_text(folder / "report.md", render(title, sections))
    return folder / "report.html"


def _kind(block: Block) -> str:
    """Name a block for the templates."""
    kinds = {str: "text", pd.DataFrame: "table", Figure: "figure"}
    return kinds.get(type(block), "list")


def _anchor(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _safe_html_table(frame: pd.DataFrame, text_columns: int) -> Markup:
    return Markup(html_table(frame, text_columns=text_columns))


def _inline(text: str) -> Markup:
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text)))
    return Markup(re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", text))


def markdown_table(frame: pd.DataFrame, *, text_columns: int = 1) -> str:
    """Render a frame without its index; ``text_columns`` are aligned left, the others right.

    A group of columns (the upper of two levels) goes before the header: "group: column".
    """
    headers = []
    for name in frame.columns:
        headers.append(": ".join(filter(None, name)) if isinstance(name, tuple) else str(name))
    n_numbers = len(headers) - text_columns
    rule = ["---"] * text_columns + ["---:"] * n_numbers
    return "\n".join(f"| {' | '.join(line)} |" for line in [headers, rule, *_cells(frame)])


def html_table(frame: pd.DataFrame, *, text_columns: int = 1) -> str:
    """Render a frame without its index, one line per row; a group's header spans its columns."""
    shown = pd.DataFrame(_cells(frame), columns=frame.columns)
    html = shown.to_html(index=False, border=0, classes=f"text-{text_columns}")
    return re.sub(r"\n *", "", html).replace("<tr", "\n<tr")


def text_table(frame: pd.DataFrame) -> str:
    """Render a frame without its index for a terminal, the first column aligned left."""
    rows = [[str(name) for name in frame.columns], *_cells(frame)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for first, *others in rows:
        padded = [first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def _cells(frame: pd.DataFrame) -> list[list[str]]:
    rows = []
    for row in frame.itertuples(index=False, name=None):
        rows.append([ABSENT if pd.isna(cell) else str(cell) for cell in row])
    return rows


def with_error(
    value: float | None, error: float | None = None, digits: int = 1, *, scale: float = 1.0
) -> str:
    """Format ``value ± error`` ("97.3 ± 1.4"); None or NaN is absent."""
    if value is None or math.isnan(value):
        return ABSENT
    text = f"{scale * value:.{digits}f}"
    if error is None or math.isnan(error):
        return text
    return f"{text} ± {scale * error:.{digits}f}"


def signed(value: float) -> str:
    """Format with a sign: +1.2, −1.2, and +0.0 for values that round to zero."""
    # Adding 0.0 turns the −0.0 that `round` returns into 0.0.
    return f"{round(value, 1) + 0.0:+.1f}".replace("-", MINUS)


def percent_change(ratio: float | None) -> str:
    """Format a ratio as a change: 0.9 as "−10.0 %"; None or NaN is absent."""
    if ratio is None or math.isnan(ratio):
        return ABSENT
    return f"{signed(100 * (ratio - 1))} %"


def sizes(frame: pd.DataFrame, name: str) -> list[int]:
    """List the sizes at which something was measured.

    4 and 8 for columns ``kv_choice_4`` and ``kv_choice_8``.
    """
    measured = []
    for column in frame:
        match = re.fullmatch(rf"{name}_(\d+)", str(column))
        if match:
            measured.append(int(match[1]))
    return sorted(measured)


def pairs_of(frame: pd.DataFrame, stated: int | None) -> int:
    """Return the dictionary size that one figure stands for.

    It is the ``stated`` one, else 16 pairs, else the largest.
    """
    measured = sizes(frame, "kv_generation")
    if stated in measured:
        return stated
    return size_shown(measured)


def task_name(name: str) -> str:
    """Name an accuracy: ``kv_choice_8`` is "KV by choice, 8 pairs"."""
    reading, _, size = name.rpartition("_")
    readings = {
        "kv_choice": "KV by choice",
        "kv_generation": "KV by generation",
        "far_choice": "KV by choice, far away",
    }
    if reading in readings:
        return f"{readings[reading]}, {size} pairs"
    return name


def zeroed_section(
    names: pd.DataFrame, columns: Sequence[Column], values: pd.DataFrame, part: HeadPart
) -> Section:
    """Compare the models' figures with and without zeroing one part of all replaced heads.

    Rows are labeled by ``names``. Columns ``whole_NAME`` and ``zeroed_PART_NAME`` are measured on
    few examples; ``PART_unused`` is 1 for a student whose figures do not change. Empty if that was
    not measured.
    """
    if f"{part}_unused" not in values:
        return Section("", [])
    values = values.loc[values[f"{part}_unused"].notna()]
    table = names.loc[values.index].copy()
    for column in columns:
        zeroed = f"zeroed_{part}_{column.name}"
        if zeroed not in values:
            continue
        cells = []
        for pair in zip(values[f"whole_{column.name}"], values[zeroed]):
            texts = [with_error(x, None, column.digits, scale=column.scale) for x in pair]
            cells.append(" → ".join(texts))
        table[column.group, column.header] = cells
    is_unused = values[f"{part}_unused"] == 1
    table["", part] = ["unused" if unused else "used" for unused in is_unused]
    note = (
        f"The student as it is → with zeros in place of what the {part} of its replaced heads "
        "writes, on the same few examples."
    )
    return Section(f"Without the {part}", [table, note], names.shape[1])
