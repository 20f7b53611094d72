"""Read a run or compare directory into one record of rows and head scores; note what is missing."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from ...evaluation.evaluate import EvalResult
from ...plan import HeadId, HeadPlan
from ...scoring import HeadScores

DEFAULT_PAIRS = 16
RANKED = ("top", "top_k", "restoration", "joint")


class Measured(NamedTuple):
    """A value and its standard error (0 where none can be given)."""

    value: float
    error: float = 0.0


@dataclass(frozen=True)
class Row:
    """One model: how its heads were chosen, what was measured, how its stages trained.

    ``cells`` maps "knowledge", "perplexity", "agreement", "kl", "conv", "kv_choice/16", "kv_generation/16",
    "cache/2048" ... to numbers: accuracies are shares, memory is in bytes. ``data`` names a control data
    set, empty for the main one. ``draws`` is the number of rows that this one is the mean of. ``losses``
    holds each stage's metrics, by the name of its folder.
    """

    label: str
    selection: str
    k: int | None = None
    cells: Mapping[str, Measured] = field(default_factory=dict)
    data: str = ""
    draws: int = 1
    losses: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)

    def by_size(self, name: str) -> list[tuple[int, Measured]]:
        """What was measured at several sizes, for example ``by_size("cache")``, ascending."""
        found = (key.partition("/") for key in self.cells)
        return sorted(
            (int(size), self.cells[f"{name}/{size}"]) for prefix, _, size in found if prefix == name
        )


@dataclass(frozen=True)
class HeadMap:
    """One file of head scores, and the heads that the student ``label`` kept by it."""

    name: str
    scores: HeadScores
    kept: frozenset[HeadId] = frozenset()
    label: str = ""


@dataclass
class Record:
    """Everything a report shows; ``missing`` lists what could not be read.

    ``questions`` counts those on KV retrieval (for each dictionary size) and on knowledge. ``shared_losses``
    holds the metrics of stages that were run once for all students of a comparison.
    """

    title: str
    n_pairs: int = 0
    n_heads: int | None = None
    teacher: Row | None = None
    students: list[Row] = field(default_factory=list)
    head_maps: list[HeadMap] = field(default_factory=list)
    questions: tuple[int, int] | None = None
    knowledge_chance: float | None = None
    shared_losses: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    @property
    def rows(self) -> list[Row]:
        """The teacher, then every student; several random draws are followed by their mean."""
        return [*([self.teacher] if self.teacher else []), *with_means(self.students)]


def read_record(directory: Path) -> Record:
    """Collect what a report needs. Raises ValueError for a directory that is no run and no comparison."""
    if (directory / "compare.json").is_file():
        record = _read_comparison(directory)
    elif any(
        (directory / name).exists() for name in ("config.json", "plan.json", "evaluation.json", "stages")
    ):
        record = _read_run(directory)
    else:
        raise ValueError(
            f"{directory} is neither a run nor a comparison: it has no compare.json, config.json, plan.json, "
            "evaluation.json or stages/; pass the output directory of a run."
        )
    record.n_pairs = _pairs_of_the_finding(record)
    return record


def _read_comparison(directory: Path) -> Record:
    try:
        comparison = json.loads((directory / "compare.json").read_text())
        entries = [(entry, directory / entry["dir"]) for entry in comparison["students"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{directory / 'compare.json'} cannot be read ({error!r}); it needs "
            '{"students": [{"name", "label", "dir", "selection", "k"}], "teacher": path}.'
        ) from error
    record = Record(comparison.get("title") or directory.resolve().name, comparison.get("n_pairs", 0))
    record.shared_losses = _read_losses(directory / "aligned")
    _read_teacher(record, directory / comparison.get("teacher", "teacher/evaluation.json"))
    kept_by: dict[str, tuple[HeadPlan, str]] = {}
    for entry, folder in entries:
        row, plan = _read_student(record, folder, entry)
        record.students.append(row)
        if plan is not None and row.selection in RANKED and not row.data:
            kept_by.setdefault(entry.get("scores", "scores.json"), (plan, row.label))
    for file in dict.fromkeys(["scores.json", *kept_by]):
        _read_scores(record, directory / file, *kept_by.get(file, (None, "")))
    return record


def _read_run(directory: Path) -> Record:
    record = Record(directory.resolve().name)
    _read_teacher(record, directory / "teacher" / "evaluation.json")
    row, plan = _read_student(record, directory, {"label": "student", "selection": "student"})
    if plan is not None:
        row = replace(row, label=f"student, {plan.k} head{'s' * (plan.k != 1)} kept")
    record.students.append(row)
    _read_scores(record, directory / "scores.json", plan, row.label)
    return record


def _read_teacher(record: Record, path: Path) -> None:
    result = _read_evaluation(record, path, "the teacher's evaluation")
    if result is not None:
        record.teacher = Row("teacher", "teacher", cells=measured(result))
        record.questions = (result.n_examples, result.n_knowledge)
        record.knowledge_chance = result.knowledge_chance


def _read_student(record: Record, folder: Path, entry: Mapping[str, Any]) -> tuple[Row, HeadPlan | None]:
    label, data = entry.get("label") or entry.get("name") or folder.name, entry.get("data", "")
    label += f" ({data})" if data else ""
    result = _read_evaluation(record, folder / "evaluation.json", f"the evaluation of {label!r}")
    losses = _read_losses(folder)
    if not losses:
        record.missing.append(f"the loss curves of {label!r} (`{folder.name}/stages/*/metrics.jsonl`)")
    plan = None
    try:
        plan = HeadPlan.load(folder / "plan.json")
        record.n_heads = plan.n_layers * plan.n_heads
    except ValueError as error:
        record.missing.append(f"the plan of {label!r} (`{folder.name}/plan.json`: {_reason(error)})")
    row = Row(
        label=label,
        selection=entry.get("selection", "student"),
        k=entry.get("k") if plan is None else plan.k,
        cells={} if result is None else measured(result),
        data=data,
        losses=losses,
    )
    return row, plan


def _read_scores(record: Record, path: Path, plan: HeadPlan | None, label: str) -> None:
    try:
        scores = HeadScores.load(path)
    except ValueError as error:
        record.missing.append(f"head scores (`{path.name}`: {_reason(error)})")
        return
    record.n_heads = scores.n_layers * scores.n_heads
    record.head_maps.append(HeadMap(path.stem, scores, frozenset(plan.kept if plan else ()), label))


def _read_evaluation(record: Record, path: Path, what: str) -> EvalResult | None:
    try:
        return EvalResult.load(path)
    except ValueError as error:
        record.missing.append(f"{what} (`{path.parent.name}/{path.name}`: {_reason(error)})")
        return None


def _reason(error: Exception) -> str:
    return "not there" if isinstance(error.__cause__, FileNotFoundError) else str(error)


def _read_losses(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Metrics of a run's stages, by the name of the stage's folder."""
    paths = sorted((folder / "stages").glob("*/metrics.jsonl"))
    return {path.parent.name: read_metrics(path) for path in paths}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Records of a metrics.jsonl, in order, without skipped steps and the torn last line that a killed run leaves."""
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return [record for record in records if "skipped" not in record]


def measured(result: EvalResult) -> dict[str, Measured]:
    """The cells of one evaluation: accuracies with binomial standard errors, only what was measured."""
    cells: dict[str, Measured] = {"conv": Measured(result.conv_state_bytes)}
    for key, value in (
        ("perplexity", result.perplexity),
        ("agreement", result.top1_agreement),
        ("kl", result.kl_to_teacher),
    ):
        if value is not None and math.isfinite(value):
            cells[key] = Measured(value)
    if result.knowledge is not None:
        cells["knowledge"] = _binomial(result.knowledge, result.n_knowledge)
    for name, shares in (("kv_choice", result.kv_choice), ("kv_generation", result.kv_generation)):
        cells |= {
            f"{name}/{n_pairs}": _binomial(share, result.n_examples) for n_pairs, share in shares.items()
        }
    return cells | {f"cache/{length}": Measured(size) for length, size in result.cache_bytes.items()}


def _binomial(share: float, n: int) -> Measured:
    """A share of n answers. Its error is that of (k + 1/2) / (n + 1), which is not zero at 0 % and 100 %."""
    smoothed = (share * n + 0.5) / (n + 1)
    return Measured(share, math.sqrt(smoothed * (1 - smoothed) / n) if n else 0.0)


def with_means(rows: Sequence[Row]) -> list[Row]:
    """The rows; random draws of one size are followed by their mean and its standard error over the draws."""
    groups: dict[tuple[int | None, str], list[Row]] = defaultdict(list)
    for row in rows:
        if row.selection == "random" and row.cells:
            groups[row.k, row.data].append(row)
    out: list[Row] = []
    for row in rows:
        out.append(row)
        group = groups[row.k, row.data]
        if len(group) > 1 and row is group[-1]:
            out.append(_mean_row(group))
    return out


def _mean_row(group: Sequence[Row]) -> Row:
    cells = {}
    for key in set.intersection(*(set(row.cells) for row in group)):
        values = [row.cells[key].value for row in group]
        cells[key] = Measured(fmean(values), stdev(values) / math.sqrt(len(values)))
    k, data = group[0].k, group[0].data
    label = f"{k} random heads (mean of {len(group)}{', ' * bool(data)}{data})"
    return Row(label, "random", k, cells, data, draws=len(group))


def _pairs_of_the_finding(record: Record) -> int:
    """The dictionary size that is asked for, else 16 pairs, else the largest that was measured."""
    sizes = {n for row in [record.teacher, *record.students] if row for n, _ in row.by_size("kv_generation")}
    for wanted in (record.n_pairs, DEFAULT_PAIRS):
        if wanted in sizes:
            return wanted
    return max(sizes, default=DEFAULT_PAIRS)
