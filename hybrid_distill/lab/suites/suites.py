"""Tasks and suites: the groups the papers report, and the metric that counts for each task."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Literal

from ...limits import words
from ...probes.registry import PROBES as OWN_PROBES

Group = Literal["knowledge", "retrieval", "text"]
Reading = Literal["likelihood", "generation"]


@dataclass(frozen=True)
class SuiteTask:
    """A task of a suite: a task of lm-eval, a group of them, or a probe of this package."""

    name: str
    group: Group
    reading: Reading
    metric: str
    """lm-eval's key of the figure that counts: a metric and a filter."""
    folder: str = ""
    """Folder below lm_eval/tasks that defines the task; empty for a probe."""
    fields: str = "prompt answer choices gold"
    """Fields that a row of its questions has."""
    probe: str = ""


def _knowledge(name: str, metric: str, folder: str, fields: str) -> SuiteTask:
    return SuiteTask(name, "knowledge", "likelihood", f"{metric},none", folder, fields)


def _retrieval(name: str, reading: Reading, metric: str, folder: str, fields: str) -> SuiteTask:
    return SuiteTask(name, "retrieval", reading, metric, folder, fields)


def _probe(name: str, group: Group) -> list[SuiteTask]:
    return [
        SuiteTask(name, group, "likelihood", "acc,none", probe=name),
        SuiteTask(f"{name}_generate", group, "generation", "acc,none", probe=name),
    ]


STOCK = (
    _knowledge("arc_challenge", "acc_norm", "arc", "question choices answerKey"),
    _knowledge("arc_easy", "acc", "arc", "question choices answerKey"),
    _knowledge("piqa", "acc", "piqa", "goal sol1 sol2 label"),
    _knowledge("winogrande", "acc", "winogrande", "sentence option1 option2 answer"),
    _knowledge("hellaswag", "acc_norm", "hellaswag", "activity_label ctx_a ctx_b endings label"),
    _knowledge("openbookqa", "acc_norm", "openbookqa", "question_stem choices answerKey"),
    _retrieval("lambada_openai", "likelihood", "acc,none", "lambada", "text"),
    _retrieval("mmlu", "likelihood", "acc,none", "mmlu/default", "question choices answer"),
    _retrieval("gsm8k", "generation", "exact_match,strict-match", "gsm8k", "question answer"),
    _retrieval("swde", "generation", "contains,none", "swde", "text value"),
    _retrieval("bbh", "generation", "exact_match,get-answer", "bbh/cot_fewshot", "input target"),
    _retrieval("niah", "generation", "mean over lengths", "ruler", "input outputs gen_prefix max_length"),
)
PROBES = (
    *(task for name in OWN_PROBES for task in _probe(name, "retrieval")),
    *_probe("knowledge", "knowledge"),
    SuiteTask("text", "text", "likelihood", "byte_perplexity,none", fields="text", probe="text"),
)
TASKS = {task.name: task for task in (*STOCK, *PROBES)}
PAPER = (*STOCK, *_probe("kv", "retrieval"))
SUITES = {
    "paper": [task.name for task in PAPER],
    "paper-knowledge": [task.name for task in PAPER if task.group == "knowledge"],
    "paper-retrieval": [task.name for task in PAPER if task.group == "retrieval"],
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
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
            advice = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}."
            raise ValueError(f"there is no suite and no task {name!r}; {advice}")
    return [TASKS[name] for name in dict.fromkeys(task for name in wanted for task in SUITES.get(name, [name]))]
