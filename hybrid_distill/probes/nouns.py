"""Words that probes draw from."""

from __future__ import annotations

from collections.abc import Sequence

from ..assets.dictionaries import NOUNS
from . import as_tuple, check_words


def words_or_nouns(name: str, words: Sequence[str] | None, at_least: int) -> tuple[str, ...]:
    """Return the words that a probe draws from, `NOUNS` for None. Raises ValueError for repeated or too few words."""
    found = NOUNS if words is None else as_tuple(name, words)
    check_words(name, found, at_least)
    return found
