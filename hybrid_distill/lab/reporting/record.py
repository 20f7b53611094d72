"""Read what the report of a run shows, from the files on disk alone."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from ...evaluation.evaluate import EvalResult
from ...io import Record, read_json
from ...pipeline.folder import check_is_not_another
from ...pipeline.paths import RunPaths
from ...plan import HeadPlan
from ...scoring import HeadScores
from ...train.metrics import METRICS

T = TypeVar("T")
TEACHER = "teacher"
CONTROL = "control"
STUDENT = "student"
GUESSING = "guessing"
SHARED = "all heads, once for every student"


@dataclass(frozen=True)
class RunRecord:
    """Contents of a run's report."""

    title: str
    models: pd.DataFrame
    """Figures of the teacher (if it was evaluated), the control (if there is one), the student, and guessing: one row
    each."""
    errors: pd.DataFrame
    """Standard errors of ``models``, as far as there are any."""
    kept: Mapping[str, tuple[float, float] | None]
    """Accuracies of the student relative to its teacher's (`EvalResult.relative_to`)."""
    speed: pd.DataFrame
    """Rows of speed.json; empty if speed was not measured."""
    losses: pd.DataFrame
    """Points of the training curves; see `_losses`."""
    plan: HeadPlan | None
    scores: HeadScores | None
    questions: str
    """Number and format of the questions behind the accuracies, and which models answered others; empty if the teacher
    was not evaluated."""
    window: int
    """Tokens of the windows of replaced heads; 0 if they have none, or if it is not known."""
    unit: str
    """Units that the plan keeps: single heads, or groups of them."""
    text_length: float
    """Mean tokens of a held-out text; 0 if none was measured."""
    missing: tuple[str, ...]
    """Files that could not be read."""


def read_run(folder: Path) -> RunRecord:
    """Read a run, finished or not. Raises ValueError for a folder that holds none."""
    folder = folder.resolve()  # "." has no name, and the name is the title
    paths = RunPaths(folder)
    _check_is_run(paths)
    # The report lists what is missing in the order of these calls.
    files = _Files()
    teacher = files.load(EvalResult.load, paths.teacher_evaluation, "the teacher's evaluation")
    student = files.load(EvalResult.load, paths.evaluation, "the evaluation of 'student'")
    plan = files.load(HeadPlan.load, paths.plan, "the plan of 'student'")
    losses = _losses(paths, STUDENT)
    # By a loader of its own, so as not to be listed: a run without settings lacks other files, which are.
    settings = _Files().load(read_json, paths.config, "the settings") or {}
    if losses.empty and settings.get("stages", True):
        pattern = f"{folder.name}/{paths.stages.name}/*/{METRICS}"
        files.missing.append(f"the loss curves of 'student' (`{pattern}`)")
    scores = files.load(HeadScores.load, paths.scores, "head scores")

    speed = None
    # Not listed if absent: only `evaluate --speed` writes it.
    if paths.speed.exists():
        speed = files.load(_speed_rows, paths.speed, "the speeds")

    results: dict[str, EvalResult | None] = {}
    if teacher is not None:
        results[TEACHER] = teacher
    if paths.control.evaluation.exists():
        results[CONTROL] = files.load(
            EvalResult.load, paths.control.evaluation, "the control's evaluation"
        )
    results[STUDENT] = student
    models: dict[str, dict[str, float]] = {}
    errors: dict[str, dict[str, float]] = {}
    for name, result in results.items():
        models[name] = {}
        errors[name] = {}
        if result is not None:
            models[name] = all_figures(result)
            errors[name] = result.standard_errors()
    models[GUESSING] = {}
    errors[GUESSING] = {}
    kept: dict[str, tuple[float, float] | None] = {}
    questions = ""
    text_length = 0.0
    if teacher is not None:
        models[GUESSING] = teacher.chances()
        questions = _questions(teacher, results)
    if student is not None:
        text_length = student.text_length
        if teacher is not None:
            kept = student.relative_to(teacher)
    return RunRecord(
        title=folder.name,
        models=_frame(models),
        errors=_frame(errors),
        kept=kept,
        speed=pd.DataFrame(speed),
        # For a `restoration` plan all heads align in a run of its own: the plan comes after it.
        losses=pd.concat([_losses(paths.aligned, SHARED), losses]),
        plan=plan,
        scores=scores,
        questions=questions,
        window=settings.get("student", {}).get("window", 0),
        unit=settings.get("plan", {}).get("unit", "head"),
        text_length=text_length,
        missing=tuple(files.missing),
    )


