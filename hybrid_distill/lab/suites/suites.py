"""Which tasks there are, the two groups that the papers report them in, and the figure that speaks for each."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ...limits import words

Group = Literal["knowledge", "retrieval", "text"]
Reading = Literal["likelihood", "generation"]

GENERATE = "_generate"


@dataclass(frozen=True)
class SuiteTask:
    """A task by name. ``metric`` is the figure that speaks for it, by lm-eval's name: a metric and a filter."""

    name: str
    group: Group
    reading: Reading
    metric: str


@dataclass(frozen=True)
class StockTask(SuiteTask):
    """A task of lm-eval itself, or a group of such tasks, its parts.

    ``folder`` is where lm-eval defines it, ``hub`` the data set that it asks for, ``fields`` what it reads of a row.
    """

    folder: str
    hub: str
    fields: tuple[str, ...]


@dataclass(frozen=True)
class ProbeTask(SuiteTask):
    """A probe of this package as a task of lm-eval; ``probe`` names it, and the folder of its questions."""

    probe: str


_CHOICE = ("question", "choices {text, label}", "answerKey")
NIAH = (
    "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3",
    "niah_multivalue", "niah_multiquery",
)  # fmt: skip

STOCK = (
    StockTask("arc_challenge", "knowledge", "likelihood", "acc_norm,none", "arc", "allenai/ai2_arc", _CHOICE),
    StockTask("arc_easy", "knowledge", "likelihood", "acc,none", "arc", "allenai/ai2_arc", _CHOICE),
    StockTask(
        "piqa", "knowledge", "likelihood", "acc,none", "piqa", "baber/piqa",
        ("goal", "sol1", "sol2", "label (0 or 1)"),
    ),
    StockTask(
        "winogrande", "knowledge", "likelihood", "acc,none", "winogrande", "allenai/winogrande",
        ("sentence (with _)", "option1", "option2", 'answer ("1" or "2")'),
    ),
    StockTask(
        "hellaswag", "knowledge", "likelihood", "acc_norm,none", "hellaswag", "Rowan/hellaswag",
        ("activity_label", "ctx_a", "ctx_b", "endings", 'label ("0" to "3")'),
    ),
    StockTask(
        "openbookqa", "knowledge", "likelihood", "acc_norm,none", "openbookqa", "allenai/openbookqa",
        ("question_stem", "choices {text, label}", "answerKey"),
    ),
    StockTask(
        "lambada_openai", "retrieval", "likelihood", "acc,none", "lambada", "EleutherAI/lambada_openai",
        ("text",),
    ),
    StockTask(
        "mmlu", "retrieval", "likelihood", "acc,none", "mmlu/default", "cais/mmlu",
        ("question", "choices (four)", "answer (0 to 3)"),
    ),
    StockTask(
        "gsm8k", "retrieval", "generation", "exact_match,strict-match", "gsm8k", "openai/gsm8k",
        ("question", "answer (ends in #### NUMBER)"),
    ),
    StockTask(
        "swde", "retrieval", "generation", "contains,none", "swde", "hazyresearch/based-swde-v2",
        ("text", "value"),
    ),
    StockTask(
        "bbh", "retrieval", "generation", "exact_match,get-answer", "bbh/cot_fewshot", "SaylorTwift/bbh",
        ("input", "target"),
    ),
    StockTask(
        "niah", "retrieval", "generation", "mean over lengths", "ruler", "written by RULER's generators",
        ("input", "outputs", "gen_prefix", "max_length"),
    ),
)  # fmt: skip


def _probe_tasks(probe: str, group: Group) -> tuple[ProbeTask, ProbeTask]:
    """A probe by choice, and by generation."""
    return (
        ProbeTask(probe, group, "likelihood", "acc,none", probe),
        ProbeTask(f"{probe}{GENERATE}", group, "generation", "acc,none", probe),
    )


PROBES = (
    *_probe_tasks("kv", "retrieval"),
    *_probe_tasks("letters", "retrieval"),
    *_probe_tasks("needle", "retrieval"),
    *_probe_tasks("copy", "retrieval"),
    *_probe_tasks("two_hop", "retrieval"),
    *_probe_tasks("knowledge", "knowledge"),
    ProbeTask("text", "text", "likelihood", "byte_perplexity,none", "text"),
)
TASKS: dict[str, StockTask | ProbeTask] = {task.name: task for task in (*STOCK, *PROBES)}

PAPER = (*STOCK, *_probe_tasks("kv", "retrieval"))
SUITES: dict[str, tuple[str, ...]] = {
    "paper": tuple(task.name for task in PAPER),
    "paper-knowledge": tuple(task.name for task in PAPER if task.group == "knowledge"),
    "paper-retrieval": tuple(task.name for task in PAPER if task.group == "retrieval"),
    "probes": tuple(task.name for task in PROBES),
}


def tasks_of(names: str) -> list[StockTask | ProbeTask]:
    """The tasks of suites and tasks separated by commas, each once, in the order given.

    Raises ValueError for an unknown name, with the nearest ones there are, and where nothing is named.
    """
    wanted = words(names)
    if not wanted:
        raise ValueError(f"--suite is {names!r}; name a suite ({', '.join(SUITES)}) or tasks, such as arc_easy,kv.")
    expanded = [task for name in wanted for task in _expand(name)]
    return [TASKS[name] for name in dict.fromkeys(expanded)]


def _expand(name: str) -> Iterable[str]:
    if name in SUITES:
        return SUITES[name]
    if name in TASKS:
        return (name,)
    known = [*SUITES, *TASKS]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    advice = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}."
    raise ValueError(f"there is no suite and no task {name!r}; {advice}")
