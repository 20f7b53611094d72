"""Run directory: its contents, and whether a config may resume it."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from ..config import RunConfig, to_json
from ..io import Record, differences
from ..train.checkpoint import MANIFEST
from ..train.config import MAY_CHANGE as STAGE_MAY_CHANGE
from ..train.tracking import PROJECT

log = logging.getLogger(__name__)

MAY_CHANGE = (
    "out", "resume", "trackers", "group", "profile", "dry_run", "show_config", "gpus", "gpu_memory", "export",
    "teacher_sharding", "collective_timeout",
)  # fmt: skip
"""Config fields that may differ from config.json when a run resumes."""
STUDENT_MAY_CHANGE = ("kernels",)
"""Fields of ``student`` that may differ too: they change how it is computed, not what it is."""
LEAVES = (
    "scores.json", "scores.partial.json", "plan.json", "restoration-*.json", "build.json", "build.safetensors",
    "aligned", "stages/*-*",
    "teacher/evaluation.json", "evaluation.json", "export", ".export.*.tmp", "report.md",
    f"{PROJECT}/events.out.tfevents.*",
)  # fmt: skip
"""Results of a run, next to config.json; a new run in the same directory must not read them."""
MEASURED = ("teacher/evaluation.json", "evaluation.json", "report.md")
"""The only results to redo when the config's evaluation changes."""


def is_run(path: Path) -> bool:
    """Check whether a config.json belongs to a run, of this or another version."""
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return isinstance(record, dict) and {"teacher", "scoring", "stages"} <= record.keys()


def has_result(folder: Path) -> bool:
    """Check whether a run directory holds any result; config.json alone does not count."""
    found = (path for name in LEAVES for left in folder.glob(name) for path in (left, *left.rglob("*")))
    return any(path.name != "config.json" and path.is_file() and path.stat().st_size for path in found)


def outdated(config: RunConfig) -> list[Path]:
    """List the files in a run's directory that the run must not read: with ``resume`` "never", all results of an
    earlier run; if only ``evaluation`` has changed, the measurements.

    Raises ValueError if the directory holds a run with other settings, naming the fields, or if its config.json is
    not a run's.
    """
    path = config.out / "config.json"
    if path.exists() and not is_run(path):
        raise ValueError(f"{config.out} holds a model, an export or other files, not a run; pass another --out.")
    if config.resume == "never":
        return _left_by_an_earlier_run(config) if path.exists() else []
    if not path.exists() or not has_result(config.out):
        return []
    before, now = json.loads(path.read_text()), to_json(config)
    _check_same(config, before, now)
    measured = [record.get("evaluation", {}) for record in (before, now)]
    changed = differences(*measured, leave_out=("batch_size", "stated_pairs"), prefix="evaluation.")
    left = [found for name in MEASURED if changed and (found := config.out / name).exists()]
    if left:
        log.info("teacher and student are measured again: %s", ", ".join(changed))
    return left


def _check_same(config: RunConfig, before: Record, now: Record) -> None:
    """Raise ValueError unless ``before`` is the record of this run's config. Settings may differ for the evaluation,
    and for stages that are not run or have not started."""
    free = [stage for stage in config.stages if not _has_begun(config.out, stage)]
    within = {*STAGE_MAY_CHANGE, *STUDENT_MAY_CHANGE}
    changed = differences(before, now, {*MAY_CHANGE, *config.unused_stages, *free, "evaluation"}, within)
    if changed:
        raise ValueError(
            f"{config.out} holds a run with other settings: {', '.join(changed)}; "
            "use another --out, or --resume never to begin again."
        )


def _has_begun(out: Path, stage: str) -> bool:
    """Check whether a stage has left a checkpoint or a result."""
    return any(path for name in (MANIFEST, "checkpoints/step-*") for path in out.glob(f"stages/*-{stage}/{name}"))


def _left_by_an_earlier_run(config: RunConfig) -> list[Path]:
    """List the `LEAVES` that exist. Raises ValueError if this run has one of them as input."""
    left = [found for name in LEAVES for found in sorted(config.out.glob(name))]
    files = (
        config.scoring.file,
        config.plan.file,
        config.student.aligned,
        *(s.cached_logits for s in config.own_stages),
    )
    for found in left:
        if inputs := [path for path in files if path and path.resolve().is_relative_to(found.resolve())]:
            raise ValueError(
                f"{inputs[0]} is an input of this run, but --resume never would delete it; copy it elsewhere, or use "
                "another --out."
            )
    return left
