"""Evaluation of a model on lm-eval tasks; each result is saved before the next task starts."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from contextlib import redirect_stderr
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from ...distributed import limit_collectives, make_accelerator, on_main_process
from ...io import Record, differences
from ...probes import digest
from ...scoring import describe_run
from ...teacher import longest_context, read_teacher
from .job import SuiteJob, SuiteTask, tasks_of
from .results import FILE, SuiteResult, TaskScore
from .tasks import Part, check_job, load_part, parts_of, write_part

Untyped = Any
"""lm-eval object, whose annotations do not match its classes."""
DEFAULT_CONTEXT = 2048

log = logging.getLogger(__name__)


def write_questions(job: SuiteJob, folder: Path) -> tuple[str, str]:
    """Write the questions of a suite into a folder; return (files written, tasks without files and the reasons)."""
    check_job(job)
    tokenizer = None if job.model is None else read_teacher(job.model, flag="--model")[1]
    written: list[str] = []
    failed: dict[str, list[str]] = {}
    for task in tasks_of(job.suite):
        try:
            for part in parts_of(task, job):
                written += write_part(folder, part, job, tokenizer)
        except Exception as error:  # the hub and its libraries raise many kinds of errors
            # Grouped by reason: without a network, all data sets fail for the same one.
            failed.setdefault(_reason(error), []).append(task.name)
    reasons = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in failed.items())
    return "\n".join(written) or f"{folder}: nothing new", reasons


def make_lm(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch_size: int, max_length: int) -> Untyped:
    """Wrap a model for lm-eval; launched processes split its requests."""
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no end-of-text token, which lm-eval needs; set its eos_token.")
    accelerator = make_accelerator()
    limit_collectives(None)  # lm-eval gathers results, and a process may have longer texts than another
    from lm_eval.models.huggingface import HFLM

    wrap: Untyped = HFLM
    lm = wrap(model, tokenizer=tokenizer, batch_size=batch_size, max_length=max_length)
    if accelerator.num_processes > 1:  # HFLM leaves this to callers that pass a model
        lm.accelerator = accelerator
        lm._rank, lm._world_size = accelerator.process_index, accelerator.num_processes
    return lm


def run_suite(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, job: SuiteJob, out: Path) -> SuiteResult:
    """Measure a model; write ``OUT/results.json`` after each task, and skip what it already holds.

    A failed task is recorded with its reason, and the next one starts; the same call retries it. Of several
    processes, only the main one returns the whole result. Raises ValueError for a file of another model or settings.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns about every truncated prompt
    max_length = job.max_length or longest_context(model.config) or DEFAULT_CONTEXT
    result = SuiteResult(describe_run(model), json.loads(json.dumps(_settings(job, max_length))))
    if not job.again and (out / FILE).exists():
        result = _resumed(result, out / FILE)
    lm = make_lm(model, tokenizer, job.batch_size, max_length)
    on_main_process(lambda: out.mkdir(parents=True, exist_ok=True))
    tried = set(result.parts)  # tasks share parts, and only the main process has their figures
    for task in tasks_of(job.suite):
        parts = parts_of(task, job)
        for part in parts:
            if part.name not in tried:
                tried.add(part.name)
                _run_part(result, part, lm, tokenizer, job)
            if all(part.name in result.parts for part in parts):
                result.tasks[task.name] = _score(task, [result.parts[part.name] for part in parts])
            on_main_process(lambda: result.save(out / FILE))
    return result


def _settings(job: SuiteJob, max_length: int) -> Record:
    """Return everything that the figures depend on."""
    return {
        "limit": job.limit, "fewshot": job.fewshot, "seed": job.seed, "max_length": max_length,
        "truncate": job.truncate, "pairs": job.numbers("pairs"), "lengths": job.numbers("lengths"),
        "ruler_lengths": job.numbers("ruler_lengths"), "facts": str(job.facts or ""), "texts": job.texts,
        "versions": {name: version(name) for name in ("lm_eval", "datasets")},
    }  # fmt: skip


def _resumed(fresh: SuiteResult, path: Path) -> SuiteResult:
    """Load an earlier run's results without its failures. Raises ValueError for another model or other settings."""
    found = SuiteResult.load(path)
    here, there = (
        {"model": of.model["fingerprint"], "dtype": of.model["dtype"], **of.settings} for of in (fresh, found)
    )
    if changed := differences(there, here):
        raise ValueError(
            f"{path} was measured with other settings: {', '.join(changed)}; pass another folder with --out, or "
            "measure again with --again."
        )
    found.failed.clear()
    return found


def _run_part(result: SuiteResult, part: Part, lm: Untyped, tokenizer: PreTrainedTokenizerBase, job: SuiteJob) -> None:
    """Measure a part into the result, or into its failures. If one of several processes fails alone, all end."""
    try:
        if measured := measure_part(part, lm, tokenizer, job):
            result.parts[part.name] = measured
            log.info("%s: %.4f (%s, %.0f s)", part.name, measured["value"], part.task.metric, measured["seconds"])
    except Exception as error:
        if lm.world_size > 1 and not isinstance(error, ValueError):
            raise
        reason = _reason(error)
        if part.task.folder and job.data_dir is None:
            reason += "; without a network, give its questions with --data-dir"
        result.failed[part.name] = reason
        log.warning("%s failed: %s", part.name, reason)


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()[:1]
    return lines[0] if lines and isinstance(error, ValueError) else ": ".join([type(error).__name__, *lines])


