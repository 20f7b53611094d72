"""Write documents of five tasks in RULER's form (arXiv 2404.06654) in the embedded teacher's vocabulary.

``needles``: every line is a fact, one is asked for (niah_multikey_2). ``codes``: the same with keys and values of
several words (niah_multikey_3). ``variables``: names that were given one number, one of them directly, the others each
by the one before (vt). ``common``: three words listed about ten times as often as the rest, in any order (cwe).
``frequent``: the three most frequent words, whose counts fall with the square of their rank (fwe).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice, product
from typing import NamedTuple

import torch
from records import ROOT
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybrid_distill.assets.dictionaries import N_VALUES, NOUNS

sys.path.insert(0, str(ROOT / "recipes"))
from tiny_world import PEOPLE, TIMES

LENGTHS = (48, 64, 96, 128, 192, 256, 384, 512, 768, 1000)


class Question(NamedTuple):
    """A question at the end of a document, and the words of its answer; ``in_order`` if they have one order."""

    text: str
    answers: tuple[str, ...]
    in_order: bool = True


class Document(NamedTuple):
    text: str
    questions: list[Question]


class Words(NamedTuple):
    """Wording of one task: a line, and the question."""

    line: str
    question: str


# The last of each is kept for measuring: only the teacher sees it.
WORDING = {
    "needles": [
        Words("{k} {v}", "{k}"),
        Words("{k}: {v}", "{k}:"),
        Words("the {k} has {v}.", "the {k} has"),
        Words("One number of the {k} is {v}.", "The number of the {k} is"),
        Words("The number for {k} was {v}.", "What is the number for {k}?"),
    ],
    "codes": [
        Words("{k} {v}", "{k}"),
        Words("{k}: {v}", "{k}:"),
        Words("the {k} has {v}.", "the {k} has"),
        Words("One code of the {k} is {v}.", "The code of the {k} is"),
        Words("The code for {k} was {v}.", "What is the code for {k}?"),
    ],
    "variables": [
        Words("set {k} {v}", "which are {v}"),
        Words("the {k} is {v}.", "Who is {v}?"),
        Words("set {k} = {v}.", "Names with {v}:"),
        Words("The {k} has the number of {v}.", "The number {v} is that of"),
    ],
    "common": [
        Words(" {w}", "most common:"),
        Words(" {w},", "The words that are there the most:"),
        Words("a {w}\n", "Common words:"),
        Words("- {w}\n", "What are the common words?"),
    ],
    "frequent": [
        Words(" {w}", "most frequent:"),
        Words(" {w},", "The three words that are there the most:"),
        Words("a {w}\n", "Frequent words:"),
        Words("- {w}\n", "What are the three frequent words?"),
    ],
}


def combined(questions: Sequence[str], *parts: Sequence[str]) -> list[Words]:
    """Return each combination of a line's parts with each question.

    An empty question is the line up to its value.
    """
    wordings = []
    for line_parts in product(*parts):
        line = "".join(line_parts)
        up_to_value = line.partition("{v}")[0].rstrip()
        for question in questions:
            wordings.append(Words(line, question or up_to_value))
    return wordings


STARTS = ("the ", "one ", "The ", "Note the ", "In the ", "* ", "> ", "Here a ")
MIDDLES = (" ", ": ", " = ", " has ", " is ", " > ", ", ", " still has ", " costs ")
ENDS = ("", ".", ";", ",", " today.")
FACTS = (STARTS, ["{k}"], MIDDLES, ["{v}"], ENDS)
LISTED = (" {w};", "{w}\n", " the {w}", " one {w},", "* {w}\n", "> {w};\n", "the {w}\n", " {w}:")
COMBINED = {
    "needles": combined(
        ["", "Which number has the {k}?", "Look up {k}:", "So the {k} has"], *FACTS
    ),
    "codes": combined(["", "Which code has the {k}?", "Look up {k}:", "So the {k} has"], *FACTS),
    "variables": combined(
        [
            "Which have {v}?",
            "Like {v}:",
            "List those with {v}:",
            "Who has {v}?",
            "{v}:",
            "equal to {v}:",
        ],
        ("set ", "the ", "Now ", "let ", "> ", "In the room ", "name "),
        ["{k}"],
        (" ", " = ", " is ", ": ", " as ", " like ", " has "),
        ["{v}"],
        ENDS,
    ),
    "common": combined(
        [
            "common:",
            "Which are common?",
            "Common ones:",
            "List the common ones:",
            "Words that are there often:",
        ],
        LISTED,
    ),
    "frequent": combined(
        [
            "frequent:",
            "Which are frequent?",
            "Frequent ones:",
            "List the frequent ones:",
            "Three, by their count:",
        ],
        LISTED,
    ),
}
TASKS = tuple(WORDING)


def draw_wording(
    task: str,
    rng: random.Random,
    *,
    for_teacher: bool = False,
    is_varied: bool = True,
) -> Words:
    """Draw a wording: as often a combined one as one of the others, of which the teacher alone sees the last."""
    if is_varied and rng.random() < 0.5:
        return rng.choice(COMBINED[task])
    wordings = WORDING[task]
    return rng.choice(wordings if for_teacher else wordings[:-1])


class Writer:
    """Writes documents of about so many tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def size(self, text: str) -> int:
        """Return how many tokens a line or question takes with words of one token each."""
        example = text.format(k="apple", v="17", w="apple")
        return len(self.tokenizer(example, add_special_tokens=False)["input_ids"])

    def write(
        self,
        task: str,
        words: Words,
        length: int,
        rng: random.Random,
        n_questions: int = 12,
    ) -> Document:
        """Write a document of one task, with at most ``n_questions`` where the task can ask several."""
        line = self.size(words.line)
        question = self.size(words.question) + 2
        if task in ("common", "frequent"):
            n_words = (length - question - 6) // line
            return write_list(rng, words, is_common=task == "common", n_words=n_words)
        if task == "variables":
            return write_variables(rng, words, length, line + 1)
        is_long = task == "codes"
        return write_facts(rng, words, is_long, length, line + 1, question, n_questions)


