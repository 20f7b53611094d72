"""Versions of transformers that reproduce an export's results: versions.json, written by benchmarks/versions.py."""

from __future__ import annotations

from pathlib import Path

import transformers

from ..io import Record, read_json
from ..model.configuration_hybrid import release

TRIED: Record = read_json(Path(__file__).with_name("versions.json"))
"""``tried``: all tested versions, oldest first. ``oldest``: the first correct one, by backbone. ``falcon-h1``: the
versions that are correct with that form, which cannot reject the others."""


def checked_transformers(model_type: str) -> list[str]:
    """List the versions that run exports with this backbone correctly, oldest first, the installed one included."""
    installed = ".".join(map(str, release(transformers.__version__)))
    oldest = TRIED["oldest"].get(model_type)
    if oldest is None:
        return [installed]
    right = [version for version in TRIED["tried"] if release(version) >= release(oldest)]
    return sorted({*right, installed}, key=release)


def oldest_transformers(model_type: str) -> str:
    """Return the oldest version that runs exports with this backbone correctly; if untested, the installed one."""
    return checked_transformers(model_type)[0]
