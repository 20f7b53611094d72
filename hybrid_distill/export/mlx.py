"""Export of a student for mlx-lm: its weights and configuration, and the model file that mlx-lm imports."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ..io import write_json
from ..model import HybridForCausalLM
from ..model.configuration_hybrid import rope_settings
from .checkpoint import tied_weights, write_weights
from .falcon_h1 import backbone_obstacles, rope_kinds

MODEL_FILE = Path(__file__).with_name("mlx_model.py")
ROPE = {"default", "linear", "llama3"}


def obstacles(student: HybridForCausalLM) -> list[str]:
    """List the reasons why the shipped MLX model cannot express a student."""
    found = backbone_obstacles(student)
    if student.config.recurrence == "gdn":
        found.append("its recurrent heads are gdn")
    if student.config.conv_bias:
        found.append("its convolutions have a bias, as Llamba's")
    if not (kinds := rope_kinds(student)) <= ROPE:
        found.append(f"its RoPE is {', '.join(sorted(kinds))}, not one of {', '.join(sorted(ROPE))}")
    return found


def write(student: HybridForCausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a folder for ``mlx_lm.load`` and mlx-lm's commands, with ``trust_remote_code``."""
    config = json.loads(student.config.to_json_string())
    for name in ("_name_or_path", "auto_map"):
        config.pop(name, None)
    theta = [rope["rope_theta"] for rope in rope_settings(student.model.config) if "rope_theta" in rope]
    config["backbone"].setdefault("rope_theta", theta[0] if theta else 10000.0)
    write_json(folder / "config.json", {**config, "model_file": MODEL_FILE.name})
    shutil.copyfile(MODEL_FILE, folder / MODEL_FILE.name)
    write_weights(student.state_dict(), folder, tied_weights(student))
