"""Results of a suite: one JSON file that grows task by task, and its tables (docs/evaluation.md)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from statistics import fmean

import pandas as pd

from ...io import Record, refused, write_json
from ..reporting import markdown_table, percent_change, with_error
from .job import TASKS

FORMAT = "hybrid-distill/suite/1"
FILE = "results.json"


@dataclass(frozen=True)
class TaskScore:
    """Score of a task of the suite, over all its parts. Shares are 0 to 1.

    ``n_cut`` prompts were truncated to fit the context; ``prompts_sha256`` shows if two models got the same prompts.
    """

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

    @property
    def asked(self) -> tuple[object, ...]:
        """Everything that must match before two models are compared."""
        return self.prompts_sha256, self.n_examples, self.n_shots, self.version, self.metric

    def cell(self) -> str:
        """Format a share in percent with its standard error, any other figure as it is."""
        if not self.higher_is_better:
            return with_error(self.value, digits=3)
        return with_error(self.value, self.stderr or None, scale=100)


@dataclass
class SuiteResult:
    """Everything measured so far for one model: lm-eval tasks (``parts``), and suite tasks whose parts are complete.

    Figures depend on ``settings``: a result resumes only with the same ones. ``failed`` maps parts to reasons.
    """

    model: Record
    settings: Record
    parts: dict[str, Record] = field(default_factory=dict)
    tasks: dict[str, TaskScore] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    comparison: Record | None = None

    def save(self, path: Path) -> None:
        """Write the file atomically."""
        write_json(path, {"format": FORMAT, **dataclasses.asdict(self)})

    @classmethod
    def load(cls, path: Path) -> SuiteResult:
        """Read a file that `save` wrote, or the folder it is in. Raises ValueError for anything else."""
        path = path / FILE if path.is_dir() else path
        with refused(f"{path} cannot be read as a suite's results", "pass what evaluate-suite has written"):
            record = json.loads(path.read_text())
            if (found := record.pop("format", None)) != FORMAT:
                raise ValueError(f"its format is {found!r}, expected {FORMAT!r}")
            record["tasks"] = {name: TaskScore(**score) for name, score in record["tasks"].items()}
            return cls(**record)


def compare(result: SuiteResult, teacher: SuiteResult) -> Record:
    """Return a model's scores relative to its teacher's, as JSON.

    ``tasks`` are ratios, without tasks where lower is better or the teacher scores 0; ``groups`` are their means, the
    coverage. ``asked_differently`` lists shared tasks with different prompts, examples, shots, versions or metrics.
    """
    pairs = {name: (score, teacher.tasks[name]) for name, score in result.tasks.items() if name in teacher.tasks}
    other = [name for name, (ours, theirs) in pairs.items() if ours.asked != theirs.asked]
    ratios = {
        name: ours.value / theirs.value
        for name, (ours, theirs) in pairs.items()
        if name not in other and ours.higher_is_better and theirs.value > 0
    }
    groups: dict[str, list[float]] = {}
    for name, ratio in ratios.items():
        groups.setdefault(result.tasks[name].group, []).append(ratio)
    coverage = {group: fmean(found) for group, found in groups.items()}
    return {"tasks": ratios, "groups": coverage, "asked_differently": other}


def tables(result: SuiteResult, teacher: SuiteResult | None = None) -> str:
    """Render Markdown: a row per task, RULER by length, coverage of the teacher by group, and what is missing."""
    return "\n\n".join(_blocks(result, teacher))


def _blocks(result: SuiteResult, teacher: SuiteResult | None) -> Iterator[str]:
    compared = None if teacher is None else compare(result, teacher)
    rows = []
    for name in sorted(result.tasks, key=list(TASKS).index):
        score = result.tasks[name]
        row: dict[str, object] = {
            "task": name, "group": score.group, "read by": score.reading, "metric": score.metric.removesuffix(",none"),
            "shots": score.n_shots, "examples": f"{score.n_examples:,}", "value": score.cell(),
        }  # fmt: skip
        if teacher and compared:
            row["teacher"] = teacher.tasks[name].cell() if name in teacher.tasks else None
            row["change"] = percent_change(compared["tasks"].get(name))
        rows.append(row)
    if rows:
        yield markdown_table(pd.DataFrame(rows))
    if by_length := _by_length(result):
        yield markdown_table(pd.DataFrame(by_length))
    if compared and (groups := compared["groups"]):
        shares = [{"group": name, "coverage of the teacher": f"{100 * share:.1f} %"} for name, share in groups.items()]
        yield markdown_table(pd.DataFrame(shares))
    if compared and (other := compared["asked_differently"]):
        yield f"Not compared, because the teacher got other prompts or settings: {', '.join(other)}."
    if cut := [f"{name} ({score.n_cut})" for name, score in result.tasks.items() if score.n_cut]:
        yield f"Prompts cut on the left because the context could not hold them: {', '.join(cut)}."
    if result.failed:
        yield "\n".join(["Without a figure:", *(f"- {part}: {reason}" for part, reason in result.failed.items())])


def _by_length(result: SuiteResult) -> list[Record]:
    """Tabulate RULER's parts: one row per task, one column per length, shortest first."""
    rows: dict[str, Record] = {}
    for part in sorted((part for part in result.parts.values() if "length" in part), key=itemgetter("length")):
        row = rows.setdefault(part["ruler"], {"by length": part["ruler"]})
        row[str(part["length"])] = with_error(part["value"], part["stderr"], scale=100)
    return list(rows.values())
