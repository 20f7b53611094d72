"""Options of `hybrid-distill evaluate-suite`, and its tasks and suites."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from ...kernels import Kernels
from ...limits import Count, CountOrZero, Limits, check_options, numbers, words
from ...probes.registry import PROBES as OWN_PROBES
from ...probes.ruler import NEEDLES
from ...probes.ruler import TASKS as RULER_TASKS
from ...teacher import TINY


@dataclass(frozen=True)
class SuiteJob:
    """Model to evaluate on lm-eval tasks. Raises ValueError for a number out of range."""

    model: str | None = None
    """Local folder (a student's export too), hub id, or ``tiny`` for the embedded teacher."""
    suite: str = "paper"
    """``paper`` (its halves ``paper-knowledge`` and ``paper-retrieval``), ``ruler``, ``probes``, or tasks by name, such
    as ``arc_easy,kv,kv_generate``; docs/evaluation.md lists them."""
    teacher: str | None = None
    """Teacher, to compute coverage: a model as in ``--model``, or the results.json of an earlier evaluation."""
    data_dir: Path | None = None
    """Folder with the tasks' questions, instead of the hub; write-task-files creates one."""
    fewshot: CountOrZero | None = None
    """Few-shot examples per prompt, instead of each task's own number."""
    limit: Count | None = None
    """Number of questions, from the first, per task, per part of mmlu, bbh and niah, and per length."""
    seed: CountOrZero = 1
    """Seed of our probes' questions, of needles, and of the choice of few-shot examples."""
    pairs: str = "16"
    """Dictionary sizes of kv; several alternate (``10,25,50``). two_hop takes one."""
    lengths: str = "100,200,400,800"
    """Words of filler text in needle."""
    ruler_lengths: Annotated[str, tyro.conf.arg(aliases=("--niah-lengths",))] = "4096"
    """Prompt lengths of ruler and niah, in tokens; several are measured separately (``256,512``)."""
    facts: Path | None = None
    """JSON Lines file of questions for knowledge and letters; by default the embedded facts."""
    texts: str = TINY
    """Plain text for the task text: ``tiny`` or a file."""
    max_length: Annotated[int, Limits(2, whole=True)] | None = None
    """Context length in tokens, instead of the model config's."""
    truncate: bool = False
    """Truncate prompts that exceed the context, on the left, and count them. By default their task gets no figure."""
    batch_size: Count = 16
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of the weights; by default bfloat16 on a GPU, float32 on a CPU."""
    kernels: Kernels = "auto"
    """Implementation of a student's recurrent heads, if the model is one."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Our own exports do not need it."""
    allow_bin: bool = False
    """Allow pickled weights (``*.bin``)."""
    again: bool = False
    """Measure again and replace earlier results."""
    out: Path | None = None
    """Folder for results.json and results.md; by default one in runs/evaluation, named after the model."""

    def __post_init__(self) -> None:
        check_options(self, "--")

    @property
    def folder(self) -> Path:
        """Folder of the model's results."""
        return self.out or Path("runs/evaluation") / re.sub(r"[^\w.-]+", "-", str(self.model)).strip("-.")

    def numbers(self, name: Literal["pairs", "lengths", "ruler_lengths"]) -> list[int]:
        """Parse an option that holds several numbers."""
        return numbers(name.replace("_", "-"), getattr(self, name), least=1)


@dataclass(frozen=True)
class SuiteTask:
    """Task of a suite: an lm-eval task, a group of them, or a probe of this package."""

    name: str
    group: Literal["knowledge", "retrieval", "text"]
    reading: Literal["likelihood", "generation"]
    metric: str
    """lm-eval's key of the reported figure: a metric and a filter."""
    folder: str = ""
    """Folder below lm_eval/tasks that defines the task; empty for questions from our own generators."""
    fields: str = "prompt answer choices gold"
    """Fields in each row of its questions."""
    probe: str = ""
    ruler: tuple[str, ...] = ()
    """RULER tasks that it consists of."""


def _probe(name: str, group: Literal["knowledge", "retrieval"]) -> list[SuiteTask]:
    return [
        SuiteTask(name, group, "likelihood", "acc,none", probe=name),
        SuiteTask(f"{name}_generate", group, "generation", "acc,none", probe=name),
    ]


def _ruler(name: str, *tasks: str) -> SuiteTask:
    return SuiteTask(name, "retrieval", "generation", "acc,none", fields="prompt answers", ruler=tasks)


STOCK = (
    SuiteTask("arc_challenge", "knowledge", "likelihood", "acc_norm,none", "arc", "question choices answerKey"),
    SuiteTask("arc_easy", "knowledge", "likelihood", "acc,none", "arc", "question choices answerKey"),
    SuiteTask("piqa", "knowledge", "likelihood", "acc,none", "piqa", "goal sol1 sol2 label"),
    SuiteTask("winogrande", "knowledge", "likelihood", "acc,none", "winogrande", "sentence option1 option2 answer"),
    SuiteTask(
        "hellaswag", "knowledge", "likelihood", "acc_norm,none", "hellaswag", "activity_label ctx_a ctx_b endings label"
    ),
    SuiteTask(
        "openbookqa", "knowledge", "likelihood", "acc_norm,none", "openbookqa", "question_stem choices answerKey"
    ),
    SuiteTask("lambada_openai", "retrieval", "likelihood", "acc,none", "lambada", "text"),
    SuiteTask("mmlu", "retrieval", "likelihood", "acc,none", "mmlu/default", "question choices answer"),
    SuiteTask("gsm8k", "retrieval", "generation", "exact_match,strict-match", "gsm8k", "question answer"),
    SuiteTask("swde", "retrieval", "generation", "contains,none", "swde", "text value"),
    SuiteTask("bbh", "retrieval", "generation", "exact_match,get-answer", "bbh/cot_fewshot", "input target"),
)
PROBES = (
    *(task for name in OWN_PROBES for task in _probe(name, "retrieval")),
    *_probe("knowledge", "knowledge"),
    SuiteTask("text", "text", "likelihood", "byte_perplexity,none", fields="text", probe="text"),
)
RULER = [_ruler(name, name) for name in RULER_TASKS]
PAPER = (*STOCK, _ruler("niah", *NEEDLES), *_probe("kv", "retrieval"))
TASKS = {task.name: task for task in (*PAPER, *PROBES, *RULER)}
SUITES = {
    "paper": [task.name for task in PAPER],
    "paper-knowledge": [task.name for task in PAPER if task.group == "knowledge"],
    "paper-retrieval": [task.name for task in PAPER if task.group == "retrieval"],
    "ruler": [task.name for task in RULER],
    "probes": [task.name for task in PROBES],
}


def tasks_of(names: str) -> list[SuiteTask]:
    """List the tasks of suites and tasks separated by commas, each once. Raises ValueError for an unknown name."""
    wanted = words(names)
    if not wanted:
        raise ValueError(f"--suite is {names!r}; name a suite ({', '.join(SUITES)}) or tasks, such as arc_easy,kv.")
    known = [*SUITES, *TASKS]
    for name in wanted:
        if name not in known:
            near = difflib.get_close_matches(name, known, cutoff=0.5) or known
            raise ValueError(f"there is no suite and no task {name!r}; pass {', '.join(near[:-1])} or {near[-1]}.")
    return [TASKS[name] for name in dict.fromkeys(task for name in wanted for task in SUITES.get(name, [name]))]
