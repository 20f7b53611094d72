"""What every variant of a model is measured on, and the model itself: the options that all experiments share."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

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
from ..suites.tasks import Questions as HarnessQuestions
from .lm_eval_tasks import LM_EVAL, lm_eval_column
from .tables import Column

KNOWLEDGE, TEXT, GENERATED = "knowledge", "text", ":generate"
MAX_TEXT_TOKENS = 512


@dataclass(frozen=True)
class Task:
    """A column, and how its number is found: in percent, or a perplexity."""

    column: Column
    measure: Callable[[PreTrainedModel, PreTrainedTokenizerBase], float]


def accuracy_task(
    name: str, examples: Sequence[Example], chance: float | None, *, batch_size: int, generated: bool = False
) -> Task:
    """Questions answered right, by choice or by generation; ``chance`` is a share, 0 to 1."""

    def accuracy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> float:
        if generated:
            return 100 * answer_generation(model, tokenizer, examples, batch_size=batch_size).double().mean().item()
        return 100 * answer_choices(model, tokenizer, examples, batch_size=batch_size).accuracy

    return Task(Column(name, "%", None if chance is None else 100 * chance), accuracy)


def measure(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tasks: Sequence[Task]
) -> tuple[float, ...]:
    """One number for each task."""
    return tuple(task.measure(model, tokenizer) for task in tasks)


@dataclass(frozen=True)
class Subject:
    """The model that is looked into."""

    model: str = TINY
    """A local folder (a student's export too), a hub id, or ``tiny`` for the embedded teacher."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """By default bfloat16 on a GPU, float32 on a CPU."""
    allow_bin: bool = False
    """Take weights that are a pickle (``*.bin``) too."""

    def load(self, flag: str = "--model") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Model and tokenizer, as `load_teacher` has them; ``flag`` is where the user has named the model."""
        device: Any = connect().device
        dtype = self.dtype or _dtype_of(device)
        model, tokenizer = load_teacher(self.model, dtype=dtype, allow_bin=self.allow_bin, flag=flag)
        model.to(device)
        return model, tokenizer


def _dtype_of(device: Any) -> str:
    return "bfloat16" if device.type == "cuda" else "float32"


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
    """Where the questions of lm-eval's tasks are as files, instead of the hub (docs/evaluation.md)."""
    examples: int = 128
    """Questions of each probe and task of lm-eval (of each part of mmlu, bbh and niah), and documents of the text."""
    seed: int = 1
    """Of the questions; take another one than for scoring heads."""
    batch_size: int = 32

    def make(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[Task]:
        """The tasks by name. Raises ValueError for an unknown name, and for questions that the model cannot read."""
        return [self._task(name, model, tokenizer) for name in self.names()]

    def names(self) -> list[str]:
        """Of the tasks. Raises ValueError for none."""
        names = words(self.tasks)
        if not names:
            raise ValueError(f"--tasks is {self.tasks!r}; name at least one, such as kv.")
        return names

    def _task(self, name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Task:
        if name == TEXT:
            return self._text()
        if name.startswith(LM_EVAL):
            asked = HarnessQuestions(data_dir=self.data_dir, limit=self.examples, seed=self.seed)
            return Task(*lm_eval_column(name.removeprefix(LM_EVAL), asked, batch_size=self.batch_size))
        probe_name, generated = name.removesuffix(GENERATED), name.endswith(GENERATED)
        examples, chance = self.examples_of(probe_name)
        check_answerable(examples, tokenizer, longest_context(model.config) or sys.maxsize)

        chance = None if generated else chance
        return accuracy_task(name, examples, chance, batch_size=self.batch_size, generated=generated)

    def examples_of(self, name: str) -> tuple[list[Example], float]:
        """The questions of a task, and the share that guessing gets right. Raises ValueError for an unknown name."""
        if name == KNOWLEDGE:
            knowledge = Knowledge(self.facts)
            return knowledge.examples(self.examples), knowledge.chance
        if name not in PROBES:
            raise ValueError(f"there is no task {name!r}; there are {', '.join([*PROBES, KNOWLEDGE, TEXT])}.")
        probe = self.probe(name, self.seed)
        return probe.examples(self.examples), probe.chance

    def probe(self, name: str, seed: int) -> Probe:
        """The probe of that name, with these questions' settings. Raises ValueError for an unknown name."""
        given: dict[str, Any] = {"pairs": self.pairs, "facts": self.facts, "seed": seed}
        return probe_with(name, given)

    def documents(self, n: int) -> list[str]:
        """The first ``n`` plain texts."""
        return read_held_out(self.texts, n)

    def _text(self) -> Task:
        texts = self.documents(self.examples)

        def perplexity(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> float:
            n_tokens, total = 0, 0.0
            sizes: dict[str, int] = {"max_tokens": MAX_TEXT_TOKENS, "batch_size": self.batch_size}
            with eval_mode(model):
                for batch in text_batches(model, tokenizer, texts, **sizes):
                    total += batch.token_losses(batch.logits(model)).double().sum().item()
                    n_tokens += int(batch.counts_BT.sum())
            return math.exp(total / n_tokens)

        return Task(Column("perplexity", "", digits=3), perplexity)
