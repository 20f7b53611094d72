"""Checks of user input: ranges of numbers, flags with several values (``0,10,all``). Uses the standard library only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Literal, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """Range of finite numbers from ``least`` to ``most``."""

    least: float
    most: float = math.inf
    whole: bool = False
    without_ends: bool = False

    def check(self, name: str, value: object) -> None:
        """Raise ValueError unless ``value`` is in the range."""
        if not isinstance(value, int if self.whole else (int, float)) or not self._has(value):
            raise ValueError(f"{name} is {value!r}; it must be {self}.")

    def _has(self, value: float) -> bool:
        inside = self.least < value < self.most if self.without_ends else self.least <= value <= self.most
        return inside and math.isfinite(value)

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

Count = Annotated[int, COUNT]
CountOrZero = Annotated[int, COUNT_OR_NONE]
Positive = Annotated[float, POSITIVE]
Share = Annotated[float, SHARE]


def check_options(options: object, prefix: str) -> None:
    """Raise ValueError for a dataclass field outside the `Limits` or Literal that it is declared with.

    The message names it by ``prefix`` and field name. Every entry of a tuple is checked; None always passes.
    """
    for name, hint in _hints_of(type(options)).items():
        shown = f"--{name.replace('_', '-')}" if prefix == "--" else f"{prefix}{name}"
        check_value(shown, hint, getattr(options, name))


def check_value(name: str, hint: object, value: object) -> None:
    """Check one value declared as ``hint``, as `check_options` does."""
    for entry in value if isinstance(value, tuple) else (value,):
        for rule in _rules(hint) if entry is not None else ():
            if isinstance(rule, Limits):
                rule.check(name, entry)
            elif entry not in rule:
                raise ValueError(f"{name} is {entry!r}; pass one of {', '.join(map(str, rule))}.")


@cache
def _hints_of(kind: type) -> dict[str, object]:
    return get_type_hints(kind, include_extras=True)


def _rules(hint: object) -> Iterator[Limits | tuple[object, ...]]:
    """Yield all limits and choices inside a type hint."""
    if get_origin(hint) is Literal:
        yield get_args(hint)
    elif isinstance(hint, Limits):
        yield hint
    else:
        for inner in get_args(hint):
            yield from _rules(inner)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or the error's type if the message is empty."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def words(text: str) -> list[str]:
    """Split at commas and drop blanks."""
    return [word for part in text.split(",") if (word := part.strip())]


def numbers(flag: str, text: str, *, least: int | None = None, named: Mapping[str, T] | None = None) -> list[int | T]:
    """Parse the comma-separated whole numbers of a flag. ``named`` maps words that are also allowed to their values.

    Raises ValueError, naming the flag, for anything else, a number below ``least``, or an empty list.
    """
    known: Mapping[str, T] = named or {}
    found: list[int | T] = []
    try:
        for word in words(text):
            found.append(known[word] if word in known else int(word))
            if word not in known and least is not None and int(word) < least:
                raise ValueError
        if not found:
            raise ValueError
    except ValueError:
        wanted = f"whole numbers{'' if least is None else f' of at least {least}'}"
        wanted += "".join(f", or {name}" for name in known)
        shown = repr(text) if words(text) else "empty"
        raise ValueError(f"--{flag} is {shown}; pass {wanted}, with commas between.") from None
    return found
