"""A needle in filler text: one fact, at a given depth of a text of a given length, asked for at the text's end."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, product

from . import Example, SeededProbe, as_tuple, check_counts, check_words, digest, duplicates
from .kv_retrieval import N_VALUES
from .nouns import NOUNS

NEEDLE = "The number of the {key} is {value}."
QUESTION = "The number of the {key} is"

SUBJECTS = """The children|Our neighbours|Two travellers|An old man|My sister|The teacher|A few students|Her
grandfather""".replace("\n", " ").split("|")
ACTIONS = """walked along the path|talked about the weather|waited for the others|looked at the sky|sang a quiet
song|sat down to rest|wrote a long story|cooked something simple""".replace("\n", " ").split("|")
TIMES = """in the early morning|before it got dark|while the sun was shining|on the way home|late on Sunday|after a
good meal|because there was time|as they often did""".replace("\n", " ").split("|")


def default_filler() -> str:
    """Return about 4,500 words of plain sentences, in an order that never changes, without numbers."""
    sentences = [" ".join(parts) + "." for parts in product(SUBJECTS, ACTIONS, TIMES)]
    random.Random("needle filler").shuffle(sentences)
    return " ".join(sentences)


@dataclass(frozen=True)
class Needle(SeededProbe):
    """``NEEDLE`` between the sentences of a passage, at every pair of ``lengths`` and ``depths`` in turn.

    A passage is as many whole sentences as it takes to reach ``length`` words, from a random sentence of the filler
    on, beginning again at the filler's end. Depth 0 is before the first sentence, 1 after the last. ``filler`` is a
    text or several; its line breaks become spaces. The answer is one of ``n_choices`` numbers; neither they nor the
    fact's key (one of ``keys``) occur in the filler.

    Raises ValueError for a filler without words, a depth outside 0..1, settings named twice, and when the filler holds
    too many of the numbers or all keys.
    """

    filler: tuple[str, ...] | None = field(default=None, repr=False)
    lengths: tuple[int, ...] = (100, 200, 400, 800)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    seed: int = 0
    n_choices: int = 10
    keys: tuple[str, ...] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in ("filler", "lengths", "depths", "keys"):
            if (value := getattr(self, name)) is not None or name in ("lengths", "depths"):
                object.__setattr__(self, name, as_tuple(name, value))
        for length in self.lengths:
            check_counts(lengths=length)
        for depth in self.depths:
            if not isinstance(depth, int | float) or not 0 <= depth <= 1:
                raise ValueError(f"depth {depth!r} is not in 0..1: 0 is before the filler, 1 after it.")
        for name in ("lengths", "depths"):
            if repeated := duplicates(map(str, getattr(self, name))):
                raise ValueError(f"{name} names {repeated[0]} twice; name each once.")
        if not self._sentences:
            raise ValueError("the filler holds no words; give at least one sentence, or leave it out.")
        check_counts(n_choices=self.n_choices)
        check_words("keys that the filler does not hold", self._keys, 1)
        if len(self._values) < self.n_choices:
            raise ValueError(
                f"the filler leaves {len(self._values)} of the numbers 0 to {N_VALUES - 1} unused, {self.n_choices} "
                "choices are asked for; lower n_choices, or take a filler with fewer numbers."
            )

    @cached_property
    def _sentences(self) -> list[str]:
        texts = [" ".join(text.split()) for text in self.filler or (default_filler(),)]
        return [sentence for text in texts for sentence in re.split(r"(?<=[.!?]) ", text) if sentence]

    @cached_property
    def _used(self) -> set[str]:
        """Words and numbers of the filler."""
        return {word for sentence in self._sentences for word in re.findall(r"\d+|[^\W\d]+", sentence.lower())}

    @cached_property
    def _keys(self) -> list[str]:
        return [key for key in self.keys or NOUNS if key.lower() not in self._used]

    @cached_property
    def _values(self) -> list[int]:
        return [value for value in range(N_VALUES) if str(value) not in self._used]

    @property
    def chance(self) -> float:
        """Accuracy of naming any of the choices."""
        return 1 / self.n_choices

    def _example(self, index: int) -> Example:
        """Make an example. Lengths change from example to example, depths after each round of lengths."""
        settings = list(product(self.depths, self.lengths))
        depth, length = settings[index % len(settings)]
        rng = random.Random(f"needle {self.seed} {length} {depth} {index}")
        key, values = rng.choice(self._keys), rng.sample(self._values, self.n_choices)
        answer = rng.choice(values)
        text = self._passage(rng.randrange(len(self._sentences)), length)
        ends = list(accumulate((len(sentence.split()) for sentence in text), initial=0))
        place = min(range(len(ends)), key=lambda i: abs(ends[i] - depth * ends[-1]))
        text.insert(place, NEEDLE.format(key=key, value=answer))
        prompt = f"{' '.join(text)}\n{QUESTION.format(key=key)}"
        return Example(prompt, answer=f" {answer}", choices=tuple(f" {value}" for value in values))

    def _passage(self, start: int, length: int) -> list[str]:
        """Return sentences from number ``start`` on, until they hold ``length`` words."""
        text, n_words = [], 0
        while n_words < length:
            sentence = self._sentences[(start + len(text)) % len(self._sentences)]
            text.append(sentence)
            n_words += len(sentence.split())
        return text

    def describe(self) -> dict[str, object]:
        """Return the settings every prompt follows from; filler and keys as hashes."""
        return {
            "name": "needle",
            "lengths": list(self.lengths),
            "depths": list(self.depths),
            "seed": self.seed,
            "n_choices": self.n_choices,
            "filler_sha256": digest(self._sentences),
            "keys_sha256": digest(self._keys),
        }
