"""Plain filler sentences, between which RULER's tasks hide what they ask for."""

from __future__ import annotations

import random
from functools import cache
from itertools import product

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
