"""One kit for every report: tables from data frames, figures in one style, one template each for Markdown and HTML.

A table is a data frame whose cells are text (or numbers that need no rounding); two levels of columns make groups::

    frame = pd.DataFrame({"model": ["teacher"], "accuracy, %": [with_error(97.32, 1.4)]})
    markdown_table(frame)      # also html_table(frame) and text_table(frame)

A figure is a grid of matplotlib axes, saved when the block ends; matplotlib is imported only then::

    if can_draw():
        with figure(path, rows=1, columns=2, size=(7, 3)) as grid:
            grid[0, 0].plot(x, y, color=BLUE)

A report is a title and sections of paragraphs (str), lists (list of str), tables (data frames) and figures::

    text = render("Title", [Section("Results", [frame, "A note.", Figure("cache.png", "What it shows.")])])

`run` reports on runs and comparisons, `sweep` on sweeps, `recommend` chooses a student, `heads` draws head scores.
"""

from .document import Figure, Section, render
from .figures import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    LOOKS,
    ORANGE,
    PALE,
    PURPLE,
    SKY,
    VERMILION,
    can_draw,
    figure,
    log_ticks,
    look,
    percent_axis,
)  # fmt: skip
from .tables import ABSENT, html_table, markdown_table, percent_change, signed, text_table, with_error

__all__ = [
    "ABSENT", "BLACK", "BLUE", "GREEN", "GREY", "LOOKS", "ORANGE", "PALE", "PURPLE", "SKY", "VERMILION", "Figure",
    "Section", "can_draw", "figure", "html_table", "log_ticks", "look", "markdown_table", "percent_axis",
    "percent_change", "render", "signed", "text_table", "with_error",
]  # fmt: skip
