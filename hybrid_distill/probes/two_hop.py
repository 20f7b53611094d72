"""Two-hop retrieval: the value of the key asked for is itself a key, and that one's value is the answer."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from . import Example, SeededProbe, check_counts, digest
from .kv_retrieval import N_VALUES
from .nouns import NOUNS, words_or_nouns

HEADER = "In this list a word stands for a number, or for another word of the list:"
QUESTION = "Followed to its end, '{key}' stands for the number"


@dataclass(frozen=True)
class TwoHop(SeededProbe):
    """Dictionaries of ``n_pairs`` entries in any order: half of them lead to another key, the rest to a number.

    Every leading key has an end of its own, so each chain but the one asked for is a distractor. Choices are the
    numbers. Raises ValueError when ``n_pairs`` is below 4 (two chains) or asks for more than 100 numbers, and for
    repeated or too few ``keys``.
    """

    n_pairs: int = 8
    seed: int = 0
    keys: tuple[str, ...] = field(default=NOUNS, repr=False)

    def __post_init__(self) -> None:
        check_counts(n_pairs=self.n_pairs)
        if self.n_pairs < 4 or self._n_ends > N_VALUES:
            raise ValueError(
                f"n_pairs is {self.n_pairs}; two chains need 4 entries, and {2 * N_VALUES} have all of the "
                f"{N_VALUES} different numbers: ask for 4 to {2 * N_VALUES}."
            )
        object.__setattr__(self, "keys", words_or_nouns("keys", self.keys, self.n_pairs))

    @property
    def _n_ends(self) -> int:
        """Entries whose value is a number: half of them, and the odd one."""
        return self.n_pairs - self.n_pairs // 2

    @property
    def chance(self) -> float:
        """Accuracy of naming any number of the dictionary."""
        return 1 / self._n_ends

    def _example(self, index: int) -> Example:
        rng = random.Random(f"two-hop {self.seed} {self.n_pairs} {index}")
        keys = rng.sample(self.keys, self.n_pairs)
        numbers = rng.sample(range(N_VALUES), self._n_ends)
        ends, leading = keys[: self._n_ends], keys[self._n_ends :]
        asked = rng.randrange(len(leading))
        entries = [f"{key}:{number}" for key, number in zip(ends, numbers, strict=True)]
        entries += [f"{key}:{end}" for key, end in zip(leading, ends)]
        prompt = "\n".join([HEADER, *rng.sample(entries, len(entries)), QUESTION.format(key=leading[asked])])
        return Example(prompt, answer=f" {numbers[asked]}", choices=tuple(f" {number}" for number in numbers))

    def describe(self) -> dict[str, object]:
        """Return the settings every prompt follows from; the keys as a hash."""
        return {"name": "two_hop", "n_pairs": self.n_pairs, "seed": self.seed, "keys_sha256": digest(self.keys)}
