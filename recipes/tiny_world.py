"""Text about a small invented world, from a seed: the corpus of the embedded teacher.

Three kinds of documents:

* *stories* are plain text;
* *facts* repeat the same few hundred facts about invented towns in varied wording: a model can only memorize them;
* *references* state something and ask about it later (lists, tables, dialogues, assignments, notes): a model can
  only answer by looking back. None of them uses the wording of the KV-retrieval probe.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from hybrid_distill.assets.dictionaries import NOUNS

PEOPLE = """Anna Ben Clara David Emma Felix Greta Henry Ida Jonas Klara Leo Mina Noah Olga Paul
Rosa Simon Tara Victor""".split()
TOWNS = """Velmora Taskel Brinnow Dorvath Elsmere Farrow Gundal Harlen Istria Jorvik Kelder Lunden Morva Nestor
Orlan Pelham Quist Rondel Selwin Tormund Ulster Varnes Wexley Yarrow Zander Ashby Belgar Corran Denholm Ergon
Fenwick Galt Hollis Ingram Jasper Kirkwall Lorne Maddox Norwell Ostend""".split()
ADJECTIVES = """old new red blue green small large heavy light warm cold dark bright quiet clean broken round long
dry strange""".split()
PLACES = "market garden kitchen harbor library station forest school bakery river bridge cellar attic yard".split()
TIMES = [
    "in the morning",
    "at noon",
    "in the evening",
    "at night",
    "after the rain",
    "before dinner",
    "last winter",
]

ATTRIBUTES: Mapping[str, Sequence[str]] = {
    "flag": "red blue green white black yellow purple grey".split(),
    "trade": "wool copper glass grain salt timber silk honey".split(),
    "region": "north south east west coast valley hills desert".split(),
    "animal": "bear falcon otter badger swan stag raven lynx".split(),
}
FACT_WORDING: dict[str, list[str]] = {
    "flag": ["The flag of {town} is {value}.", "In {town} they fly a flag that is {value}."],
    "trade": ["The people of {town} trade in {value}.", "The main trade of {town} is {value}."],
    "region": ["The town of {town} lies in the {value}.", "The region of {town} is the {value}."],
    "animal": ["The animal of {town} is the {value}.", "The shield of {town} shows the {value}."],
}
QUESTION_WORDING = {attribute: wordings[0] for attribute, wordings in FACT_WORDING.items()}


def town_facts() -> dict[tuple[str, str], str]:
    """Map (town, attribute) to its value, the same in every build of the world."""
    rng = random.Random("facts of the invented world")
    facts = {}
    for town in TOWNS:
        for attribute, values in ATTRIBUTES.items():
            facts[town, attribute] = rng.choice(values)
    return facts


def knowledge_questions(n_choices: int = 4) -> list[dict[str, object]]:
    """Return every fact as a multiple-choice completion: ``{"prompt", "answer", "choices"}``."""
    rng = random.Random("choices of the invented world")
    questions = []
    for (town, attribute), value in town_facts().items():
        beginning, _, _ = QUESTION_WORDING[attribute].partition(" {value}")
        prompt = beginning.format(town=town)
        others = [other for other in ATTRIBUTES[attribute] if other != value]
        wrong = rng.sample(others, n_choices - 1)
        choices = [f" {choice}" for choice in (value, *wrong)]
        rng.shuffle(choices)
        questions.append({"prompt": prompt, "answer": f" {value}", "choices": choices})
    return questions


FACTS = town_facts()


def fact_document(rng: random.Random) -> str:
    """State a few facts, in varied wording."""
    sentences = []
    for town, attribute in rng.sample(sorted(FACTS), rng.randint(6, 14)):
        wording = rng.choice(FACT_WORDING[attribute])
        sentences.append(wording.format(town=town, value=FACTS[town, attribute]))
    return " ".join(sentences)


def _a(word: str) -> str:
    """Put the indefinite article before a word."""
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def story(rng: random.Random) -> str:
    """Tell a short story about two people and two things."""
    name, other = rng.sample(PEOPLE, 2)
    thing, second = rng.sample(NOUNS, 2)
    place, where = rng.sample(PLACES, 2)
    adjective, colour = rng.sample(ADJECTIVES, 2)
    openings = [
        f"{name} walked to the {place} {rng.choice(TIMES)}.",
        f"{rng.choice(TIMES).capitalize()}, {name} went to the {place} with {other}.",
        f"There was {_a(adjective)} {thing} in the {place}, and {name} wanted it.",
    ]
    middles = [
        f"{name} found {_a(adjective)} {thing} near the {where}.",
        f"{other} asked for the {thing}, but {name} said no.",
        f"The {thing} was {adjective}, so they put it next to the {second}.",
        f"They looked at the {second} and did not know what to do.",
        f"It was {colour} and {adjective}, like the {second} at home.",
        f"{name} gave the {thing} to {other} and took the {second} instead.",
        f"Then {other} carried the {second} back to the {where}.",
        f"Nobody in the {place} had seen {_a(thing)} like it before.",
    ]
    endings = [
        f"At last {name} and {other} went home.",
        f"{other} smiled and thanked {name}.",
        f"The {thing} is still in the {place} today.",
        f"That was the last time {name} saw the {second}.",
    ]
    body = rng.sample(middles, rng.randint(3, 6))
    return " ".join([rng.choice(openings), *body, rng.choice(endings)])


def _draw_pairs(rng: random.Random, low: int = 3, high: int = 24) -> list[tuple[str, int]]:
    """Draw distinct nouns, each with a distinct number."""
    n = rng.randint(low, high)
    keys = rng.sample(NOUNS, n)
    values = rng.sample(range(100), n)
    return list(zip(keys, values, strict=True))


def _draw_targets(rng: random.Random, pairs: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Draw the entries that a document asks about, early and late ones alike."""
    n_targets = min(len(pairs), rng.randint(2, 8))
    return rng.sample(pairs, n_targets)


