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

from ..assets import facts_path
from . import Example, SeededProbe, as_tuple, check_counts, digest
from .knowledge import read_json_lines

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
class LetterChoice(SeededProbe):
    """Facts as questions with ``n_options`` lettered options; the choices are the letters.

    With the ``form`` "text" the choices are the options themselves, with "completion" the question stands alone and
    they continue it: the same questions with the same options. Facts are asked in an order that follows from ``seed``,
    and again with other options when all have been asked. ``facts`` are `Fact` or tuples of its fields. Raises
    ValueError when ``n_options`` is not in 2..26, for an unknown form, for a malformed fact, and for a fact without
    enough wrong answers.
    """

    facts: tuple[Fact, ...] = field(repr=False)
    n_options: int = 4
    seed: int = 0
    form: Form = "letter"

    @classmethod
    def from_file(
        cls, path: str | Path | None = None, n_options: int = 4, seed: int = 0, form: Form = "letter"
    ) -> LetterChoice:
        """Read the facts of a JSON-lines file, by default those that the embedded teacher was taught.

        A line is ``{"prompt", "answer"}``, with optional ``"choices"`` (those that are not the answer are distractors)
        and ``"kind"``. Raises ValueError for a file that cannot be read as such, naming the line.
        """
        expected = '{"prompt": ..., "answer": ...}, with optional "choices": [...] and "kind": ...'
        file = facts_path() if path is None else Path(path)
        return cls(tuple(read_json_lines(file, _read_fact, expected)), n_options, seed, form)

    def __post_init__(self) -> None:
        check_counts(n_options=self.n_options)
        if not 2 <= self.n_options <= len(ascii_uppercase):
            raise ValueError(f"n_options is {self.n_options}; there are 2 to {len(ascii_uppercase)} letters to choose.")
        if self.form not in get_args(Form):
            raise ValueError(f"form is {self.form!r}; use one of {', '.join(get_args(Form))}.")
        object.__setattr__(self, "facts", tuple(_as_fact(fact) for fact in as_tuple("facts", self.facts)))
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
        """Return answers of facts of the same kind that are not the fact's answer or one of its distractors."""
        return [answer for answer in self._answers[fact.kind] if answer not in (fact.answer, *fact.distractors)]

    @property
    def chance(self) -> float:
        """Accuracy of naming any letter."""
        return 1 / self.n_options

    @cached_property
    def _order(self) -> list[Fact]:
        return random.Random(f"letter-choice {self.seed}").sample(self.facts, len(self.facts))

    def _example(self, index: int) -> Example:
        fact = self._order[index % len(self._order)]
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
        """Return the settings every prompt follows from; the facts as a hash."""
        return {
            "name": "letter_choice",
            "n_options": self.n_options,
            "seed": self.seed,
            "n_facts": len(self.facts),
            "facts_sha256": digest(json.dumps(fact) for fact in self.facts),
            **({} if self.form == "letter" else {"form": self.form}),
        }


def _as_fact(fields: Any) -> Fact:
    """Make a fact of its fields, without spaces around them. Raises ValueError for a malformed one."""
    try:
        if isinstance(fields, str):
            raise TypeError("a text alone")
        question, answer, distractors, kind = Fact(*fields)
        wrong = as_tuple("distractors", distractors) if distractors else ()
        fact = Fact(question.strip(), answer.strip(), tuple(text.strip() for text in wrong), kind.strip())
    except (AttributeError, TypeError) as error:
        raise ValueError(
            f"the fact {fields!r} is malformed ({error}); give texts: question, answer, and if wanted "
            "a sequence of distractors and a kind."
        ) from error
    answers = [fact.answer, *fact.distractors]
    if not fact.question or not all(answers) or len(set(answers)) < len(answers):
        raise ValueError(f"the fact {fields!r} is malformed; nothing in it may be empty, and its answers must differ.")
    return fact


def _read_fact(record: dict[str, Any]) -> Fact:
    wrong = [choice for choice in record.get("choices", ()) if choice.strip() != record["answer"].strip()]
    return _as_fact((record["prompt"], record["answer"], wrong, record.get("kind", "")))
