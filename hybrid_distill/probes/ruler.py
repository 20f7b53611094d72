"""RULER tasks (arXiv 2404.06654) at any length, offline: needles, variable tracking, common and frequent words.

lm-eval's generators write the questions. Two downloads are replaced: Paul Graham's essays by `filler_sentences`,
and nltk's sentence splitter by a regular expression. Haystacks grow one unit of filler at a time, while lm-eval uses
steps of up to 500 words; lengths such as 256 tokens therefore work too.
"""

from __future__ import annotations

import random
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import cycle, islice
from string import ascii_uppercase, digits
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..assets.filler import filler_sentences
from ..limits import Count, check_options
from . import Example
from .checks import missing_words


class Needles(NamedTuple):
    """Settings of lm-eval's needle-in-a-haystack generator, under its names: keys (k), values (v), queries (q)."""

    type_haystack: str
    type_needle_k: str = "words"
    type_needle_v: str = "numbers"
    num_needle_k: int = 1
    num_needle_v: int = 1
    num_needle_q: int = 1


class RulerQuestion(NamedTuple):
    """A question, the beginning of its answer, and the strings that the answer must contain."""

    question: str
    delimiter: str
    answer_prefix: str
    answers: tuple[str, ...]

    @property
    def prompt(self) -> str:
        """Text that the model continues."""
        return f"{self.question}{self.delimiter}{self.answer_prefix}"


NEEDLES = {
    "niah_single_1": Needles("repeat"),
    "niah_single_2": Needles("essay"),
    "niah_single_3": Needles("essay", type_needle_v="uuids"),
    "niah_multikey_1": Needles("essay", num_needle_k=4),
    "niah_multikey_2": Needles("needle"),
    "niah_multikey_3": Needles("needle", type_needle_k="uuids", type_needle_v="uuids"),
    "niah_multivalue": Needles("essay", num_needle_v=4),
    "niah_multiquery": Needles("essay", num_needle_k=4, num_needle_q=4),
}
LONGEST_ANSWER = {**dict.fromkeys(NEEDLES, 128), "ruler_vt": 30, "ruler_cwe": 120, "ruler_fwe": 50}
"""Limit on generated tokens in lm-eval, by task."""
TASKS = tuple(LONGEST_ANSWER)
VT_EXAMPLE = 500  # tokens of the worked example before a ruler_vt question; at most half the length
FEWEST_CODED_WORDS = 54  # in ruler_fwe: with fewer, the third and fourth most frequent words tie
OFFERED = {
    "niah": r"is: ([\da-f-]{7,36})\.",
    "ruler_vt": r"VAR ([A-Z]+)",
    "ruler_cwe": r"\d+\. (\S+)",
    "ruler_fwe": r"\.\.\. ([a-z]{6})(?= \.\.\.)",
}
"""Patterns for strings in a prompt that can serve as wrong choices, by prefix of the task name."""

_Write = Callable[[int], RulerQuestion]
"""Function that writes a question with a given number of filler units: words, sentences or needles."""


def ruler_questions(
    task: str, length: int, tokenizer: PreTrainedTokenizerBase, seed: int, n: int
) -> Iterator[RulerQuestion]:
    """Yield the first ``n`` questions of one of `TASKS`; question i is the same for any ``n``.

    A prompt plus `tokens_to_generate` takes at most ``length`` tokens.

    Raises ValueError if the length is too short for the task, the tokenizer lacks its words, or lm-eval or its ruler
    extra is not installed.
    """
    generators = load_generators()
    room = length - tokens_to_generate(task, length)

    def fits(prompt: str, room: int = room) -> bool:
        return len(tokenizer(prompt, verbose=False)["input_ids"]) <= room

    with _seeded(generators, f"{task} {length} {seed}"):
        write, least = _writer(generators, task, length, fits)
        shortest = write(least)
        if missing := missing_words(tokenizer, [shortest.prompt, *shortest.answers]):
            raise ValueError(
                f"this tokenizer has no token for {', '.join(map(repr, missing[:6]))} of {task}; "
                "RULER needs a model that knows plain English."
            )
        most = _most(write, least, length, fits)
    for index in range(n):
        with _seeded(generators, f"{task} {length} {seed} {index}"):
            tried = map(write, range(most, least - 1, -1))
            if (question := next((q for q in tried if fits(q.prompt)), None)) is None:
                raise ValueError(f"{task} does not fit into {length} tokens of this tokenizer; pass a larger length.")
        yield question


