"""Copying: a list of words begins for the second time; the answer is the word that comes next (induction)."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from . import Example, as_tuple, check_counts, check_words, digest
from .nouns import NOUNS


@dataclass(frozen=True)
class Copying:
    """Lists of ``length`` different words on a line, and the same list again up to some word after the first.

    ``words`` replaces the default nouns, for a model that knows few words. Raises ValueError when ``length`` is below 2
    and for repeated or too few words.
    """

    length: int = 16
    seed: int = 0
    words: tuple[str, ...] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_counts(length=self.length)
        if self.length < 2:
            raise ValueError(f"length is {self.length}; a list of one word has no next word: take at least 2.")
        if self.words is not None:
            object.__setattr__(self, "words", as_tuple("words", self.words))
        check_words("words", self._words, self.length)

    @property
    def _words(self) -> tuple[str, ...]:
        return NOUNS if self.words is None else self.words

    @property
    def chance(self) -> float:
        """Accuracy of naming any word of the list."""
        return 1 / self.length

    def examples(self, n: int) -> list[Example]:
        """The first ``n`` examples; choices are the words of the list, each with its leading space."""
        check_counts(n=n)
        return [self._example(index) for index in range(n)]

    def _example(self, index: int) -> Example:
        rng = random.Random(f"copying {self.seed} {self.length} {index}")
        words = rng.sample(self._words, self.length)
        n_repeated = rng.randrange(1, self.length)
        prompt = "\n".join([" ".join(words), " ".join(words[:n_repeated])])
        return Example(prompt, answer=f" {words[n_repeated]}", choices=tuple(f" {word}" for word in words))

    def describe(self) -> dict[str, object]:
        """The settings every prompt follows from; the words as a hash."""
        return {"name": "copying", "length": self.length, "seed": self.seed, "words_sha256": digest(self._words)}
