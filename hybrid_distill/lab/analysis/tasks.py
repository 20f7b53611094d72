"""Tasks that experiments measure a model on: probes, knowledge, plain text, tasks of lm-eval."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...data import read_held_out
from ...evaluation.measure import compare_on_text, text_figures
from ...probes import Example, Probe
from ...probes.answering import answer_choices, answer_generation
from ...probes.checks import check_answerable
from ...probes.knowledge import Knowledge
from ...probes.plain_text import text_batches
from ...probes.registry import PROBES, make_probe
from ...teacher import TINY, longest_context
from ...validation import Count, Seed, check_options, check_task_reads, words
from ..probe_tasks import READERS
from ..suite import by_name, load_tasks, prepare
from ..suite_job import SuiteJob
from ..suite_results import headline
from .tables import Column

KNOWLEDGE = "knowledge"
TEXT = "text"
GENERATED = ":generate"
"""Ending of a task that is answered by generation."""
LM_EVAL = "lm_eval:"
"""Beginning of a task of lm-eval."""
MAX_TEXT_TOKENS = 512


class Task(NamedTuple):
    """Column, and the function that measures its number: a percentage or a perplexity."""

    column: Column
    measure: Callable[[PreTrainedModel, PreTrainedTokenizerBase], float]


@dataclass(frozen=True)
class QuestionDraw:
    """Which questions a probe asks, and how many."""

    pairs: Count = 16
    """Dictionary size of kv."""
    facts: Path | None = None
    """JSON Lines file of questions for knowledge and letters; by default the embedded facts."""
    examples: Count = 128
    """Questions per probe, format and lm-eval task (per part of mmlu, bbh and niah), and documents
    of the text."""
    seed: Seed = 1
    """Seed of the questions; use a different one from that for scoring heads."""

    def __post_init__(self) -> None:
        check_options(self, "--")

    def probe(self, name: str) -> Probe:
        """Make a probe that asks these questions. Raises ValueError for an unknown name."""
        return make_probe(name, pairs=self.pairs, facts=self.facts, seed=self.seed)


@dataclass(frozen=True)
class Questions(QuestionDraw):
    """The tasks that a model is measured on."""

    tasks: str = "kv,knowledge,text"
    """kv, letters, RULER's tasks, knowledge (accuracy by choice; ``kv:generate`` by generation),
    text (perplexity), and lm-eval tasks, such as ``lm_eval:arc_easy`` (docs/evaluation.md lists
    them)."""
    texts: str = TINY
    """Plain text for the task text: ``tiny`` or a file."""
    include_path: Path | None = None
    """Folder with lm-eval task files, used before lm-eval's own; they may run Python code."""
    batch_size: Count = 32
    """Questions or texts per forward pass."""

    def __post_init__(self) -> None:
        super().__post_init__()
        asked = [name.removesuffix(GENERATED) for name in words(self.tasks)]
        # Not `pairs`: an experiment may have a default of its own, which looks like a flag here.
        readers = {name: READERS[name] for name in ("facts", "texts")}
        check_task_reads(self, readers, "tasks", asked)

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
        questions = Knowledge(self.facts) if name == KNOWLEDGE else self.probe(name)
        return questions.examples(self.examples), questions.chance


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
        return text_figures(compare_on_text(model, None, list(batches)))["perplexity"]

    return Task(Column("perplexity", "", digits=3), perplexity)
