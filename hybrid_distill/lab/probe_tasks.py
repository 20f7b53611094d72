"""Make this package's probes and RULER's questions into tasks of lm-eval."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..data import read_held_out
from ..io import Record
from ..probes import Example
from ..probes.answering import begins_with
from ..probes.checks import check_answerable
from ..probes.knowledge import Knowledge
from ..probes.registry import make_probe
from ..probes.ruler import NEEDLES, ruler_questions, tokens_to_generate
from ..probes.ruler import TASKS as RULER_TASKS
from .suite_job import SuiteJob

Untyped = Any
"""lm-eval object, whose annotations do not match its classes."""
GENERATE = "_generate"
RULER = {"niah": tuple(NEEDLES), **{task: (task,) for task in RULER_TASKS}}
"""RULER tasks that a name stands for.

They replace lm-eval's own, which download essays and run Python code that comes with a tokenizer.
"""
READERS = {
    "pairs": ("kv",),
    "facts": ("letters", "knowledge"),
    "texts": ("text",),
    "ruler_lengths": RULER,
}
"""Tasks, by choice or by generation, that read an option that not every task reads."""
PROBE_EXAMPLES = 1000
RULER_EXAMPLES = 500


def own_task(name: str, tokenizer: PreTrainedTokenizerBase, job: SuiteJob) -> Untyped:
    """Make a task of `suite_job.PROBES`, or of `RULER` a group of tasks, one a length.

    Raises ValueError for words that the tokenizer lacks, and for lengths that a task does not fit.
    """
    if name in RULER:
        lengths = job.numbers("ruler_lengths")
        return _ruler_group(name, tokenizer, lengths, job.seed, job.limit or RULER_EXAMPLES)
    n_examples = job.limit or PROBE_EXAMPLES
    if name == "text":
        return _text_task(name, job.texts, n_examples)
    probe_name = name.removesuffix(GENERATE)
    if probe_name == "knowledge":
        examples = Knowledge(job.facts).examples()[:n_examples]
    else:
        pairs = job.numbers("pairs")
        probe = make_probe(probe_name, pairs=pairs, facts=job.facts, seed=job.seed)
        examples = probe.examples(n_examples)
    # Lengths are checked by the suite, which knows the context that lm-eval will use.
    check_answerable(examples, tokenizer, sys.maxsize)
    rows = [_row(example) for example in examples]
    if name == probe_name:
        choices = {
            "output_type": "multiple_choice",
            "doc_to_choice": "choices",
            "doc_to_target": "gold",
        }
        return _task(name, rows, **_accuracy(), **choices)
    # One token more than any answer, to see whether a number has ended.
    longest = 1 + max(len(example.answer.encode()) for example in examples)
    return _task(name, rows, **_generation(longest, _is_right))


def _text_task(name: str, texts: str, n_texts: int) -> Untyped:
    """Make a task of the perplexity of held-out texts."""
    rows = [{"text": text} for text in read_held_out(texts, n_texts)]
    return _task(
        name,
        rows,
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="text",
    )


def _row(example: Example) -> Record:
    return {
        "prompt": example.prompt,
        "answer": example.answer,
        "choices": list(example.choices),
        "gold": example.choices.index(example.answer),
    }


def _ruler_group(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    lengths: Sequence[int],
    seed: int,
    n_examples: int,
) -> Untyped:
    from lm_eval.api.group import Group
    from lm_eval.config.group import AggMetricConfig

    group = Group(name, aggregate_metric_list=[AggMetricConfig("acc", weight_by_size=False)])
    for task in RULER[name]:
        for length in lengths:
            rows = []
            for question in ruler_questions(task, length, tokenizer, seed, n_examples):
                rows.append({"prompt": question.prompt, "answer": list(question.answers)})
            generation = _generation(tokens_to_generate(task, length), _share_found)
            group.add(_task(f"{task}_{length}", rows, **generation))
    return group


def _task(name: str, rows: Sequence[Record], **config: Untyped) -> Untyped:
    from datasets import Dataset, DatasetDict
    from lm_eval.api.task import ConfigurableTask

    questions = DatasetDict({"test": Dataset.from_list(list(rows))})
    common = {
        "task": name,
        "test_split": "test",
        # With examples, lm-eval would take them from the questions themselves.
        "num_fewshot": 0,
        "metadata": {"version": 1},
        "custom_dataset": lambda **_: questions,
    }
    return ConfigurableTask(config={**common, **config})


def _accuracy() -> Record:
    metric = {"metric": "acc", "aggregation": "mean", "higher_is_better": True}
    # Answers and choices begin with their own space.
    return {"doc_to_text": "prompt", "target_delimiter": "", "metric_list": [metric]}


def _generation(n_tokens: int, grade: Untyped) -> Record:
    """Return the config of a task whose generated answers ``grade`` grades."""
    return {
        **_accuracy(),
        "output_type": "generate_until",
        "doc_to_target": "answer",
        "generation_kwargs": {"until": [], "max_gen_toks": n_tokens, "do_sample": False},
        "process_results": grade,
    }


def _is_right(row: Record, texts: Sequence[str]) -> dict[str, float]:
    return {"acc": float(begins_with(texts[0], row["answer"]))}


def _share_found(row: Record, texts: Sequence[str]) -> dict[str, float]:
    """Return the share of RULER's answers found anywhere in the text."""
    text = texts[0].lower()
    return {"acc": fmean(answer.lower() in text for answer in row["answer"])}
