"""Versions of transformers that compute what an export computed here: versions.json, by benchmarks/versions.py."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import transformers

from ..io import Record, read_json
from ..model.configuration_hybrid import release


@cache
def _table() -> Record:
    return read_json(Path(__file__).with_name("versions.json"))


def oldest_transformers(model_type: str) -> str:
    """Return the oldest version from which on exports with this backbone are right; this one, where none was tried."""
    here = ".".join(map(str, release(transformers.__version__)))
    return _table()["oldest"].get(model_type) or here


def tried_versions() -> list[str]:
    """Return the versions that exports were checked with, oldest first."""
    return _table()["tried"]


def right_for_falcon_h1() -> list[str]:
    """Return the versions that exports in the form falcon-h1, which cannot refuse any, were right with."""
    return _table()["falcon-h1"]
