"""Versions of transformers that reproduce an export's results, read from versions.json.

benchmarks/versions.py measures them and writes that file.
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

    The installed version is among them, unless it is older than the first correct one. For an
    untested backbone, it is the only one.
    """
    installed = ".".join(map(str, release(transformers.__version__)))
    oldest = TRIED["oldest"].get(model_type)
    if oldest is None:
        return [installed]
    versions = {*TRIED["tried"], installed}
    correct = [version for version in versions if release(version) >= release(oldest)]
    return sorted(correct, key=release)


def oldest_transformers(model_type: str) -> str:
    """Return the first of `checked_transformers`."""
    return checked_transformers(model_type)[0]
