"""Which versions of transformers compute what an export computed here: versions.json, by benchmarks/versions.py."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import transformers

from ..model.configuration_hybrid import release


@cache
def _table() -> dict[str, Any]:
    return json.loads(Path(__file__).with_name("versions.json").read_text())


def oldest_transformers(model_type: str) -> str:
    """Oldest version from which on exports with a backbone of this type are right; this one, where none was tried."""
    here = ".".join(map(str, release(transformers.__version__)))
    return _table()["oldest"].get(model_type) or here


def tried_versions() -> list[str]:
    """Versions that exports were checked with, oldest first."""
    return _table()["tried"]


def right_for_falcon_h1() -> list[str]:
    """Versions that exports in the form falcon-h1, which cannot refuse any, were right with."""
    return _table()["falcon-h1"]
