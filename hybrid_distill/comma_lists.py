"""Flags that hold several values: ``0,10,all``. Pure text."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any


def words(text: str) -> list[str]:
    """What stands between the commas, without blanks."""
    return [word for part in text.split(",") if (word := part.strip())]


def numbers(
    flag: str,
    text: str,
    *,
    number: Callable[[str], Any] = int,
    least: float | None = None,
    named: Mapping[str, Any] | None = None,
) -> list[Any]:
    """The numbers of a flag. ``named`` are words that may stand among them, and their values.

    Raises ValueError, naming the flag, for anything else, a number below ``least``, and an empty list.
    """
    named = named or {}
    kind = "whole numbers" if number is int else "numbers"
    wanted = f"{kind}{'' if least is None else f' of at least {least}'}{''.join(f', or {name}' for name in named)}"
    found = []
    for word in words(text):
        try:
            value = named[word] if word in named else number(word)
        except ValueError:
            raise ValueError(f"--{flag} is {text!r}; give {wanted}, with commas between.") from None
        if word not in named and (not math.isfinite(value) or (least is not None and value < least)):
            raise ValueError(f"--{flag} is {text!r}; give {wanted}, with commas between.")
        found.append(value)
    if not found:
        raise ValueError(f"--{flag} is empty; give {wanted}, with commas between.")
    return found
