"""Checks of what a user passes: ranges of numbers, and flags that hold several values (``0,10,all``). Pure Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Limits:
    """The numbers from ``least`` to ``most``, neither nan nor infinite."""

    least: float
    most: float = math.inf
    whole: bool = False
    without_ends: bool = False

    def check(self, name: str, value: Any) -> None:
        """Raise ValueError unless ``value`` is one of them."""
        is_number = isinstance(value, int if self.whole else int | float) and math.isfinite(value)
        ends = () if self.without_ends else (self.least, self.most)
        if not is_number or not (self.least < value < self.most or value in ends):
            raise ValueError(f"{name} is {value!r}; it must be {self}.")

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        if self.most == math.inf:
            return f"{kind} {'above' if self.without_ends else 'of at least'} {self.least:g}"
        words = ("between", "and") if self.without_ends else ("from", "to")
        return f"{kind} {words[0]} {self.least:g} {words[1]} {self.most:g}"


COUNT = Limits(1, whole=True)
COUNT_OR_NONE = Limits(0, whole=True)
POSITIVE = Limits(0, without_ends=True)
SHARE = Limits(0, 1)


def check_fields(config: object, prefix: str, **limits: Limits) -> None:
    """Raise ValueError for a field of ``config`` outside its limits; the message calls it ``prefix`` and name.

    Every number of a tuple is checked; None passes.
    """
    for name, limit in limits.items():
        value = getattr(config, name)
        shown = f"--{name.replace('_', '-')}" if prefix == "--" else f"{prefix}{name}"
        for number in value if isinstance(value, tuple) else (value,):
            if number is not None:
                limit.check(shown, number)


def words(text: str) -> list[str]:
    """Split at commas and drop blanks."""
    return [word for part in text.split(",") if (word := part.strip())]


def numbers(
    flag: str,
    text: str,
    *,
    number: Callable[[str], Any] = int,
    least: float | None = None,
    named: Mapping[str, Any] | None = None,
) -> list[Any]:
    """Read the numbers of a flag. ``named`` are words that may stand among them, and their values.

    Raises ValueError, naming the flag, for anything else, a number below ``least``, and an empty list.
    """
    named = named or {}
    kind = "whole numbers" if number is int else "numbers"
    wanted = f"{kind}{'' if least is None else f' of at least {least}'}{''.join(f', or {name}' for name in named)}"
    shown = repr(text) if words(text) else "empty"
    refusal = ValueError(f"--{flag} is {shown}; pass {wanted}, with commas between.")
    found = []
    for word in words(text):
        try:
            value = named[word] if word in named else number(word)
        except ValueError:
            raise refusal from None
        if word not in named and (not math.isfinite(value) or (least is not None and value < least)):
            raise refusal
        found.append(value)
    if not found:
        raise refusal
    return found
