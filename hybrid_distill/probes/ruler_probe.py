"""RULER's tasks as probes: one answer to choose, or to generate."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from string import ascii_uppercase, digits

from transformers import PreTrainedTokenizerBase

from . import Example, check_counts
from .ruler import RulerQuestion, ruler_questions

OFFERED = {
    "niah": r"is: ([\da-f-]{7,36})\.",
    "ruler_vt": r"VAR ([A-Z]+)",
    "ruler_cwe": r"\d+\. (\S+)",
    "ruler_fwe": r"\.\.\. ([a-z]{6})(?= \.\.\.)",
}
"""Strings of a prompt that could be taken for an answer, by the beginning of a task's name."""


@dataclass(frozen=True)
class RulerProbe:
    """Questions of a RULER ``task`` of up to ``n_tokens`` tokens.

    Where a question has several answers, all but the last are written behind it and the last is asked for. Wrong
    choices are other needles, variables or words of the prompt, made up alike where it does not hold ``n_choices``.
    """

    task: str
    n_tokens: int = 512
    seed: int = 0
    tokenizer: PreTrainedTokenizerBase | None = None
    n_choices: int = 10

    def __post_init__(self) -> None:
        check_counts(n_tokens=self.n_tokens, n_choices=self.n_choices)

    @property
    def chance(self) -> float:
        """Accuracy of naming any choice."""
        return 1 / self.n_choices

    def examples(self, n: int) -> list[Example]:
        """Return the first ``n`` examples. Raises ValueError for a length too short, and without lm-eval."""
        if self.tokenizer is None:
            raise ValueError("haystacks are as long as a model's tokens; pass its tokenizer.")
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
        return Example(
            prompt, f" {answer}", tuple(f" {choice}" for choice in rng.sample(sorted(choices), len(choices)))
        )

    def describe(self) -> dict[str, object]:
        """Return the settings every prompt follows from; its tokens are those of the model that is scored."""
        return {"name": self.task, "length": self.n_tokens, "seed": self.seed, "n_choices": self.n_choices}


def _alike(character: str) -> str:
    """Return characters to put in another's place; lower-case letters stand in hexadecimal numbers."""
    return digits if character.isdigit() else ascii_uppercase if character.isupper() else "abcdef"
