"""`hybrid-distill export`: a student in a format that other software loads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from ..evaluation.evaluate import EvalResult
from ..export.checkpoint import ExportFormat, export_checkpoint
from ..export.formats import FORMATS
from ..export.gate import GateReport, check_not_quantized, check_unchanged
from ..export.license import read_license_and_base
from ..export_paths import CARD, EVALUATION, HEAD_SCORES, PLAN, TRAINING
from ..io import Record, read_json
from ..pipeline import finished_run, is_run, trained_student
from ..pipeline.exporting import export
from ..plan import HeadPlan
from ..safe_loading import load_student
from ..scoring import HeadScores
from ..validation import number_of_bytes


@dataclass(frozen=True)
class ExportJob:
    """Export of a trained student in one of several formats, verified against the student."""

    model: Path
    """Folder of a finished run, or of an export of it (remote-code or safetensors)."""
    out: Path
    """New folder for the export, or an export to replace."""
    format: ExportFormat = "remote-code"
    """Format. ``remote-code``: for transformers, with the student's own Python files.
    ``falcon-h1``: for any software that supports FalconH1ForCausalLM, without code.
    ``safetensors``: for this package. ``vllm``, ``gguf`` (llama.cpp), ``mlx``, ``onnx``: for
    these programs (docs/serving.md)."""
    max_shard_size: str = "2GB"
    """Largest size of a weight file; a large value gives a single file. Not for onnx and gguf,
    which write one."""

    def __post_init__(self) -> None:
        number_of_bytes("--max-shard-size", self.max_shard_size)
        if FORMATS[self.format].in_one_file and self.max_shard_size != ExportJob.max_shard_size:
            raise ValueError(
                f"--max-shard-size is {self.max_shard_size!r}, and {self.format} writes one file; leave it out."
            )


def export_student(job: ExportJob) -> GateReport:
    """Export a run's student, or convert an export to another format, through the gate.

    Raises ValueError for a folder without a student or a format that cannot express it;
    ExportError when the export does not match the student.
    """
    if is_run(job.model):
        inputs = finished_run(job.model)
        student, plan = trained_student(inputs)
        report = export(
            inputs,
            student,
            plan,
            job.out,
            export_format=job.format,
            max_shard_size=job.max_shard_size,
        )
        assert report is not None, "exports are one process's work"
        return report
    if job.out.resolve() == job.model.resolve():
        raise ValueError(f"--out and --model are both {job.out}; pass another folder with --out.")
    check_not_quantized(job.model)
    student, tokenizer = load_student(job.model)
    check_unchanged(job.model)
    license, base_model = read_license_and_base(job.model / CARD)
    # An export may have been made without scores, evaluation or training; the plan is always there.
    evaluations = _read_if_there(job.model / EVALUATION)
    results = None
    if evaluations is not None:
        results = {name: EvalResult.from_dict(result) for name, result in evaluations.items()}
    record = _read_if_there(job.model / TRAINING)
    training = None if record is None else record["stages"]
    scores = job.model / HEAD_SCORES
    return export_checkpoint(
        student,
        tokenizer,
        job.out,
        plan=HeadPlan.load(job.model / PLAN),
        export_format=job.format,
        results=results,
        scores=HeadScores.load(scores) if scores.is_file() else None,
        max_shard_size=job.max_shard_size,
        training=training,
        license=license,
        base_model=base_model,
    )


def _read_if_there(path: Path) -> Record | None:
    return read_json(path) if path.is_file() else None


def command(job: tyro.conf.OmitArgPrefixes[ExportJob]) -> None:
    """Export a student for transformers, vLLM, llama.cpp, MLX or ONNX Runtime (docs/export.md).

    A separate process then loads the export and must compute the same as the student.
    """
    report = export_student(job)
    # There are none if the engine is not installed: a line has said that the export was not checked.
    if report.checks:
        print(report.table())
    print(f"export: {job.out}")
