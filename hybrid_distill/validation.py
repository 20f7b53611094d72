"""Checks of user input: ranges of numbers, flags with several values (``0,10,all``).

Uses the standard library only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import (
    Annotated,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

T = TypeVar("T")
TOKEN_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}
BYTE_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
MB = BYTE_UNITS["MB"]


@dataclass(frozen=True)
class Limits:
    """Range of finite numbers from ``least`` to ``most``."""

    least: float
    most: float = math.inf
    whole: bool = False
    without_ends: bool = False

    def check(self, name: str, value: object) -> None:
        """Raise ValueError unless ``value`` is in the range."""
        if not self._has(value):
            raise ValueError(f"{name} is {value!r}; it must be {self}.")

    def _has(self, value: object) -> bool:
        if not isinstance(value, int if self.whole else (int, float)):
            return False
        if not math.isfinite(value):
            return False
        if self.without_ends:
            return self.least < value < self.most
        return self.least <= value <= self.most

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        if self.most < math.inf:
            if self.without_ends:
                return f"{kind} between {self.least:g} and {self.most:g}"
            most = f"{self.most:.0f}" if self.whole else f"{self.most:g}"
            return f"{kind} from {self.least:g} to {most}"
        return f"{kind} {'above' if self.without_ends else 'of at least'} {self.least:g}"


COUNT = Limits(1, whole=True)
COUNT_OR_NONE = Limits(0, whole=True)
SEED = Limits(0, 2**32 - 1, whole=True)
POSITIVE = Limits(0, without_ends=True)
SHARE = Limits(0, 1)

Count = Annotated[int, COUNT]
CountOrZero = Annotated[int, COUNT_OR_NONE]
Seed = Annotated[int, SEED]
Positive = Annotated[float, POSITIVE]
Share = Annotated[float, SHARE]


def check_options(options: object, prefix: str) -> None:
    """Raise ValueError for a dataclass field of another type, or outside its declared `Limits` or Literal.

    The message names it by ``prefix`` and field name. Every entry of a tuple is checked; None
    always passes.
    """
    for name, hint in _hints_of(type(options)).items():
        label = f"{prefix}{name}"
        if prefix == "--":
            label = label.replace("_", "-")
        check_value(label, hint, getattr(options, name))


def check_counts(**counts: int) -> None:
    """Raise ValueError unless every count is a whole number of at least 1."""
    for name, value in counts.items():
        COUNT.check(name, value)


def check_task_reads(
    options: object, readers: Mapping[str, Collection[str]], choice: str, chosen: Collection[str]
) -> None:
    """Raise ValueError for an option that was set although none of the chosen tasks reads it.

    ``readers`` maps an option to the tasks that read it. ``choice`` is the flag that selects tasks, ``chosen`` the
    selected ones. An option at its default counts as not set.
    """
    for name, tasks in readers.items():
        value = getattr(options, name)
        is_set = value != getattr(type(options), name)
        if is_set and set(chosen).isdisjoint(tasks):
            label = f"--{name.replace('_', '-')}"
            raise ValueError(
                f"{label} is {str(value)!r}, which --{choice} {getattr(options, choice)} does not read; "
                f"leave out {label}."
            )


def check_value(name: str, hint: object, value: object) -> None:
    """Check one value declared as ``hint``, as `check_options` does."""
    kinds = tuple(_kinds(hint))
    if not isinstance(value, kinds):
        names = " or ".join(kind.__name__ for kind in kinds if kind is not NoneType)
        raise ValueError(f"{name} is {value!r}, a {type(value).__name__}; pass a {names}.")
    entries = value if isinstance(value, tuple) else (value,)
    for rule in _rules(hint):
        for entry in entries:
            if entry is None:
                continue
            if isinstance(rule, Limits):
                rule.check(name, entry)
            elif entry not in rule:
                choices = ", ".join(map(str, rule))
                raise ValueError(f"{name} is {entry!r}; pass one of {choices}.")


@cache
def _hints_of(kind: type) -> dict[str, object]:
    return get_type_hints(kind, include_extras=True)


def _kinds(hint: object) -> Iterator[type]:
    """Yield the classes that a type hint allows. Numbers are left to `Limits`."""
    origin = get_origin(hint)
    if origin is Annotated:
        yield from _kinds(get_args(hint)[0])
    elif origin in (Union, UnionType):
        for choice in get_args(hint):
            yield from _kinds(choice)
    elif isinstance(origin, type):
        # tuple[str, ...], Callable[...]
        yield origin
    elif isinstance(hint, type) and hint not in (int, float):
        yield hint
    else:
        yield object


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
    """Return the first line of an error's message, or its type if the message is empty."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def words(text: str) -> list[str]:
    """Split at commas and drop blanks."""
    parts = [part.strip() for part in text.split(",")]
    return [part for part in parts if part]


def numbers(
    flag: str, text: str, *, least: int | None = None, named: Mapping[str, T] | None = None
) -> list[int | T]:
    """Parse the comma-separated whole numbers of a flag.

    ``named`` maps words that are also allowed to their values. Raises ValueError, naming the flag,
    for anything else, a number below ``least``, or an empty list.
    """
    value_of: Mapping[str, T] = named or {}
    values = _numbers_or_none(words(text), least, value_of)
    if values:
        return values
    expected = "whole numbers"
    if least is not None:
        expected += f" of at least {least}"
    for name in value_of:
        expected += f", or {name}"
    shown = repr(text) if words(text) else "empty"
    raise ValueError(f"--{flag} is {shown}; pass {expected}, with commas between.")


def _numbers_or_none(
    entries: list[str], least: int | None, value_of: Mapping[str, T]
) -> list[int | T] | None:
    """Return the value of each entry; None if one is not a number, or below ``least``."""
    values: list[int | T] = []
    for entry in entries:
        if entry in value_of:
            values.append(value_of[entry])
            continue
        try:
            number = int(entry)
        except ValueError:
            return None
        if least is not None and number < least:
            return None
        values.append(number)
    return values


def number_of_tokens(name: str, text: str) -> int:
    """Parse a number of tokens such as ``20000``, ``20K`` or ``2.5M``. Raises ValueError, naming the option."""
    match = re.fullmatch(r"(\d+\.?\d*)([KMB]?)", text.upper())
    n_tokens = 0
    if match is not None:
        number, unit = match.groups()
        n_tokens = round(float(number) * TOKEN_UNITS[unit])
    if n_tokens < 1:
        raise ValueError(f"{name} is {text!r}; pass a number such as 20000, 20K or 2M.")
    return n_tokens


def number_of_bytes(name: str, text: str, whole: int | None = None) -> int:
    """Parse a size such as ``15MB``, or ``16%`` of ``whole`` bytes. Raises ValueError, naming the option."""
    sizes: dict[str, float] = {**BYTE_UNITS}
    examples = "500KB or 15MB"
    if whole is not None:
        sizes["%"] = whole / 100
        examples = "500KB, 15MB or 16%"
    match = re.fullmatch(r"(\d+\.?\d*)([KMG]B|%)", text.upper())
    n_bytes = 0
    if match is not None and match[2] in sizes:
        n_bytes = round(float(match[1]) * sizes[match[2]])
    if n_bytes < 1:
        raise ValueError(f"{name} is {text!r}; pass a size such as {examples}.")
    return n_bytes
