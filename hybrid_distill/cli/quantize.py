"""`hybrid-distill quantize`: an export with 8-bit linear projections, by torchao."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Literal

import tyro
from transformers import AutoModelForCausalLM, PreTrainedModel, TorchAoConfig

from ..export.card import quantized_card
from ..export.checkpoint import replacing_folder
from ..export.gate import check_not_quantized, copy_record, run_gate
from ..guard import load_student
from ..io import Record, write_json, write_text

Numbers = Literal["int8", "fp8"]
IN_FULL = ("lm_head", "a_proj")
"""Linear layers left unquantized: the output embedding, and the decays, whose errors accumulate with length."""
TOLERANCE = {"int8": 0.05, "fp8": 0.3}
"""Largest allowed difference from the unquantized student's logits, relative to the largest (docs/publishing.md)."""
TRAVELS = (
    "tokenizer*", "special_tokens_map.json", "chat_template.jinja", "plan.json", "head_scores.json", "training.json",
)  # fmt: skip


def _config(to: Numbers, student: PreTrainedModel) -> TorchAoConfig:
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig

    kind = {"int8": Int8WeightOnlyConfig, "fp8": Float8WeightOnlyConfig}[to]
    # Full names: transformers does not match parts of a name.
    in_full = [name for name, _ in student.named_modules() if name.split(".")[-1] in IN_FULL]
    return TorchAoConfig(kind(), modules_to_not_convert=in_full)


def _weight_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def command(
    path: tyro.conf.Positional[Path],
    out: tyro.conf.Positional[Path],
    /,
    to: Numbers = "int8",
    tolerance: float | None = None,
) -> None:
    """Quantize the linear projections of an export to 8 bits; needs torchao.

    A separate process then loads the copy, and its logits must match the student's within --tolerance.

    Args:
        path: The folder of an export in its remote-code form.
        out: The folder to create.
        to: The 8-bit format, integer or floating point, with one scale per row.
        tolerance: Largest allowed difference from the student's logits, as a share of its largest logit; by default
            0.05 for int8, 0.3 for fp8.
    """
    limit = TOLERANCE[to] if tolerance is None else tolerance
    if not 0 < limit < 1:
        raise ValueError(f"--tolerance is {tolerance}; pass a share of the largest logit, such as {TOLERANCE[to]}.")
    if out.exists():
        raise ValueError(f"{out} exists; pass a new folder.")
    if importlib.util.find_spec("torchao") is None:
        raise ValueError("quantize needs torchao, which is not installed; pip install torchao.")
    student, _ = load_student(path)
    check_not_quantized(path)
    if not (path / "gate" / "reference.safetensors").is_file():
        raise ValueError(f"{path} has no gate/reference.safetensors to compare the copy with; export it again.")
    options: Record = {"dtype": student.dtype, "quantization_config": _config(to, student)}
    copy = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=False, **options)
    with replacing_folder(out) as new:
        copy.save_pretrained(new)
        for pattern in TRAVELS:
            for file in path.glob(pattern):
                shutil.copyfile(file, new / file.name)
        copy_record(path, new, {"to": to, "limit": limit, "not_quantized": IN_FULL})
        report = run_gate(new, "cpu", called=out).require(out)
        write_json(new / "gate" / "report.json", report.to_dict())
        if (card := path / "README.md").is_file():
            write_text(new / "README.md", quantized_card(card.read_text(encoding="utf-8"), to, limit))
    print(f"{_weight_bytes(path):,} bytes of weights -> {_weight_bytes(out):,} in {to}: {out}\n{report.table()}")
