"""`hybrid-distill export`: a student in a format that other software loads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from ..evaluation.evaluate import EvalResult
from ..export.card import on_card
from ..export.checkpoint import ExportFormat, export_checkpoint
from ..export.gate import GateReport, check_not_quantized, check_unchanged
from ..io import read_json
from ..pipeline import finished_run, is_run, trained_student
from ..pipeline.run import export
from ..plan import HeadPlan
from ..safe_loading import load_student
from ..scoring import HeadScores


@dataclass(frozen=True)
class ExportJob:
    """Export of a trained student in one of several formats, verified against the student."""

    model: Path
    """Folder of a finished run, or of an export of it (remote-code or safetensors)."""
    out: Path
    """New folder for the export, or an export to replace."""
    format: ExportFormat = "remote-code"
    """Format. ``remote-code``: for transformers, with the student's own Python files. ``falcon-h1``: for any software
    that supports FalconH1ForCausalLM, without code. ``safetensors``: for this package. ``vllm``, ``gguf`` (llama.cpp),
    ``mlx``, ``onnx``: for these programs (docs/serving.md)."""
    max_shard_size: str = "2GB"
    """Largest size of a weight file; a large value gives a single file."""


def export_student(job: ExportJob) -> GateReport:
    """Export a run's student, or convert an export to another format, through the gate.

    Raises ValueError for a folder without a student or a format that cannot express it; ExportError when the export
    does not match the student.
    """
    if is_run(job.model):
        inputs = finished_run(job.model)
        student, plan = trained_student(inputs)
        options = {"export_format": job.format, "max_shard_size": job.max_shard_size}
        report = export(inputs, student, plan, job.out, **options)
        assert report is not None, "exports are one process's work"
        return report
    if job.out.resolve() == job.model.resolve():
        raise ValueError(f"--out and --model are both {job.out}; pass another folder with --out.")
    check_not_quantized(job.model)
    student, tokenizer = load_student(job.model)
    check_unchanged(job.model)
    files = {name: job.model / f"{name}.json" for name in ("plan", "head_scores", "evaluation", "training")}
    results = read_json(files["evaluation"]) if files["evaluation"].is_file() else {}
    license, base_model = on_card(job.model / "README.md")
    return export_checkpoint(
        student,
        tokenizer,
        job.out,
        plan=HeadPlan.load(files["plan"]),
        export_format=job.format,
        results={name: EvalResult.from_dict(result) for name, result in results.items()},
        scores=HeadScores.load(files["head_scores"]) if files["head_scores"].is_file() else None,
        max_shard_size=job.max_shard_size,
        training=read_json(files["training"])["stages"] if files["training"].is_file() else (),
        license=license,
        base_model=base_model,
    )


def command(job: tyro.conf.OmitArgPrefixes[ExportJob]) -> None:
    """Export a student for transformers, vLLM, llama.cpp, MLX or ONNX Runtime (docs/export.md).

    A separate process then loads the export and must compute the same as the student.
    """
    if (report := export_student(job)).checks:
        print(report.table())
    print(f"export: {job.out}")
