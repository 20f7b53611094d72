"""One kit for every report: tables, figures in one style, a template each for Markdown and HTML.

A table is a data frame whose cells are text (or numbers that need no rounding); two levels of
columns make groups. A figure is a grid of matplotlib axes, saved when the block ends; matplotlib
is imported only then. `run` reports on a run, from what `record` reads; `heads` draws head scores.
"""

from .document import (
    ABSENT,
    Section,
    html_table,
    markdown_table,
    percent_change,
    render,
    signed,
    text_table,
    with_error,
)
from .figures import (
    BLUE,
    GREEN,
    GREY,
    LOOKS,
    ORANGE,
    PALE,
    VERMILION,
    figure,
    has_matplotlib,
    log_no_figures,
)
