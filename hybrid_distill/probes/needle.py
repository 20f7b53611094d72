"""Needle in a haystack: one fact at a given depth in filler of a given length, asked for at the end."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import Annotated, ClassVar

from ..assets.dictionaries import N_VALUES, NOUNS
from ..limits import Count, Limits, Share
from . import Example, SeededProbe, checked_words, digest

NEEDLE = "The number of the {key} is {value}."
QUESTION = "The number of the {key} is"

SUBJECTS = """The children|Our neighbours|Two travellers|An old man|My sister|The teacher|A few students|Her
grandfather""".replace("\n", " ").split("|")
ACTIONS = """walked along the path|talked about the weather|waited for the others|looked at the sky|sang a quiet
song|sat down to rest|wrote a long story|cooked something simple""".replace("\n", " ").split("|")
TIMES = """in the early morning|before it got dark|while the sun was shining|on the way home|late on Sunday|after a
good meal|because there was time|as they often did""".replace("\n", " ").split("|")


@cache
def filler_sentences() -> list[str]:
    """Return about 4,500 words of plain sentences in a fixed order, without numbers or `NOUNS`."""
    sentences = [" ".join(parts) + "." for parts in product(SUBJECTS, ACTIONS, TIMES)]
    random.Random("needle filler").shuffle(sentences)
    return sentences


@dataclass(frozen=True)
class Needle(SeededProbe):
    """``NEEDLE`` between the sentences of a passage; examples cycle through all pairs of ``lengths`` and ``depths``.

    A passage starts at a random sentence of the filler, wraps around at its end, and takes whole sentences until it
    reaches ``length`` words. Depth 0 is before the first sentence, 1 after the last. The answer is one of
    ``n_choices`` numbers. Raises ValueError for duplicate lengths, depths or keys.
    """

    name: ClassVar[str] = "needle"
    lead: ClassVar[str] = "The number is"

    lengths: tuple[Count, ...] = (100, 200, 400, 800)
    depths: tuple[Share, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    seed: int = 0
    n_choices: Annotated[int, Limits(1, N_VALUES, whole=True)] = 10
    keys: tuple[str, ...] = field(default=NOUNS, repr=False)

    def __post_init__(self) -> None:
        for name in ("lengths", "depths", "keys"):
            object.__setattr__(self, name, checked_words(name, getattr(self, name)))
        super().__post_init__()

    def _example(self, index: int) -> Example:
        """Make an example. The length changes with every example, the depth after each round of lengths."""
        settings = list(product(self.depths, self.lengths))
        depth, length = settings[index % len(settings)]
        rng = random.Random(f"needle {self.seed} {length} {depth} {index}")
        key, values = rng.choice(self.keys), rng.sample(range(N_VALUES), self.n_choices)
        answer = rng.choice(values)
        sentences, text, ends = filler_sentences(), [], [0]
        start = rng.randrange(len(sentences))
        while ends[-1] < length:
            text.append(sentences[(start + len(text)) % len(sentences)])
            ends.append(ends[-1] + len(text[-1].split()))
        place = min(range(len(ends)), key=lambda i: abs(ends[i] - depth * ends[-1]))
        text.insert(place, NEEDLE.format(key=key, value=answer))
        prompt = f"{' '.join(text)}\n{QUESTION.format(key=key)}"
        return Example(prompt, answer=f" {answer}", choices=tuple(f" {value}" for value in values))

    def describe(self) -> dict[str, object]:
        """Return the settings that determine every prompt, with filler and keys as hashes."""
        return {**super().describe(), "filler_sha256": digest(filler_sentences())}
