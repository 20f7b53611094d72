"""Tasks of lm-evaluation-harness as columns of a table: ``lm_eval:arc_easy``, asked by `harness`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...distributed import make_accelerator
from ..suites.running import run_suite
from ..suites.suites import STOCK
from ..suites.tasks import Questions
from .tables import Column

LM_EVAL = "lm_eval:"


def lm_eval_column(
    name: str, questions: Questions, *, batch_size: int
) -> tuple[Column, Callable[[PreTrainedModel, PreTrainedTokenizerBase], float]]:
    """A task of lm-eval by its name there: its column, and how its figure is found, in percent.

    Raises ValueError for an unknown task, for files that a data folder lacks, and where lm-eval is not installed; what
    is returned raises it for a task that lm-eval cannot ask this model.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError(f"{LM_EVAL}{name} needs lm-eval, which is not installed; pip install lm-eval.")
    task = next((task for task in STOCK if task.name == name), None)
    if task is None:
        raise ValueError(f"there is no task {LM_EVAL}{name}; there are {', '.join(task.name for task in STOCK)}.")
    if missing := questions.missing(questions.parts(task)):
        raise ValueError(f"{LM_EVAL}{name} asks the questions in {missing[0]}.jsonl, and there is no such file.")

    def percent(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> float:
        with TemporaryDirectory() as folder:
            place = Path(folder)
            found = run_suite(model, tokenizer, [task], questions, place, make_accelerator(), batch_size=batch_size)
        if found.failed:
            part, reason = next(iter(found.failed.items()))
            raise ValueError(f"{LM_EVAL}{part} cannot be asked: {reason}")
        return 100 * found.tasks[name].value

    return Column(name, "%"), percent
