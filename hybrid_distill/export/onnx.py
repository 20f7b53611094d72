"""Export of a student as an ONNX graph, which ONNX Runtime runs on a CPU without this package.

The same graph reads a prompt and then, from the states it returned, one token after another. Each
layer stores only the states of its own heads. `onnx_graph` builds the graph; `obstacles` lists what
it cannot express.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedTokenizerBase

from ..model import HybridForCausalLM
from .obstacles import backbone_obstacles, recurrence_obstacles, rope_kinds
from .onnx_graph import GraphBuilder

if TYPE_CHECKING:
    from onnx_ir import Model

BACKBONES = ("llama", "mistral", "qwen2", "qwen3")
MODEL = "model.onnx"
DATA = "model.onnx.data"
RUNNER = "generate.py"
LARGEST_FILE = 2**31 - 2**24
"""Bytes of weights in model.onnx itself: protobuf allows 2 GiB, including the graph."""
ROPE_BY_LENGTH = {"dynamic", "longrope"}
"""RoPE types whose frequencies depend on the length of the text."""


def obstacles(student: HybridForCausalLM) -> list[str]:
    """List the reasons why a student cannot be written as ONNX."""
    reasons = backbone_obstacles(student, BACKBONES)
    reasons += recurrence_obstacles(student)
    windows = [mixer.windowed for mixer in student.mixers() if mixer.windowed is not None]
    if any(windowed.reach.limit is not None for windowed in windows):
        reasons.append("its windows are in layers with sliding-window attention")
    kinds = rope_kinds(student) & ROPE_BY_LENGTH
    if kinds:
        reasons.append(
            f"its RoPE is {', '.join(sorted(kinds))}: its frequencies change with the length of the text"
        )
    return reasons


@torch.no_grad()
def write(
    student: HybridForCausalLM,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    max_shard_size: int | str,
) -> None:
    """Write generate.py and a float32 model.onnx.

    The weights are in model.onnx.data if one file cannot hold them.
    """
    import onnx_ir

    model = GraphBuilder(student).build()
    model.metadata_props["eos_token_id"] = json.dumps(_end_tokens(student))
    data_file = DATA if _weight_bytes(model) > LARGEST_FILE else None
    onnx_ir.save(model, folder / MODEL, external_data=data_file)
    shutil.copyfile(Path(__file__).with_name("onnx_generate.py"), folder / RUNNER)


def _end_tokens(student: HybridForCausalLM) -> list[int]:
    """List the end-of-text tokens; transformers stores none, one or several."""
    ends = student.config.eos_token_id
    if student.generation_config is not None:
        ends = student.generation_config.eos_token_id
    if ends is None:
        return []
    if isinstance(ends, int):
        return [ends]
    return ends


def _weight_bytes(model: Model) -> int:
    """Count the bytes of a graph's weights."""
    n_bytes = 0
    for value in model.graph.initializers.values():
        assert value.const_value is not None, "an initializer is a constant"
        n_bytes += value.const_value.nbytes
    return n_bytes