def write_facts(
    rng: random.Random,
    words: Words,
    is_long: bool,
    length: int,
    line: int,
    question: int,
    n_questions: int,
) -> Document:
    """Write a fact a line and ask for some of them; long ones have keys and values of several words."""
    if is_long:
        line += 5
        question += 4
    n_questions = min(n_questions, max(1, length // (2 * question)))
    room = (length - n_questions * question) // line
    n_facts = max(2, min(room, len(NOUNS)))
    if is_long:
        facts = long_facts(rng, n_facts)
    else:
        facts = short_facts(rng, n_facts)
    lines = [words.line.format(k=key, v=value) for key, value in facts]
    questions = []
    for key, value in rng.choices(facts, k=n_questions):
        questions.append(Question(words.question.format(k=key), tuple(value.split())))
    return Document("\n".join(lines), questions)


def short_facts(rng: random.Random, n: int) -> list[tuple[str, str]]:
    keys = rng.sample(NOUNS, n)
    values = rng.choices(numbers(), k=n)
    return list(zip(keys, values))


def long_facts(rng: random.Random, n: int) -> list[tuple[str, str]]:
    first_words = rng.choices(NOUNS, k=n)
    second_words = rng.sample(NOUNS, n)
    facts = []
    for first, second in zip(first_words, second_words):
        value = " ".join(rng.sample(numbers(), 3))
        facts.append((f"{first} {second}", value))
    return facts


def numbers() -> list[str]:
    return [str(number) for number in range(N_VALUES)]


def write_variables(rng: random.Random, words: Words, length: int, line: int) -> Document:
    """Write two chains of five names in filler; with room for fewer, shorter ones."""
    n_chains = 1 if length < 64 else 2
    n_names = 3 if length < 96 else 5
    names = rng.sample(NOUNS, n_chains * n_names)
    values = rng.sample(range(N_VALUES), n_chains)
    chains = [names[i::n_chains] for i in range(n_chains)]

    # Names of a chain stand in their order, those of two chains between each other.
    order = []
    for i in range(n_chains):
        order += [i] * n_names
    rng.shuffle(order)
    lines = []
    before = {i: str(value) for i, value in enumerate(values)}
    unwritten = [iter(chain) for chain in chains]
    for i in order:
        name = next(unwritten[i])
        lines.append(words.line.format(k=name, v=before[i]))
        before[i] = name

    room = (length - len(lines) * line - n_chains * (n_names + 8)) // 11
    for _ in range(room):
        name, other = rng.sample(PEOPLE, 2)
        place = rng.randrange(len(lines) + 1)
        lines.insert(place, f"{name} talked to {other} {rng.choice(TIMES)}.")

    questions = []
    for value, chain in zip(values, chains):
        questions.append(Question(words.question.format(v=value), tuple(chain)))
    rng.shuffle(questions)
    return Document("\n".join(lines), questions)


def write_list(rng: random.Random, words: Words, *, is_common: bool, n_words: int) -> Document:
    """List words, three of them more often than the others, and ask for the three."""
    n_words = max(15, n_words)  # with fewer, words would tie
    vocabulary = rng.sample(NOUNS, len(NOUNS))
    listed = common_words(vocabulary, n_words) if is_common else frequent_words(vocabulary, n_words)
    rng.shuffle(listed)
    lines = [words.line.format(w=word) for word in listed]
    question = Question(words.question, tuple(vocabulary[:3]), in_order=not is_common)
    return Document("".join(lines).rstrip("\n"), [question])


def common_words(vocabulary: list[str], n_words: int) -> list[str]:
    """Repeat the first three words about ten times as often as the rest."""
    times_rare = 1 if n_words < 350 else 3
    times_common = 10 * times_rare if n_words > 96 else 6
    listed = []
    for word in vocabulary[:3]:
        listed += [word] * min(times_common, n_words // 5)
    listed += islice(cycle(vocabulary[3:]), n_words - len(listed))
    return listed


def frequent_words(vocabulary: list[str], n_words: int) -> list[str]:
    """Repeat each word as often as its rank says; the first three stand apart from each other and the rest."""
    counts = [round(0.62 * n_words / (rank + 1) ** 2) for rank in range(len(vocabulary))]
    for rank, least in enumerate((6, 4, 3)):
        counts[rank] = max(least, counts[rank])
    most = counts[2] // 2
    listed = []
    for rank, word in enumerate(vocabulary):
        count = counts[rank]
        if rank >= 3:
            count = max(1, min(count, most))
        listed += [word] * count
    return listed[:n_words]


@dataclass
class Rows:
    """Documents as tokens [B, L], with masks of the answers and of their words, and the words accepted in any order."""

    ids: Tensor
    inside: Tensor
    answer: Tensor
    any_of: dict[tuple[int, int], set[int]]


def as_rows(
    tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document], rng: random.Random
) -> Rows:
    """Write the questions and their answers below each document, and tokenize."""
    texts = []
    spans_of_rows = []
    for document in documents:
        text, spans = with_answers(document, rng)
        texts.append(text)
        spans_of_rows.append(spans)
    encoded = tokenizer(
        texts, padding=True, return_tensors="pt", return_offsets_mapping=True, padding_side="right"
    )
    ids_BL = encoded.input_ids
    starts_BL, ends_BL = encoded.offset_mapping.unbind(-1)
    inside_BL = torch.zeros_like(ids_BL, dtype=torch.bool)
    for row, spans in enumerate(spans_of_rows):
        for low, high in spans:
            is_within = (starts_BL[row] >= low) & (ends_BL[row] <= high)
            # Padding has the empty span (0, 0).
            inside_BL[row] |= is_within & (ends_BL[row] > starts_BL[row])
    space_before_number = tokenizer.convert_tokens_to_ids("\u0120")
    answer_BL = inside_BL & (ids_BL != space_before_number)
    any_of: dict[tuple[int, int], set[int]] = {}
    for row, document in enumerate(documents):
        if not document.questions[0].in_order:
            places = answer_BL[row].nonzero().flatten().tolist()
            for i, place in enumerate(places):
                # The words that are still to be named: each of them is right here.
                any_of[row, place] = set(ids_BL[row, places[i:]].tolist())
    return Rows(ids_BL, inside_BL, answer_BL, any_of)


def with_answers(document: Document, rng: random.Random) -> tuple[str, list[tuple[int, int]]]:
    """Return the text with its questions answered, and the span of characters of each answer."""
    text = document.text
    spans = []
    for question in document.questions:
        answers = list(question.answers)
        if not question.in_order:
            rng.shuffle(answers)
        text += f"\n{question.text}"
        start = len(text)
        for answer in answers:
            text += f" {answer}"
        spans.append((start, len(text)))
    return text, spans
