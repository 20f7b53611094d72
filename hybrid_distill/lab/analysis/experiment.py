"""Structure that experiments share: measure variants of a model, write a table and a figure."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean, pstdev
from typing import ClassVar, NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...distributed import Dtype, own_device
from ...io import Record, check_out, write_text
from ...kernels import Kernels, use_kernels
from ...plan import HeadId
from ...progress import track
from ...scoring.resume_log import ResumeLog
from ...student.teachers import check_teacher
from ...teacher import TINY, load_on_own_device, read_teacher
from ...validation import check_options
from ..reporting import has_matplotlib, log_no_figures, markdown_table, text_table
from .tables import Row, Table, shortened
from .tasks import Questions, Task


@dataclass(frozen=True, kw_only=True)
class Experiment(ABC):
    """One subcommand of `hybrid-distill analyze`.

    Raises ValueError for bad options before it writes anything.
    """

    NAME: ClassVar[str]

    out: Path = Path("runs/analysis")
    """Folder for the tables and figures; replaces those of an earlier call."""

    def __post_init__(self) -> None:
        check_options(self, "--")
        check_out(self.out, "--out")

    @abstractmethod
    def run(self) -> str:
        """Write the tables and figures to ``out``; return the tables as text."""

    def save(
        self,
        table: Table,
        draw: Callable[[Table, Path], None] | None = None,
        *,
        suffix: str = "",
        most: int = 0,
    ) -> str:
        """Write OUT/NAME.md, .csv and .png; return the table as text.

        ``most`` limits text and figure to that many rows, plus those that belong to a group.
        """
        path = self.out / f"{self.NAME}{suffix}"
        cells, numbers = table.frames()
        self.out.mkdir(parents=True, exist_ok=True)
        write_text(Path(f"{path}.md"), f"{table.title}\n\n{markdown_table(cells)}\n")
        write_text(Path(f"{path}.csv"), numbers.to_csv(index=False, lineterminator="\n"))
        if most:
            table = shortened(table, most)
        # matplotlib is an extra.
        if draw is not None and has_matplotlib():
            draw(table, Path(f"{path}.png"))
        elif draw is not None:
            log_no_figures()
        cells, _ = table.frames()
        return f"{table.title}\n{text_table(cells)}"


@dataclass(frozen=True)
class Subject:
    """The model under study."""

    model: str = TINY
    """Local folder (a student's export too), hub id, or ``tiny`` for the embedded teacher."""
    dtype: Dtype | None = None
    """Dtype of the weights; by default bfloat16 on a GPU, float32 on a CPU. ``auto``: bfloat16 also
    on a CPU that has instructions for it."""
    allow_bin: bool = False
    """Allow pickled weights (``*.bin``)."""
    kernels: Kernels = "auto"
    """Implementation of a student's recurrent heads."""

    def load(self, flag: str = "--model") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Load model and tokenizer; errors name ``flag``.

        Raises ValueError if the model cannot be a teacher.
        """
        # Before the weights, which take minutes: the model may be unsuitable.
        config, _ = read_teacher(self.model, flag=flag)
        check_teacher(config, name=self.model)
        model, tokenizer = load_on_own_device(
            self.model, dtype=self.dtype, allow_bin=self.allow_bin, flag=flag
        )
        return use_kernels(model, self.kernels, own_device()), tokenizer


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
    """Label, and the context manager that turns the model into that variant.

    ``group`` and ``x`` as in a `Row`.
    """

    label: str
    changed: AbstractContextManager[object]
    group: str = ""
    x: float = 0


class Bench(NamedTuple):
    """Model, and the tasks to measure its variants on.

    With a ``resume_log``, a stopped call resumes.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    tasks: Sequence[Task]
    resume_log: ResumeLog | None = None

    def table(self, title: str, label: str, variants: Sequence[Variant]) -> Table:
        """Measure variants as the rows of a table, whose title begins with the model's name."""
        columns = [task.column for task in self.tasks]
        rows = self.rows(variants, label)
        return Table(f"{self.model.name_or_path}: {title}", label, columns, rows)

    def rows(self, variants: Sequence[Variant], label: str) -> list[Row]:
        """Measure each variant as a row; ``label`` names the progress bar.

        Variants with the same label are draws, shown as their mean.
        """
        resume_log = self.resume_log or ResumeLog(None, {})
        draws: dict[str, list[list[float]]] = {}
        for variant in track(variants, label):
            step = resume_log.next(partial(self._measure, variant))
            draws.setdefault(variant.label, []).append(step["values"])
        if resume_log.path is not None:
            # Complete: the next call measures anew.
            resume_log.path.unlink(missing_ok=True)
        # One row a label, at the place of its first draw.
        last_of = {variant.label: variant for variant in variants}
        rows = []
        for name, variant in last_of.items():
            by_column = list(zip(*draws[name]))
            means = tuple(map(fmean, by_column))
            spreads = tuple(map(pstdev, by_column)) if len(draws[name]) > 1 else ()
            rows.append(Row(name, means, variant.group, variant.x, spreads))
        return rows

    def _measure(self, variant: Variant) -> Record:
        with variant.changed:
            return {"values": [task.measure(self.model, self.tokenizer) for task in self.tasks]}


def parse_head(text: str) -> HeadId:
    """Parse ``"L2H6"``. Raises ValueError for anything else."""
    match = re.fullmatch(r"L(\d+)H(\d+)", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a head; pass one by layer and head, such as L2H6.")
    return HeadId(int(match[1]), int(match[2]))
