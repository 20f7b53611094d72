"""Versions of transformers that reproduce an export's results.

They are in versions.json, which benchmarks/versions.py writes.
"""

from __future__ import annotations

from pathlib import Path

import transformers

from ..io import Record, read_json
from ..model.field_rules import release

TRIED: Record = read_json(Path(__file__).with_name("versions.json"))
"""Table of ``tried``, all tested versions, oldest first; ``oldest``, the first correct one by
backbone; and ``falcon-h1``, the versions correct with that format, which cannot reject others."""


def checked_transformers(model_type: str) -> list[str]:
    """List the versions that run exports with this backbone correctly, oldest first.

    The installed one is among them, unless an older one is known to be the first that is correct.
    """
    installed = ".".join(map(str, release(transformers.__version__)))
    oldest = TRIED["oldest"].get(model_type)
    if oldest is None:
        return [installed]
    versions = {*TRIED["tried"], installed}
    correct = [version for version in versions if release(version) >= release(oldest)]
    return sorted(correct, key=release)


def oldest_transformers(model_type: str) -> str:
    """Return the oldest version that runs exports with this backbone; untested: the installed."""
    return checked_transformers(model_type)[0]
