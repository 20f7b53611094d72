"""Multiple-choice questions about facts, with or without lettered options in the prompt.

With letters, knowing the answer is not enough: the model must retrieve its letter from the prompt (arXiv 2504.18574).
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
from ..limits import Limits
from . import Example, SeededProbe, digest

Item = TypeVar("Item")
ANSWER = "Answer:"
Form = Literal["letter", "text", "completion"]


@dataclass(frozen=True)
class Knowledge:
    """Questions from a JSON Lines file, one ``{"prompt", "answer", "choices"}`` per line.

    ``path`` defaults to the facts that the embedded teacher was trained on. Raises ValueError for an unreadable file,
    naming the line.
    """

    path: str | Path | None = None

    @property
    def chance(self) -> float:
        """Accuracy of guessing, 0 to 1."""
        examples = self.examples()
        return sum(1 / len(example.choices) for example in examples) / len(examples)

    def examples(self, n: int | None = None) -> list[Example]:
        """Return the first ``n`` questions in file order, by default all."""

        def read(record: Record) -> Example:
            return Example(record["prompt"], record["answer"], tuple(record["choices"]))

        return read_questions(self.path, read, '{"prompt": ..., "answer": ..., "choices": [...]}')[:n]

    def describe(self) -> dict[str, object]:
        """Return the file's name and hash."""
        file = Path(self.path or facts_path())
        return {"name": "knowledge", "file": file.name, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()[:16]}


def read_questions(path: str | Path | None, read: Callable[[Record], Item], expected: str) -> list[Item]:
    """Read the questions in a file, one per line; without a path, those of the embedded teacher.

    Raises ValueError for an unreadable file, naming the first bad line and the expected format.
    """
    file, found = Path(path or facts_path()), []
    with refused(f"the questions {file} cannot be read", "pass a file of JSON lines"):
        with file.open(encoding="utf-8") as text:
            lines = list(text_lines(text))
    for number, line in enumerate(lines, start=1):
        with refused(f"line {number} of {file} is not a question", f"write {expected}"):
            if line.strip():
                found.append(read(whole_strings(json.loads(line))))
    if not found:
        raise ValueError(f"{file} holds no questions; write one per line.")
    return found


class Fact(NamedTuple):
    """A question (or the beginning of a sentence) and its answer.

    ``distractors`` are wrong answers; if there are too few, answers to other facts of the same ``kind`` are added.
    """

    question: str
    answer: str
    distractors: tuple[str, ...] = ()
    kind: str = ""


@dataclass(frozen=True)
class LetterChoice(SeededProbe):
    """Facts as questions with ``n_options`` lettered options; the choices are the letters.

    With ``form`` "text", the choices are the options themselves. With "completion", the prompt is the question alone
    and the options continue it. Every form asks the same questions with the same options. ``seed`` sets the order of
    the facts; once all have been asked, they repeat with other options. ``facts`` are `Fact` or tuples of its fields.
    Raises ValueError for a fact without enough wrong answers.
    """

    name: ClassVar[str] = "letter_choice"

    facts: tuple[Fact, ...] = field(repr=False)
    n_options: Annotated[int, Limits(2, len(ascii_uppercase), whole=True)] = 4
    seed: int = 0
    form: Form = "letter"

    @classmethod
    def from_file(
        cls, facts: str | Path | None = None, n_options: int = 4, seed: int = 0, form: Form = "letter"
    ) -> LetterChoice:
        """Read facts from a JSON Lines file, by default those that the embedded teacher was trained on.

        A line is ``{"prompt", "answer"}``, with optional ``"choices"`` (all but the answer become distractors) and
        ``"kind"``. Raises ValueError for an unreadable file, naming the line.
        """
        expected = '{"prompt": ..., "answer": ...}, with optional "choices": [...] and "kind": ...'
        return cls(tuple(read_questions(facts, _read_fact, expected)), n_options, seed, form)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "facts", tuple(Fact(*fact) for fact in self.facts))
        for fact in self.facts:
            if (n_wrong := len(fact.distractors) + len(self._others(fact))) < self.n_options - 1:
                raise ValueError(
                    f"{fact.question!r} has {n_wrong} wrong answers, {self.n_options} options need "
                    f"{self.n_options - 1}; give it distractors, or more facts of kind {fact.kind!r}."
                )

    @cached_property
    def _answers(self) -> dict[str, list[str]]:
        """Distinct answers to each kind of fact, in the order of the facts."""
        kinds = {fact.kind for fact in self.facts}
        return {kind: list(dict.fromkeys(fact.answer for fact in self.facts if fact.kind == kind)) for kind in kinds}

    def _others(self, fact: Fact) -> list[str]:
        """Return answers to facts of the same kind, except the fact's own answer and distractors."""
        return [answer for answer in self._answers[fact.kind] if answer not in (fact.answer, *fact.distractors)]

    @cached_property
    def _order(self) -> list[Fact]:
        return random.Random(f"letter-choice {self.seed}").sample(self.facts, len(self.facts))

    def _example(self, index: int) -> Example:
        fact = self._order[index % len(self._order)]
        rng = random.Random(f"letter-choice {self.seed} {self.n_options} {index}")
        n_own = min(self.n_options - 1, len(fact.distractors))
        wrong = rng.sample(fact.distractors, n_own)
        wrong += rng.sample(self._others(fact), self.n_options - 1 - n_own)
        options = rng.sample([fact.answer, *wrong], self.n_options)
        letters = ascii_uppercase[: self.n_options]
        lines = [f"{letter}. {option}" for letter, option in zip(letters, options, strict=True)]
        prompt = fact.question if self.form == "completion" else "\n".join([fact.question, *lines, ANSWER])
        choices = tuple(f" {choice}" for choice in (letters if self.form == "letter" else options))
        return Example(prompt, choices[options.index(fact.answer)], choices)

    def describe(self) -> dict[str, object]:
        """Return the settings that determine every prompt, with the facts as a hash."""
        return {
            "name": "letter_choice",
            "n_options": self.n_options,
            "seed": self.seed,
            "n_facts": len(self.facts),
            "facts_sha256": digest(json.dumps(fact) for fact in self.facts),
            **({} if self.form == "letter" else {"form": self.form}),
        }


def _read_fact(record: Record) -> Fact:
    """Make a fact from a line's entries, stripped of spaces. Raises ValueError for empty or repeated texts."""
    answer, kind = record["answer"].strip(), record.get("kind", "").strip()
    choices = [choice.strip() for choice in record.get("choices", ())]
    fact = Fact(record["prompt"].strip(), answer, tuple(choice for choice in choices if choice != answer), kind)
    if not (fact.question and answer and all(choices)) or len(set(fact.distractors)) < len(fact.distractors):
        raise ValueError("no text may be empty, and choices must differ")
    return fact
