"""The shape that experiments share: load a model, measure variants of it on tasks, write a table and a figure."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, NamedTuple

from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...plan import HeadId
from .tables import Column, Row, Table
from .tasks import Questions, Subject, Task


@dataclass(frozen=True, kw_only=True)
class Experiment(ABC):
    """One subcommand of `hybrid-distill analyze`. Raises ValueError for bad options before it writes anything."""

    NAME: ClassVar[str]

    out: Path = Path("runs/analysis")
    """Folder of the tables and figures, which replace those of an earlier call."""

    @abstractmethod
    def run(self) -> str:
        """Write the tables and figures to ``out``; return the tables as text."""

    def save(self, table: Table, draw: Callable[[Table, Path], None] | None = None, suffix: str = "") -> str:
        """Write OUT/NAME.md, .csv and, drawn by ``draw``, .png; return the table as text."""
        table.save(self.out, f"{self.NAME}{suffix}")
        if draw is not None:
            draw(table, self.out / f"{self.NAME}{suffix}.png")
        return table.text()


@dataclass(frozen=True, kw_only=True)
class ModelExperiment(Experiment):
    """An experiment that asks a model questions."""

    subject: Subject = field(default_factory=Subject)
    questions: Questions = field(default_factory=Questions)

    def load(self) -> Bench:
        """Load model and tokenizer, and make the tasks."""
        model, tokenizer = self.subject.load()
        return Bench(model, tokenizer, self.questions.make(model, tokenizer))


class Variant(NamedTuple):
    """A label, and the context in which the model is that variant; ``group`` and ``x`` as in a `Row`."""

    label: str
    changed: AbstractContextManager[object]
    group: str = ""
    x: float = 0


class Bench(NamedTuple):
    """A model, and the tasks that it and its variants are measured on."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    tasks: Sequence[Task]

    @property
    def columns(self) -> tuple[Column, ...]:
        return tuple(task.column for task in self.tasks)

    def measure(self) -> tuple[float, ...]:
        """Find one number for each task."""
        return tuple(task.measure(self.model, self.tokenizer) for task in self.tasks)

    def table(self, title: str, label: str, variants: Sequence[Variant]) -> Table:
        """Make a table with a row for each variant; variants of one label are draws, shown as their mean."""
        found: dict[str, list[tuple[float, ...]]] = {}
        for variant in tqdm(variants, desc=label, disable=None):
            with variant.changed:
                found.setdefault(variant.label, []).append(self.measure())
        first = {variant.label: variant for variant in reversed(variants)}
        rows = (Row.mean(name, values, first[name].group, first[name].x) for name, values in found.items())
        return Table(f"{self.model.name_or_path}: {title}", label, self.columns, tuple(rows))


def parse_head(text: str) -> HeadId:
    """Parse ``"L2H6"``. Raises ValueError for anything else."""
    match = re.fullmatch(r"L(\d+)H(\d+)", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a head; pass one by layer and head, such as L2H6.")
    return HeadId(int(match[1]), int(match[2]))
