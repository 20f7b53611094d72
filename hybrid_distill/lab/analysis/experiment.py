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
from ..reporting import can_draw
from .tables import Row, Table
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

    def save(
        self, table: Table, draw: Callable[[Table, Path], None] | None = None, *, suffix: str = "", most: int = 0
    ) -> str:
        """Write OUT/NAME.md, .csv and, drawn by ``draw``, .png; return the table as text.

        With ``most``, text and figure show so many rows, and those of a group; the files have all.
        """
        table.save(self.out, f"{self.NAME}{suffix}")
        if most:
            rows = [row for number, row in enumerate(table.rows) if number < most or row.group]
            left = len(table.rows) - len(rows)
            table = table._replace(title=table.title + (f" ({left} more in the file)" if left else ""), rows=rows)
        if draw is not None and can_draw():
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

    def row(self, variant: Variant) -> Row:
        """Measure one variant: a number for each task."""
        with variant.changed:
            values = tuple(task.measure(self.model, self.tokenizer) for task in self.tasks)
        return Row(variant.label, values, variant.group, variant.x)

    def table(self, title: str, label: str, variants: Sequence[Variant]) -> Table:
        """Make a table with a row for each variant; variants of one label are draws, shown as their mean."""
        drawn: dict[str, list[Row]] = {}
        for variant in tqdm(variants, desc=label, disable=None):
            drawn.setdefault(variant.label, []).append(self.row(variant))
        return self.table_of(title, label, list(map(Row.mean, drawn.values())))

    def table_of(self, title: str, label: str, rows: Sequence[Row]) -> Table:
        """Put measured rows under a title that names the model."""
        return Table(f"{self.model.name_or_path}: {title}", label, [task.column for task in self.tasks], rows)


def parse_head(text: str) -> HeadId:
    """Parse ``"L2H6"``. Raises ValueError for anything else."""
    match = re.fullmatch(r"L(\d+)H(\d+)", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a head; pass one by layer and head, such as L2H6.")
    return HeadId(int(match[1]), int(match[2]))
