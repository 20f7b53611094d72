"""Multiple-choice questions about facts, with or without lettered options in the prompt.

With letters, knowing the answer is not enough: the model must retrieve its letter from the prompt
(arXiv 2504.18574).
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from string import ascii_uppercase
from typing import Annotated, ClassVar, Literal, NamedTuple, TypeVar

from ..assets import facts_path
from ..io import Record, refused, text_lines, whole_strings
from ..validation import Limits
from .probe import Example, SeededProbe
from .words import digest

Item = TypeVar("Item")
ANSWER = "Answer:"
AnswerFormat = Literal["letter", "text", "completion"]


@dataclass(frozen=True)
class Knowledge:
    """Questions from a JSON Lines file, one ``{"prompt", "answer", "choices"}`` per line.

    ``path`` defaults to the facts that the embedded teacher was trained on. Raises ValueError for
    an unreadable file, naming the line.
    """

    path: str | Path | None = None

    @property
    def chance(self) -> float:
        """Accuracy of guessing, 0 to 1."""
        examples = self.examples()
        return sum(1 / len(example.choices) for example in examples) / len(examples)

    def examples(self, n: int | None = None) -> list[Example]:
        """Return the first ``n`` questions in file order, by default all."""
        expected = '{"prompt": ..., "answer": ..., "choices": [...]}'
        return read_questions(self.path, _read_example, expected)[:n]

    def describe(self) -> dict[str, object]:
        """Return the file's name and hash."""
        file = Path(self.path or facts_path())
        sha256 = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
        return {
            "name": "knowledge",
            "file": file.name,
            "sha256": sha256,
        }


def read_questions(
    path: str | Path | None, read: Callable[[Record], Item], expected: str
) -> list[Item]:
    """Read a file's questions, one per line; without a path, those of the embedded teacher.

    ``read`` makes a question from a line's entries. Raises ValueError for an unreadable file, naming
    the first bad line and the ``expected`` format.
    """
    file = Path(path or facts_path())
    questions = []
    with refused(f"the questions {file} cannot be read", "pass a file of JSON lines"):
        with file.open(encoding="utf-8") as text:
            lines = list(text_lines(text))
    for number, line in enumerate(lines, start=1):
        with refused(f"line {number} of {file} is not a question", f"write {expected}"):
            # Editors leave blank lines at the end.
            if line.strip():
                questions.append(read(whole_strings(json.loads(line))))
    if not questions:
        raise ValueError(f"{file} holds no questions; write one per line.")
    return questions


class Fact(NamedTuple):
    """A question (or the beginning of a sentence) and its answer.

    ``distractors`` are wrong answers; if there are too few, answers to other facts of the same
    ``kind`` are added.
    """

    question: str
    answer: str
    distractors: tuple[str, ...] = ()
    kind: str = ""


