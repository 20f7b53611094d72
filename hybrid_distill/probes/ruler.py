"""RULER tasks (arXiv 2404.06654) at any length, offline: needles, variables, common and frequent words.

lm-eval's generators write the questions. Two downloads are replaced: Paul Graham's essays by
`filler_sentences`, and nltk's sentence splitter by a regular expression. Haystacks grow one unit of
filler at a time, where lm-eval uses steps of up to 500 words, so lengths such as 256 tokens work
too.
"""

from __future__ import annotations

import random
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import cycle, islice
from string import ascii_uppercase, digits
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..assets.filler import filler_sentences
from ..validation import Count, check_options
from .checks import missing_words
from .probe import Example


class Needles(NamedTuple):
    """Settings of lm-eval's needle generator, under its names: keys, values, queries."""

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
LONGEST_ANSWER = {
    **dict.fromkeys(NEEDLES, 128),
    "ruler_vt": 30,
    "ruler_cwe": 120,
    "ruler_fwe": 50,
}
"""Limit on generated tokens in lm-eval, by task."""
TASKS = tuple(LONGEST_ANSWER)
VT_EXAMPLE = 500  # tokens of the worked example before a ruler_vt question; at most half the length
FEWEST_COMMON_WORDS = 10
FEWEST_CODED_WORDS = 54  # in ruler_fwe: with fewer, the third and fourth most frequent words tie
WRONG_CHOICES = {
    "niah": r"is: ([\da-f-]{7,36})\.",
    "ruler_vt": r"VAR ([A-Z]+)",
    "ruler_cwe": r"\d+\. (\S+)",
    "ruler_fwe": r"\.\.\. ([a-z]{6})(?= \.\.\.)",
}
"""Patterns for strings in a prompt that can serve as wrong choices, by prefix of the task name."""

_Write = Callable[[int], RulerQuestion]
"""Function that writes a question with a number of filler units: words, sentences or needles."""


def ruler_questions(
    task: str,
    length: int,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    n: int,
) -> Iterator[RulerQuestion]:
    """Yield the first ``n`` questions of one of `TASKS`; question i is the same for any ``n``.

    A prompt plus `tokens_to_generate` takes at most ``length`` tokens.

    Raises ValueError if the length is too short for the task, the tokenizer lacks its words, or
    lm-eval or its ruler extra is not installed.
    """
    generators = load_generators()
    room = length - tokens_to_generate(task, length)

    def fits(prompt: str, room: int = room) -> bool:
        return len(tokenizer(prompt, verbose=False)["input_ids"]) <= room

    with _seeded(generators, f"{task} {length} {seed}"):
        # Sized by one question with a seed of its own, so that n does not change the prompts.
        write, least = _writer(generators, task, length, fits)
        shortest = write(least)
        missing = missing_words(tokenizer, [shortest.prompt, *shortest.answers])
        if missing:
            raise ValueError(
                f"this tokenizer has no token for {', '.join(map(repr, missing[:6]))} of {task}; "
                "RULER needs a model that knows plain English."
            )
        most = _most(write, least, length, fits)
    for index in range(n):
        with _seeded(generators, f"{task} {length} {seed} {index}"):
            question = _longest_that_fits(write, range(most, least - 1, -1), fits)
        if question is None:
            raise ValueError(
                f"{task} does not fit into {length} tokens of this tokenizer; pass a larger length."
            )
        yield question


def _longest_that_fits(
    write: _Write, units: range, fits: Callable[[str], bool]
) -> RulerQuestion | None:
    """Return the first question that fits, None if none does.

    The numbers of ``units`` descend from the most that fitted another question, whose words may
    have been shorter.
    """
    for n_units in units:
        question = write(n_units)
        if fits(question.prompt):
            return question
    return None


