"""Export of a student for mlx-lm: weights, configuration, and the model file that mlx-lm imports."""

from __future__ import annotations

import shutil
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ..io import write_json
from ..model import HybridForCausalLM
from ..model.backbone_config import rope_settings
from .obstacles import backbone_obstacles, recurrence_obstacles, rope_kinds
from .weights import student_config, tied_weights, write_weights

MODEL_FILE = Path(__file__).with_name("mlx_model.py")
ROPE_TYPES = {"default", "linear", "llama3"}
DEFAULT_THETA = 10000.0


def obstacles(student: HybridForCausalLM) -> list[str]:
    """List the reasons why the shipped MLX model cannot express a student."""
    reasons = backbone_obstacles(student)
    reasons += recurrence_obstacles(student)
    if student.config.conv_bias:
        reasons.append("its convolutions have a bias, as Llamba's")
    kinds = rope_kinds(student)
    if not kinds <= ROPE_TYPES:
        reasons.append(
            f"its RoPE is {', '.join(sorted(kinds))}, not one of {', '.join(sorted(ROPE_TYPES))}"
        )
    return reasons


def write(
    student: HybridForCausalLM,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    max_shard_size: int | str,
) -> None:
    """Write a folder for ``mlx_lm.load`` and mlx-lm's commands, with ``trust_remote_code``."""
    config = student_config(student)
    # mlx-lm reads RoPE's base by its older name.
    theta = DEFAULT_THETA
    for rope in rope_settings(student.model.config):
        if "rope_theta" in rope:
            theta = rope["rope_theta"]
            break
    config["backbone"].setdefault("rope_theta", theta)
    config["model_file"] = MODEL_FILE.name
    write_json(folder / "config.json", config)
    shutil.copyfile(MODEL_FILE, folder / MODEL_FILE.name)
    # With PyTorch's names: `sanitize` in the model file renames the tensors for which MLX has others.
    write_weights(student.state_dict(), folder, tied_weights(student), max_shard_size)
