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
    """List the versions that run exports with this backbone correctly, oldest first.

    The installed one is among them, unless an older one is known to be the first that is correct.
    """
    installed = ".".join(map(str, release(transformers.__version__)))
    if model_type not in TRIED["oldest"]:
        return [installed]
    oldest = TRIED["oldest"][model_type]
    versions = {*TRIED["tried"], installed}
    return sorted((v for v in versions if release(v) >= release(oldest)), key=release)


def oldest_transformers(model_type: str) -> str:
    """Return the oldest version that runs exports with this backbone correctly; if untested, the installed one."""
    return checked_transformers(model_type)[0]
