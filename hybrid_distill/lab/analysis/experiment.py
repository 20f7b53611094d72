"""Common structure of experiments: measure variants of a model, write a table and a figure."""

from __future__ import annotations

import math
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, ClassVar, Literal, NamedTuple

import pandas as pd
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...data import read_held_out
from ...distributed import own_device
from ...evaluation.measure import compare_on_text
from ...io import Record, write_text
from ...kernels import Kernels, use_kernels
from ...limits import words
from ...plan import HeadId
from ...probes import Example, Probe
from ...probes.answering import answer_choices, answer_generation
from ...probes.checks import check_answerable
from ...probes.knowledge import Knowledge
from ...probes.plain_text import text_batches
from ...probes.registry import PROBES, make_probe
from ...progress import track
from ...scoring.resume_log import ResumeLog
from ...student.teachers import check_teacher
from ...teacher import TINY, load_on_own_device, longest_context, read_teacher
from ..reporting import can_draw, markdown_table, percent_change, text_table, with_error
from ..suite import by_name, headline, load_tasks, prepare
from ..suite_job import SuiteJob

KNOWLEDGE = "knowledge"
TEXT = "text"
GENERATED = ":generate"
"""Ending of a task that is answered by generation."""
LM_EVAL = "lm_eval:"
"""Beginning of a task of lm-eval."""
MAX_TEXT_TOKENS = 512


class Column(NamedTuple):
    """Measure and its unit ("" for none). ``chance`` is the accuracy of guessing."""

    name: str
    unit: str = "%"
    chance: float | None = None
    digits: int = 1

    @property
    def header(self) -> str:
        return f"{self.name}, {self.unit}" if self.unit else self.name


class Row(NamedTuple):
    """One variant: a number per column, with standard deviations if it is a mean over several
    draws.

    ``group`` and ``x`` are its line in a figure and its position there.
    """

    label: str
    values: tuple[float, ...]
    group: str = ""
    x: float = 0
    spreads: tuple[float, ...] = ()


