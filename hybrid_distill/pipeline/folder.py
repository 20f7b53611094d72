"""Run directory: whether a config may resume what it holds, and what must go first."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..config import RunConfig, from_json
from ..evaluation import EvalResult
from ..io import Record, check_out, differences
from ..train.checkpoint import CHECKPOINTS, STEPS
from ..train.config import StageConfig
from ..train.result import MANIFEST
from ..tunable import fixed_fields
from .paths import RunPaths

log = logging.getLogger(__name__)


def is_run(folder: Path) -> bool:
    """Check whether a folder holds the config of a run, of this or another version."""
    try:
        record = json.loads(RunPaths(folder).config.read_text())
    except (OSError, ValueError):
        return False
    # By its fields: a model's config.json has the same name.
    return isinstance(record, dict) and {"teacher", "scoring", "stages"} <= record.keys()


def check_is_not_another(folder: Path, fix: str) -> None:
    """Raise ValueError if a folder's config.json is not a run's; the message ends with ``fix``."""
    if RunPaths(folder).config.exists() and not is_run(folder):
        raise ValueError(f"{folder} holds a model, an export or other files, not a run; {fix}.")


def has_result(folder: Path) -> bool:
    """Check whether a run directory holds any result; config.json alone does not count."""
    for result in RunPaths(folder).results():
        for path in (result, *result.rglob("*")):
            if path.name != RunPaths(folder).config.name and path.is_file() and path.stat().st_size:
                return True
    return False


def as_started(config: RunConfig) -> RunConfig:
    """Return the run as it starts or resumes (`RunConfig.resolved`).

    A run that resumes has the dtypes that ``auto`` stood for when it began, maybe on another kind of machine.
    """
    is_open = config.with_dtypes() != config
    # Asked last: a sweep opens many runs, and `has_result` searches the whole folder.
    if is_open and config.resume == "auto" and is_run(config.out) and has_result(config.out):
        config = _with_dtypes_of(from_json(RunPaths(config.out).config), config)
    return config.resolved()


def _with_dtypes_of(before: RunConfig, config: RunConfig) -> RunConfig:
    """Return a run with the dtype and the precisions of the run ``before`` in place of ``auto``."""
    teacher = config.teacher
    if teacher.dtype == "auto":
        teacher = replace(teacher, dtype=before.teacher.dtype)
    precisions = {stage.name: stage.precision for stage in before.stages}
    stages: list[StageConfig] = []
    for stage in config.stages:
        if stage.precision == "auto" and stage.name in precisions:
            stage = replace(stage, precision=precisions[stage.name])
        stages.append(stage)
    return replace(config, teacher=teacher, stages=tuple(stages))


def obsolete_results(config: RunConfig) -> list[Path]:
    """List the results in a run's directory that the run must not read.

    - With ``resume`` "never": all of an earlier run.
    - After other evaluation settings or `other_questions`: both evaluations, and the report.
    - After other stages alone: the student's evaluation, and the report.

    Raises ValueError if the directory holds a run with other settings, naming the fields, or if its config.json is
    not a run's.
    """
    check_out(config.out)
    paths = RunPaths(config.out)
    if not paths.config.exists():
        return []
    check_is_not_another(config.out, "pass another --out")
    if config.resume == "never":
        return _left_by_an_earlier_run(config)
    if not has_result(config.out):
        return []
    before = as_moved(from_json(paths.config), config.out)
    _check_same(config, before)
    return _obsolete_measurements(config, before)


def _obsolete_measurements(config: RunConfig, before: RunConfig) -> list[Path]:
    """List the measurements that were made with other settings or of a student of other stages; log why."""
    paths = RunPaths(config.out)
    student_results = [path for path in (paths.evaluation, paths.report) if path.exists()]
    changed = differences(
        fixed_fields(before.evaluation), fixed_fields(config.evaluation), prefix="evaluation."
    )
    if not changed:
        changed = other_questions(config)
    if changed:
        log.info("teacher and student are measured again: %s", ", ".join(changed))
        if paths.teacher_evaluation.exists():
            return [*student_results, paths.teacher_evaluation]
        return student_results
    if config.stage_names == before.stage_names:
        return []
    if paths.evaluation.exists():
        log.info(
            "the student is measured again: its stages were %s",
            " ".join(before.stage_names) or "none",
        )
    return student_results


def other_questions(config: RunConfig) -> list[str]:
    """List the settings in which the questions behind a run's figures differ from its config's: `hybrid-distill
    evaluate` can ask others."""
    paths = RunPaths(config.out)
    wanted = {
        "n_examples": config.evaluation.n_examples,
        "prompt_format": config.scoring.prompt_format,
    }
    for path in (paths.teacher_evaluation, paths.evaluation):
        if path.exists():
            changed = differences(EvalResult.load(path).question_settings, wanted)
            if changed:
                return changed
    return []


def settings(config: RunConfig, stages: Sequence[str]) -> Record:
    """Return as JSON values what may not change when a run resumes: all but evaluation and `Tunable` fields.

    Of its stages, only those named in ``stages`` count.
    """
    record = fixed_fields(config)
    del record["stages"], record["evaluation"]
    for stage in config.stages:
        if stage.name in stages:
            record[stage.name] = stage.identity()
    return record


def as_moved(before: RunConfig, out: Path) -> RunConfig:
    """Return the config of the run in ``out``, whose folder may have moved together with the files that it names, as
    those of a sweep do."""

    def moved(file: Path | None) -> Path | None:
        if file is None or file.exists():
            return file
        new = Path(os.path.normpath(out / os.path.relpath(file, before.out)))
        return new if new.exists() else file

    return replace(
        before,
        scoring=replace(before.scoring, file=moved(before.scoring.file)),
        plan=replace(before.plan, file=moved(before.plan.file)),
        student=replace(before.student, aligned=moved(before.student.aligned)),
    )


def _check_same(config: RunConfig, before: RunConfig) -> None:
    """Raise ValueError unless ``before`` is this run's config. Settings may differ for the evaluation, and for stages
    that are not run or have not started. `train_stage` compares those that ``before`` left out."""
    begun = []
    for name in config.stage_names:
        if name in before.stage_names and _has_begun(config.out, name):
            begun.append(name)
    changed = differences(settings(before, begun), settings(config, begun))
    if changed:
        raise ValueError(
            f"{config.out} holds a run with other settings: {', '.join(changed)}; "
            "use another --out, or --resume never to begin again."
        )


def _has_begun(out: Path, stage: str) -> bool:
    """Check whether a stage has left a checkpoint or a result."""
    for folder in RunPaths(out).stages.glob(f"*-{stage}"):
        if (folder / MANIFEST).exists() or any((folder / CHECKPOINTS).glob(STEPS)):
            return True
    return False


def _left_by_an_earlier_run(config: RunConfig) -> list[Path]:
    """List the results that exist. Raises ValueError if this run has one of them as input."""
    results = RunPaths(config.out).results()
    files = [config.scoring.file, config.plan.file, config.student.aligned]
    files += [stage.cached_logits for stage in config.stages]
    teachers = [config.teacher, *map(config.teacher_of, config.stages)]
    # For a model on the hub, this names a folder that does not exist, which does no harm.
    files += [Path(teacher.path).expanduser() for teacher in teachers]
    for result in results:
        for file in files:
            if file is not None and file.resolve().is_relative_to(result.resolve()):
                raise ValueError(
                    f"{file} is an input of this run, but --resume never would delete it; copy it elsewhere, or "
                    "use another --out."
                )
    return results
