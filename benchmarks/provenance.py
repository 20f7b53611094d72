"""What a benchmark's results were measured with."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Of the packages that are installed; absent ones are left out."""
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