def _listing(
    rng: random.Random,
    *,
    titles: list[str],
    rows: list[str],
    questions: list[str],
    low: int = 3,
    high: int = 24,
) -> str:
    """Write a title, one row per entry, then one line per entry that the document asks about."""
    pairs = _draw_pairs(rng, low, high)
    row = rng.choice(rows)
    question = rng.choice(questions)
    lines = [rng.choice(titles)] if titles else []
    for key, value in pairs:
        lines.append(row.format(key=key, value=value))
    for key, value in _draw_targets(rng, pairs):
        lines.append(question.format(key=key, value=value))
    return "\n".join(lines)


price_list = partial(
    _listing,
    titles=["Price list:", "Prices today:", "At the market:"],
    rows=["{key} {value}", "{key}: {value}", "{key}:{value}", "- {key}, {value} coins"],
    questions=[
        "The {key} costs {value} coins.",
        "Price of '{key}': {value}",
        "One {key} is {value}.",
    ],
)
inventory = partial(
    _listing,
    titles=["Inventory of the shop:", "In the cellar:", "Stock:", "Count every item:"],
    rows=["{key}:{value}", "{key} = {value}", "{value} {key}", "{key} ({value})"],
    questions=[
        "How many of '{key}'? {value}",
        "There are {value} of {key}.",
        "We have '{key}' in stock: {value}",
    ],
)
table = partial(
    _listing,
    titles=["item | number", "| name | count |", "name\tnumber"],
    rows=["{key} | {value}", "| {key} | {value} |", "{key}\t{value}"],
    questions=[
        "number for {key}: {value}",
        "In row {key} the table says {value}",
        "{key} -> {value}",
    ],
)
code = partial(
    _listing,
    titles=["# settings", "# numbers", "def main():"],
    rows=["{key} = {value}", "set {key} {value}", "d['{key}'] = {value}", "{key}:{value},"],
    questions=[
        "print({key}) # {value}",
        "assert {key} == {value}",
        "d['{key}'] is {value}",
        "get {key}\n{value}",
    ],
)
rooms = partial(
    _listing,
    titles=["Room numbers of the hotel:", "Keys at the desk:", "Codes for the doors:"],
    rows=["{key}:{value}", "the {key} room, {value}", "door {key} code {value}"],
    questions=[
        "To open the '{key}' door, enter {value}",
        "The number of room '{key}' is {value}",
        "Who lives behind {key}? Room {value}",
    ],
)


