"""Records of what a result was made with: versions and date."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
from collections.abc import Iterable

PACKAGES = ("hybrid-distill", "torch", "transformers", "accelerate")


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
