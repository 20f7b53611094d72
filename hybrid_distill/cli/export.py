"""The command ``hybrid-distill export``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import tyro
from huggingface_hub import ModelCard

from ..evaluation.evaluate import EvalResult
from ..export.card import UNKNOWN
from ..export.checkpoint import Form, export_checkpoint
from ..export.falcon_h1 import MODEL_TYPE
from ..export.gate import GateReport, check_unchanged
from ..guard import check_in_full, load_student, read_json
from ..model import HybridConfig
from ..pipeline import finished_run, is_run
from ..plan import HeadPlan
from ..scoring import HeadScores


@dataclass(frozen=True)
class ExportJob:
    """Write a trained student so that others can load it, in one of three forms, and prove that it is the student."""

    model: Path
    """The folder of a finished run, or of an export of it (remote-code or safetensors)."""
    out: Path
    """Where the export goes: a new folder, or an export to replace."""
    form: Form = "remote-code"
    """``remote-code``: for transformers, with the student's own Python files. ``falcon-h1``: for whatever knows
    FalconH1ForCausalLM, without any. ``safetensors``: for this package to reload."""
    max_shard_size: str = "2GB"
    """Weights are divided into files of at most this size; a large value merges them into one."""


def export_student(job: ExportJob) -> GateReport:
    """The gate's report of what was written. Raises ValueError for a folder without student, or a form that
    cannot express it, ExportError when what was written is not the student.
    """
    if is_run(job.model / "config.json"):
        run = finished_run(job.model)
        options = {"form": job.form, "max_shard_size": job.max_shard_size}
        return cast(GateReport, run.export(*run.trained_student(), job.out, **options))
    if job.out.resolve() == job.model.resolve():
        raise ValueError(f"--out is {job.out}, which is --model too; name another folder.")
    if not (job.model / "config.json").is_file():
        raise ValueError(f"--model is {job.model}, which holds no student; name a finished run, or an export.")
    config = read_json(job.model / "config.json")
    check_in_full(job.model)
    if config.get("model_type") != HybridConfig.model_type:
        hint = "the export that this one was made beside" if config.get("model_type") == MODEL_TYPE else "a student"
        raise ValueError(
            f"{job.model} holds a model of type {config.get('model_type')!r}; name a finished run, or {hint}: a folder "
            f"whose config.json says {HybridConfig.model_type}."
        )
    check_unchanged(job.model)
    student, tokenizer = load_student(job.model)
    files = {name: job.model / f"{name}.json" for name in ("plan", "head_scores", "evaluation", "training")}
    results = read_json(files["evaluation"]) if files["evaluation"].is_file() else {}
    license, base_model = _origin_on_card(job.model)
    return export_checkpoint(
        student,
        tokenizer,
        job.out,
        plan=HeadPlan.load(files["plan"]),
        form=job.form,
        results={name: EvalResult.from_dict(result) for name, result in results.items()},
        scores=HeadScores.load(files["head_scores"]) if files["head_scores"].is_file() else None,
        max_shard_size=job.max_shard_size,
        training=read_json(files["training"])["stages"] if files["training"].is_file() else (),
        license=license,
        base_model=base_model,
    )


def _origin_on_card(folder: Path) -> tuple[str, str]:
    """(license, base_model) as an export's own card has them."""
    card = folder / "README.md"
    data = ModelCard.load(card, ignore_metadata_errors=True).data.to_dict() if card.is_file() else {}
    return data.get("license") or UNKNOWN, data.get("base_model") or ""


def command(job: tyro.conf.OmitArgPrefixes[ExportJob]) -> None:
    """Write a student so that others can load it: remote code, a stock Falcon-H1, or safetensors (docs/export.md).

    Another process loads what was written, and must compute what the student does.
    """
    print(export_student(job).table())
    print(f"export: {job.out}")
