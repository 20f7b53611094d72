"""The directory of a run: what it holds, and whether a config may resume it."""

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
    "teacher_sharding",
)  # fmt: skip
"""Fields of a config in which a resumed run may differ from its directory's config.json."""
LEAVES = (
    "scores.json", "scores.partial.json", "plan.json", "restoration-*.json", "build.json", "aligned", "stages/*-*",
    "teacher/evaluation.json", "evaluation.json", "export", ".export.*.tmp", "report.md",
    f"{PROJECT}/events.out.tfevents.*",
)  # fmt: skip
"""Results of a run beside config.json; a new run in its place must not read them."""
MEASURED = ("teacher/evaluation.json", "evaluation.json", "report.md")
"""Results made again, and nothing else, when the config asks for another evaluation."""


def is_run(path: Path) -> bool:
    """Return whether a config.json is that of a run, perhaps of another version."""
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return isinstance(record, dict) and {"teacher", "scoring", "stages"} <= record.keys()


def has_result(folder: Path) -> bool:
    """Return whether a run has left any result in its directory; its settings alone are not one."""
    found = (path for name in LEAVES for left in folder.glob(name) for path in (left, *left.rglob("*")))
    return any(path.name != "config.json" and path.is_file() and path.stat().st_size for path in found)


def outdated(config: RunConfig) -> list[Path]:
    """List what lies in a run's directory and the run must not read: with ``resume`` "never" all results of an earlier
    run; after a change of ``evaluation`` alone, what was measured.

    Raises ValueError, naming the fields, when the directory holds a run with other settings, and when it holds
    another kind of config.json.
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
    """Raise ValueError unless ``before`` is the record of this run's config. The evaluation may differ, and settings of
    stages that are not run or have not begun."""
    free = [stage for stage in config.stages if not _has_begun(config.out, stage)]
    changed = differences(before, now, {*MAY_CHANGE, *config.unused_stages, *free, "evaluation"}, STAGE_MAY_CHANGE)
    if changed:
        raise ValueError(
            f"{config.out} holds a run with other settings: {', '.join(changed)}; "
            "use another --out, or --resume never to begin again."
        )


def _has_begun(out: Path, stage: str) -> bool:
    """Return whether a stage has left a checkpoint or its result."""
    return any(path for name in (MANIFEST, "checkpoints/step-*") for path in out.glob(f"stages/*-{stage}/{name}"))


def _left_by_an_earlier_run(config: RunConfig) -> list[Path]:
    """List the `LEAVES` that are there. Raises ValueError when this run is to read one of them."""
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
                f"{inputs[0]} is to be read, and is of the run that --resume never removes; copy it to another place, "
                "or use another --out."
            )
    return left
