"""Base of all probes: a task whose examples each ask a model one question."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import ClassVar, Protocol

from ..validation import check_counts, check_options
from .words import digest


@dataclass(frozen=True)
class Example:
    """One question: a model that knows the answer continues ``prompt`` with ``answer``.

    ``answer`` is one of ``choices``; each choice includes its leading space.
    """

    prompt: str
    answer: str
    choices: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.prompt or not all(self.choices):
            raise ValueError(f"a prompt or a choice of {self!r} is empty; give it text.")
        if len(set(self.choices)) != len(self.choices) or self.answer not in self.choices:
            raise ValueError(
                f"answer {self.answer!r}, choices {self.choices!r}: choices must differ and hold the answer."
            )


class Probe(Protocol):
    """A task that heads can be scored on."""

    @property
    def chance(self) -> float:
        """Accuracy of guessing, 0 to 1."""
        ...

    def examples(self, n: int) -> list[Example]:
        """Return the first ``n`` examples, the same on every call."""
        ...

    def describe(self) -> dict[str, object]:
        """Return all settings that determine the examples, as JSON values."""
        ...


class SeededProbe(ABC):
    """Base for dataclasses of settings; example i is the same however many examples are requested.

    Raises ValueError for a setting outside the range that its field declares.
    """

    name: ClassVar[str]
    lead: ClassVar[str] = "The answer is"
    """Beginning of an answer in a chat, before the choice."""

    def __post_init__(self) -> None:
        check_options(self, "")

    def examples(self, n: int) -> list[Example]:
        """Return the first ``n`` examples. Each choice begins with the space after the prompt."""
        check_counts(n=n)
        return [self._example(index) for index in range(n)]

    @property
    def chance(self) -> float:
        """Accuracy of guessing, 0 to 1, on the first example."""
        return 1 / len(self._example(0).choices)

    @abstractmethod
    def _example(self, index: int) -> Example: ...

    def describe(self) -> dict[str, object]:
        """Return the settings that determine every prompt; fields without repr as hashes."""
        settings: dict[str, object] = {"name": self.name}
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            # Lists of hundreds of words would fill every file of scores.
            if not field.repr:
                settings[f"{field.name}_sha256"] = digest(value)
            elif isinstance(value, tuple):
                # A list, as it is when it has been read from JSON.
                settings[field.name] = list(value)
            else:
                settings[field.name] = value
        return settings


def queries_of(probe: Probe) -> int:
    """Return the number of consecutive examples that ask about one prompt; these are scored together."""
    return getattr(probe, "n_queries", 1)
