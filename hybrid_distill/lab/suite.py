"""Evaluate any model on lm-eval tasks: the papers' suites by name, and our probes."""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Mapping
from contextlib import redirect_stderr
from functools import cache
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..distributed import alone_in, limit_collectives, make_accelerator
from ..io import Record
from ..probes.ruler import load_generators
from ..scoring import describe_run
from ..teacher import fingerprint, longest_context
from ..validation import check_task_reads, first_line
from .probe_tasks import GENERATE, READERS, RULER, Untyped, own_task
from .suite_job import PROBES, SUITES, SuiteJob

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

PAPER_FOLDERS = (
    *("arc", "piqa", "winogrande", "hellaswag", "openbookqa", "lambada"),
    *("mmlu/default", "gsm8k", "swde", "bbh/cot_fewshot"),
)
"""Folders of lm-eval's task files that the papers' tasks are in."""
EVERYTHING = ("",)
"""The folder of all task files itself."""
DEFAULT_CONTEXT = 2048
"""Tokens of context for a model whose config states none."""
BOOTSTRAP_DRAWS = 1000
"""They give a standard error to about 2 %; lm-eval draws a hundred times as many."""


def load_tasks(job: SuiteJob) -> dict[str, list[Untyped]]:
    """Load the tasks that lm-eval defines, with their questions, by name.

    Our own tasks need a tokenizer (`own_task`). A tag of lm-eval is several tasks; any other name
    is one task or group. Raises ValueError for unknown tasks, bad options, missing packages, and
    tasks whose questions cannot be loaded.
    """
    _check_job(job)
    if not RULER.keys().isdisjoint(job.names):
        load_generators()
    stock = [name for name in job.names if name not in PROBES and name not in RULER]
    manager = _manager_of(stock, job.include_path)
    tasks: dict[str, list[Untyped]] = {}
    failures: dict[str, str] = {}
    for name in stock:
        try:
            loaded: Untyped = manager.load([name])
        except Exception as error:  # the hub, its libraries and task files raise many kinds
            failures[name] = f"{type(error).__name__}: {first_line(error)}"
            continue
        if name in loaded["groups"]:
            tasks[name] = [loaded["groups"][name]]
        else:
            tasks[name] = list(loaded["tasks"].values())
    if failures:
        # Without a network, all tasks fail for the same reason.
        reason = next(iter(failures.values()))
        raise ValueError(
            f"lm-eval cannot load {', '.join(failures)} ({reason}); without a network, bring a copy "
            "of the Hugging Face cache, or pass task files with --include-path "
            "(docs/evaluation.md), or leave them out of --suite."
        )
    return tasks


def _check_job(job: SuiteJob) -> None:
    """Raise ValueError for a job without tasks, for options that no task reads, for missing files, and without
    lm-eval."""
    if not job.names:
        raise ValueError(
            f"--suite is {job.suite!r}; pass a suite ({', '.join(SUITES)}) or tasks, such as kv."
        )
    job.numbers("pairs")
    job.numbers("ruler_lengths")
    asked = [name.removesuffix(GENERATE) for name in job.names]
    check_task_reads(job, READERS, "suite", asked)
    if job.include_path is not None and not job.include_path.is_dir():
        raise ValueError(
            f"--include-path {job.include_path} is not a folder; pass one with lm-eval task files."
        )
    if job.facts is not None and not job.facts.is_file():
        raise ValueError(f"--facts {job.facts} is not a file; pass one of JSON lines.")
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError("lm-eval is not installed; pip install 'lm-eval[ruler]'.")


def _manager_of(names: list[str], include_path: Path | None) -> TaskManager:
    """Return an index of lm-eval's tasks that has all ``names``. Raises ValueError if there is none."""
    unknown: list[str] = []
    # Reading all of lm-eval's 10,000 task files takes 10 seconds or more.
    for folders in (PAPER_FOLDERS, EVERYTHING):
        manager = _task_manager(include_path, folders)
        unknown = [name for name in names if name not in manager.task_index]
        if not unknown:
            return manager
    raise ValueError(
        f"--suite has {', '.join(unknown)}: neither a suite ({', '.join(SUITES)}), nor a task of "
        f"this package ({', '.join([*PROBES, *RULER])}), nor one that `lm-eval ls tasks` lists; "
        "pass one of those."
    )


@cache
def _task_manager(include_path: Path | None, folders: tuple[str, ...]) -> TaskManager:
    """Index folders of lm-eval's tasks, and ``include_path``, which takes precedence."""
    import lm_eval.tasks

    # It warns about every truncated prompt, and every task that is replaced.
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    root = Path(lm_eval.tasks.__file__).parent
    paths: list[str | Path] = [root / folder for folder in folders]
    if include_path is not None:
        paths.append(include_path)
    return lm_eval.tasks.TaskManager(include_path=paths, include_defaults=False)


