"""Export of a student as the Falcon-H1 that vLLM runs, with heads of a size that its kernels take.

vLLM's class has no biases in attention and MLPs, and silently drops those of a checkpoint. Its CPU
attention supports certain head sizes, its Triton attention 32 or more. A smaller head is spread
over a larger one: RoPE rotates row j of a head by base^(-2j / size), which is the angle of row s*j
of a head s times as large. So zeros go between the rows, and ``key_multiplier`` compensates for the
softmax, which divides by the square root of the larger size.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..io import write_json
from ..model import HybridForCausalLM
from . import falcon_h1
from .falcon_h1 import to_falcon_h1
from .obstacles import rope_kinds
from .weights import tied_weights, write_weights

HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
SPREADABLE = {"default", "linear", "llama3"}
"""RoPE types whose angles depend only on base^(-2j / size)."""
UNBIASED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def obstacles(student: HybridForCausalLM) -> list[str]:
    """List the reasons why vLLM's Falcon-H1 cannot express a student."""
    reasons = falcon_h1.obstacles(student)
    biased = set()
    for name, tensor in student.state_dict().items():
        if name.endswith(".bias") and tensor.any():
            biased.add(name.split(".")[-2])
    dropped = [part for part in UNBIASED if part in biased]
    if dropped:
        reasons.append(f"its {', '.join(dropped)} have biases, which vLLM's Falcon-H1 leaves out")
    head_dim = student.config.head_dim
    step = spacing(head_dim)
    kinds = rope_kinds(student)
    if step is None or (step > 1 and kinds - SPREADABLE):
        reasons.append(
            f"its heads of {head_dim} with {', '.join(sorted(kinds))} RoPE cannot be padded to a "
            f"size that vLLM takes: {', '.join(map(str, HEAD_DIMS))}"
        )
    return reasons


def spacing(head_dim: int) -> int | None:
    """Return the distance of a head's rows in the smallest head size of vLLM that it divides, if any."""
    for size in HEAD_DIMS:
        if size % head_dim == 0:
            return size // head_dim
    return None


def write(
    student: HybridForCausalLM,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    max_shard_size: int | str,
) -> None:
    """Write weights and configuration for ``vllm serve``; transformers reads them too."""
    falcon = to_falcon_h1(student)
    step = spacing(student.config.head_dim)
    assert step is not None, "an obstacle"
    config = {
        **falcon.config,
        # Biases that are not zero are an obstacle: vLLM's attention has none.
        "attention_bias": False,
        "head_dim": falcon.config["head_dim"] * step,
        "key_multiplier": step**0.5,
    }
    write_json(folder / "config.json", config)
    state = {}
    for name, tensor in falcon.state.items():
        if ".self_attn." not in name:
            state[name] = tensor
        elif not name.endswith(".bias"):
            # Heads are the columns of the output projection, the rows of all others.
            state[name] = _spread(tensor, step, dim=1 if "o_proj" in name else 0)
    write_weights(state, folder, tied_weights(student), max_shard_size)


def _spread(weight: Tensor, step: int, dim: int) -> Tensor:
    """Put the rows (columns if ``dim`` is 1) at every ``step``-th position, and zeros between them."""
    rows = weight.transpose(0, dim)
    spread = rows.new_zeros(len(rows) * step, *rows.shape[1:])
    spread[::step] = rows
    return spread.transpose(0, dim)
