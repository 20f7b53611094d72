"""Common English nouns, the keys of synthetic dictionaries. The order is part of every seeded prompt: append only."""

from __future__ import annotations

from collections.abc import Sequence

from . import as_tuple, check_words

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


def words_or_nouns(name: str, words: Sequence[str] | None, at_least: int) -> tuple[str, ...]:
    """Return the words that a probe draws from, `NOUNS` for None. Raises ValueError for repeated or too few words."""
    found = NOUNS if words is None else as_tuple(name, words)
    check_words(name, found, at_least)
    return found
