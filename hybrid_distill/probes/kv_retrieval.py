"""Key-value retrieval: a dictionary and a question about one of its values (arXiv 2504.18574)."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, ClassVar, NamedTuple

from ..assets import general_facts_path
from ..assets.dictionaries import HEADER, N_VALUES, NOUNS, QUESTION
from ..validation import Count, CountOrZero, Limits
from .knowledge import Knowledge
from .probe import Example, SeededProbe
from .words import as_tuple, checked_words

Pairs = Annotated[int, Limits(1, N_VALUES, whole=True)]
"""Number of entries in a dictionary; limited because values are distinct."""


class Wording(NamedTuple):
    """Wording of a dictionary prompt: first line ("" for none), entry, question."""

    header: str = HEADER
    entry: str = "{key}:{value}"
    question: str = QUESTION


REMINDER = "Recall the dictionary above."
"""Comes before a question that is far from its dictionary."""
DICTIONARY = Wording()
REWORDED = Wording("Register:", question="Look up '{key}':")
DIALOGUE = Wording(
    "", "Anna: I have {value} of the {key}.", "Ben: How many of the {key}?\nAnna: You said"
)


@dataclass(frozen=True)
class KVRetrieval(SeededProbe):
    """Dictionaries of ``n_pairs`` distinct nouns with distinct values from 0 to 99, the choices.

    With several ``n_pairs``, successive dictionaries cycle through the sizes. Each dictionary
    yields ``n_queries`` consecutive examples that ask for different keys. ``seed`` determines the
    keys, the values, their order and the questions. ``keys`` replaces the default nouns, for a
    model that knows few words; ``wording`` replaces the text around them. ``distance`` puts that
    many words of general knowledge between dictionary and question, so that a window of as many
    tokens does not cover both. Raises ValueError for repeated or too few keys, and for more queries
    than pairs.
    """

    name: ClassVar[str] = "kv_retrieval"
    lead: ClassVar[str] = "The value is"

    n_pairs: Pairs | tuple[Pairs, ...]
    seed: int = 0
    keys: tuple[str, ...] = field(default=NOUNS, repr=False)
    wording: Wording = DICTIONARY
    n_queries: Count = 1
    distance: CountOrZero = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_words("n_pairs", self._sizes)
        object.__setattr__(self, "keys", checked_words("keys", self.keys, max(self._sizes)))
        _check_queries(self.n_queries, min(self._sizes))

    @property
    def _sizes(self) -> tuple[int, ...]:
        return as_tuple("n_pairs", self.n_pairs)

    @property
    def chance(self) -> float:
        """Accuracy of guessing among the dictionary's values, averaged over sizes."""
        return sum(1 / n_pairs for n_pairs in self._sizes) / len(self._sizes)

    def _example(self, index: int) -> Example:
        dictionary, query = divmod(index, self.n_queries)
        number, size = divmod(dictionary, len(self._sizes))
        n_pairs = self._sizes[size]
        # Seeded by size and number: example i is the same whichever others are requested.
        rng = random.Random(f"kv-retrieval {self.seed} {n_pairs} {number}")
        keys = rng.sample(self.keys, n_pairs)
        values = rng.sample(range(N_VALUES), n_pairs)
        # The targets of all queries are drawn, so that the questions about one prompt differ.
        targets = rng.sample(range(n_pairs), self.n_queries)
        target = targets[query]
        header, entry, question = self.wording
        lines = [header] if header else []
        for key, value in zip(keys, values, strict=True):
            lines.append(entry.format(key=key, value=value))
        question = question.format(key=keys[target])
        if self.distance:
            lines.append(f"\n{_statements(rng, self.distance)}\n")
            # Without the reminder, models continue the statements (docs/scores.md).
            question = f"{REMINDER} {question}"
        lines.append(question)
        choices = tuple(f" {value}" for value in values)
        return Example("\n".join(lines), choices[target], choices)

    def describe(self) -> dict[str, object]:
        """Return the settings that determine every prompt; default wording, queries and distance are left out."""
        settings = super().describe()
        if self.wording == DICTIONARY:
            del settings["wording"]
        if self.n_queries == 1:
            del settings["n_queries"]
        if not self.distance:
            del settings["distance"]
        return settings


def _statements(rng: random.Random, n_words: int) -> str:
    """Return random statements, ``n_words`` words or a few more in all.

    Not generated sentences, which repeat themselves: with these, heads that look for repetitions rank high too.
    """
    statements = _general_statements()
    shuffled: list[str] = []
    chosen: list[str] = []
    n_chosen = 0
    while n_chosen < n_words:
        # All are used up, and used again, only for a distance of more than a thousand words.
        if not shuffled:
            shuffled = rng.sample(statements, len(statements))
        statement = shuffled.pop(0)
        chosen.append(statement)
        n_chosen += len(statement.split())
    return " ".join(chosen)


@cache
def _general_statements() -> list[str]:
    """List the shipped facts as sentences; cached, because every prompt with a distance needs them."""
    facts = Knowledge(general_facts_path()).examples()
    return [f"{fact.prompt}{fact.answer}." for fact in facts]


def _check_queries(n_queries: int, n_pairs: int) -> None:
    """Raise ValueError if a prompt has more questions than pairs."""
    if n_queries > n_pairs:
        raise ValueError(
            f"n_queries is {n_queries}, but a prompt has {n_pairs} pairs; pass at most {n_pairs}."
        )
