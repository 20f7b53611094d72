"""Installed packages: those of a result, with its date; those that are supported; those that warn when imported."""

from __future__ import annotations

import datetime
import importlib.metadata
import logging
import platform
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache

PACKAGES = ("hybrid-distill", "torch", "transformers", "accelerate")

SUPPORTED = {"python": ("3.10", "3.13"), "torch": ("2.9", "2.x"), "transformers": ("5.2", "5.24")}
"""Oldest supported versions, as in pyproject.toml, and newest ones (docs/versions.md lists those tested)."""


NOISY_IMPORTS = ("torchao", "torch.utils._pytree")
"""Loggers that warn about a missing GPU while transformers is imported."""


def mute_imports() -> None:
    """Mute the warnings of `NOISY_IMPORTS`, before transformers imports them."""
    for name in NOISY_IMPORTS:
        logging.getLogger(name).setLevel(logging.ERROR)


@lru_cache
def check_supported() -> str | None:
    """Return a note if Python, torch or transformers is newer than in `SUPPORTED`, else None.

    Raises ValueError if one is older or missing, and on Windows.
    """
    if sys.platform == "win32":
        raise ValueError(
            "this is Windows. Linux and macOS are supported; run it in the Linux of WSL 2."
        )
    note = None
    for name, (oldest, newest) in SUPPORTED.items():
        note = _check(name, oldest, newest) or note
    return note


def _check(name: str, oldest: str, newest: str) -> str | None:
    """Return a note if the version in use is newer than ``newest``; raise as `check_supported` does."""
    supported = f"{oldest} to {newest}"
    fix = f"pip install '{name}>={oldest}'"
    version = installed([name]).get(name)
    if name == "python":
        fix = f"use Python {supported}"
        version = platform.python_version()
    if version is None:
        raise ValueError(f"{name} is not installed. Version {supported} is needed; {fix}.")
    if _numbers(version) < _numbers(oldest):
        raise ValueError(f"this is {name} {version}. Version {supported} is supported; {fix}.")
    # "2.x" has one number: every version 2 is supported.
    limit = _numbers(newest)
    if _numbers(version)[: len(limit)] > limit:
        return f"this is {name} {version}, which was not tried. Version {supported} is supported."
    return None


def _numbers(version: str) -> list[int]:
    """Return the first two numbers of a version, or one if there are no more."""
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


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
