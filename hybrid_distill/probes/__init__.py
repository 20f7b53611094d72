"""Synthetic tasks that ask a model one question each, and the two ways of reading its answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Example:
    """One question: ``prompt + answer`` is the text a model that knows would write.

    ``answer`` is one of ``choices``; each carries its own leading space.
    """

    prompt: str
    answer: str
    choices: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.prompt or not all(self.choices):
            raise ValueError(f"a prompt or a choice of {self!r} is empty; nothing can be compared with it.")
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
        """The first ``n`` examples: the same ones at every call."""
        ...

    def describe(self) -> dict[str, object]:
        """Everything the examples follow from, for the provenance of a result (JSON values only)."""
        ...


def check_counts(**counts: int) -> None:
    """Raise ValueError unless every named count is a whole number of at least 1."""
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} is {value!r}; it must be a whole number of at least 1.")


def duplicates(words: Iterable[str]) -> list[str]:
    """Words that occur more than once, sorted."""
    return sorted(word for word, count in Counter(words).items() if count > 1)