def tokens_to_generate(task: str, length: int) -> int:
    """Return lm-eval's limit on generated tokens, capped at a quarter of the length."""
    return min(LONGEST_ANSWER[task], length // 4)


def _most(write: _Write, least: int, length: int, fits: Callable[[str], bool]) -> int:
    """Return the most filler units that fit, or the task's minimum. A unit takes at least one token."""
    return least - 1 + max(1, bisect_left(range(least, length), True, key=lambda units: not fits(write(units).prompt)))


def _writer(generators: SimpleNamespace, task: str, length: int, fits: Callable[..., bool]) -> tuple[_Write, int]:
    """Return a function that writes questions of a task, and the minimum number of filler units."""
    if task in NEEDLES:
        return _needle_writer(generators, NEEDLES[task], length)
    if task == "ruler_cwe":

        def common_words(units: int) -> RulerQuestion:
            _, text, answers = generators.cwe.generate_input_output(units, length)
            return _split(text, generators.cwe.CONFIG["answer_prefix"], answers, "\n\n")

        return common_words, 10
    if task == "ruler_fwe":

        def frequent_words(units: int) -> RulerQuestion:
            tokens = {"max_len": 1, "tokenizer": lambda text: SimpleNamespace(input_ids=())}  # no length limit
            text, answers, _ = generators.fwe.generate_input_output(**tokens, num_words=units, vocab_size=length // 50)
            return _split(text, generators.fwe.CONFIG["answer_prefix"], answers)

        return frequent_words, FEWEST_CODED_WORDS

    def variables(units: int, is_icl: bool = False) -> RulerQuestion:
        text, answers = generators.vt.generate_input_output(units, 1, 4, is_icl=is_icl)
        return _split(text, " Answer: According to the chain(s) of variable assignment", answers)

    def example(units: int) -> RulerQuestion:
        return variables(units, is_icl=True)

    shown_room = min(VT_EXAMPLE, length // 2) - LONGEST_ANSWER[task]
    shown = example(_most(example, 1, length, lambda prompt: fits(prompt, shown_room)))
    shown_text = f"{shown.question} {shown.answer_prefix}  {' '.join(shown.answers)}\n\n"

    def tracking(units: int) -> RulerQuestion:
        asked = variables(units)
        return asked._replace(question=f"{generators.vt.randomize_icl(shown_text)}\n\n{asked.question}")

    return tracking, 1


def _needle_writer(generators: SimpleNamespace, needles: Needles, length: int) -> tuple[_Write, int]:
    niah, kind, values = generators.niah, needles.type_haystack, needles.type_needle_v
    is_single = needles.num_needle_q * needles.num_needle_v == 1
    essay = list(islice(cycle(" ".join(filler_sentences()).split()), length))
    options = {**needles._asdict(), "template": generators.niah_template}

    def write(units: int) -> RulerQuestion:
        haystack = essay if kind == "essay" else niah.get_haystack(kind)
        text, answers, query = niah.generate_input_output(units, haystack, **options)
        asked = f"{values[:-1] if is_single else values} for {query} mentioned in the provided text"
        return RulerQuestion(text, " ", f"The special magic {asked} {'is' if is_single else 'are'}", tuple(answers))

    return write, needles.num_needle_k * needles.num_needle_v


def _split(text: str, answer_prefix: str, answers: list[str], delimiter: str = " ") -> RulerQuestion:
    """Split a text into the question and the beginning of its answer."""
    at = text.rfind(answer_prefix)
    return RulerQuestion(text[:at].strip(), delimiter, text[at:].strip(), tuple(answers))


@cache
def load_generators() -> SimpleNamespace:
    """Import lm-eval's generators, blocking the download that one of them starts. Raises ValueError without lm-eval."""
    try:
        from nltk import data

        find, data.find = data.find, lambda *_: None
        try:
            from lm_eval.tasks.ruler import cwe_utils, fwe_utils, niah_utils, prepare_niah, vt_utils
        finally:
            data.find = find
    except ImportError as error:
        raise ValueError(
            f"RULER's generators cannot be imported ({error}). They come with lm-eval: pip install 'lm-eval[ruler]'."
        ) from error
    prepare_niah.cached_sent_tokenize = lambda text: re.split(r"(?<=[.!?]) ", text)
    template = niah_utils.TEMPLATE
    return SimpleNamespace(cwe=cwe_utils, fwe=fwe_utils, niah=prepare_niah, niah_template=template, vt=vt_utils)


@contextmanager
def _seeded(generators: SimpleNamespace, seed: str) -> Iterator[None]:
    """Seed the generators' sources of randomness; restore the global random states on exit."""
    before, before_numpy = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(random.getrandbits(32))
    generators.cwe.RNG.seed(seed)
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(before_numpy)


@dataclass(frozen=True)
class RulerProbe:
    """Questions from a RULER ``task``, up to ``n_tokens`` tokens long.

    If a question has several answers, the prompt includes all except the last, which is asked for. Wrong choices are
    other needles, variables or words from the prompt, or similar made-up strings if it has too few for ``n_choices``.
    """

    task: str
    n_tokens: Count = 512
    seed: int = 0
    tokenizer: PreTrainedTokenizerBase | None = None
    n_choices: Count = 10

    def __post_init__(self) -> None:
        check_options(self, "")

    @property
    def chance(self) -> float:
        """Accuracy of guessing, 0 to 1."""
        return 1 / self.n_choices

    def examples(self, n: int) -> list[Example]:
        """Return the first ``n`` examples. Raises ValueError without a tokenizer, and as `ruler_questions` does."""
        if self.tokenizer is None:
            raise ValueError("RULER's lengths are counted in tokens; pass the model's tokenizer.")
        asked = ruler_questions(self.task, self.n_tokens, self.tokenizer, self.seed, n)
        return [self._example(index, question) for index, question in enumerate(asked)]

    def _example(self, index: int, question: RulerQuestion) -> Example:
        rng = random.Random(f"{self.task} {self.n_tokens} {self.seed} {index}")
        *given, answer = question.answers
        pattern = next(pattern for name, pattern in OFFERED.items() if self.task.startswith(name))
        found = sorted({*re.findall(pattern, question.question)} - {*question.answers})
        choices = {answer, *rng.sample(found, min(len(found), self.n_choices - 1))}
        while len(choices) < self.n_choices:
            choices.add(re.sub(r"\w", lambda match: rng.choice(_alike(match[0])), answer))
        prompt = " ".join([question.prompt, *given])
        shown = rng.sample(sorted(choices), len(choices))
        return Example(prompt, f" {answer}", tuple(f" {choice}" for choice in shown))

    def describe(self) -> dict[str, object]:
        """Return the settings that determine every prompt, except the tokenizer, which is the scored model's."""
        return {"name": self.task, "length": self.n_tokens, "seed": self.seed, "n_choices": self.n_choices}


def _alike(character: str) -> str:
    """Return characters that can replace another; lower-case letters are treated as hexadecimal digits."""
    return digits if character.isdigit() else ascii_uppercase if character.isupper() else "abcdef"
