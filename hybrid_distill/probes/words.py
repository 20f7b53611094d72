"""Word-list tasks: copying (induction), two-hop lookup, and multi-query associative recall (MQAR)."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from transformers import PreTrainedTokenizerBase

from ..assets.dictionaries import N_VALUES, NOUNS
from ..limits import Count, Limits
from . import Example, SeededProbe, check_queries, checked_words

HEADER = "In this list a word stands for a number, or for another word of the list:"
QUESTION = "Followed to its end, '{key}' stands for the number"


@dataclass(frozen=True)
class Copying(SeededProbe):
    """Lists of ``length`` different ``words`` on one line, repeated on the next up to a random word before the last.

    The answer is the next word; the choices are the words of the list. Raises ValueError for repeated or too few
    words.
    """

    name: ClassVar[str] = "copying"
    lead: ClassVar[str] = "The next word is"

    length: Annotated[int, Limits(2, whole=True)] = 16
    seed: int = 0
    words: tuple[str, ...] = field(default=NOUNS, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "words", checked_words("words", self.words, self.length))

    def _example(self, index: int) -> Example:
        rng = random.Random(f"copying {self.seed} {self.length} {index}")
        words = rng.sample(self.words, self.length)
        n_repeated = rng.randrange(1, self.length)
        prompt = "\n".join([" ".join(words), " ".join(words[:n_repeated])])
        return Example(prompt, answer=f" {words[n_repeated]}", choices=tuple(f" {word}" for word in words))


@dataclass(frozen=True)
class TwoHop(SeededProbe):
    """Dictionaries of ``n_pairs`` shuffled entries: half of them point to another key, the rest to a number.

    The question asks for a key whose value is another key; the value of that second key is the answer. No two chains
    end in the same key, so every other chain is a distractor. The choices are the numbers. Raises ValueError for
    repeated or too few ``keys``.
    """

    name: ClassVar[str] = "two_hop"
    lead: ClassVar[str] = "The number is"

    n_pairs: Annotated[int, Limits(4, 2 * N_VALUES, whole=True)] = 8
    """Number of entries: enough for two chains, and at most twice the available numbers."""
    seed: int = 0
    keys: tuple[str, ...] = field(default=NOUNS, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "keys", checked_words("keys", self.keys, self.n_pairs))

    def _example(self, index: int) -> Example:
        rng = random.Random(f"two-hop {self.seed} {self.n_pairs} {index}")
        keys = rng.sample(self.keys, self.n_pairs)
        n_ends = self.n_pairs - self.n_pairs // 2
        numbers = rng.sample(range(N_VALUES), n_ends)
        ends, leading = keys[:n_ends], keys[n_ends:]
        asked = rng.randrange(len(leading))
        entries = [f"{key}:{number}" for key, number in zip(ends, numbers, strict=True)]
        entries += [f"{key}:{end}" for key, end in zip(leading, ends)]
        prompt = "\n".join([HEADER, *rng.sample(entries, len(entries)), QUESTION.format(key=leading[asked])])
        return Example(prompt, answer=f" {numbers[asked]}", choices=tuple(f" {number}" for number in numbers))


@dataclass(frozen=True)
class MQAR(SeededProbe):
    """Rows of ``n_pairs`` keys, each followed by its value, then ``n_queries`` keys to recall (arXiv 2312.04927).

    Keys and values are drawn from ``words``; with `single_token_words`, a row is a plain sequence of tokens from the
    model's vocabulary. Each row yields ``n_queries`` examples: each asks for one more key, after those already
    answered. The choices are the row's values. Raises ValueError for too many queries, and for repeated or too few
    words.
    """

    name: ClassVar[str] = "mqar"
    lead: ClassVar[str] = "The value is"

    n_pairs: Count = 16
    n_queries: Count = 4
    seed: int = 0
    words: tuple[str, ...] = field(default=NOUNS, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_queries(self.n_queries, self.n_pairs)
        object.__setattr__(self, "words", checked_words("words", self.words, 2 * self.n_pairs))

    def _example(self, index: int) -> Example:
        row, query = divmod(index, self.n_queries)
        rng = random.Random(f"mqar {self.seed} {self.n_pairs} {row}")
        words = rng.sample(self.words, 2 * self.n_pairs)
        keys, values = words[: self.n_pairs], words[self.n_pairs :]
        asked = rng.sample(range(self.n_pairs), self.n_queries)[: query + 1]
        said = [word for place in (*range(self.n_pairs), *asked) for word in (keys[place], values[place])]
        return Example(" ".join(said[:-1]), f" {said[-1]}", tuple(f" {value}" for value in values))


def single_token_words(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return the lower-case words that are a single token after a space, in vocabulary order."""
    vocabulary = tokenizer.get_vocab()
    pieces = sorted(vocabulary, key=vocabulary.__getitem__)
    begun = [piece[1:] for piece in pieces if piece[:1] in ("Ġ", "▁")] or pieces  # not the middles of words
    words = [word for word in dict.fromkeys(begun) if re.fullmatch("[a-z]{3,}", word)]
    before, *rows = tokenizer(["a", *(f"a {word}" for word in words)], add_special_tokens=False)["input_ids"]
    return tuple(word for word, row in zip(words, rows, strict=True) if len(row) == len(before) + 1)
