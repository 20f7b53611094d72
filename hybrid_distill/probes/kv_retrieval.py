"""Key-value retrieval: a dictionary in the prompt and a question for one of its values (arXiv 2504.18574)."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field
from typing import NamedTuple

from . import Example, check_counts, duplicates
from .nouns import NOUNS

HEADER = "Memorize the following dictionary:"
QUESTION = "The value of the key '{key}' is"
N_VALUES = 100

KVExample = Example


class Wording(NamedTuple):
    """How a dictionary is put: its first line ("" for none), an entry, the question."""

    header: str = HEADER
    entry: str = "{key}:{value}"
    question: str = QUESTION


DICTIONARY = Wording()
REWORDED = Wording("Register:", question="Look up '{key}':")
DIALOGUE = Wording("", "Anna: I have {value} of the {key}.", "Ben: How many of the {key}?\nAnna: You said")


@dataclass(frozen=True)
class KVRetrieval:
    """Dictionaries of ``n_pairs`` distinct nouns with distinct values 0 to 99.

    Keys, values, their order and the key asked for all follow from ``seed``; example i is the same whatever
    number of examples is asked for. ``keys`` replaces the default nouns, for a model that knows few words, ``wording``
    the words around them.

    Raises ValueError when ``n_pairs`` is not in 1..100 (values are distinct), for repeated or too few keys.
    """

    n_pairs: int
    seed: int = 0
    keys: tuple[str, ...] | None = field(default=None, repr=False)
    wording: Wording = DICTIONARY

    def __post_init__(self) -> None:
        check_counts(n_pairs=self.n_pairs)
        if self.n_pairs > N_VALUES:
            raise ValueError(
                f"n_pairs is {self.n_pairs}, but only {N_VALUES} values (0 to {N_VALUES - 1}) are distinct; "
                f"ask for at most {N_VALUES} pairs."
            )
        if self.keys is not None:
            object.__setattr__(self, "keys", tuple(self.keys))
        if repeated := duplicates(self.nouns):
            raise ValueError(f"keys named twice: {', '.join(repeated)}; a dictionary needs distinct keys.")
        if len(self.nouns) < self.n_pairs:
            raise ValueError(
                f"{len(self.nouns)} keys cannot fill a dictionary of {self.n_pairs} pairs; "
                "give more keys or ask for fewer pairs."
            )

    @property
    def nouns(self) -> tuple[str, ...]:
        """The keys that dictionaries are drawn from."""
        return NOUNS if self.keys is None else self.keys

    @property
    def chance(self) -> float:
        """Accuracy of naming any value of the dictionary."""
        return 1 / self.n_pairs

    def examples(self, n: int) -> list[Example]:
        """The first ``n`` examples. Answers and choices begin with the space that follows the prompt."""
        check_counts(n=n)
        return [self._example(index) for index in range(n)]

    def _example(self, index: int) -> Example:
        rng = random.Random(f"kv-retrieval {self.seed} {self.n_pairs} {index}")
        keys = rng.sample(self.nouns, self.n_pairs)
        values = rng.sample(range(N_VALUES), self.n_pairs)
        asked = rng.randrange(self.n_pairs)
        header, entry, question = self.wording
        pairs = [entry.format(key=key, value=value) for key, value in zip(keys, values, strict=True)]
        prompt = "\n".join([*([header] if header else []), *pairs, question.format(key=keys[asked])])
        return Example(prompt, answer=f" {values[asked]}", choices=tuple(f" {value}" for value in values))

    def describe(self) -> dict[str, object]:
        """The settings every prompt follows from; the keys as a hash."""
        keys = hashlib.sha256("\n".join(self.nouns).encode()).hexdigest()[:16]
        described = {"name": "kv_retrieval", "n_pairs": self.n_pairs, "seed": self.seed, "keys_sha256": keys}
        return described if self.wording == DICTIONARY else {**described, "wording": list(self.wording)}