def prepare(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    job: SuiteJob,
    stock: Mapping[str, list[Untyped]],
) -> tuple[Untyped, list[Untyped], dict[str, int]]:
    """Return (model for lm-eval, its tasks and groups, truncated prompts by task).

    ``stock`` is from `load_tasks`. Raises ValueError for prompts that exceed the context, unless
    the job truncates them, and as `own_task` does.
    """
    lm = make_lm(model, tokenizer, job)
    tasks: list[Untyped] = []
    for name in job.names:
        if name in stock:
            tasks += stock[name]
        else:
            tasks.append(own_task(name, tokenizer, job))
    n_truncated: dict[str, int] = {}
    for name, task in by_name(tasks)["tasks"].items():
        # Like simple_evaluate: a task that sets 0 few-shot examples has none.
        if job.fewshot is not None and task.get_config("num_fewshot") != 0:
            task.set_config("num_fewshot", job.fewshot)
        lengths = _prompt_lengths(task, lm, job)
        n_long = sum(length > lm.max_length for length in lengths)
        if n_long and not job.truncate:
            raise ValueError(
                f"{n_long} of {len(lengths)} prompts of {name} do not fit into the context of {lm.max_length} tokens; "
                f"the longest needs {max(lengths)}. Pass smaller --fewshot, --pairs or --ruler-lengths, or --truncate "
                "to cut them on the left, as lm-eval does."
            )
        if n_long:
            n_truncated[name] = n_long
    return lm, tasks, n_truncated


def by_name(tasks: list[Untyped]) -> Untyped:
    """Return lm-eval's dict of tasks and groups, members included.

    Raises ValueError if a task is in two of them.
    """
    return _task_manager(None, ()).load(tasks)


def make_lm(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, job: SuiteJob) -> Untyped:
    """Wrap a model for lm-eval; launched processes split its requests."""
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "the tokenizer has no end-of-text token, which lm-eval needs; set its eos_token."
        )
    accelerator = make_accelerator()
    # lm-eval gathers results, and a process may have longer texts than another.
    limit_collectives(None)
    from lm_eval.models.huggingface import HFLM

    wrap: Untyped = HFLM
    max_length = job.max_length or longest_context(model.config) or DEFAULT_CONTEXT
    lm = wrap(model, tokenizer=tokenizer, batch_size=job.batch_size, max_length=max_length)
    if accelerator.num_processes > 1:  # HFLM leaves this to callers that pass a model
        lm.accelerator = accelerator
        lm._rank = accelerator.process_index
        lm._world_size = accelerator.num_processes
    return lm


def _prompt_lengths(task: Untyped, lm: Untyped, job: SuiteJob) -> list[int]:
    """Count the tokens that each request needs; 0 for a text that lm-eval reads in windows, which always fits."""
    task.set_fewshot_seed(job.seed)
    with redirect_stderr(StringIO()):  # evaluate builds them again, and shows its own progress
        task.build_all_requests(limit=job.limit)
    task.set_fewshot_seed(job.seed)
    lengths: list[int] = []
    for request in task.instances:
        if request.request_type == "generate_until":
            prompt, options = request.args
            n_generated = options.get("max_gen_toks", lm.max_gen_toks)
            if n_generated >= lm.max_length:
                raise ValueError(
                    f"{task.task_name} generates up to {n_generated} tokens, which leaves no room "
                    f"for a prompt in the context of {lm.max_length}; pass a larger --max-length, "
                    "or leave the task out of --suite."
                )
            lengths.append(len(lm.tok_encode(prompt)) + n_generated)
        elif request.request_type == "loglikelihood":
            # Its last token is predicted, not read.
            lengths.append(len(lm.tok_encode("".join(request.args))) - 1)
        else:
            lengths.append(0)
    return lengths


def run_suite(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    job: SuiteJob,
    stock: Mapping[str, list[Untyped]],
) -> Record:
    """Measure a model with `lm_eval.simple_evaluate`; return its results as JSON.

    Only the main process has results. Answers are cached as they come, so that a stopped call
    resumes. Raises ValueError as `prepare` does.
    """
    import lm_eval
    from lm_eval.utils import handle_non_serializable

    lm, tasks, n_truncated = prepare(model, tokenizer, job, stock)
    # lm-eval's cache is keyed by requests only, so each model needs its own.
    dtype = str(model.dtype).removeprefix("torch.")
    answers = job.cache / f"{fingerprint(model)}-{lm.max_length}-{dtype}"
    with alone_in(answers):
        if job.again:
            (answers / f"lm_eval_rank{lm.rank}.db").unlink(missing_ok=True)
        evaluate: Untyped = lm_eval.simple_evaluate
        results = evaluate(
            model=lm,
            tasks=tasks,
            task_manager=_task_manager(None, ()),
            use_cache=str(answers / "lm_eval"),
            limit=job.limit,
            bootstrap_iters=BOOTSTRAP_DRAWS,
            log_samples=False,
            fewshot_random_seed=job.seed,
        )
    # lm-eval gathers results on its first process, and returns None on the others.
    if results is None:
        return {}
    record = {
        **results,
        "asked": _reported_names(tasks),
        "truncated": n_truncated,
        "described": describe_run(model),
    }
    return json.loads(json.dumps(record, default=handle_non_serializable))


def _reported_names(tasks: list[Untyped]) -> list[str]:
    """List the names whose figures are reported: tasks, groups with a figure, and members of other groups."""
    from lm_eval.api.group import Group

    names: list[str] = []
    for item in tasks:
        if not isinstance(item, Group):
            names.append(item.task_name)
        elif item.has_aggregation:
            names.append(item.name)
        else:
            names += [task.task_name for task in item.get_all_tasks()]
    return names
