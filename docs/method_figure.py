"""Draw docs/method.svg, the figure of README.md, from the tables of docs/results_tiny.md.

python docs/method_figure.py
"""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE / "method.svg"
N_LAYERS, N_HEADS = 6, 8
CELL, GAP, LEFT, TOP, STRIDE = 22, 5, 34, 84, 305
WIDTH, HEIGHT = 890, 476
BAR = N_HEADS * (CELL + GAP) - GAP
N_TOKENS, N_WINDOW, N_SINKS, TOKEN, SPACE = 24, 6, 1, 11, 4
STYLE = """\
:root { --card: #ffffff; --edge: #d0d7de; --text: #1f2328; --soft: #59636e; --lit: #0072b2; --state: #afb8c1;
  --track: #eaeef2; --memory: #d55e00; }
@media (prefers-color-scheme: dark) { :root { --card: #151b23; --edge: #3d444d; --text: #f0f6fc; --soft: #9198a1;
  --lit: #56b4e9; --state: #545d68; --track: #2a313c; --memory: #e69f00; } }
text { font: 14px system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif; fill: var(--text); }
.title { font-size: 17px; font-weight: 600; }
.soft { fill: var(--soft); }
.note { font-size: 12px; }
.number { font-weight: 600; text-anchor: end; }
.card { fill: var(--card); stroke: var(--edge); }
.lit, .retrieval, .seen { fill: var(--lit); }
.state, .summary { fill: none; stroke: var(--state); stroke-width: 2.5; }
.track { fill: var(--track); }
.memory { fill: var(--memory); }
.arrow { fill: none; stroke: var(--soft); stroke-width: 2; }"""


def row(table: str, label: str) -> list[str]:
    """Return the cells of the first row of a Markdown page that begins with a label."""
    found = re.search(rf"(?m)^\| {re.escape(label)} \|(.*)\|$", table)
    assert found, f"docs/results_tiny.md has no row {label!r}"
    return [cell.strip() for cell in found[1].split("|")]


def panel(
    number: int, title: str, below: str, lit: set[tuple[int, int]], cells: list[str], most: float
) -> list[str]:
    """Draw a model: heads that are attention as squares, recurrent ones as rings; what it retrieves, what it holds."""
    x, bottom = LEFT + number * STRIDE, TOP + N_LAYERS * (CELL + GAP)
    drawn = [
        f'<text class="title" x="{x}" y="42">{title}</text>',
        f'<text class="soft" x="{x}" y="64">{below}</text>',
    ]
    for layer in range(N_LAYERS):
        for head in range(N_HEADS):
            left, top = x + head * (CELL + GAP), TOP + (N_LAYERS - 1 - layer) * (CELL + GAP)
            if (layer, head) in lit:
                drawn.append(
                    f'<rect class="lit" x="{left}" y="{top}" width="{CELL}" height="{CELL}" rx="4"/>'
                )
            else:
                drawn.append(
                    f'<circle class="state" cx="{left + CELL / 2:g}" cy="{top + CELL / 2:g}" r="6"/>'
                )
    retrieval, memory = float(cells[3].split()[0]), float(cells[8])
    for name, place, share, text in (
        ("retrieval", bottom + 22, retrieval / 100, f"{retrieval:.0f} %"),
        ("memory", bottom + 66, memory / most, f"{memory:.{1 if memory > 1 else 2}f} MB"),
    ):
        drawn += [
            f'<text class="soft" x="{x}" y="{place}">{name}</text>',
            f'<text class="number" x="{x + BAR}" y="{place}">{text}</text>',
            f'<rect class="track" x="{x}" y="{place + 8}" width="{BAR}" height="10" rx="5"/>',
            f'<rect class="{name}" x="{x}" y="{place + 8}" width="{max(4, share * BAR):.0f}" height="10" rx="4"/>',
        ]
    return drawn


def strip(x: int, title: str, parts: str, seen: set[int]) -> list[str]:
    """Draw what a head reads: tokens that it sees as squares, those it knows from a state through a bar."""
    top = HEIGHT - 106
    drawn = [f'<text x="{x}" y="{top}">{title}</text>']
    for token in range(N_TOKENS):
        left = x + token * (TOKEN + SPACE)
        kind = "seen" if token in seen else "track"
        drawn.append(
            f'<rect class="{kind}" x="{left}" y="{top + 12}" width="{TOKEN}" height="{TOKEN}" rx="2"/>'
        )
    unseen = [token for token in range(N_TOKENS) if token not in seen]
    if unseen:
        first = x + unseen[0] * (TOKEN + SPACE)
        last = x + unseen[-1] * (TOKEN + SPACE) + TOKEN
        ring = last - 8
        line = top + 35
        drawn += [
            f'<path class="summary" d="M{first} {line} H{ring - 6}"/>',
            f'<circle class="summary" cx="{ring}" cy="{line}" r="6"/>',
        ]
    drawn.append(f'<text class="soft note" x="{x}" y="{top + 58}">{parts}</text>')
    return drawn


def method_figure() -> str:
    """Return the figure as SVG: teacher, student with the heads that were kept, student without any."""
    page = (HERE / "results_tiny.md").read_text(encoding="utf-8")
    teacher, student, bare = (
        row(page, label) for label in ("teacher", "top 6 by ablation", "0 heads")
    )
    every = {(layer, head) for layer in range(N_LAYERS) for head in range(N_HEADS)}
    kept = {
        (int(layer), int(head))
        for layer, head in re.findall(r"(?m)^\| \d+ \| L(\d+)H(\d+) \| yes \|", page)
    }
    most = float(teacher[8])
    middle, between = TOP + N_LAYERS * (CELL + GAP) // 2, LEFT + BAR + 12
    shown = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        "<title>A teacher of 48 attention heads; a student that keeps the 6 heads which retrieval needs; one that "
        "keeps none. Below each, how much it retrieves and how much memory it takes. At the bottom, what heads read: a "
        "kept one every token, a replaced one a window of the last tokens, a state of all, or both.</title>",
        f"<style>\n{STYLE}\n</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="10"/>',
        *panel(0, "Teacher", f"{len(every)} attention heads", every, teacher, most),
        *panel(
            1,
            "Student",
            f"{len(kept)} heads kept, {len(every) - len(kept)} recurrent",
            kept,
            student,
            most,
        ),
        *panel(2, "Without them", f"{len(every)} recurrent heads", set(), bare, most),
        f'<path class="arrow" d="M{between} {middle} h58 m-9 -6 l9 6 l-9 6"/>',
        *strip(LEFT, "A kept head", "sees every token: its cache grows", set(range(N_TOKENS))),
        *strip(
            LEFT + 420,
            "A replaced head",
            "a state of earlier tokens, a window of the last, or both: a fixed size",
            {*range(N_SINKS), *range(N_TOKENS - N_WINDOW, N_TOKENS)},
        ),
        f'<text class="soft note" x="{LEFT}" y="{HEIGHT - 18}">Rows are layers. Retrieval: dictionaries of 8 pairs. '
        "Memory: cache of 4,096 tokens. The embedded teacher of 1.4 M parameters.</text>",
        "</svg>",
    ]
    return "\n".join(shown) + "\n"


if __name__ == "__main__":
    PAGE.write_text(method_figure(), encoding="utf-8")
