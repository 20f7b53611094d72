"""Documents in the wording of the KV-retrieval probe: training data of the embedded teacher, a control for students."""

from __future__ import annotations

import random

from .kv_retrieval import HEADER, QUESTION
from .nouns import NOUNS


def probe_document(
    rng: random.Random,
    n_pairs: int,
    n_questions: int,
    entry: str = "{key}:{value}",
    question: str = QUESTION + " ",
) -> str:
    """A dictionary with several questions to it; by default all of it in the probe's wording."""
    pairs = list(zip(rng.sample(NOUNS, n_pairs), rng.sample(range(100), n_pairs), strict=True))
    lines = [HEADER, *(entry.format(key=key, value=value) for key, value in pairs)]
    for key, value in rng.choices(pairs, k=n_questions):
        lines.append(f"{question.format(key=key)}{value}")
    return "\n".join(lines)


def write_probe_documents(n: int, seed: str) -> list[str]:
    """``n`` dictionaries of 4 to 32 pairs with a few questions each, in the probe's wording."""
    rng = random.Random(seed)
    return [probe_document(rng, rng.randint(4, 32), rng.randint(1, 4)) for _ in range(n)]
