"""docs/reference.md is what the code says."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_reference_is_up_to_date() -> None:
    page = runpy.run_path(str(ROOT / "docs/reference.py"))["reference"]()
    written = (ROOT / "docs/reference.md").read_text()
    assert written == page, "the command line has changed: run `python docs/reference.py`"
