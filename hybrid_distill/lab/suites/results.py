"""What a model made of a suite: one JSON file that grows task by task, and its tables (docs/evaluation.md)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd

from ...io import write_json
from ..reporting import ABSENT, markdown_table, percent_change
from .suites import TASKS

FORMAT = "hybrid-distill/suite/1"
FILE = "results.json"


@dataclass(frozen=True)
class PartResult:
    """One task of lm-eval, measured. ``metrics`` are all its figures by lm-eval's names, ``value`` the one that counts.

    ``prompts_sha256`` tells whether two models were asked the same. ``n_cut`` of ``n_requests`` prompts were cut
    because they did not fit into the context.
    """

    task: str
    value: float
    stderr: float | None
    metrics: dict[str, float]
    n_examples: int
    n_available: int
    n_shots: int
    version: str
    source: str
    prompts_sha256: str
    n_requests: int
    n_cut: int
    seconds: float


@dataclass(frozen=True)
class TaskScore:
    """A task of the suite: one part, or several as lm-eval puts them together. Shares are 0 to 1."""

    group: str
    reading: str
    metric: str
    higher_is_better: bool
    value: float
    stderr: float | None
    n_examples: int
    n_shots: int
    n_cut: int
    version: str
    prompts_sha256: str


@dataclass
class SuiteResult:
    """Everything measured so far of one model; ``tasks`` are those whose parts are all there.

    ``settings`` are what the figures depend on: a result goes on only with the same. ``failed`` says by part why there
    is no figure. ``comparison`` is that with the teacher, where one was named.
    """

    model: dict[str, Any]
    settings: dict[str, Any]
    parts: dict[str, PartResult] = field(default_factory=dict)
    tasks: dict[str, TaskScore] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    comparison: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        return json.loads(json.dumps({"format": FORMAT, **dataclasses.asdict(self)}))

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> SuiteResult:
        """Read what `save` wrote, or the folder that it stands in. Raises ValueError for anything else."""
        path = Path(path)
        path = path / FILE if path.is_dir() else path
        try:
            record = json.loads(path.read_text())
            if (found := record.pop("format", None)) != FORMAT:
                raise ValueError(f"its format is {found!r}, expected {FORMAT!r}")
            record["parts"] = {name: PartResult(**part) for name, part in record["parts"].items()}
            record["tasks"] = {name: TaskScore(**score) for name, score in record["tasks"].items()}
            return cls(**record)
        except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} cannot be read as a suite's results ({error}); hybrid-distill evaluate --model writes one."
            ) from error


@dataclass(frozen=True)
class Comparison:
    """A model beside its teacher: for each task asked of both alike, and for each group of tasks."""

    tasks: dict[str, float]
    """Model over teacher; tasks where less is better, and where the teacher scores 0, have none."""
    groups: dict[str, float]
    """Coverage: the mean over the tasks of a group that have one."""
    asked_differently: tuple[str, ...]
    """Tasks that both have, with other prompts, numbers of examples or versions."""


def compare(result: SuiteResult, teacher: SuiteResult) -> Comparison:
    """How much of its teacher's scores a model reaches."""
    shared = [name for name in result.tasks if name in teacher.tasks]
    other = tuple(name for name in shared if _asked(result.tasks[name]) != _asked(teacher.tasks[name]))
    ratios = {
        name: result.tasks[name].value / teacher.tasks[name].value
        for name in shared
        if name not in other and result.tasks[name].higher_is_better and teacher.tasks[name].value > 0
    }
    groups: dict[str, list[float]] = {}
    for name, ratio in ratios.items():
        groups.setdefault(result.tasks[name].group, []).append(ratio)
    return Comparison(ratios, {group: fmean(found) for group, found in groups.items()}, other)


def _asked(score: TaskScore) -> tuple[Any, ...]:
    return score.prompts_sha256, score.n_examples, score.n_shots, score.version, score.metric


def tables(result: SuiteResult, teacher: SuiteResult | None = None) -> str:
    """Markdown: a row a task, then coverage of the teacher by group, then what is missing."""
    compared = None if teacher is None else compare(result, teacher)
    table = [_task_table(result, teacher, compared)] if result.tasks else []
    return "\n\n".join([*table, *_remarks(result, compared)])


def _task_table(result: SuiteResult, teacher: SuiteResult | None, compared: Comparison | None) -> str:
    headers = ["task", "group", "read by", "metric", "shots", "examples", "value"]
    headers += ["teacher", "change"] if teacher else []
    lines = []
    for name in sorted(result.tasks, key=list(TASKS).index):
        score = result.tasks[name]
        line = [name, score.group, score.reading, score.metric.removesuffix(",none"), str(score.n_shots)]
        line += [f"{score.n_examples:,}", _value(score)]
        if teacher and compared:
            theirs = teacher.tasks.get(name)
            ratio = compared.tasks.get(name)
            line += [_value(theirs) if theirs else ABSENT, percent_change(ratio)]
        lines.append(line)
    return markdown_table(pd.DataFrame(lines, columns=headers))


def _value(score: TaskScore) -> str:
    """In percent with its standard error; what is no share as it is."""
    if not score.higher_is_better:
        return f"{score.value:.3f}"
    error = f" ± {100 * score.stderr:.1f}" if score.stderr else ""
    return f"{100 * score.value:.1f}{error}"


def _remarks(result: SuiteResult, compared: Comparison | None) -> Iterable[str]:
    if compared and compared.groups:
        lines = [[group, f"{100 * ratio:.1f} %"] for group, ratio in compared.groups.items()]
        yield markdown_table(pd.DataFrame(lines, columns=["group", "coverage of the teacher"]))
    if compared and compared.asked_differently:
        yield f"Not compared, for the teacher was asked otherwise: {', '.join(compared.asked_differently)}."
    if cut := [f"{name} ({score.n_cut})" for name, score in result.tasks.items() if score.n_cut]:
        yield f"Prompts cut on the left because the context could not hold them: {', '.join(cut)}."
    if result.failed:
        yield f"Without a figure:\n{_bullets([f'{part}: {reason}' for part, reason in result.failed.items()])}"


def _bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
