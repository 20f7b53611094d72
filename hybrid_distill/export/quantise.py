"""The command ``hybrid-distill quantise``: an export with its linear projections in 8 bits, by torchao."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, TorchAoConfig

from ..guard import check_checkpoint, load_student
from .check import Prompts, _worse, load_record

Numbers = Literal["int8", "fp8"]
IN_FULL = ("lm_head", "a_proj")
"""Linears that stay as they are: the output embedding, and the decays, of which small errors add up over a context."""
TOLERANCE = {"int8": 0.05, "fp8": 0.2}
"""Largest difference of logits from the unquantised student's, relative to its largest logit (docs/publishing.md)."""
TRAVELS = (
    "tokenizer*", "special_tokens_map.json", "chat_template.jinja", "plan.json", "head_scores.json", "training.json",
)  # fmt: skip


def quantise(folder: Path, out: Path, to: Numbers = "int8") -> str:
    """Write the student of an export to a new folder with 8-bit weights; says what that changes, as text.

    What was written is loaded again and held against the export's record. Raises ValueError without torchao, for a
    folder that is no export, for an ``out`` that exists, and when logits differ by more than `TOLERANCE`.
    """
    if out.exists():
        raise ValueError(f"{out} exists; pass a new folder.")
    check_checkpoint(folder, numbers=False)
    if importlib.util.find_spec("torchao") is None:
        raise ValueError("quantise needs torchao, which is not installed; pip install torchao.")
    student, _ = load_student(folder)
    dtype = student.dtype
    _, prompts = load_record(folder / "gate", "cpu")
    try:
        load: Any = AutoModelForCausalLM.from_pretrained
        settings = _config(to, student)
        load(folder, dtype=dtype, quantization_config=settings, trust_remote_code=False).save_pretrained(out)
        reloaded = load(out, dtype=dtype, trust_remote_code=False).eval()
        difference, same = compare(reloaded, prompts)
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        raise
    if not difference <= TOLERANCE[to]:
        shutil.rmtree(out)
        raise ValueError(
            f"in {to}, logits differ by {difference:.3f} of the largest one, more than {TOLERANCE[to]}; "
            "keep this student as it is, or take int8."
        )
    for pattern in TRAVELS:
        for file in folder.glob(pattern):
            shutil.copyfile(file, out / file.name)
    record = {"numbers": to, "not_quantised": IN_FULL, "difference": difference, "limit": TOLERANCE[to], "same": same}
    (out / "quantisation.json").write_text(json.dumps(record, indent=2) + "\n")
    return (
        f"{_weight_bytes(folder):,} bytes of weights -> {_weight_bytes(out):,} in {to}; logits differ by "
        f"{difference:.4f} of the largest one (at most {TOLERANCE[to]}); {same:.1%} of next tokens are the same: {out}"
    )


def _config(to: Numbers, student: PreTrainedModel) -> TorchAoConfig:
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig

    kind = {"int8": Int8WeightOnlyConfig, "fp8": Float8WeightOnlyConfig}[to]
    # Whole names: transformers does not find a part of one.
    in_full = [name for name, _ in student.named_modules() if name.split(".")[-1] in IN_FULL]
    return TorchAoConfig(kind(), modules_to_not_convert=in_full)


@torch.no_grad()
def compare(model: PreTrainedModel, prompts: Prompts) -> tuple[float, float]:
    """(largest difference of logits relative to the largest one, share of places with the same best token)."""
    worst, same, places = 0.0, 0, 0
    for ids_L, expected_LC in zip(prompts.ids_L, prompts.logits_LC, strict=True):
        logits_LC = model(input_ids=ids_L[None], use_cache=False).logits[0].float()[:, prompts.columns_C]
        worst = _worse(worst, logits_LC - expected_LC)
        same += int((logits_LC.argmax(-1) == expected_LC.argmax(-1)).sum())
        places += len(ids_L)
    return worst / prompts.scale, same / places


def _weight_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
