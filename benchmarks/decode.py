"""Measure the cost of a decoded token, teacher against hybrid, from short to long contexts.

    python benchmarks/decode.py            # measures; writes benchmarks/results/decode.json
    python benchmarks/decode.py --bytes    # bytes a token and the throughput they allow; needs no GPU
    python benchmarks/decode.py --small    # a tiny model, also without a GPU, to see that it runs

The teacher has the shape of Llama-3.2-1B; the hybrid keeps 20 of its 512 heads, drawn at random, and has states of 64.
Weights are random: only time and memory are looked at. Caches are filled, not computed, and both models decode as
transformers runs them, without graphs.

Bytes a token: weights once a step, shared by the batch; keys and values read once; states read and written. At equal
memory each model has as many sequences as fit beside its weights; the quotient of the two throughputs is the claim.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from provenance import about, write
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hybrid_distill.evaluation.evaluate import cache_bytes
from hybrid_distill.model.layout import cache_argument
from hybrid_distill.model.modeling_hybrid import HybridForCausalLM
from hybrid_distill.plan import HeadPlan
from hybrid_distill.student.build import empty_student

RESULTS = Path(__file__).parent / "results" / "decode.json"
BANDWIDTH = {"H100": 3.0e12, "H200": 4.3e12}  # bytes a second that a good kernel reaches
BF16, FP32 = 2, 4
MEMORY = 64e9
"""Bytes for weights and caches, at equal memory."""
LARGEST_BATCH = 1024
PACKAGES = ("torch", "triton", "transformers")


class Setting(NamedTuple):
    """A model's shape, and where it is looked at."""

    config: LlamaConfig
    k: int
    d_state: int
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    memory: float
    steps: int


LLAMA_1B = Setting(
    LlamaConfig(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, max_position_embeddings=131072 + 64, tie_word_embeddings=True,
    ),
    k=20, d_state=64, contexts=(2048, 8192, 32768, 131072), batches=(1, 4, 16, 64), memory=MEMORY, steps=20,
)  # fmt: skip
TINY = Setting(
    LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128,
    ),
    k=2, d_state=8, contexts=(8, 32), batches=(1, 2), memory=4e5, steps=2,
)  # fmt: skip