def lookup(rng: random.Random) -> str:
    """Write an index, then questions about it, each in a different form."""
    pairs = _draw_pairs(rng)
    titles = ["Index:", "Register:", "Glossary of numbers:", "Notes on the following words:"]
    forms = [
        "Look up '{k}': {v}",
        "see {k}, page {v}",
        "Entry '{k}' has {v}",
        "'{k}' stands for {v}",
        "{k}:{v}",
    ]
    lines = [rng.choice(titles)]
    lines += [f"{key}:{value}" for key, value in pairs]
    for key, value in _draw_targets(rng, pairs):
        lines.append(rng.choice(forms).format(k=key, v=value))
    return "\n".join(lines)


def dialogue(rng: random.Random) -> str:
    """Let two speakers list what they have, then ask each other about some of it."""
    speakers = rng.sample(PEOPLE, 2)
    pairs = _draw_pairs(rng, 2, 8)
    lines = []
    for number, (key, value) in enumerate(pairs):
        speaker = speakers[number % 2]
        lines.append(f"{speaker}: I have {value} of the {key}.")
    for key, value in _draw_targets(rng, pairs):
        lines.append(f"{speakers[0]}: How many of the {key}?")
        lines.append(f"{speakers[1]}: You said {value}.")
    return "\n".join(lines)


def owners(rng: random.Random) -> str:
    """Write who has what, a story, and a question about it."""
    names = rng.sample(PEOPLE, rng.randint(2, 8))
    numbers = dict(zip(names, rng.sample(range(100), len(names)), strict=True))
    targets = rng.sample(names, min(3, len(names)))
    statements = " ".join(f"{name} has {number} coins." for name, number in numbers.items())
    answers = " ".join(f"The coins of {name} are {numbers[name]}." for name in targets)
    return f"{statements} {story(rng)} {answers}"


def early_note(rng: random.Random) -> str:
    """Write a note, a story, and the note once more."""
    key = rng.choice(NOUNS)
    value = rng.randrange(100)
    note = rng.choice(
        ["The number on the {k} was {v}.", "Remember: {k}, {v}.", "Write down {k} {v}."]
    )
    again = rng.choice(
        ["On the {k} was the number {v}.", "So it was {k}, {v}.", "The note said {k} {v}."]
    )
    return f"{note.format(k=key, v=value)} {story(rng)} {again.format(k=key, v=value)}"


def repetition(rng: random.Random) -> str:
    """Write a list of words and repeat it twice."""
    words = []
    for _ in range(rng.randint(4, 16)):
        # Both are drawn, whichever is taken: every seed depends on the order of draws.
        noun = rng.choice(NOUNS)
        number = str(rng.randrange(100))
        words.append(rng.choice([noun, number]))
    separator = rng.choice([" ", ", ", "\n", "-"])
    line = separator.join(words)
    return f"{line}\nagain:\n{line}\nagain:\n{line}"


STORIES: list[Callable[[random.Random], str]] = [story]
FACT_DOCUMENTS: list[Callable[[random.Random], str]] = [fact_document]
REFERENCES: list[Callable[[random.Random], str]] = [
    price_list, inventory, table, code, rooms, lookup, lookup, dialogue, owners, early_note, repetition,
]  # fmt: skip


def corpus_document(rng: random.Random) -> str:
    """Write one document of the corpus: a quarter stories, a quarter facts, half references."""
    kind = rng.choices([STORIES, FACT_DOCUMENTS, REFERENCES], weights=[1, 1, 2])[0]
    return rng.choice(kind)(rng)


def write_documents(n: int, seed: str) -> list[str]:
    """Write ``n`` corpus documents; the same seed gives the same text."""
    rng = random.Random(seed)
    return [corpus_document(rng) for _ in range(n)]
