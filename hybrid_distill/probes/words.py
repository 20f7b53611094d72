"""Check the words and numbers that a probe is made of, and identify long lists of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any


def checked_words(name: str, words: object, at_least: int = 1) -> tuple[Any, ...]:
    """Return ``words`` as a tuple.

    Raises ValueError unless they are at least ``at_least`` distinct single words.
    """
    entries = as_tuple(name, words)
    distinct: set[str] = set()
    for word in map(str, entries):
        if word in distinct:
            raise ValueError(f"{name}: {word!r} appears twice; pass each once.")
        if word.split() != [word]:
            raise ValueError(f"{name} holds {word!r}; each must be one word, without spaces.")
        distinct.add(word)
    if len(distinct) < at_least:
        raise ValueError(
            f"{name} has {len(distinct)} words, expected at least {at_least}; pass more words, or fewer pairs."
        )
    return entries


def as_tuple(name: str, value: object) -> tuple[Any, ...]:
    """Return a sequence as a tuple; a single number or word becomes a tuple of one.

    Raises ValueError if empty.
    """
    if isinstance(value, str | int | float):
        return (value,)
    values = tuple(value) if isinstance(value, Iterable) else ()
    if not values:
        raise ValueError(f"{name} is {value!r}; give at least one value.")
    return values


def digest(words: Iterable[str]) -> str:
    """Return a short hash that identifies a word list."""
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]
