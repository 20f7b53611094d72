"""Ranges of numbers that a user gives, checked where they come in. Pure Python."""

from __future__ import annotations

import math
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


def check_fields(config: Any, prefix: str, **limits: Limits) -> None:
    """Raise ValueError, calling it ``prefix`` and name, for a field of ``config`` that is outside of its limits.

    Of a tuple every number is checked; None is left to mean what it means.
    """
    for name, limit in limits.items():
        value = getattr(config, name)
        shown = f"--{name.replace('_', '-')}" if prefix == "--" else f"{prefix}{name}"
        for number in value if isinstance(value, tuple) else (value,):
            if number is not None:
                limit.check(shown, number)