class Cost(NamedTuple):
    """Bytes of one model: its weights, and of each sequence what is held and what a step moves."""

    weights: int
    held: int
    moved: int

    def bytes_per_token(self, batch: int) -> float:
        return self.weights / batch + self.moved

    def largest_batch(self, memory: float) -> int:
        return min(LARGEST_BATCH, int((memory - self.weights) // self.held))


def meta_models(setting: Setting) -> tuple[LlamaForCausalLM, HybridForCausalLM, HeadPlan]:
    """Teacher and hybrid without values, and the hybrid's plan."""
    with torch.device("meta"):
        teacher = LlamaForCausalLM(setting.config)
    plan = HeadPlan.random(teacher, setting.k, seed=0)
    return teacher, empty_student(teacher, plan, setting.d_state, 4), plan


def costs(setting: Setting, context: int) -> dict[str, Cost]:
    """From the shapes alone; bf16 but for the states, which are in fp32."""
    teacher, student, plan = meta_models(setting)
    found = {}
    for name, model, heads in (("teacher", teacher, HeadPlan.all(teacher)), ("hybrid", student, plan)):
        shape = {"length": context, "head_dim": setting.config.head_dim, "d_state": setting.d_state}
        held = cache_bytes(heads, **shape)
        ssm = cache_bytes(heads, **shape, bytes_per_element=FP32).ssm
        unread = 0 if setting.config.tie_word_embeddings else model.get_input_embeddings().weight.numel()
        found[name] = Cost(
            weights=BF16 * (sum(p.numel() for p in model.parameters()) - unread),
            held=held.kv + held.conv + ssm,
            moved=held.kv + 2 * (held.conv + ssm),
        )
    return found


def real_model(name: str, setting: Setting, device: str) -> PreTrainedModel:
    _, student, _ = meta_models(setting)
    with torch.device(device):
        model = LlamaForCausalLM(setting.config) if name == "teacher" else HybridForCausalLM(student.config)
    return model.to(torch.bfloat16).eval()


def filled_cache(model: PreTrainedModel, setting: Setting, context: int, batch: int) -> Any:
    """As after ``context`` tokens, with random values."""
    config, device = setting.config, model.device

    def some(heads: int) -> torch.Tensor:
        return torch.randn(batch, heads, context, config.head_dim, device=device, dtype=torch.bfloat16)

    if not isinstance(model, HybridForCausalLM):
        cache = DynamicCache()
        for layer in range(config.num_hidden_layers):
            cache.update(some(config.num_key_value_heads), some(config.num_key_value_heads), layer)
        return cache
    cache = model.new_cache()
    for index, mixer in enumerate(model.mixers()):
        layer = cache.layer(index)
        if mixer.kept:
            layer.update(some(len(mixer.kv_groups)), some(len(mixer.kv_groups)))
        if mixer.ssm is not None:
            channels, width = mixer.ssm.conv_weight.shape
            state = torch.randn(batch, mixer.ssm.n_heads, config.head_dim, setting.d_state, device=device)
            conv_state = torch.randn(batch, channels, width - 1, device=device, dtype=torch.bfloat16)
            layer.remember(conv_state=conv_state, ssm_state=state)
        layer.advance(context)
    return cache


@torch.no_grad()
def tokens_per_second(model: PreTrainedModel, setting: Setting, context: int, batch: int) -> float | str:
    """Return the median step time of the whole batch, or the reason that there is none."""
    on_gpu = model.device.type == "cuda"
    try:
        cache = filled_cache(model, setting, context, batch)
        options = {cache_argument(model.forward): cache, "use_cache": True}
        token = torch.zeros(batch, 1, dtype=torch.long, device=model.device)
        seconds = []
        for _ in range(3 + setting.steps):
            if on_gpu:
                torch.cuda.synchronize()
            start = time.perf_counter()
            model(input_ids=token, **options)
            if on_gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        return batch / statistics.median(seconds[3:])
    except torch.cuda.OutOfMemoryError:
        return "out of memory"
    finally:
        cache = None
        if on_gpu:
            torch.cuda.empty_cache()


def table_of_bytes(setting: Setting) -> dict[str, Any]:
    """Bytes a token, and the throughput at equal memory that bandwidth allows."""
    rows = {}
    for context in setting.contexts:
        of_model = costs(setting, context)
        batch = {name: cost.largest_batch(setting.memory) for name, cost in of_model.items()}
        at_equal_memory = {
            device: {
                name: batch[name] * rate / (cost.weights + batch[name] * cost.moved) for name, cost in of_model.items()
            }
            for device, rate in BANDWIDTH.items()
        }
        rows[str(context)] = {
            "bytes_per_token": {
                name: {str(b): round(cost.bytes_per_token(b)) for b in setting.batches}
                for name, cost in of_model.items()
            },
            "bytes_held_per_sequence": {name: cost.held for name, cost in of_model.items()},
            "batch_at_equal_memory": batch,
            "tokens_per_second_limit_at_equal_memory": at_equal_memory,
            "times_the_teacher": {
                d: row["hybrid"] / row["teacher"] for d, row in at_equal_memory.items() if row["teacher"]
            },
        }
    return rows


def measured(setting: Setting, device: str) -> dict[str, Any]:
    """Tokens per second of each model at each context, batch by batch and at equal memory."""
    batches = {context: {n: c.largest_batch(setting.memory) for n, c in costs(setting, context).items()}
               for context in setting.contexts}  # fmt: skip
    found: dict[str, Any] = {str(context): {} for context in setting.contexts}
    for name in ("teacher", "hybrid"):
        model = real_model(name, setting, device)
        for context in setting.contexts:
            wanted = sorted({*setting.batches, batches[context][name]} - {0})
            found[str(context)][name] = {str(b): tokens_per_second(model, setting, context, b) for b in wanted}
            print(context, name, found[str(context)][name], flush=True)
        del model
    return found


def show(rows: dict[str, Any]) -> None:
    for context, row in rows.items():
        per_token = {
            name: " ".join(f"{b}: {n / 1e6:.1f}" for b, n in by_batch.items())
            for name, by_batch in row["bytes_per_token"].items()
        }
        print(f"context {context}, MB a token by batch: teacher {per_token['teacher']} | hybrid {per_token['hybrid']}")
        times = ", ".join(f"{value:.1f}x on {device}" for device, value in row["times_the_teacher"].items())
        print(f"  at equal memory: batch {row['batch_at_equal_memory']}; bandwidth allows the hybrid {times}")


def main() -> None:
    """Compute, measure, print, write the JSON; exit status 2 where a GPU is needed and absent."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", action="store_true", help="only what follows from the shapes")
    parser.add_argument("--small", action="store_true", help="a tiny model on any device; written only with --out")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    setting, on_gpu = (TINY if options.small else LLAMA_1B), torch.cuda.is_available()
    if not (on_gpu or options.small or options.bytes):
        print("benchmarks/decode.py: no CUDA device; nothing was measured. --bytes and --small run without one.")
        raise SystemExit(2)
    rows = table_of_bytes(setting)
    device = "cuda" if on_gpu else "cpu"
    record = about("a decoded token", device, PACKAGES) | {"memory": setting.memory, "shapes": rows}
    if not options.bytes:
        record["tokens_per_second"] = measured(setting, device)
    if out := options.out or (None if options.small or options.bytes else RESULTS):
        write(out, record)
    show(rows)


if __name__ == "__main__":
    main()