def _check_is_run(paths: RunPaths) -> None:
    check_is_not_another(paths.out, "pass the --out of `hybrid-distill run`")
    signs = (paths.config, paths.plan, paths.evaluation, paths.stages)
    if not any(path.exists() for path in signs):
        raise ValueError(
            f"{paths.out} is neither a run nor a sweep: it has no {paths.config.name} or results.csv. "
            "Pass the --out of `hybrid-distill run` or `sweep`."
        )


def _speed_rows(path: Path) -> list[Record]:
    rows: list[Record] = read_json(path)["rows"]
    return rows


class _Files:
    """Loader of a run's files, which notes those that cannot be read."""

    def __init__(self) -> None:
        self.missing: list[str] = []
        """Files that could not be read, with reasons."""

    def load(self, load: Callable[[Path], T], path: Path, content: str) -> T | None:
        """Load a file; if that fails, note its ``content`` and the reason, and return None."""
        try:
            return load(path)
        except ValueError as error:
            is_absent = isinstance(error.__cause__, FileNotFoundError)
            reason = "not there" if is_absent else error
            self.missing.append(f"{content} (`{path.parent.name}/{path.name}`: {reason})")
            return None


def _frame(rows: dict[str, dict[str, float]]) -> pd.DataFrame:
    return pd.DataFrame(list(rows.values()), index=list(rows), dtype=float)


def _questions(teacher: EvalResult, results: Mapping[str, EvalResult | None]) -> str:
    kinds = [
        f"{teacher.n_examples} for each dictionary size",
        f"{teacher.n_knowledge} on knowledge",
    ]
    if teacher.n_far:
        kinds.append(f"{teacher.n_far} on dictionaries {teacher.distance} words earlier")
    sentences = [f"Questions: {', '.join(kinds)}.", f"Prompt format: {teacher.prompt_format}."]
    for name, result in results.items():
        if result is None:
            continue
        # `hybrid-distill evaluate` may have asked others of teacher and student, but not of the control.
        own = result.question_settings
        changed = []
        for setting, teachers in teacher.question_settings.items():
            if own[setting] != teachers:
                changed.append(f"{setting} is {own[setting]}, not {teachers}")
        if changed:
            sentences.append(
                f"The {name} answered other questions than the teacher: {', '.join(changed)}."
            )
    return " ".join(sentences)


def all_figures(result: EvalResult) -> dict[str, float]:
    """Return an evaluation's figures, with and without the recurrent heads (`zeroed_section`)."""
    figures = result.figures()
    parts = {"recurrence": result.recurrent_heads_zeroed, "window": result.windows_zeroed}
    for part, zeroed in parts.items():
        if zeroed is None:
            continue
        for name, measured in zeroed["figures"].items():
            figures[f"whole_{name}"] = measured["whole"]
            figures[f"zeroed_{part}_{name}"] = measured["zeroed"]
        figures[f"{part}_unused"] = float(zeroed["unused"])
    return figures


def metrics(path: Path) -> list[Record]:
    """Read the complete lines of a metrics.jsonl; a killed process may have left a partial one."""
    records = []
    for line in path.read_text().splitlines():
        with suppress(ValueError):
            records.append(json.loads(line))
    return records


def _losses(paths: RunPaths, panel: str) -> pd.DataFrame:
    """Return the losses of a run's stages and of every layer as running means, one row per point.

    Columns: ``panel``, ``stage``, ``x`` (step), ``line`` ("loss" or a layer), ``y``. Leaves out
    skipped steps; a step repeated after a resume counts once.
    """
    points = []
    for path in paths.metrics():
        stage = path.parent.name
        for record in metrics(path):
            if "step" not in record or "skipped" in record:
                continue
            losses = {"loss": record.get("loss"), **record.get("per_layer", {})}
            for line, loss in losses.items():
                points.append((panel, stage, record["step"], line, loss))
    frame = pd.DataFrame(points, columns=["panel", "stage", "x", "line", "y"]).dropna()
    frame = frame.drop_duplicates(["stage", "x", "line"], keep="last")
    frame = frame.sort_values(["stage", "x"], kind="stable")
    # A logarithmic axis has no place for others.
    frame = frame.loc[(frame.y > 0) & (frame.y < math.inf)]
    smooth = frame.groupby(["stage", "line"]).y.transform(_running_mean)
    return frame.assign(y=smooth)


def _running_mean(losses: pd.Series) -> Any:
    window = max(len(losses) // 40, 5)
    return losses.rolling(window, center=True, min_periods=1).mean()
