"""Run a suite task by task; what is finished is on disk before the next begins."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

from accelerate import Accelerator
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from ...distributed import on_main_process
from ...probes import digest
from ...scoring import describe_run
from ...teacher import longest_context
from .lm import make_lm
from .results import FILE, PartResult, SuiteResult, TaskScore
from .suites import ProbeTask, StockTask
from .tasks import Part, Questions

log = logging.getLogger(__name__)

DEFAULT_CONTEXT = 2048
SuiteTasks = Sequence[StockTask | ProbeTask]


def run_suite(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: SuiteTasks,
    questions: Questions,
    out: Path,
    accelerator: Accelerator,
    *,
    max_length: int | None = None,
    batch_size: int = 16,
    truncate: bool = False,
    again: bool = False,
) -> SuiteResult:
    """Measure a model on tasks; ``OUT/results.json`` is written after each, and what it holds is not measured again.

    ``max_length`` is the context in tokens, by default the model's, or `DEFAULT_CONTEXT` where it does not say.
    A part that fails is recorded with its reason, and the next begins; the same call tries it once more. Of several
    processes the main one returns the whole result. Raises ValueError when the file there is of another model or of
    other settings.
    """
    max_length = max_length or longest_context(model.config) or DEFAULT_CONTEXT
    settings = {
        "limit": questions.limit, "fewshot": questions.n_shots, "seed": questions.seed, "max_length": max_length,
        "truncate": truncate, "pairs": questions.pairs, "lengths": questions.lengths,
        "niah_lengths": questions.niah_lengths, "facts": str(questions.facts or ""), "texts": questions.texts,
        "versions": {name: version(name) for name in ("lm_eval", "datasets")},
    }  # fmt: skip
    fresh = SuiteResult(describe_run(model), json.loads(json.dumps(settings)))
    result = fresh if again else _earlier(fresh, out / FILE)
    parts = {part.name: part for task in tasks for part in questions.parts(task)}
    left = [part for name, part in parts.items() if name not in result.parts]
    on_main_process(lambda: out.mkdir(parents=True, exist_ok=True))
    with quiet():
        lm = make_lm(model, tokenizer, accelerator, batch_size=batch_size, max_length=max_length, truncate=truncate)
    for number, part in enumerate(left, start=1):
        lm.doing = f"{part.name} ({number} of {len(left)})"
        with quiet():
            _run_part(result, part, lm, tokenizer, questions)
        _put_together(result, part.task, questions)
        on_main_process(lambda: result.save(out / FILE))
    return result


def _earlier(fresh: SuiteResult, path: Path) -> SuiteResult:
    """What an earlier run left, without its failures. Raises ValueError where it measured something else."""
    if not path.exists():
        return fresh
    found = SuiteResult.load(path)
    differences = [
        f"{name} {found.settings.get(name)} there, {value} here"
        for name, value in fresh.settings.items()
        if found.settings.get(name) != value
    ]
    if found.model["fingerprint"] != fresh.model["fingerprint"]:
        differences = [f"model {found.model['model']} there, {fresh.model['model']} here, with other weights"]
    if differences:
        raise ValueError(
            f"{path} was measured otherwise ({'; '.join(differences)}); name another folder with --out, or measure "
            "anew with --again."
        )
    found.failed.clear()
    return found


@contextmanager
def quiet() -> Iterator[None]:
    """Without the lines and bars of lm-eval and datasets; what they warn of is counted or refused by `make_lm`."""
    import datasets
    import lm_eval.api.task

    loggers = [logging.getLogger(name) for name in ("lm_eval", "lm-eval")]
    levels = [logger.level for logger in loggers]
    had_bars = not datasets.are_progress_bars_disabled()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        with patch.object(lm_eval.api.task, "tqdm", lambda items, **_: items):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if had_bars:
            datasets.enable_progress_bars()


def _run_part(
    result: SuiteResult, part: Part, lm: Any, tokenizer: PreTrainedTokenizerBase, questions: Questions
) -> None:
    """Add a part to the result, or to its failures. One of several processes that fails alone ends them all."""
    try:
        measured = measure_part(part, lm, tokenizer, questions)
        if measured is not None:
            result.parts[part.name] = measured
            log.info("%s: %.4f (%s, %.0f s)", part.name, measured.value, part.task.metric, measured.seconds)
    except Exception as error:
        if lm.world_size > 1 and not isinstance(error, ValueError):
            raise
        reason = first_line(error)
        if isinstance(part.task, StockTask) and questions.data_dir is None:
            reason += "; without a network, give its questions with --data-dir"
        result.failed[part.name] = reason
        log.warning("%s failed: %s", part.name, reason)


def first_line(error: Exception) -> str:
    """What an error says, without what it says below."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines and isinstance(error, ValueError) else ": ".join([type(error).__name__, *lines[:1]])


