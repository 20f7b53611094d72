"""Write export folders: model files, tokenizer, plan, scores, results, record, model card."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME

from ..evaluation.evaluate import EvalResult
from ..export_paths import CARD, EVALUATION, HEAD_SCORES, PLAN, REPORT, TRAINING
from ..io import Record, write_json, write_text
from ..model import HybridForCausalLM
from ..plan import HeadPlan
from ..progress import Phase
from ..scoring import HeadScores
from ..student.dtypes import check_one_dtype
from . import gate as export_gate
from .card import model_card
from .formats import FORMATS, ExportFormat, check_expressible, missing_program
from .gate import GateReport
from .license import UNKNOWN
from .record import write_record
from .replacement import check_replaceable, replacing_folder
from .weights import MAX_SHARD_SIZE

log = logging.getLogger(__name__)


def export_checkpoint(
    student: HybridForCausalLM,
    tokenizer: PreTrainedTokenizerBase | None,
    path: str | Path,
    *,
    plan: HeadPlan,
    export_format: ExportFormat = "remote-code",
    results: Mapping[str, EvalResult] | None = None,
    scores: HeadScores | None = None,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    gate: bool = True,
    license: str = UNKNOWN,
    base_model: str = "",
    training: Sequence[Record] | None = None,
) -> GateReport:
    """Export ``student``, by default for `from_pretrained` with ``trust_remote_code=True``.

    ``results`` maps "teacher" and "student" to their evaluations, for the model card. ``license`` (a hub identifier)
    and ``base_model`` are the teacher's. ``training`` holds the name, steps and tokens of each stage; None if they are
    unknown. The folder appears, or replaces an earlier export, only when it is complete and has passed the gate
    (`verify_export`).

    Raises ExportError when the student cannot be stored or fails the gate; ValueError when ``plan`` is not the
    student's, the student's parameters have several dtypes, ``path`` holds anything but an export, or
    ``export_format`` cannot express the student.
    """
    path = Path(path)
    check_one_dtype(student)
    _check_plan(plan, student)
    # Before the student is written and run: both take minutes for a large one.
    check_replaceable(path)
    check_expressible(student, export_format)
    with replacing_folder(path) as folder:
        with Phase("writing the export"):
            if tokenizer is not None:
                _save_tokenizer(tokenizer, folder)
            if student.generation_config is not None:
                # Not `save_pretrained`: it refuses what some teachers have, such as top_p without sampling.
                settings = student.generation_config.to_json_string()
                write_text(folder / GENERATION_CONFIG_NAME, settings)
            FORMATS[export_format].write(student, tokenizer, folder, max_shard_size)
        # Before plan, scores and card: the record lists the files that another program needs.
        with Phase("recording what the student computes"):
            record = write_record(student, tokenizer, folder, export_format)
        plan.save(folder / PLAN)
        _write_measurements(folder, results, scores, training)
        card = model_card(
            student,
            plan,
            results,
            scores,
            export_format=export_format,
            license=license,
            base_model=base_model,
            training=training,
            kernels=record["kernels"],
        )
        write_text(folder / CARD, card)
        if not gate:
            return GateReport()
        # Inside: a folder that fails must not replace an earlier export.
        with Phase("checking the export in another process"):
            return _verify(folder, path, export_format, student.device)


def _save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save a tokenizer as it is once it has read a text: without a length to pad or truncate to.

    A fast tokenizer keeps those of its file until its first call, so that a resumed run, which may not have called it,
    would export other bytes. Programs that read tokenizer.json by themselves (generate.py of ONNX) would obey them.
    """
    if tokenizer.is_fast:
        backend: Any = tokenizer.backend_tokenizer
        backend.no_padding()
        backend.no_truncation()
    tokenizer.save_pretrained(folder)


def _check_plan(plan: HeadPlan, student: HybridForCausalLM) -> None:
    """Raise ValueError for a plan that the student was not built with."""
    plan.check_fits(student)
    kept = [list(plan.kept_in(layer)) for layer in range(plan.n_layers)]
    kept_by_student = [list(heads) for heads in student.config.kept]
    if kept != kept_by_student:
        raise ValueError(
            f"the plan keeps {kept}, the student {kept_by_student}; pass the plan it was built with."
        )


def _verify(
    folder: Path, path: Path, export_format: ExportFormat, device: torch.device
) -> GateReport:
    """Run the gate on the unfinished ``folder`` and store its report.

    Warns and returns an empty report if the program that runs the format is not installed. Raises ExportError, naming
    the final ``path``, if a check fails.
    """
    missing = missing_program(export_format)
    if missing is not None:
        log.warning("%s was not checked: %s", path, missing)
        return GateReport()
    if device.type == "cuda":
        # Frees the record's float32 copy of the student: the gate's process needs that memory.
        torch.cuda.empty_cache()
    report = export_gate.run_gate(folder, str(device), shown_path=path).require(path)
    write_json(folder / REPORT, report.to_dict())
    return report


def _write_measurements(
    folder: Path,
    results: Mapping[str, EvalResult] | None,
    scores: HeadScores | None,
    training: Sequence[Record] | None,
) -> None:
    """Write head scores, evaluations and stages, each if it is not None."""
    if scores is not None:
        # An export may be published.
        public = replace(scores, provenance=_without_paths(scores.provenance))
        public.save(folder / HEAD_SCORES)
    for name, content in measurements(results, training).items():
        write_json(folder / name, content)


def measurements(
    results: Mapping[str, EvalResult] | None, training: Sequence[Record] | None
) -> dict[str, Record]:
    """Return the contents of an export's files of evaluations and stages, by file name."""
    files = {}
    if results is not None:
        evaluations = {name: result.to_dict() for name, result in results.items()}
        files[EVALUATION] = _without_paths(evaluations)
    if training is not None:
        files[TRAINING] = {"stages": list(training)}
    return files


def _without_paths(value: Any) -> Any:
    """Shorten absolute paths in a JSON value to their last component: they name users and machines."""
    if isinstance(value, dict):
        return {name: _without_paths(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_paths(item) for item in value]
    if isinstance(value, str) and (value.startswith("~") or Path(value).is_absolute()):
        return Path(value).name
    return value
