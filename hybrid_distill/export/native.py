"""Export of a student as it is, for transformers with the student's Python files or for this package."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from ..io import Record, write_json
from ..model import HybridForCausalLM
from ..model.field_rules import ATTENTION
from ..safe_loading import MODEL_CODE
from .versions import checked_transformers
from .weights import student_config, tied_weights, write_weights

AUTO_MAP = {
    "AutoConfig": "configuration_hybrid.HybridConfig",
    "AutoModel": "modeling_hybrid.HybridModel",
    "AutoModelForCausalLM": "modeling_hybrid.HybridForCausalLM",
    "AutoModelForSequenceClassification": "modeling_hybrid.HybridForSequenceClassification",
}


def tensors(student: HybridForCausalLM) -> dict[str, Tensor]:
    """Return the stored tensors by name, including tied ones."""
    return student.state_dict()


def write(
    student: HybridForCausalLM,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    max_shard_size: int | str,
) -> None:
    """Write weights and configuration, for this package to reload."""
    write_weights(tensors(student), folder, tied_weights(student), max_shard_size)
    write_json(folder / "config.json", configuration(student))


def write_with_code(
    student: HybridForCausalLM,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    max_shard_size: int | str,
) -> None:
    """Write weights, configuration and the Python files that compute the student."""
    write_weights(tensors(student), folder, tied_weights(student), max_shard_size)
    write_json(folder / "config.json", {**configuration(student), "auto_map": AUTO_MAP})
    # All but __init__.py, which would make the folder a package.
    for file in MODEL_CODE.glob("[!_]*.py"):
        shutil.copyfile(file, folder / file.name)


def configuration(student: HybridForCausalLM) -> Record:
    """Build config.json, with the checked attention implementation and versions of transformers."""
    config = student_config(student)
    config["architectures"] = [type(student).__name__]
    config["dtype"] = str(student.dtype).removeprefix("torch.")
    config["checked_attention"] = checked_attention(student)
    config["checked_transformers"] = checked_transformers(student.config.backbone["model_type"])
    return config


def checked_attention(student: HybridForCausalLM) -> str:
    """Return the student's attention implementation, or transformers' default if it needs a GPU."""
    own = student.model.config._attn_implementation
    if own in ATTENTION:
        return own
    # transformers chooses it when it makes a model of the family; on meta, that takes no memory.
    with torch.device("meta"):
        backbone_config = student.config.backbone_config()
        backbone = AutoModelForCausalLM.from_config(backbone_config, trust_remote_code=False)
    return backbone.config._attn_implementation
