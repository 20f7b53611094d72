"""Copying: a list of words begins for the second time; the answer is the word that comes next (induction)."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from . import Example, SeededProbe, check_counts, digest
from .nouns import NOUNS, words_or_nouns


@dataclass(frozen=True)
class Copying(SeededProbe):
    """Lists of ``length`` different ``words`` on a line, and the same list again up to some word after the first.

    Choices are the words of the list. Raises ValueError when ``length`` is below 2 and for repeated or too few words.
    """

    length: int = 16
    seed: int = 0
    words: tuple[str, ...] = field(default=NOUNS, repr=False)

    def __post_init__(self) -> None:
        check_counts(length=self.length)
        if self.length < 2:
            raise ValueError(f"length is {self.length}; a list of one word has no next word: pass at least 2.")
        object.__setattr__(self, "words", words_or_nouns("words", self.words, self.length))

    @property
    def chance(self) -> float:
        """Accuracy of naming any word of the list."""
        return 1 / self.length

    def _example(self, index: int) -> Example:
        rng = random.Random(f"copying {self.seed} {self.length} {index}")
        words = rng.sample(self.words, self.length)
        n_repeated = rng.randrange(1, self.length)
        prompt = "\n".join([" ".join(words), " ".join(words[:n_repeated])])
        return Example(prompt, answer=f" {words[n_repeated]}", choices=tuple(f" {word}" for word in words))

    def describe(self) -> dict[str, object]:
        """Return the settings every prompt follows from; the words as a hash."""
        return {"name": "copying", "length": self.length, "seed": self.seed, "words_sha256": digest(self.words)}
