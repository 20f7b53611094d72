"""Versions of transformers that compute what an export computed here: versions.json, by benchmarks/versions.py."""

from __future__ import annotations

from pathlib import Path

import transformers

from ..io import Record, read_json
from ..model.configuration_hybrid import release

TRIED: Record = read_json(Path(__file__).with_name("versions.json"))
"""``tried``: all versions that exports were checked with, oldest first. ``oldest``: the first right one, by backbone.
``falcon-h1``: those right with that form, which cannot refuse any."""


def oldest_transformers(model_type: str) -> str:
    """Return the oldest version from which on exports with this backbone are right; this one, where none was tried."""
    return TRIED["oldest"].get(model_type) or ".".join(map(str, release(transformers.__version__)))
