"""Synthetic tasks: each example asks a model one question."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol

from ..validation import COUNT, check_options

# For a ranking: 24 prompts of 8 questions tell more heads apart than 128 of one, in half the time
# (docs/scores.md).
QUERIES = 8
MOST_PROMPTS = 128
FEWEST_PROMPTS = 24


@dataclass(frozen=True)
class Example:
    """One question: a model that knows the answer continues ``prompt`` with ``answer``.

    ``answer`` is one of ``choices``; each choice includes its leading space.
    """

    prompt: str
    answer: str
    choices: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.prompt or not all(self.choices):
            raise ValueError(f"a prompt or a choice of {self!r} is empty; give it text.")
        if len(set(self.choices)) != len(self.choices) or self.answer not in self.choices:
            raise ValueError(
                f"answer {self.answer!r}, choices {self.choices!r}: choices must differ and hold the answer."
            )


class Probe(Protocol):
    """A task that heads can be scored on."""

    @property
    def chance(self) -> float:
        """Accuracy of guessing, 0 to 1."""
        ...

    def examples(self, n: int) -> list[Example]:
        """Return the first ``n`` examples, the same on every call."""
        ...

    def describe(self) -> dict[str, object]:
        """Return all settings that determine the examples, as JSON values."""
        ...


class SeededProbe(ABC):
    """Base for dataclasses of settings; example i is the same however many examples are requested.

    Raises ValueError for a setting outside the range that its field declares.
    """

    name: ClassVar[str]
    lead: ClassVar[str] = "The answer is"
    """Beginning of an answer in a chat, before the choice."""

    def __post_init__(self) -> None:
        check_options(self, "")

    def examples(self, n: int) -> list[Example]:
        """Return the first ``n`` examples. Each choice begins with the space after the prompt."""
        check_counts(n=n)
        return [self._example(index) for index in range(n)]

    @property
    def chance(self) -> float:
        """Accuracy of guessing, 0 to 1, on the first example."""
        return 1 / len(self._example(0).choices)

    @abstractmethod
    def _example(self, index: int) -> Example: ...

    def describe(self) -> dict[str, object]:
        """Return the settings that determine every prompt; fields without repr as hashes."""
        settings: dict[str, object] = {"name": self.name}
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            # Lists of hundreds of words would fill every file of scores.
            if not field.repr:
                settings[f"{field.name}_sha256"] = digest(value)
            elif isinstance(value, tuple):
                # A list, as it is when it has been read from JSON.
                settings[field.name] = list(value)
            else:
                settings[field.name] = value
        return settings


def check_counts(**counts: int) -> None:
    """Raise ValueError unless every count is a whole number of at least 1."""
    for name, value in counts.items():
        COUNT.check(name, value)


def check_queries(n_queries: int, n_pairs: int) -> None:
    """Raise ValueError if a prompt has more questions than pairs."""
    if n_queries > n_pairs:
        raise ValueError(
            f"n_queries is {n_queries}, but a prompt has {n_pairs} pairs; pass at most {n_pairs}."
        )


def queries_of(probe: Probe) -> int:
    """Return the number of consecutive examples that ask about one prompt; these are scored together."""
    return getattr(probe, "n_queries", 1)


def default_queries(sizes: Iterable[int]) -> int:
    """Return the number of questions per dictionary of a ranking, for dictionaries of these sizes."""
    return min(QUERIES, *sizes)


def default_prompts(n_queries: int) -> int:
    """Return the number of prompts of a ranking, for this number of questions per prompt."""
    n_prompts = FEWEST_PROMPTS * QUERIES // n_queries
    return min(MOST_PROMPTS, max(FEWEST_PROMPTS, n_prompts))


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
            f"there are {len(distinct)} {name}, and {at_least} are needed; pass more, or ask for fewer pairs."
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
