"""Run `analyze` commands and read the tables that they write."""

import csv
from pathlib import Path

from hybrid_distill.cli.app import main

FILES = ("md", "csv", "png")
"""Formats in which every table is written."""


def run(*argv: object) -> None:
    """Run ``hybrid-distill analyze`` with these words."""
    main(["analyze", *map(str, argv)])


def rows_of(path: Path) -> list[dict[str, str]]:
    """Read a table in CSV."""
    with path.open() as file:
        return list(csv.DictReader(file))