def measure_part(part: Part, lm: Any, tokenizer: PreTrainedTokenizerBase, questions: Questions) -> PartResult | None:
    """What lm-eval says of one of its tasks; None in processes that are not the main one."""
    from lm_eval.evaluator import evaluate

    began, before = time.monotonic(), (lm.n_requests, lm.n_cut)
    task, source = questions.load(part, tokenizer)
    # Not simple_evaluate: it describes the machine after every task, for 10 seconds.
    set_seed(questions.seed)
    task.set_fewshot_seed(questions.seed)
    task.set_config("num_fewshot", part.n_shots)
    found: Any = evaluate(lm, {"tasks": {part.name: task}}, limit=questions.limit, bootstrap_iters=0)
    if found is None:
        return None
    name = part.name
    figures: dict[str, Any] = found["results"][name]
    metrics = {key: float(value) for key, value in figures.items() if "," in key and isinstance(value, int | float)}
    return PartResult(
        task=part.task.name,
        value=fmean(metrics.values()) if part.task.name == "niah" else metrics[part.task.metric],
        stderr=_stderr(task, part.task.metric, found["samples"][name]),
        metrics=metrics,
        n_examples=found["n-samples"][name]["effective"],
        n_available=found["n-samples"][name]["original"],
        n_shots=part.n_shots,
        version=str(found["versions"][name]),
        source=source,
        prompts_sha256=_prompts_hash(found["samples"][name]),
        n_requests=lm.n_requests - before[0],
        n_cut=lm.n_cut - before[1],
        seconds=round(time.monotonic() - began, 1),
    )


def _stderr(task: Any, metric_and_filter: str, samples: Sequence[Mapping[str, Any]]) -> float | None:
    """Of a mean over questions; None for other figures, which lm-eval would have to bootstrap."""
    from lm_eval.api.metrics import mean, mean_stderr

    metric, _, kind = metric_and_filter.partition(",")
    values = [sample[metric] for sample in samples if sample["filter"] == kind and metric in sample]
    return mean_stderr(values) if len(values) > 1 and task.aggregation().get(metric) is mean else None


def _prompts_hash(samples: Sequence[Mapping[str, Any]]) -> str:
    """Of everything that the model was asked, in the order of the questions."""
    asked = sorted({(sample["doc_id"], json.dumps(sample["arguments"], default=str)) for sample in samples})
    return digest([json.dumps(asked)])


def _put_together(result: SuiteResult, task: StockTask | ProbeTask, questions: Questions) -> None:
    """Add a task when its parts are all there, weighted as lm-eval weights them."""
    from lm_eval.api.metrics import aggregate_subtask_metrics, pooled_sample_stderr

    names = [part.name for part in questions.parts(task)]
    parts = [result.parts[name] for name in names if name in result.parts]
    if len(parts) < len(names):
        return
    sizes, errors = [part.n_examples for part in parts], [part.stderr for part in parts if part.stderr is not None]
    stderr = None
    if len(errors) == len(parts):
        stderr = errors[0] if len(parts) == 1 else pooled_sample_stderr(errors, sizes)
    hashes = [part.prompts_sha256 for part in parts]
    result.tasks[task.name] = TaskScore(
        group=task.group,
        reading=task.reading,
        metric=task.metric,
        higher_is_better="perplexity" not in task.metric,
        # RULER counts its tasks alike; mmlu and bbh count questions.
        value=aggregate_subtask_metrics([part.value for part in parts], sizes, weight_by_size=task.name != "niah"),
        stderr=stderr,
        n_examples=sum(sizes),
        n_shots=parts[0].n_shots,
        n_cut=sum(part.n_cut for part in parts),
        version=parts[0].version,
        prompts_sha256=hashes[0] if len(hashes) == 1 else digest(["".join(hashes)]),
    )
