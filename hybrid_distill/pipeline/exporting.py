"""Export of a finished run: the student, with the run's scores, results and training record."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from ..distributed import from_main, on_main_process
from ..evaluation.evaluate import EvalResult
from ..export import ExportError, GateReport, export_checkpoint, is_exported, license_and_name
from ..model.modeling_hybrid import HybridForCausalLM
from ..plan import HeadPlan
from ..scoring import HeadScores
from .finished import training_record
from .folder import other_questions
from .inputs import RunInputs
from .paths import RunPaths

log = logging.getLogger(__name__)


def export_once(inputs: RunInputs, student: HybridForCausalLM, plan: HeadPlan) -> None:
    """Export the student unless the run's folder holds the same export, checked and unchanged."""
    paths = inputs.paths

    def is_done() -> bool:
        results = evaluations_by_role(paths)
        return is_exported(paths.export, student, "remote-code", results, training_record(inputs))

    if from_main(is_done):
        log.info(
            "export: %s is there and unchanged; `hybrid-distill verify` checks it again",
            paths.export,
        )
    else:
        export(inputs, student, plan)


def evaluations_by_role(paths: RunPaths) -> dict[str, EvalResult]:
    """Return the run's evaluations by role: teacher, control and student, as far as there are any."""
    files = {
        "teacher": paths.teacher_evaluation,
        "control": paths.control.evaluation,
        "student": paths.evaluation,
    }
    results = {}
    for role, file in files.items():
        if file.exists():
            results[role] = EvalResult.load(file)
    return results


def export(
    inputs: RunInputs,
    student: HybridForCausalLM,
    plan: HeadPlan,
    path: Path | None = None,
    **options: Any,
) -> GateReport | None:
    """Export the student through the export gate, with the scores and results in the run directory.

    ``options`` go to `export_checkpoint`. Returns the gate's report on the main process, None on the others. Raises
    ExportError if the exported model does not compute the same as the student. Nothing is lost then: the student is
    in its last stage's folder, and the same command finds everything but the export.
    """
    paths = inputs.paths
    license, base_model = license_and_name(inputs.config.teacher.path)
    changed = other_questions(inputs.config)
    if changed:
        log.warning(
            "the exported figures answer other questions than the run's: %s; for the run's own, "
            "`hybrid-distill evaluate %s` first",
            ", ".join(changed),
            paths.out,
        )
    results = evaluations_by_role(paths)
    scores = None
    if paths.scores.exists():
        scores = HeadScores.load(paths.scores)
    reports: list[GateReport] = []

    def write() -> None:
        try:
            report = export_checkpoint(
                student,
                inputs.tokenizer,
                path or paths.export,
                plan=plan,
                results=results,
                scores=scores,
                training=training_record(inputs),
                license=license,
                base_model=base_model,
                **options,
            )
        except ExportError as error:
            raise ExportError(
                f"{error}\nNothing else is lost: the trained student is in {paths.stages} and its "
                "results are written; the same command repeats the export alone."
            ) from error
        reports.append(report)

    on_main_process(write)
    return reports[0] if reports else None
