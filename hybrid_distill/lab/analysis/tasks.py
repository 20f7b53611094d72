"""The model under study, and the tasks its variants are measured on: options that experiments share."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...data import read_held_out
from ...distributed import connect
from ...limits import words
from ...probes import Example, Probe
from ...probes.answering import answer_choices, answer_generation
from ...probes.checks import check_answerable
from ...probes.knowledge import Knowledge
from ...probes.plain_text import text_batches
from ...probes.registry import PROBES, probe_with
from ...teacher import TINY, eval_mode, load_teacher, longest_context
from ..suites import SuiteJob, check_job, run_suite
from .tables import Column

KNOWLEDGE, TEXT, GENERATED, LM_EVAL = "knowledge", "text", ":generate", "lm_eval:"
MAX_TEXT_TOKENS = 512


class Task(NamedTuple):
    """A column, and the function that finds its number: a percentage, or a perplexity."""

    column: Column
    measure: Callable[[PreTrainedModel, PreTrainedTokenizerBase], float]


def own_device() -> torch.device:
    """Return the device of this process."""
    return torch.device(connect().device or "cpu")


@dataclass(frozen=True)
class Subject:
    """The model under study."""

    model: str = TINY
    """Local folder (a student's export too), hub id, or ``tiny`` for the embedded teacher."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Number format; by default bfloat16 on a GPU, float32 on a CPU."""
    allow_bin: bool = False
    """Accept weights that are a pickle (``*.bin``)."""

    def load(self, flag: str = "--model") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Load model and tokenizer; errors name ``flag``."""
        device = own_device()
        dtype = self.dtype or ("bfloat16" if device.type == "cuda" else "float32")
        model, tokenizer = load_teacher(self.model, dtype=dtype, allow_bin=self.allow_bin, flag=flag)
        nn.Module.to(model, device)
        return model, tokenizer


@dataclass(frozen=True)
class Questions:
    """The tasks that a model is measured on."""

    tasks: str = "kv,knowledge,text"
    """kv, letters, needle, copy, two_hop, knowledge (accuracy by choice; ``kv:generate`` by generation), text
    (perplexity), and tasks of lm-eval, such as ``lm_eval:arc_easy`` (docs/evaluation.md lists them)."""
    pairs: int = 16
    """Dictionary size of kv and two_hop."""
    facts: Path | None = None
    """JSON lines of questions for knowledge and letters; by default the embedded facts."""
    texts: str = TINY
    """Plain text, ``tiny`` or a file, for the perplexity."""
    data_dir: Path | None = None
    """Folder of the questions of lm-eval's tasks, instead of the hub (docs/evaluation.md)."""
    examples: int = 128
    """Questions of each probe and task of lm-eval (of each part of mmlu, bbh and niah), and documents of the text."""
    seed: int = 1
    """Seed of the questions; take another one than for scoring heads."""
    batch_size: int = 32

    def make(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[Task]:
        """Make the tasks. Raises ValueError for an unknown name, and for questions that the model cannot read."""
        return [self._task(name, model, tokenizer) for name in self.names()]

    def names(self) -> list[str]:
        """Return the names of the tasks. Raises ValueError for none."""
        names = words(self.tasks)
        if not names:
            raise ValueError(f"--tasks is {self.tasks!r}; name at least one, such as kv.")
        return names

    def _task(self, name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Task:
        if name == TEXT:
            return perplexity_task(self.documents(self.examples), self.batch_size)
        if name.startswith(LM_EVAL):
            suite, seed, size = name.removeprefix(LM_EVAL), self.seed, self.batch_size
            return lm_eval_task(
                SuiteJob(suite=suite, data_dir=self.data_dir, limit=self.examples, seed=seed, batch_size=size)
            )
        examples, chance = self.examples_of(name.removesuffix(GENERATED))
        check_readable(model, tokenizer, examples)
        return accuracy_task(name, examples, chance, self.batch_size)

    def examples_of(self, name: str) -> tuple[list[Example], float]:
        """Return a task's questions, and the share that guessing gets right. Raises ValueError for an unknown name."""
        if name not in (KNOWLEDGE, *PROBES):
            raise ValueError(f"there is no task {name!r}; there are {', '.join([*PROBES, KNOWLEDGE, TEXT])}.")
        asked = Knowledge(self.facts) if name == KNOWLEDGE else self.probe(name, self.seed)
        return asked.examples(self.examples), asked.chance

    def probe(self, name: str, seed: int) -> Probe:
        """Make a probe with these questions' settings. Raises ValueError for an unknown name."""
        return probe_with(name, {"pairs": self.pairs, "facts": self.facts, "seed": seed})

    def documents(self, n: int) -> list[str]:
        """Return the first ``n`` plain texts."""
        return read_held_out(self.texts, n)


def accuracy_task(name: str, examples: Sequence[Example], chance: float, batch_size: int) -> Task:
    """Make a column of questions answered right, by generation if so named; ``chance``, by choice, is 0 to 1."""
    if name.endswith(GENERATED):
        return Task(
            Column(name),
            lambda m, t: 100 * answer_generation(m, t, examples, batch_size=batch_size).double().mean().item(),
        )
    column = Column(name, chance=100 * chance)
    return Task(column, lambda m, t: 100 * answer_choices(m, t, examples, batch_size=batch_size).accuracy)


def perplexity_task(texts: Sequence[str], batch_size: int) -> Task:
    """Make a column of the perplexity of plain text."""

    def perplexity(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> float:
        n_tokens, total = 0, 0.0
        with eval_mode(model):
            for batch in text_batches(model, tokenizer, texts, max_tokens=MAX_TEXT_TOKENS, batch_size=batch_size):
                total += batch.token_losses(batch.logits(model)).double().sum().item()
                n_tokens += int(batch.counts_BT.sum())
        return math.exp(total / n_tokens)

    return Task(Column("perplexity", "", digits=3), perplexity)


def lm_eval_task(job: SuiteJob) -> Task:
    """Make a column of a task of lm-eval, in percent.

    Raises ValueError for an unknown task, for missing files, and where lm-eval is not installed; the column raises it
    for a task that lm-eval cannot ask this model.
    """
    check_job(job)

    def percent(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> float:
        with TemporaryDirectory() as folder:
            found = run_suite(model, tokenizer, job, Path(folder))
        for part, reason in found.failed.items():
            raise ValueError(f"{LM_EVAL}{part} cannot be asked: {reason}")
        return 100 * found.tasks[job.suite].value

    return Task(Column(job.suite), percent)


def check_readable(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example]) -> None:
    """Raise ValueError for words that the tokenizer does not know, and prompts beyond the model's context."""
    check_answerable(examples, tokenizer, longest_context(model.config) or sys.maxsize)
