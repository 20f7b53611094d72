"""Provenance of results: package versions and date."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache

PACKAGES = ("hybrid-distill", "torch", "transformers", "accelerate")

SUPPORTED = {"python": ("3.10", "3.13"), "torch": ("2.9", "2.x"), "transformers": ("5.2", "5.24")}
"""Oldest supported versions, as in pyproject.toml, and newest ones (docs/versions.md lists those tested)."""


@lru_cache
def check_supported() -> str | None:
    """Return a note if Python, torch or transformers is newer than in `SUPPORTED`, else None.

    Raises ValueError if one is older or missing, and on Windows.
    """
    if sys.platform == "win32":
        raise ValueError(
            "this is Windows. Linux and macOS are supported; run it in the Linux of WSL 2."
        )
    found, note = {"python": platform.python_version(), **installed(SUPPORTED)}, None
    for name, (oldest, newest) in SUPPORTED.items():
        range, fix = f"{oldest} to {newest}", f"pip install '{name}>={oldest}'"
        if name not in found:
            raise ValueError(f"{name} is not installed. Version {range} is needed; {fix}.")
        ours, least, most = (
            tuple(map(int, re.findall(r"\d+", version)[:2]))
            for version in (found[name], oldest, newest)
        )
        if ours < least:
            fix = f"use Python {range}" if name == "python" else fix
            raise ValueError(f"this is {name} {found[name]}. Version {range} is supported; {fix}.")
        if ours[: len(most)] > most:
            note = (
                f"this is {name} {found[name]}, which was not tried. Version {range} is supported."
            )
    return note


def versions() -> dict[str, str]:
    """Look up the versions of Python and of `PACKAGES`."""
    return {"python": platform.python_version(), **installed(PACKAGES)}


def installed(packages: Iterable[str]) -> dict[str, str]:
    """Look up the versions of the packages that are installed; a clone that runs in place is not."""
    found = {}
    for package in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def now() -> str:
    """Return the current UTC time in ISO format, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
