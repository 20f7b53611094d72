"""Train a few steps in the loop: one of the processes of `train_step.py --waiting`.

    accelerate launch --multi_gpu --num_processes 2 benchmarks/train_loop_worker.py OUT align 2 6

This is with 2 workers, for 6 steps. Writes OUT/metrics.jsonl as any run does, and OUT/reads.json: how often, and where,
each step would wait for a device.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig

from hybrid_distill.data import PackedRows, Tokens
from hybrid_distill.data.tokens import Shard
from hybrid_distill.distributed import connect
from hybrid_distill.plan import HeadPlan
from hybrid_distill.student.build import build_student
from hybrid_distill.train import loop
from hybrid_distill.train.config import Align, Distill
from hybrid_distill.train.stages import make_stage

SHAPE = LlamaConfig(
    vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3, head_dim=64, tie_word_embeddings=True,
)  # fmt: skip
"""SmolLM2-135M's."""
CONFIGS = {"align": Align(), "distill": Distill()}
OPERATORS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_consecutive")
METHODS = (Tensor.tolist, Tensor.cpu, Tensor.numpy)
CPU_ONLY = ("_check_numbers", "_check_tensors")  # of the fused loss, which checks values of CPU tensors alone
NOT_PLACES = (Path(__file__).name, "overrides.py", "_tensor.py")


class HostReads(TorchDispatchMode):
    """Counts where the host would wait for a device: operators that read values, and indexing with a Boolean mask.

    `METHODS` do not reach the dispatcher on a CPU: a second mode counts them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put", "index_put_", "_unsafe_index") else ()
        if name in OPERATORS or any(index is not None and index.dtype == torch.bool for index in indices):
            self.count(name)
        return func(*args, **(kwargs or {}))

    def count(self, name: str) -> None:
        stack = [frame for frame in traceback.extract_stack() if Path(frame.filename).name not in NOT_PLACES]
        if not any(frame.name in CPU_ONLY for frame in stack):
            self.places[f"{name} in {stack[-1].name}, {Path(stack[-1].filename).name}"] += 1


class _Methods(TorchFunctionMode):
    def __init__(self, reads: HostReads) -> None:
        super().__init__()
        self.reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METHODS:
            self.reads.count(func.__name__)
        return func(*args, **(kwargs or {}))


@contextmanager
def counting_reads() -> Iterator[HostReads]:
    """Yield the `HostReads` of what runs inside."""
    with ExitStack() as modes:
        reads = modes.enter_context(HostReads())
        modes.enter_context(_Methods(reads))
        yield reads


def counted(step: Callable[..., Any], found: list[Counter[str]]) -> Callable[..., Any]:
    """Wrap `_Training._train_step`."""

    def counting(*args: Any) -> Any:
        with counting_reads() as reads:
            result = step(*args)
        found.append(reads.places)
        return result

    return counting


def some_rows() -> PackedRows:
    """Documents of 10 to 400 random tokens, in rows of 256."""
    random = np.random.default_rng(0)
    lengths = random.integers(10, 400, 1000)
    ids = random.integers(0, SHAPE.vocab_size, lengths.sum()).astype(np.uint16)
    shard = Shard(ids, np.cumsum([0, *lengths])[:-1])
    return PackedRows([Tokens((shard,), pad_id=0, fingerprint="random")], seq_len=256)


def main() -> None:
    out, name, workers, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    state = connect()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    teacher = AutoModelForCausalLM.from_config(SHAPE, attn_implementation="sdpa")
    student, _ = build_student(teacher, HeadPlan.random(SHAPE, 14, seed=1), d_state=16, init="random")
    config = replace(CONFIGS[name], steps=steps, batch_size=4, micro_batch_size=1, log_every=1, data_workers=workers)
    found: list[Counter[str]] = []
    loop._Training._train_step = counted(loop._Training._train_step, found)  # type: ignore[method-assign]
    loop.train_stage(make_stage(config, student, teacher), some_rows(), out, progress=False)
    if state.is_main_process:
        (out / "reads.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
