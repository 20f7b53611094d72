"""docs/reference.md is what the code says."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/reference.md"


def test_the_reference_is_up_to_date() -> None:
    made = runpy.run_path(str(ROOT / "docs/reference.py"))["reference"]()
    assert PAGE.read_text() == made, (
        "the command line has changed: run `python docs/reference.py`"
    )
