"""Records of what a result was made with: versions and date."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import re
from collections.abc import Iterable

PACKAGES = ("hybrid-distill", "torch", "transformers", "accelerate")

OLDEST = {"python": "3.10", "torch": "2.6", "transformers": "4.56"}
"""Oldest supported versions, as in pyproject.toml; newer ones are tried as they appear (docs/export.md)."""


def check_supported() -> None:
    """Raise ValueError for a Python, torch or transformers that is missing, or older than `OLDEST`."""
    found = {"python": platform.python_version(), **installed(OLDEST)}
    for name, oldest in OLDEST.items():
        fix = "use a newer Python" if name == "python" else f"pip install '{name}>={oldest}'"
        if name not in found:
            raise ValueError(f"{name} is not installed. Version {oldest} or newer is needed; {fix}.")
        ours, least = (tuple(map(int, re.findall(r"\d+", version)[:2])) for version in (found[name], oldest))
        if ours < least:
            raise ValueError(f"this is {name} {found[name]}. Version {oldest} or newer is supported; {fix}.")


def versions() -> dict[str, str]:
    """Look up the versions of Python and of `PACKAGES`."""
    return {"python": platform.python_version(), **installed(PACKAGES)}


def installed(packages: Iterable[str]) -> dict[str, str]:
    """Look up the versions of those packages that are installed; a clone run in place is not."""
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def now() -> str:
    """Format the time in UTC, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
