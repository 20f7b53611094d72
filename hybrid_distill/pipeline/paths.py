"""Files of a run: the only place that knows their names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..train.config import StageConfig
from ..train.metrics import METRICS
from ..train.tracking import PROJECT, RUN_ID


@dataclass(frozen=True)
class RunPaths:
    """Files in the folder of a run, whether they exist or not."""

    out: Path

    @property
    def config(self) -> Path:
        """Resolved settings of the run."""
        return self.out / "config.json"

    @property
    def sources(self) -> Path:
        """Commits of the data sources on the hub."""
        return self.out / "sources.json"

    @property
    def scores(self) -> Path:
        return self.out / "scores.json"

    @property
    def partial_scores(self) -> Path:
        """Scores of a scoring that was interrupted."""
        return self.out / "scores.partial.json"

    @property
    def partial_attribution(self) -> Path:
        """Attribution that was interrupted, or given up because the teacher cannot answer from afar.

        Not one file with `partial_scores`: a run that was given up for ablation starts with it again.
        """
        return self.out / "attribution.partial.json"

    @property
    def plan(self) -> Path:
        return self.out / "plan.json"

    def restoration_plan(self, k: int) -> Path:
        """Plan of the ``k`` heads that recover most, made from the student in `aligned`."""
        return self.out / f"restoration-{k}.json"

    def partial_restoration(self, k: int) -> Path:
        """Heads chosen for `restoration_plan` before it was interrupted.

        One file a plan: cells of a sweep choose heads in the same folder at the same time.
        """
        return self.out / f"restoration-{k}.partial.json"

    @property
    def aligned(self) -> RunPaths:
        """Folder of the run that aligns every head before ``restoration`` chooses some."""
        return RunPaths(self.out / "aligned")

    @property
    def control(self) -> RunPaths:
        """Folder of the run that trains the teacher itself through the same stages."""
        return RunPaths(self.out / "control")

    @property
    def build(self) -> Path:
        """Record of the built student; its weights are `built_weights`."""
        return self.out / "build.json"

    @property
    def built_weights(self) -> Path:
        return self.out / "build.safetensors"

    @property
    def stages(self) -> Path:
        """Folder of the stages' folders."""
        return self.out / "stages"

    def stage_folders(self, stages: Sequence[StageConfig]) -> list[Path]:
        """Return the folder of each stage: ``stages/1-align``, ``stages/2-distill``."""
        return [
            self.stages / f"{number}-{stage.name}" for number, stage in enumerate(stages, start=1)
        ]

    def metrics(self) -> list[Path]:
        """List the metrics of the stages that have begun, in the order of the stages."""
        return sorted(self.stages.glob(f"*/{METRICS}"))

    @property
    def teacher_evaluation(self) -> Path:
        return self.out / "teacher" / "evaluation.json"

    @property
    def evaluation(self) -> Path:
        """Evaluation of the student."""
        return self.out / "evaluation.json"

    @property
    def speed(self) -> Path:
        """Speed of teacher and student by length of context."""
        return self.out / "speed.json"

    @property
    def export(self) -> Path:
        return self.out / "export"

    @property
    def report(self) -> Path:
        return self.out / "report.md"

    def results(self) -> list[Path]:
        """List what exists of all that a run writes besides its config: a new run here must not read it."""
        patterns = (
            self.scores.name,
            self.partial_scores.name,
            self.partial_attribution.name,
            self.plan.name,
            "restoration-*.json",
            self.aligned.out.name,
            self.control.out.name,
            self.build.name,
            self.built_weights.name,
            f"{self.stages.name}/*-*",
            str(self.teacher_evaluation.relative_to(self.out)),
            self.evaluation.name,
            self.speed.name,
            self.export.name,
            ".export.*.tmp",
            f"{self.report.stem}.*",
            f"{PROJECT}/events.out.tfevents.*",
            RUN_ID,
        )
        existing: list[Path] = []
        for pattern in patterns:
            existing += sorted(self.out.glob(pattern))
        return existing


def run_of_stage(stage: Path) -> RunPaths:
    """Return the run that a stage's folder, RUN/stages/NAME, belongs to."""
    return RunPaths(stage.resolve().parents[1])
