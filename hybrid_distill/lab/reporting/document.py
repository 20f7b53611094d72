"""A report as sections, rendered by the templates beside this file: Markdown, or one self-contained HTML page."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jinja2
import pandas as pd
from markupsafe import Markup, escape

from .tables import html_table, markdown_table


@dataclass(frozen=True)
class Figure:
    """An image file in the report's folder, and its caption."""

    file: str
    caption: str


Block = str | Sequence[str] | pd.DataFrame | Figure


@dataclass(frozen=True)
class Section:
    """A title (empty for what stands above all sections) and blocks: paragraphs, lists, tables, figures."""

    title: str
    blocks: Sequence[Block]
    text_columns: int = 1
    """Columns of its tables that hold words, from the left."""


def render(
    title: str, sections: Sequence[Section], form: Literal["md", "html"] = "md", *, folder: Path = Path()
) -> str:
    """Render a report; sections without blocks are left out.

    Paragraphs may hold `code` and **bold** and nothing else of Markdown. HTML embeds the figures, PNG files in
    ``folder``.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__ or "", "."), autoescape=form == "html", trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    environment.filters |= {
        "kind": _kind,
        "inline": _inline,
        "anchor": lambda text: re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-"),
        "markdown_table": markdown_table,
        "html_table": lambda frame, text_columns: Markup(html_table(frame, text_columns=text_columns)),
        "data": lambda file: base64.b64encode((folder / file).read_bytes()).decode(),
    }
    shown = [section for section in sections if section.blocks]
    return environment.get_template(f"report.{form}.jinja").render(title=title, sections=shown)


def _kind(block: Block) -> str:
    kinds = {str: "text", pd.DataFrame: "table", Figure: "figure"}
    return kinds.get(type(block), "list")


def _inline(text: str) -> Markup:
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text)))
    return Markup(re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", text))
