"""docs/reference.md is what the code says."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/reference.md"


def test_the_reference_is_up_to_date() -> None:
    made = runpy.run_path(str(ROOT / "docs/reference.py"))["reference"]()
    assert PAGE.read_text() == made, "the command line has changed: run `python docs/reference.py`"


def test_the_reference_has_what_people_look_for() -> None:
    page = PAGE.read_text()
    for line in (
        "### hybrid-distill score", "### hybrid-distill analyze remove-heads", "| `--plan.k` | INT | `6` | Heads kept,",
        "| `--STAGE.steps` | INT | `1000` |", "| `--post.teacher` |", "| `--tokenizer` | STR | required |",
    ):  # fmt: skip
        assert line in page, line
    assert ".name`" not in page and "--on-policy.teacher-logits" not in page
