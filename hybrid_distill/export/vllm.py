"""Export of a student as the Falcon-H1 that vLLM runs, with attention heads enlarged to a size its kernels support.

vLLM's class has no biases in attention and MLPs, and silently drops those of a checkpoint. Its CPU attention supports
certain head sizes, its Triton attention 32 or more. A smaller head is spread over a larger one: RoPE rotates row j of a
head by base^(-2j / size), which is the angle of row s j of a head s times as large. So zeros go between the rows, and
``key_multiplier`` compensates for the softmax, which divides by the square root of the larger size.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..io import write_json
from ..model import HybridForCausalLM
from . import falcon_h1
from .checkpoint import tied_weights, write_weights

HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
SPREADABLE = {"default", "linear", "llama3"}
"""RoPE types whose angles depend only on base^(-2j / size)."""


def obstacles(student: HybridForCausalLM) -> list[str]:
    """List the reasons why vLLM's Falcon-H1 cannot express a student."""
    found = falcon_h1.obstacles(student)
    parts = [f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")]
    biases = {
        name.split(".")[-2] for name, tensor in student.state_dict().items() if name[-5:] == ".bias" and tensor.any()
    }
    if left_out := [part for part in parts if part in biases]:
        found.append(f"its {', '.join(left_out)} have biases, which vLLM's Falcon-H1 leaves out")
    head_dim, times = student.config.head_dim, spacing(student.config.head_dim)
    kinds = falcon_h1.rope_kinds(student)
    if times is None or (times > 1 and kinds - SPREADABLE):
        found.append(
            f"its heads of {head_dim} with {', '.join(sorted(kinds))} RoPE cannot be padded to a size that vLLM takes: "
            f"{', '.join(map(str, HEAD_DIMS))}"
        )
    return found


def spacing(head_dim: int) -> int | None:
    """Return how many times a head fits into the smallest vLLM head size that it divides; None if it divides none."""
    return next((size // head_dim for size in HEAD_DIMS if size % head_dim == 0), None)


def write(student: HybridForCausalLM, tokenizer: PreTrainedTokenizerBase | None, folder: Path) -> None:
    """Write weights and configuration for ``vllm serve``; transformers reads them too."""
    stock, times = falcon_h1.container(student), spacing(student.config.head_dim) or 1
    sizes = {"head_dim": stock.config["head_dim"] * times, "key_multiplier": times**0.5}
    write_json(folder / "config.json", {**stock.config, **sizes})
    state = {
        name: _spread(tensor, times, dim=int("o_proj" in name)) if ".self_attn." in name else tensor
        for name, tensor in stock.state.items()
    }
    write_weights(state, folder, tied_weights(student))


def _spread(weight: Tensor, times: int, dim: int) -> Tensor:
    """Insert zeros after every row (column if ``dim`` is 1), so that there are ``times`` as many."""
    rows = weight.transpose(0, dim)
    spread = rows.new_zeros(len(rows) * times, *rows.shape[1:])
    spread[::times] = rows
    return spread.transpose(0, dim)
