"""Tell teachers apart: by a fingerprint of the weights, and by the file that a folder came from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..io import read_json
from ..model.backbone_config import rope_settings
from ..model.configuration_hybrid import HybridConfig
from ..model.layout import text_config
from ..model.prefix import STUDENT_FIELDS
from ..model.weight_samples import spread_elements

FIELDS = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "layer_types",
    "sliding_window",
    "attn_logit_softcapping",
    "final_logit_softcapping",
)
"""Settings that decide what the weights compute, where a family has them. RoPE's are added."""
SAMPLES_PER_TENSOR = 256
"""Elements of each weight that a fingerprint reads: some of every head, up to 85 heads a layer."""
IMPORTED = "imported_from.json"
"""File that `hybrid-distill import-gguf` writes: ``file`` and ``sha256`` of the source."""


def fingerprint(model: nn.Module) -> str:
    """Hash a teacher's settings, and the names, shapes and some elements of its parameters.

    Of a student, also what was kept and what the other heads became. Elements are rounded to
    bfloat16, so that a checkpoint has the same fingerprint in bfloat16 and in float32. In float16
    it has another one (`float16_note`). Reads at most 256 elements per tensor: cheap for any model size.
    """
    config = text_config(model)
    settings = [getattr(config, name, None) for name in FIELDS]
    settings += [_rope(rope) for rope in rope_settings(config)]
    if config.model_type == HybridConfig.model_type:
        settings += [getattr(config, name) for name in STUDENT_FIELDS]
    digest = hashlib.sha256(json.dumps(settings).encode())
    for name, parameter in sorted(model.named_parameters()):
        values = parameter.detach()
        # torchao's 8-bit weights are a Tensor subclass that knows how to become an ordinary tensor.
        if type(values).dequantize is not Tensor.dequantize:
            values = values.dequantize()
        sample = spread_elements(values, SAMPLES_PER_TENSOR).to(torch.bfloat16)
        bits = sample.view(torch.int16).tolist()
        digest.update(f"{name} {tuple(parameter.shape)} {bits}".encode())
    return digest.hexdigest()[:16]


def _rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return RoPE's settings as every version of transformers and every source of a checkpoint spells them."""
    spelled = {}
    for name, value in sorted(rope.items()):
        if isinstance(value, int):
            value = float(value)
        # Older files name the type twice.
        if value is not None and name != "type":
            spelled[name] = value
    return spelled


def float16_note(teacher: nn.Module) -> str:
    """Explain that a teacher in float16 has a fingerprint of its own; empty for other dtypes."""
    if next(teacher.parameters()).dtype != torch.float16:
        return ""
    return " In float16, a teacher has a fingerprint of its own: score it and cache its logits in the dtype of the run."


def imported_from(name_or_path: str | Path) -> str | None:
    """Return the name and SHA-256 of the file that a folder was imported from, for reports.

    None if the folder was not imported.
    """
    path = Path(name_or_path).expanduser() / IMPORTED
    if not path.is_file():
        return None
    record = read_json(path)
    return f"{record.get('file')}, sha256 {record.get('sha256')}"