def tokens_to_generate(task: str, length: int) -> int:
    """Return lm-eval's limit on generated tokens, capped at a quarter of the length."""
    return min(LONGEST_ANSWER[task], length // 4)


def _most(
    write: _Write,
    least: int,
    length: int,
    fits: Callable[[str], bool],
) -> int:
    """Return the most filler units that fit, or the task's minimum."""

    def is_too_long(units: int) -> bool:
        return not fits(write(units).prompt)

    # Up to ``length`` units: a unit takes at least one token.
    n_fitting = bisect_left(range(least, length), True, key=is_too_long)
    return least + max(n_fitting, 1) - 1


def _writer(
    generators: SimpleNamespace,
    task: str,
    length: int,
    fits: Callable[..., bool],
) -> tuple[_Write, int]:
    """Return a function that writes questions of a task, and the minimum number of filler units."""
    if task == "ruler_cwe":
        return partial(_write_common_words, generators.cwe, length), FEWEST_COMMON_WORDS
    if task == "ruler_fwe":
        return partial(_write_frequent_words, generators.fwe, length), FEWEST_CODED_WORDS
    if task == "ruler_vt":
        return _variable_writer(generators.vt, length, fits), 1
    needles = NEEDLES[task]
    return _needle_writer(generators, needles, length), needles.num_needle_k * needles.num_needle_v


def _write_common_words(cwe: Any, length: int, units: int) -> RulerQuestion:
    _, text, answers = cwe.generate_input_output(units, length)
    return _split(text, cwe.CONFIG["answer_prefix"], answers, "\n\n")


def _write_frequent_words(fwe: Any, length: int, units: int) -> RulerQuestion:
    # lm-eval drops words until the text fits; by this tokenizer's count every text does.
    def no_tokens(text: str) -> SimpleNamespace:
        return SimpleNamespace(input_ids=())

    text, answers, _ = fwe.generate_input_output(
        max_len=1,
        tokenizer=no_tokens,
        num_words=units,
        vocab_size=length // 50,
    )
    return _split(text, fwe.CONFIG["answer_prefix"], answers)


def _variable_writer(vt: Any, length: int, fits: Callable[..., bool]) -> _Write:
    """Return a writer of variable tracking; all its prompts begin with the same worked example."""

    def write_chain(units: int, *, is_example: bool) -> RulerQuestion:
        text, answers = vt.generate_input_output(units, 1, 4, is_icl=is_example)
        return _split(text, " Answer: According to the chain(s) of variable assignment", answers)

    write_example = partial(write_chain, is_example=True)
    # The example is as long as lm-eval's, unless that leaves too little for the question.
    room = min(VT_EXAMPLE, length // 2) - LONGEST_ANSWER["ruler_vt"]
    example = write_example(_most(write_example, 1, length, partial(fits, room=room)))
    example_text = f"{example.question} {example.answer_prefix}  {' '.join(example.answers)}\n\n"

    def write(units: int) -> RulerQuestion:
        chain = write_chain(units, is_example=False)
        return chain._replace(question=f"{vt.randomize_icl(example_text)}\n\n{chain.question}")

    return write


def _needle_writer(generators: SimpleNamespace, needles: Needles, length: int) -> _Write:
    niah = generators.niah
    options = {**needles._asdict(), "template": generators.niah_template}
    words = " ".join(filler_sentences()).split()
    # As many words as any haystack needs: a word takes at least one token.
    essay = list(islice(cycle(words), length))
    values = needles.type_needle_v
    verb = "are"
    if needles.num_needle_q * needles.num_needle_v == 1:
        # In the singular: "number", not "numbers".
        values = values[:-1]
        verb = "is"

    def write(units: int) -> RulerQuestion:
        kind = needles.type_haystack
        # prepare_niah would download its essays.
        haystack = essay if kind == "essay" else niah.get_haystack(kind)
        text, answers, query = niah.generate_input_output(units, haystack, **options)
        answer_prefix = (
            f"The special magic {values} for {query} mentioned in the provided text {verb}"
        )
        return RulerQuestion(text, " ", answer_prefix, tuple(answers))

    return write


def _split(
    text: str,
    answer_prefix: str,
    answers: list[str],
    delimiter: str = " ",
) -> RulerQuestion:
    """Split a text into the question and the beginning of its answer."""
    # The last one: a worked example before the question holds it too.
    at = text.rfind(answer_prefix)
    return RulerQuestion(text[:at].strip(), delimiter, text[at:].strip(), tuple(answers))


@cache
def load_generators() -> SimpleNamespace:
    """Import lm-eval's generators, blocking the download that one of them starts.

    Raises ValueError without lm-eval.
    """
    try:
        from nltk import data

        # prepare_niah downloads punkt_tab when it is imported, unless data.find finds it.
        find = data.find
        data.find = lambda *_: None
        try:
            from lm_eval.tasks.ruler import cwe_utils, fwe_utils, niah_utils, prepare_niah, vt_utils
        finally:
            data.find = find
    except ImportError as error:
        raise ValueError(
            f"RULER's generators cannot be imported ({error}). They come with lm-eval: pip install 'lm-eval[ruler]'."
        ) from error
    # nltk's splitter needs the download that was blocked.
    prepare_niah.cached_sent_tokenize = lambda text: re.split(r"(?<=[.!?]) ", text)
    template = niah_utils.TEMPLATE
    return SimpleNamespace(
        cwe=cwe_utils,
        fwe=fwe_utils,
        niah=prepare_niah,
        niah_template=template,
        vt=vt_utils,
    )


@contextmanager
def _seeded(generators: SimpleNamespace, seed: str) -> Iterator[None]:
    """Seed the generators' sources of randomness; restore the global random states on exit."""
    before = random.getstate()
    before_numpy = np.random.get_state()
    # lm-eval draws from the global generators, and ruler_cwe from one of its own.
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

    If a question has several answers, the prompt ends with all but the last, which is to be chosen.
    Wrong choices are other needles, variables or words from the prompt and, if it has too few for
    ``n_choices``, similar made-up strings.
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
        """Return the first ``n`` examples.

        Raises ValueError without a tokenizer, and as `ruler_questions` does.
        """
        if self.tokenizer is None:
            raise ValueError("RULER's lengths are counted in tokens; pass the model's tokenizer.")
        questions = ruler_questions(
            self.task,
            self.n_tokens,
            self.tokenizer,
            self.seed,
            n,
        )
        return [self._example(index, question) for index, question in enumerate(questions)]

    def _example(self, index: int, question: RulerQuestion) -> Example:
        rng = random.Random(f"{self.task} {self.n_tokens} {self.seed} {index}")
        *others, answer = question.answers
        matches = re.findall(self._wrong_choice_pattern(), question.question)
        # Sorted: the order of a set of strings differs between processes.
        candidates = sorted(set(matches) - set(question.answers))
        n_wrong = min(len(candidates), self.n_choices - 1)
        choices = {answer, *rng.sample(candidates, n_wrong)}
        while len(choices) < self.n_choices:
            made_up = re.sub(r"\w", lambda match: rng.choice(_alike(match[0])), answer)
            choices.add(made_up)
        shuffled = rng.sample(sorted(choices), len(choices))
        prompt = " ".join([question.prompt, *others])
        return Example(prompt, f" {answer}", tuple(f" {choice}" for choice in shuffled))

    def _wrong_choice_pattern(self) -> str:
        for prefix, pattern in WRONG_CHOICES.items():
            if self.task.startswith(prefix):
                return pattern
        raise KeyError(self.task)

    def describe(self) -> dict[str, object]:
        """Return the settings that determine every prompt, without the scored model's tokenizer."""
        return {
            "name": self.task,
            "length": self.n_tokens,
            "seed": self.seed,
            "n_choices": self.n_choices,
        }


def _alike(character: str) -> str:
    """Return characters that can replace another.

    Lower-case letters are treated as hexadecimal digits.
    """
    if character.isdigit():
        return digits
    return ascii_uppercase if character.isupper() else "abcdef"
