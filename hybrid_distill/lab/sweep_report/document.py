"""A report as blocks, and its two forms: Markdown with figures beside it, and one HTML page that needs nothing else."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from ..report.tables import markdown_table


@dataclass(frozen=True)
class Heading:
    """Of a section."""

    text: str


@dataclass(frozen=True)
class Text:
    """A paragraph; `code` and **bold** as in Markdown, nothing else."""

    text: str


@dataclass(frozen=True)
class Bullets:
    """Paragraphs of a list."""

    items: Sequence[str]


@dataclass(frozen=True)
class Table:
    """Cells as text. ``groups`` spans columns from the left: (name, how many), the name empty for none."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    groups: Sequence[tuple[str, int]] = ()
    n_text: int = 1
    """Columns from the left that hold words."""


@dataclass(frozen=True)
class Figure:
    """``name``.png beside the Markdown, ``name``.svg inside the page."""

    name: str
    caption: str


Block = Heading | Text | Bullets | Table | Figure


def to_markdown(title: str, blocks: Sequence[Block]) -> str:
    """The report as Markdown."""
    return "\n\n".join([f"# {title}", *map(_markdown, blocks)]) + "\n"


def _markdown(block: Block) -> str:
    match block:
        case Heading(text):
            return f"## {text}"
        case Text(text):
            return text
        case Bullets(items):
            return "\n".join(f"- {item}" for item in items)
        case Table():
            names = [
                f"{group}: {header}" if group else header for group, header in zip(_group_of(block), block.headers)
            ]
            return markdown_table(names, block.rows)
        case Figure(name, caption):
            return f"![{caption}]({name}.png)\n\n*{caption}*"


def _group_of(table: Table) -> list[str]:
    groups = [name for name, n in table.groups for _ in range(n)]
    return groups + [""] * (len(table.headers) - len(groups))


def to_html(title: str, blocks: Sequence[Block], svg: Mapping[str, Path]) -> str:
    """The report as one page: no script, no file and no address outside it. ``svg``: the figures' files by name."""
    headings = [block.text for block in blocks if isinstance(block, Heading)]
    links = "\n".join(f'<li><a href="#{_anchor(text)}">{escape(text)}</a></li>' for text in headings)
    body = "\n".join(_html(block, svg) for block in blocks)
    return PAGE.format(title=escape(title), style=STYLE, links=links, body=body)


def _html(block: Block, svg: Mapping[str, Path]) -> str:
    match block:
        case Heading(text):
            return f'<h2 id="{_anchor(text)}">{escape(text)}</h2>'
        case Text(text):
            return f"<p>{_inline(text)}</p>"
        case Bullets(items):
            return "<ul>\n" + "\n".join(f"<li>{_inline(item)}</li>" for item in items) + "\n</ul>"
        case Table():
            return _html_table(block)
        case Figure(name, caption):
            data = base64.b64encode(svg[name].read_bytes()).decode()
            image = f'<img src="data:image/svg+xml;base64,{data}" alt="{escape(caption)}">'
            return f"<figure>\n{image}\n<figcaption>{escape(caption)}</figcaption>\n</figure>"


def _html_table(table: Table) -> str:
    kinds = ["word" if number < table.n_text else "" for number in range(len(table.headers))]
    head = "".join(f"<th{_class(kind)}>{escape(header)}</th>" for header, kind in zip(table.headers, kinds))
    head = f"<tr>{head}</tr>"
    if table.groups:
        spans = [*table.groups, ("", len(table.headers) - sum(n for _, n in table.groups))]
        cells = (f'<th colspan="{n}"{_class("group" * bool(name))}>{escape(name)}</th>' for name, n in spans if n)
        head = f"<tr>{''.join(cells)}</tr>\n{head}"
    rows = []
    for first, *rest in table.rows:
        cells = (f"<td{_class(kind)}>{_inline(cell)}</td>" for cell, kind in zip(rest, kinds[1:]))
        rows.append(f'<tr><th scope="row">{_inline(first)}</th>{"".join(cells)}</tr>')
    body = "\n".join(rows)
    return f'<div class="wide"><table>\n<thead>\n{head}\n</thead>\n<tbody>\n{body}\n</tbody>\n</table></div>'


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""


def _inline(text: str) -> str:
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text, quote=False))
    return re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", text)


def _anchor(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{style}
</style>
</head>
<body>
<h1>{title}</h1>
<nav aria-label="sections"><ul>
{links}
</ul></nav>
{body}
</body>
</html>
"""

STYLE = """\
:root { color-scheme: light; }
body { max-width: 72rem; margin: 2rem auto 4rem; padding: 0 1.2rem; background: #fff; color: #1c1c1c;
  font: 16px/1.5 system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .6rem; }
h2 { font-size: 1.2rem; margin: 2.4rem 0 .6rem; padding-top: .6rem; border-top: 1px solid #d5d5d5; }
nav ul { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; margin: 0 0 1rem; padding: 0; list-style: none;
  font-size: .9rem; }
a { color: #005a8c; }
p, li { max-width: 46rem; }
figure { margin: 1.2rem 0 1.8rem; }
figure img { display: block; max-width: 100%; height: auto; }
figcaption { margin-top: .4rem; max-width: 46rem; color: #555; font-size: .88rem; }
.wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .8rem; font-variant-numeric: tabular-nums; line-height: 1.3; }
th, td { padding: .2rem .45rem; text-align: right; white-space: nowrap; }
thead th { font-weight: 600; vertical-align: bottom; white-space: normal; }
thead tr:last-child th { border-bottom: 1px solid #888; }
thead th.group { border-bottom: 1px solid #bbb; text-align: center; color: #555; }
tbody th { font-weight: 400; }
th:first-child, .word { text-align: left; }
tbody tr:nth-child(even) { background: #f5f6f7; }
code { font-size: .9em; background: #f2f2f2; padding: 0 .2em; overflow-wrap: anywhere; }
@media print {
  @page { margin: 14mm; }
  body { max-width: none; margin: 0; padding: 0; font-size: 10pt; }
  nav { display: none; }
  a { color: inherit; text-decoration: none; }
  .wide { overflow: visible; }
  table { font-size: 7.2pt; }
  th, td { padding: .1rem .3rem; }
  h2 { break-after: avoid; }
  figure, tr { break-inside: avoid; }
  thead { display: table-header-group; }
}"""
