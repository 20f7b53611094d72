"""Nouns and wording of the retrieval probe's dictionaries, and dictionary documents for training the tiny teacher.

Append only: every seeded prompt depends on the order of the nouns.
"""

from __future__ import annotations

import random

NOUNS: tuple[str, ...] = tuple(
    """
    apple anchor arrow basket bell bench blanket boat bottle bowl box branch bread bridge brush bucket button cabin
    camera candle carpet castle chain chair cheese church circle clock cloud coat coffee coin copper corner cotton
    cradle crown cup curtain desk dish door dress drum eagle engine farm feather fence field finger flag flame
    flower forest fork fountain fruit garden gate ghost glass glove grain guitar hammer harbor hat helmet hill
    honey horse house island jacket jewel kettle key kitchen knife ladder lamp leaf lemon letter lion lock
    machine magnet map market mask meadow mirror moon mountain mouse needle nest net ocean olive orange oven
    paper pencil pepper piano pillow pipe plate pocket potato rabbit ribbon ring river road robot rocket roof
    rope rose saddle sail salt sand scarf school shell ship shirt shoe shop silver snake soap soup spoon spring
    stable stamp star statue stone storm stove street sugar table tail temple tent thread ticket tiger tower
    train tree trumpet tunnel umbrella valley vase violin wagon wall wallet watch water wheel whistle window
    winter wolf wood yard zebra acorn actor album almond ankle apron artist aunt badge bakery ball banana bank
    barn battle beach beard beetle belt bird blade board bone book boot border brick broom bubble bullet bus
    butter cage cake camp canal canoe cap card carrot cart cat cave cedar chalk cherry chest chicken city class
    clay cliff cloth club coach coal collar comb cook cord corn couch cousin cow crab crane cream crowd cube
    daisy dance deer doctor dog doll donkey dragon drawer dream duck dust earth egg elbow elephant envelope
    evening farmer fire fish flute fog foot fox frame friend frog frost game giant giraffe goat gold grape grass
    group guest hair hall hand harp hawk hay heart hen hotel hour ice iron ivory jar judge juice jungle
    """.split()
)
HEADER = "Memorize the following dictionary:"
QUESTION = "The value of the key '{key}' is"
N_VALUES = 100


def probe_document(
    rng: random.Random,
    n_pairs: int,
    n_questions: int,
    entry: str = "{key}:{value}",
    question: str = QUESTION + " ",
) -> str:
    """Write a dictionary followed by answered questions about it, by default in the probe's wording."""
    pairs = list(zip(rng.sample(NOUNS, n_pairs), rng.sample(range(N_VALUES), n_pairs), strict=True))
    lines = [HEADER, *(entry.format(key=key, value=value) for key, value in pairs)]
    for key, value in rng.choices(pairs, k=n_questions):
        lines.append(f"{question.format(key=key)}{value}")
    return "\n".join(lines)


def write_probe_documents(n: int, seed: str) -> list[str]:
    """Write ``n`` dictionaries of 4 to 32 pairs with a few questions each, in the probe's wording."""
    rng = random.Random(seed)
    return [probe_document(rng, rng.randint(4, 32), rng.randint(1, 4)) for _ in range(n)]