class Table(NamedTuple):
    """Rows under a title.

    Unless ``compared`` is off, all are compared with the first, the intact model.
    """

    title: str
    label: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    compared: bool = True

    def frames(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Return cells as text, with guessing as the last row, and the numbers behind them."""
        cells = pd.DataFrame({self.label: [row.label for row in self.rows]})
        numbers = cells.copy()
        for index, column in enumerate(self.columns):
            value = pd.Series([row.values[index] for row in self.rows], dtype=float)
            spread = pd.Series(
                [row.spreads[index] if row.spreads else math.nan for row in self.rows]
            )
            texts = [with_error(v, sd or None, column.digits) for v, sd in zip(value, spread)]
            numbers[column.name] = value
            if self.compared:
                # A change from 0 has no percentage.
                intact = value[0] or math.nan
                change = (value / intact).where(value.index > 0)
                texts = [text + _change_text(ratio) for text, ratio in zip(texts, change)]
                numbers[f"{column.name}_change_percent"] = 100 * (change - 1)
                numbers[f"{column.name}_sd"] = spread
            cells[column.header] = texts
        chances = []
        for column in self.columns:
            chances.append("" if column.chance is None else f"{column.chance:.1f}")
        if any(chances):
            cells.loc[len(cells)] = ["guessing", *chances]
        return cells, numbers


def _change_text(ratio: float) -> str:
    return "" if math.isnan(ratio) else f" ({percent_change(ratio)})"


@dataclass(frozen=True, kw_only=True)
class Experiment(ABC):
    """One subcommand of `hybrid-distill analyze`. Raises ValueError for bad options before it
    writes anything."""

    NAME: ClassVar[str]

    out: Path = Path("runs/analysis")
    """Folder for the tables and figures; replaces those of an earlier call."""

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
            table = _shortened(table, most)
        # matplotlib is an extra.
        if draw is not None and can_draw():
            draw(table, Path(f"{path}.png"))
        cells, _ = table.frames()
        return f"{table.title}\n{text_table(cells)}"


def _shortened(table: Table, most: int) -> Table:
    """Keep the first ``most`` rows and those that belong to a group."""
    rows = [row for number, row in enumerate(table.rows) if number < most or row.group]
    n_left_out = len(table.rows) - len(rows)
    title = f"{table.title} ({n_left_out} more in the file)" if n_left_out else table.title
    return table._replace(title=title, rows=rows)


@dataclass(frozen=True)
class Subject:
    """The model under study."""

    model: str = TINY
    """Local folder (a student's export too), hub id, or ``tiny`` for the embedded teacher."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of the weights; by default bfloat16 on a GPU, float32 on a CPU."""
    allow_bin: bool = False
    """Allow pickled weights (``*.bin``)."""
    kernels: Kernels = "auto"
    """Implementation of a student's recurrent heads, if the model is one."""

    def load(self, flag: str = "--model") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Load model and tokenizer; errors name ``flag``.

        Raises ValueError if the model cannot be a teacher.
        """
        # Read first: a model that cannot be studied is refused before its weights are loaded.
        config, _ = read_teacher(self.model, flag=flag)
        check_teacher(config, name=self.model)
        model, tokenizer = load_on_own_device(
            self.model, dtype=self.dtype, allow_bin=self.allow_bin, flag=flag
        )
        return use_kernels(model, self.kernels, own_device()), tokenizer


class Task(NamedTuple):
    """Column, and the function that measures its number: a percentage or a perplexity."""

    column: Column
    measure: Callable[[PreTrainedModel, PreTrainedTokenizerBase], float]


@dataclass(frozen=True)
class Questions:
    """The tasks that a model is measured on."""

    tasks: str = "kv,knowledge,text"
    """kv, letters, RULER's tasks, knowledge (accuracy by choice; ``kv:generate`` by generation),
    text (perplexity), and lm-eval tasks, such as ``lm_eval:arc_easy`` (docs/evaluation.md lists
    them)."""
    pairs: int = 16
    """Dictionary size of kv."""
    facts: Path | None = None
    """JSON Lines file of questions for knowledge and letters; by default the embedded facts."""
    texts: str = TINY
    """Plain text, ``tiny`` or a file, for the perplexity."""
    include_path: Path | None = None
    """Folder with lm-eval task files, used before lm-eval's own (docs/evaluation.md); they may run
    Python code."""
    examples: int = 128
    """Questions per probe and lm-eval task (per part of mmlu, bbh and niah), and documents of the
    text."""
    seed: int = 1
    """Seed of the questions; use a different one from that for scoring heads."""
    batch_size: int = 32

    @property
    def names(self) -> list[str]:
        names = words(self.tasks)
        if not names:
            raise ValueError(f"--tasks is {self.tasks!r}; name at least one, such as kv.")
        return names

    def make(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[Task]:
        """Make the tasks.

        Raises ValueError for an unknown name, and for questions that the model cannot read.
        """
        return [self._task(name, model, tokenizer) for name in self.names]

    def _task(
        self,
        name: str,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
    ) -> Task:
        if name == TEXT:
            return perplexity_task(read_held_out(self.texts, self.examples), self.batch_size)
        if name.startswith(LM_EVAL):
            job = SuiteJob(
                suite=name.removeprefix(LM_EVAL),
                seed=self.seed,
                include_path=self.include_path,
                limit=self.examples,
                batch_size=self.batch_size,
            )
            return lm_eval_task(job)
        examples, chance = self.examples_of(name.removesuffix(GENERATED))
        check_readable(model, tokenizer, examples)
        return accuracy_task(name, examples, chance, self.batch_size)

    def examples_of(self, name: str) -> tuple[list[Example], float]:
        """Return a task's questions, and the share that guessing gets right.

        Raises ValueError for an unknown name.
        """
        if name not in (KNOWLEDGE, *PROBES):
            raise ValueError(
                f"unknown task {name!r}; pass one of {', '.join([*PROBES, KNOWLEDGE, TEXT])}."
            )
        questions = Knowledge(self.facts) if name == KNOWLEDGE else self.probe(name, self.seed)
        return questions.examples(self.examples), questions.chance

    def probe(self, name: str, seed: int) -> Probe:
        """Make a probe with these questions' settings. Raises ValueError for an unknown name."""
        return make_probe(name, pairs=self.pairs, facts=self.facts, seed=seed)


def accuracy_task(
    name: str,
    examples: Sequence[Example],
    chance: float,
    batch_size: int = 32,
) -> Task:
    """Make a task that measures accuracy, by generation if so named.

    ``chance``, by choice, is 0 to 1.
    """
    if name.endswith(GENERATED):

        def by_generation(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> float:
            correct_E = answer_generation(model, tokenizer, examples, batch_size=batch_size)
            return 100 * correct_E.double().mean().item()

        return Task(Column(name), by_generation)

    def by_choice(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> float:
        return 100 * answer_choices(model, tokenizer, examples, batch_size=batch_size).accuracy

    return Task(Column(name, chance=100 * chance), by_choice)


def check_readable(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example]
) -> None:
    """Raise ValueError for unknown words, and for prompts beyond the model's context."""
    check_answerable(examples, tokenizer, longest_context(model.config) or sys.maxsize)


def lm_eval_task(job: SuiteJob) -> Task:
    """Make a task from one lm-eval task.

    Raises ValueError for a suite, and for a task that cannot be loaded.
    """
    tasks_of = load_tasks(job)
    name, *others = job.names
    # A tag of lm-eval is one name for several tasks.
    n_tasks = len(others) + len(tasks_of.get(name, [name]))
    if n_tasks > 1:
        raise ValueError(
            f"{LM_EVAL}{job.suite} is {n_tasks} tasks; pass one of them, as {LM_EVAL}{name}."
        )
    # The package's own tasks are not in lm-eval's list; they are graded by accuracy.
    metrics = ["acc,none"]
    for task in by_name(tasks_of.get(name, []))["tasks"].values():
        metrics = [f"{metric},none" for metric in task.aggregation()]
    is_share = "perplexity" not in headline(name, metrics)

    def measure(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> float:
        import lm_eval

        lm, tasks, _ = prepare(model, tokenizer, job, tasks_of)
        # Not simple_evaluate: it describes the machine after every call, which takes seconds.
        evaluate: Any = lm_eval.evaluate
        results = evaluate(
            lm,
            by_name(tasks),
            limit=job.limit,
            bootstrap_iters=0,
            log_samples=False,
        )
        figures = results["results"][name]
        figure = figures[headline(name, figures)]
        return 100 * figure if is_share else figure

    column = Column(name) if is_share else Column(name, "", digits=3)
    return Task(column, measure)


def perplexity_task(texts: Sequence[str], batch_size: int) -> Task:
    """Make a task that measures perplexity on plain texts, each cut to MAX_TEXT_TOKENS."""

    def perplexity(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> float:
        batches = text_batches(
            model,
            tokenizer,
            texts,
            max_tokens=MAX_TEXT_TOKENS,
            batch_size=batch_size,
        )
        return compare_on_text(model, None, list(batches))["perplexity"]

    return Task(Column("perplexity", "", digits=3), perplexity)


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

    def table(
        self,
        title: str,
        label: str,
        variants: Sequence[Variant],
    ) -> Table:
        """Make a table with a row per variant.

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
        columns = [task.column for task in self.tasks]
        return Table(f"{self.model.name_or_path}: {title}", label, columns, rows)

    def _measure(self, variant: Variant) -> Record:
        with variant.changed:
            return {"values": [task.measure(self.model, self.tokenizer) for task in self.tasks]}


def parse_head(text: str) -> HeadId:
    """Parse ``"L2H6"``. Raises ValueError for anything else."""
    match = re.fullmatch(r"L(\d+)H(\d+)", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a head; pass one by layer and head, such as L2H6.")
    return HeadId(int(match[1]), int(match[2]))
