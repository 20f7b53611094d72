"""Questions with lettered options: knowing the answer is not enough, its letter must be fetched from the prompt.

The same questions can be asked for the answer's text, and without any options: formats to compare (arXiv 2504.18574).
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from string import ascii_uppercase
from typing import Any, Literal, NamedTuple, get_args

from . import Example, as_tuple, check_counts, digest

ANSWER = "Answer:"
Form = Literal["letter", "text", "completion"]


class Fact(NamedTuple):
    """A question (or the beginning of a sentence) and its answer.

    ``distractors`` are wrong answers; where they do not suffice, answers of other facts of the same ``kind`` are taken.
    """

    question: str
    answer: str
    distractors: tuple[str, ...] = ()
    kind: str = ""


@dataclass(frozen=True)
class LetterChoice:
    """Facts as questions with ``n_options`` lettered options; the choices are the letters.

    With the ``form`` "text" the choices are the options themselves, with "completion" the question stands alone and
    they continue it: the same questions with the same options. Facts are asked in an order that follows from ``seed``,
    and again with other options when all have been asked. ``facts`` are `Fact` or tuples of its fields. Raises
    ValueError when ``n_options`` is not in 2..26, for an unknown form, for something that is no fact, and for a fact
    without enough wrong answers.
    """

    facts: tuple[Fact, ...] = field(repr=False)
    n_options: int = 4
    seed: int = 0
    form: Form = "letter"

    @classmethod
    def from_file(
        cls, path: str | Path | None = None, n_options: int = 4, seed: int = 0, form: Form = "letter"
    ) -> LetterChoice:
        """Facts of a JSON-lines file, by default those that the embedded teacher was taught.

        A line is ``{"prompt", "answer"}``, and if it likes ``"choices"`` (whatever is not the answer is a distractor)
        and ``"kind"``. Raises ValueError for a file that cannot be read as such, naming the line.
        """
        return cls(tuple(read_facts(path)), n_options, seed, form)

    def __post_init__(self) -> None:
        check_counts(n_options=self.n_options)
        if not 2 <= self.n_options <= len(ascii_uppercase):
            raise ValueError(f"n_options is {self.n_options}; there are 2 to {len(ascii_uppercase)} letters to choose.")
        if self.form not in get_args(Form):
            raise ValueError(f"form is {self.form!r}; use one of {', '.join(get_args(Form))}.")
        facts = as_tuple("facts", self.facts)
        object.__setattr__(self, "facts", tuple(_as_fact(number, fact) for number, fact in enumerate(facts, start=1)))
        for fact in self.facts:
            n_wrong = len(fact.distractors) + len(self._others(fact))
            if n_wrong < self.n_options - 1:
                raise ValueError(
                    f"{fact.question!r} has {n_wrong} wrong answers, {self.n_options} options need "
                    f"{self.n_options - 1}; give it distractors, or more facts of kind {fact.kind!r}."
                )

    @cached_property
    def _answers(self) -> dict[str, list[str]]:
        """Answers of each kind of fact, in the facts' order."""
        answers: dict[str, dict[str, None]] = {}
        for fact in self.facts:
            answers.setdefault(fact.kind, {})[fact.answer] = None
        return {kind: list(found) for kind, found in answers.items()}

    def _others(self, fact: Fact) -> list[str]:
        """Answers of facts of the same kind that are neither the answer nor one of the fact's own distractors."""
        return [answer for answer in self._answers[fact.kind] if answer not in (fact.answer, *fact.distractors)]

    @property
    def chance(self) -> float:
        """Accuracy of naming any letter."""
        return 1 / self.n_options

    def examples(self, n: int) -> list[Example]:
        """The first ``n`` examples; each choice begins with the space that follows the prompt."""
        check_counts(n=n)
        order = random.Random(f"letter-choice {self.seed}").sample(self.facts, len(self.facts))
        return [self._example(order[index % len(order)], index) for index in range(n)]

    def _example(self, fact: Fact, index: int) -> Example:
        rng = random.Random(f"letter-choice {self.seed} {self.n_options} {index}")
        n_wrong = self.n_options - 1
        n_own = min(n_wrong, len(fact.distractors))
        wrong = rng.sample(fact.distractors, n_own)
        if n_own < n_wrong:
            wrong += rng.sample(self._others(fact), n_wrong - n_own)
        options = rng.sample([fact.answer, *wrong], self.n_options)
        letters = ascii_uppercase[: self.n_options]
        lines = [f"{letter}. {option}" for letter, option in zip(letters, options, strict=True)]
        prompt = fact.question if self.form == "completion" else "\n".join([fact.question, *lines, ANSWER])
        choices = tuple(f" {choice}" for choice in (letters if self.form == "letter" else options))
        return Example(prompt, choices[options.index(fact.answer)], choices)

    def describe(self) -> dict[str, object]:
        """The settings every prompt follows from; the facts as a hash."""
        facts = digest(json.dumps(fact) for fact in self.facts)
        return {
            "name": "letter_choice",
            "n_options": self.n_options,
            "seed": self.seed,
            "n_facts": len(self.facts),
            "facts_sha256": facts,
            **({} if self.form == "letter" else {"form": self.form}),
        }


def _as_fact(number: int, fields: Any) -> Fact:
    """A fact from its fields, without spaces around them. Raises ValueError for what is no fact."""
    try:
        if isinstance(fields, str):
            raise TypeError("a text alone")
        question, answer, distractors, kind = Fact(*fields)
        wrong = as_tuple("distractors", distractors) if distractors else ()
        fact = Fact(question.strip(), answer.strip(), tuple(text.strip() for text in wrong), kind.strip())
    except (AttributeError, TypeError) as error:
        raise ValueError(
            f"fact {number} is {fields!r} ({error}); expected texts: question, answer, and if wanted "
            "a sequence of distractors and a kind."
        ) from error
    answers = [fact.answer, *fact.distractors]
    if not fact.question or not all(answers) or len(set(answers)) < len(answers):
        raise ValueError(f"fact {number} is {fields!r}; nothing in it may be empty, and its answers must differ.")
    return fact


def read_facts(path: str | Path | None = None) -> list[Fact]:
    """Facts of a JSON-lines file: see `LetterChoice.from_file`."""
    file = _embedded() if path is None else Path(path)
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the facts {file} cannot be read ({error}).") from error
    facts = [_read_fact(file, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not facts:
        raise ValueError(f"{file} holds no facts.")
    return facts


def _read_fact(file: Path, number: int, line: str) -> Fact:
    try:
        record = json.loads(line)
        wrong = [choice for choice in record.get("choices", ()) if choice.strip() != record["answer"].strip()]
        return _as_fact(number, (record["prompt"], record["answer"], wrong, record.get("kind", "")))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"line {number} of {file} is no fact ({error}); "
            'expected {"prompt": ..., "answer": ...}, and if wanted "choices": [...] and "kind": ....'
        ) from error


def _embedded() -> Path:
    from ..assets import facts_path

    return facts_path()
