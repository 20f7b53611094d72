"""Key-value retrieval: a dictionary in the prompt and a question for one of its values (arXiv 2504.18574)."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import NamedTuple

from ..assets.dictionaries import HEADER, N_VALUES, NOUNS, QUESTION
from . import Example, SeededProbe, as_tuple, check_counts, digest, duplicates


class Wording(NamedTuple):
    """Wording of a dictionary: its first line ("" for none), an entry, the question."""

    header: str = HEADER
    entry: str = "{key}:{value}"
    question: str = QUESTION


DICTIONARY = Wording()
REWORDED = Wording("Register:", question="Look up '{key}':")
DIALOGUE = Wording("", "Anna: I have {value} of the {key}.", "Ben: How many of the {key}?\nAnna: You said")


@dataclass(frozen=True)
class KVRetrieval(SeededProbe):
    """Dictionaries of ``n_pairs`` distinct nouns with distinct values 0 to 99, which are the choices.

    Of several ``n_pairs``, examples take one after the other, in turn. Keys, values, their order and the key asked for
    all follow from ``seed``. ``keys`` replaces the default nouns, for a model that knows few words, ``wording`` the
    words around them.

    Raises ValueError when ``n_pairs`` is not in 1..100 (values are distinct), for repeated or too few keys.
    """

    n_pairs: int | tuple[int, ...]
    seed: int = 0
    keys: tuple[str, ...] | None = field(default=None, repr=False)
    wording: Wording = DICTIONARY

    def __post_init__(self) -> None:
        for n_pairs in self._sizes:
            check_counts(n_pairs=n_pairs)
            if n_pairs > N_VALUES:
                raise ValueError(
                    f"n_pairs is {n_pairs}, but only {N_VALUES} values (0 to {N_VALUES - 1}) are distinct; "
                    f"ask for at most {N_VALUES} pairs."
                )
        if repeated := duplicates(map(str, self._sizes)):
            raise ValueError(f"n_pairs is {self.n_pairs}: {repeated[0]} is there twice; pass each size once.")
        if self.keys is not None:
            object.__setattr__(self, "keys", tuple(self.keys))
        if repeated := duplicates(self.nouns):
            raise ValueError(f"keys named twice: {', '.join(repeated)}; a dictionary needs distinct keys.")
        if len(self.nouns) < max(self._sizes):
            raise ValueError(
                f"{len(self.nouns)} keys cannot fill a dictionary of {max(self._sizes)} pairs; "
                "give more keys or ask for fewer pairs."
            )

    @property
    def _sizes(self) -> tuple[int, ...]:
        return as_tuple("n_pairs", self.n_pairs)

    @property
    def nouns(self) -> tuple[str, ...]:
        """Keys that dictionaries are drawn from."""
        return NOUNS if self.keys is None else self.keys

    @property
    def chance(self) -> float:
        """Accuracy of naming any value of the dictionary, mean over sizes."""
        return sum(1 / n_pairs for n_pairs in self._sizes) / len(self._sizes)

    def _example(self, index: int) -> Example:
        index, place = divmod(index, len(self._sizes))
        n_pairs = self._sizes[place]
        rng = random.Random(f"kv-retrieval {self.seed} {n_pairs} {index}")
        keys = rng.sample(self.nouns, n_pairs)
        values = rng.sample(range(N_VALUES), n_pairs)
        asked = rng.randrange(n_pairs)
        header, entry, question = self.wording
        pairs = [entry.format(key=key, value=value) for key, value in zip(keys, values, strict=True)]
        prompt = "\n".join([*([header] if header else []), *pairs, question.format(key=keys[asked])])
        return Example(prompt, answer=f" {values[asked]}", choices=tuple(f" {value}" for value in values))

    def describe(self) -> dict[str, object]:
        """Return the settings every prompt follows from; the keys as a hash."""
        n_pairs = list(self.n_pairs) if isinstance(self.n_pairs, tuple) else self.n_pairs
        described = {"name": "kv_retrieval", "n_pairs": n_pairs, "seed": self.seed, "keys_sha256": digest(self.nouns)}
        return described if self.wording == DICTIONARY else {**described, "wording": list(self.wording)}
