"""Count the bytes of a decoded token, teacher against hybrid, from short to long contexts; no GPU is needed.

    python benchmarks/decode.py    # prints the table of docs/performance.md

The teacher has the shape of Llama-3.2-1B; the hybrid keeps 20 of its 512 heads, drawn at random, and has states of 64.

Bytes a token: weights once a step, shared by the batch; keys and values read once; states read and written. At equal
memory each model has as many sequences as fit beside its weights; the quotient of the two throughputs is the claim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from records import parser_of
from transformers import LlamaConfig, LlamaForCausalLM

from hybrid_distill.cache_size import cache_bytes
from hybrid_distill.plan import HeadPlan
from hybrid_distill.student.build import empty_student

BANDWIDTH = {"H100": 3.0e12, "H200": 4.3e12}  # bytes a second that a good kernel reaches
# Bytes of a number.
BF16 = 2
FP32 = 4
MEMORY = 64e9
"""Bytes for weights and caches, at equal memory."""
LARGEST_BATCH = 1024
CONTEXTS = (2048, 8192, 32768, 131072)
BATCHES = (1, 4, 16, 64)
LLAMA_1B = LlamaConfig(
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    tie_word_embeddings=True,
)
N_KEPT = 20
D_STATE = 64


class Cost(NamedTuple):
    """Bytes of one model: its weights, and of each sequence what is held and what a step moves."""

    weights: int
    held: int
    moved: int

    def bytes_per_token(self, batch: int) -> float:
        return self.weights / batch + self.moved

    def largest_batch(self) -> int:
        """Return how many sequences fit beside the weights."""
        return max(0, min(LARGEST_BATCH, int((MEMORY - self.weights) // self.held)))


def costs(context: int) -> dict[str, Cost]:
    """Count from the shapes alone; bf16 but for the states, which are in fp32."""
    with torch.device("meta"):
        teacher = LlamaForCausalLM(LLAMA_1B)
    plan = HeadPlan.random(teacher, N_KEPT, seed=0)
    student = empty_student(teacher, plan, d_state=D_STATE, conv_width=4)
    shape = {"length": context, "head_dim": LLAMA_1B.head_dim, "d_state": D_STATE}
    by_model = {}
    for name, model, heads in (
        ("teacher", teacher, HeadPlan.all(teacher)),
        ("hybrid", student, plan),
    ):
        cache = cache_bytes(heads, **shape)
        states = cache_bytes(heads, **shape, bytes_per_element=FP32).ssm
        n_parameters = sum(p.numel() for p in model.parameters())
        by_model[name] = Cost(
            weights=BF16 * n_parameters,
            held=cache.kv + cache.conv + states,
            moved=cache.kv + 2 * (cache.conv + states),
        )
    return by_model


def row(context: int) -> dict[str, Any]:
    """Return bytes a token, and the throughput at equal memory that bandwidth allows."""
    by_model = costs(context)
    batch = {name: cost.largest_batch() for name, cost in by_model.items()}
    limits: dict[str, dict[str, float]] = {}
    for device, rate in BANDWIDTH.items():
        limits[device] = {}
        for name, cost in by_model.items():
            bytes_of_step = cost.weights + batch[name] * cost.moved
            limits[device][name] = batch[name] * rate / bytes_of_step
    bytes_per_token: dict[str, dict[str, int]] = {}
    for name, cost in by_model.items():
        bytes_per_token[name] = {str(n): round(cost.bytes_per_token(n)) for n in BATCHES}
    times_the_teacher: dict[str, float] = {}
    for device, rates in limits.items():
        times_the_teacher[device] = rates["hybrid"] / rates["teacher"]
    return {
        "bytes_per_token": bytes_per_token,
        "bytes_held_per_sequence": {name: cost.held for name, cost in by_model.items()},
        "batch_at_equal_memory": batch,
        "tokens_per_second_limit_at_equal_memory": limits,
        "times_the_teacher": times_the_teacher,
    }


def show(context: int, counted: dict[str, Any]) -> None:
    for name, by_batch in counted["bytes_per_token"].items():
        megabytes = ", ".join(f"{batch}: {n / 1e6:.1f}" for batch, n in by_batch.items())
        print(f"context {context}, {name}: MB a token by batch: {megabytes}")
    ratios = counted["times_the_teacher"].items()
    times = ", ".join(f"{ratio:.1f}x on {device}" for device, ratio in ratios)
    batches = counted["batch_at_equal_memory"]
    print(f"  at equal memory: batch {batches}; bandwidth allows the hybrid {times}")


def main() -> None:
    parser_of(__doc__).parse_args()
    for context in CONTEXTS:
        show(context, row(context))


if __name__ == "__main__":
    main()