@dataclass(frozen=True)
class LetterChoice(SeededProbe):
    """Facts as questions with ``n_options`` lettered options; the choices are the letters.

    With ``answer_format`` "text", the choices are the options themselves. With "completion", the
    prompt is the question alone and the options continue it. Every format asks the same questions
    with the same options. ``seed`` sets the order of the facts; once all have been asked, they
    repeat with other options. ``facts`` are `Fact` or tuples of its fields. Raises ValueError for a
    fact without enough wrong answers.
    """

    name: ClassVar[str] = "letter_choice"

    facts: tuple[Fact, ...] = field(repr=False)
    n_options: Annotated[int, Limits(2, len(ascii_uppercase), whole=True)] = 4
    seed: int = 0
    answer_format: AnswerFormat = "letter"

    @classmethod
    def from_file(
        cls,
        facts: str | Path | None = None,
        n_options: int = 4,
        seed: int = 0,
        answer_format: AnswerFormat = "letter",
    ) -> LetterChoice:
        """Read facts from a JSON Lines file, by default those that the embedded teacher was trained on.

        A line is ``{"prompt", "answer"}``, with optional ``"choices"`` (all but the answer become
        distractors) and ``"kind"``. Raises ValueError for an unreadable file, naming the line.
        """
        expected = '{"prompt": ..., "answer": ...}, with optional "choices": [...] and "kind": ...'
        questions = read_questions(facts, _read_fact, expected)
        return cls(tuple(questions), n_options, seed, answer_format)

    def __post_init__(self) -> None:
        super().__post_init__()
        # Callers may pass plain tuples. The class is frozen, so this is the way to convert them.
        object.__setattr__(self, "facts", tuple(Fact(*fact) for fact in self.facts))
        for fact in self.facts:
            n_wrong = len(fact.distractors) + len(self._others(fact))
            if n_wrong < self.n_options - 1:
                raise ValueError(
                    f"{fact.question!r} has {n_wrong} wrong answers, {self.n_options} options need "
                    f"{self.n_options - 1}; give it distractors, or more facts of kind {fact.kind!r}."
                )

    @cached_property
    def _answers(self) -> dict[str, list[str]]:
        """Distinct answers to each kind of fact, in the order of the facts."""
        # A dict, not a set: the seeded draws depend on their order.
        answers: dict[str, dict[str, None]] = {}
        for fact in self.facts:
            answers.setdefault(fact.kind, {})[fact.answer] = None
        return {kind: list(distinct) for kind, distinct in answers.items()}

    def _others(self, fact: Fact) -> list[str]:
        """Return answers to facts of the same kind, except the fact's own and its distractors."""
        own = {fact.answer, *fact.distractors}
        return [answer for answer in self._answers[fact.kind] if answer not in own]

    @cached_property
    def _order(self) -> list[Fact]:
        return random.Random(f"letter-choice {self.seed}").sample(self.facts, len(self.facts))

    def _example(self, index: int) -> Example:
        fact = self._order[index % len(self._order)]
        # Seeded by text, which gives the same numbers on every machine and version of Python.
        rng = random.Random(f"letter-choice {self.seed} {self.n_options} {index}")
        n_wrong = self.n_options - 1
        n_own = min(n_wrong, len(fact.distractors))
        wrong = rng.sample(fact.distractors, n_own)
        wrong += rng.sample(self._others(fact), n_wrong - n_own)
        options = rng.sample([fact.answer, *wrong], self.n_options)
        letters = list(ascii_uppercase[: self.n_options])
        prompt = fact.question
        if self.answer_format != "completion":
            lines = [f"{letter}. {option}" for letter, option in zip(letters, options, strict=True)]
            prompt = "\n".join([fact.question, *lines, ANSWER])
        answers = letters if self.answer_format == "letter" else options
        choices = tuple(f" {answer}" for answer in answers)
        return Example(prompt, choices[options.index(fact.answer)], choices)

    def describe(self) -> dict[str, object]:
        """Return the settings that determine every prompt, with the facts as a hash."""
        settings: dict[str, object] = {
            "name": self.name,
            "n_options": self.n_options,
            "seed": self.seed,
            "n_facts": len(self.facts),
            "facts_sha256": digest(json.dumps(fact) for fact in self.facts),
        }
        if self.answer_format != "letter":
            settings["answer_format"] = self.answer_format
        return settings


def _read_example(record: Record) -> Example:
    return Example(record["prompt"], record["answer"], tuple(record["choices"]))


def _read_fact(record: Record) -> Fact:
    """Make a fact from a line's entries, stripped of spaces.

    Raises ValueError for empty or repeated texts.
    """
    question = record["prompt"].strip()
    answer = record["answer"].strip()
    choices = [choice.strip() for choice in record.get("choices", ())]
    distractors = tuple(choice for choice in choices if choice != answer)
    if not all([question, answer, *choices]):
        raise ValueError("no text may be empty")
    if len(set(distractors)) < len(distractors):
        raise ValueError("choices must differ")
    return Fact(question, answer, distractors, record.get("kind", "").strip())