def measure_part(part: Part, lm: Untyped, tokenizer: PreTrainedTokenizerBase, job: SuiteJob) -> Record | None:
    """Measure one lm-eval task; return None in all processes except the main one."""
    import lm_eval

    began = time.monotonic()
    task, source = load_part(part, job, tokenizer)
    task.set_config("num_fewshot", part.n_shots)
    task.set_fewshot_seed(job.seed)
    lengths = _prompt_lengths(task, lm, job.limit)
    n_cut = sum(length > lm.max_length for length in lengths)
    if n_cut and not job.truncate:
        raise ValueError(
            f"{n_cut} of {len(lengths)} prompts do not fit into the context of {lm.max_length} tokens; the longest "
            f"needs {max(lengths)}. Make them shorter (--fewshot, --pairs, --lengths, --ruler-lengths), or pass "
            "--truncate to cut them on the left, as lm-eval does."
        )
    # Not simple_evaluate: it spends 10 seconds after every task describing the machine.
    set_seed(job.seed)
    task.set_fewshot_seed(job.seed)
    evaluate: Untyped = lm_eval.evaluate
    found = evaluate(lm, {"tasks": {part.name: task}}, limit=job.limit, bootstrap_iters=0)
    if found is None:
        return None
    figures, samples = found["results"][part.name], found["samples"][part.name]
    metrics = {key: float(value) for key, value in figures.items() if "," in key and isinstance(value, int | float)}
    asked = sorted({(sample["doc_id"], json.dumps(sample["arguments"], default=str)) for sample in samples})
    return {
        "task": part.task.name,
        **({"ruler": part.ruler[0], "length": part.ruler[1]} if part.ruler else {}),
        "value": metrics[part.task.metric],
        "stderr": _stderr(task, part.task.metric, samples),
        "metrics": metrics,
        "n_examples": found["n-samples"][part.name]["effective"],
        "n_available": found["n-samples"][part.name]["original"],
        "n_shots": part.n_shots,
        "version": str(found["versions"][part.name]),
        "source": source,
        "prompts_sha256": digest([json.dumps(asked)]),
        "n_requests": len(lengths),
        "n_cut": n_cut,
        "seconds": round(time.monotonic() - began, 1),
    }


def _prompt_lengths(task: Untyped, lm: Untyped, limit: int | None) -> list[int]:
    """Count the tokens each request needs; a text that lm-eval reads in windows always fits."""
    with redirect_stderr(StringIO()):  # evaluate builds them again, and shows its own progress
        task.build_all_requests(limit=limit)

    def length(request: Untyped) -> int:
        if request.request_type == "generate_until":
            prompt, options = request.args
            return len(lm.tok_encode(prompt)) + options.get("max_gen_toks", lm.max_gen_toks)
        is_whole = request.request_type == "loglikelihood"  # its last token is predicted, not read
        return len(lm.tok_encode("".join(request.args))) - 1 if is_whole else 0

    return [length(request) for request in task.instances]


def _stderr(task: Untyped, metric_and_filter: str, samples: Sequence[Record]) -> float | None:
    """Return the standard error of a mean over questions; None for other figures."""
    from lm_eval.api.metrics import mean, mean_stderr

    metric, _, kind = metric_and_filter.partition(",")
    values = [sample[metric] for sample in samples if sample["filter"] == kind and metric in sample]
    is_mean = task.aggregation().get(metric) is mean
    return mean_stderr(values) if len(values) > 1 and is_mean else None


def _score(task: SuiteTask, parts: Sequence[Record]) -> TaskScore:
    """Combine the parts of a task, weighted as lm-eval weights them."""
    from lm_eval.api.metrics import aggregate_subtask_metrics, pooled_sample_stderr

    sizes, errors, hashes = zip(*((part["n_examples"], part["stderr"], part["prompts_sha256"]) for part in parts))
    pooled = None if None in errors or len(parts) == 1 else float(pooled_sample_stderr(list(errors), list(sizes)))
    return TaskScore(
        group=task.group,
        reading=task.reading,
        metric=task.metric,
        higher_is_better="perplexity" not in task.metric,
        # RULER weights its tasks equally; mmlu and bbh weight them by questions.
        value=aggregate_subtask_metrics([part["value"] for part in parts], sizes, weight_by_size=not task.ruler),
        stderr=errors[0] if len(parts) == 1 else pooled,
        n_examples=sum(sizes),
        n_shots=parts[0]["n_shots"],
        n_cut=sum(part["n_cut"] for part in parts),
        version=parts[0]["version"],
        prompts_sha256=hashes[0] if len(hashes) == 1 else digest(["".join(hashes)]),
    )
