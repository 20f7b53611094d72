"""Measure the cost of a generated token on a CPU, teacher against students, from short to long contexts.

    python benchmarks/generate.py            # measures; writes results/generate.json and docs/decode_cost.png
    python benchmarks/generate.py --small    # a tiny model, to see that it runs; writes with --out
    python benchmarks/generate.py --figure   # the figure again, from what was measured

A random model of Llama's shape and its students that keep no head, 2 of 32, and all. A context is read in pieces, then
tokens are decoded one by one, a few by each model in turn. Times are seconds of this process's CPU, the least of many,
so that other programs on the machine count as little as can be; they say how the cost grows, not what a server would
reach (benchmarks/decode.py asks that of a GPU). Cache bytes are those of the tensors' memory, and the script fails
where `cache_bytes` says otherwise. Peak memory is that of a process that reads the whole context at once.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from provenance import about, write
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hybrid_distill.lab.reporting import figure, look
from hybrid_distill.model import HybridCache, HybridForCausalLM
from hybrid_distill.plan import HeadPlan, cache_bytes
from hybrid_distill.student.build import build_student

RESULTS = Path(__file__).parent / "results" / "generate.json"
FIGURE = Path(__file__).parent.parent / "docs" / "decode_cost.png"
FP32 = 4
PIECE = 512
"""Tokens of a context that are read at a time."""
BURST = 5
"""Tokens that a model decodes in its turn; the first brings its weights into the processor's cache again."""
LOOKS = {"teacher": "teacher", "none": "none", "few": "top", "all": "all"}
"""Model whose color each row takes in the figures."""


class Setting(NamedTuple):
    """A teacher's shape, and where its students are looked at."""

    config: LlamaConfig
    few: int
    d_state: int
    contexts: tuple[int, ...]
    prefills: tuple[int, ...]
    rounds: int


CPU_SIZED = Setting(
    LlamaConfig(
        vocab_size=2048, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, head_dim=32, max_position_embeddings=16384,
    ),
    few=2, d_state=16, contexts=(512, 1024, 2048, 4096, 8192), prefills=(2048, 4096, 8192), rounds=16,
)  # fmt: skip
TINY = Setting(
    LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256,
    ),
    few=2, d_state=4, contexts=(16, 64), prefills=(64,), rounds=1,
)  # fmt: skip


class Contestant(NamedTuple):
    """A model, the heads that it keeps, and the cache that it generates from."""

    name: str
    model: PreTrainedModel
    plan: HeadPlan
    cache: HybridCache | DynamicCache


def contestants(setting: Setting) -> list[Contestant]:
    """Teacher and students, with empty caches."""
    torch.manual_seed(0)
    teacher = LlamaForCausalLM(setting.config).eval()
    plans = {
        "none": HeadPlan.none(teacher),
        "few": HeadPlan.random(teacher, setting.few, seed=0),
        "all": HeadPlan.all(teacher),
    }
    found = [Contestant("teacher", teacher, plans["all"], DynamicCache())]
    for name, plan in plans.items():
        student = build_student(teacher, plan, d_state=setting.d_state)[0].eval()
        found.append(Contestant(name, student, plan, student.new_cache()))
    return found


def read(one: Contestant, n_tokens: int) -> None:
    """Let the cache grow by some random tokens."""
    for piece in torch.randint(0, one.model.config.vocab_size, (1, n_tokens)).split(PIECE, dim=1):
        one.model(piece, cache=one.cache, use_cache=True, logits_to_keep=1)


@contextmanager
def watched(modules: Sequence[nn.Module]) -> Iterator[list[float]]:
    """CPU seconds of each call of these modules while the context is open."""
    seconds: list[float] = []
    started: list[float] = []

    def begin(module: nn.Module, args: Any) -> None:
        started.append(time.process_time())

    def end(module: nn.Module, args: Any, output: Any) -> None:
        seconds.append(time.process_time() - started.pop())

    hooks = [module.register_forward_pre_hook(begin) for module in modules]
    hooks += [module.register_forward_hook(end) for module in modules]
    try:
        yield seconds
    finally:
        for hook in hooks:
            hook.remove()


def decode(one: Contestant) -> list[tuple[float, float]]:
    """CPU seconds of each further token, and of its recurrent heads."""
    found: list[tuple[float, float]] = []
    recurrent = one.model.recurrent_heads() if isinstance(one.model, HybridForCausalLM) else []
    for token in torch.randint(0, one.model.config.vocab_size, (BURST, 1, 1)):
        with watched(recurrent) as in_heads:
            start = time.process_time()
            one.model(token, cache=one.cache, use_cache=True)
            found.append((time.process_time() - start, sum(in_heads)))
    return found


def held_bytes(one: Contestant, d_state: int) -> dict[str, int]:
    """Bytes of the cache's memory by kind. Raises RuntimeError where `cache_bytes` says otherwise."""
    config, length = one.model.config, one.cache.get_seq_length()
    said = cache_bytes(one.plan, length=length, head_dim=config.head_dim, d_state=d_state, bytes_per_element=FP32)
    tensors = [t for layer in one.cache.layers for t in vars(layer).values() if isinstance(t, Tensor)]
    memory = sum(t.untyped_storage().nbytes() for t in tensors)
    if memory != said.kv + said.ssm + said.conv:
        raise RuntimeError(f"{one.name}: {memory:,} bytes are held after {length} tokens, cache_bytes says {said}.")
    return {"kv": said.kv, "ssm": said.ssm, "conv": said.conv}


@torch.no_grad()
def decoding(setting: Setting) -> dict[str, Any]:
    """By context and model: milliseconds a token, the least of all, and cache bytes."""
    models, found = contestants(setting), {}
    for context in setting.contexts:
        for one in models:
            read(one, context - one.cache.get_seq_length())
        held = {one.name: held_bytes(one, setting.d_state) for one in models}
        seconds: dict[str, list[tuple[float, float]]] = {one.name: [] for one in models}
        for one in setting.rounds * models:
            seconds[one.name] += decode(one)
        found[str(context)] = {
            name: {
                "ms_per_token": round(1e3 * min(whole for whole, _ in of_model), 3),
                "ms_of_recurrent_heads": round(1e3 * min(recurrent for _, recurrent in of_model), 3),
                "cache_bytes": held[name],
            }
            for name, of_model in seconds.items()
        }
        print(context, {name: row["ms_per_token"] for name, row in found[str(context)].items()}, flush=True)
    return found


@torch.no_grad()
def _prefill(one: Contestant, length: int, answer: Any) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    one.model(torch.zeros(1, length, dtype=torch.long), cache=one.cache, use_cache=True, logits_to_keep=1)
    answer.put((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)


def prefill_memory(setting: Setting) -> dict[str, Any]:
    """By length and model: bytes that a process needs on top to read a context at once, its cache included."""
    models, fork = contestants(setting), multiprocessing.get_context("fork")
    found: dict[str, Any] = {}
    for length in setting.prefills:
        for one in models:
            answer = fork.SimpleQueue()
            process = fork.Process(target=_prefill, args=(one, length, answer))
            process.start()
            process.join()
            found.setdefault(str(length), {})[one.name] = answer.get()
        print(length, {name: f"{n / 1e6:.0f} MB" for name, n in found[str(length)].items()}, flush=True)
    return found


def draw(record: dict[str, Any], path: Path) -> None:
    """Time per token and cache bytes against the context."""
    rows, n_heads = record["decoding"], record["heads"]
    labels = {"teacher": "teacher", "none": "0 heads", "few": f"{record['few']} of {n_heads} heads", "all": "all heads"}
    panels = (
        ("Milliseconds of CPU a token", lambda row: row["ms_per_token"]),
        ("Cache, MB", lambda row: sum(row["cache_bytes"].values()) / 1e6),
    )
    with figure(path, 1, 2, size=(10.5, 3.9)) as grid:
        for axes, (title, value) in zip(grid[0], panels):
            for name, label in labels.items():
                y = [value(row[name]) for row in rows.values()]
                color, marker, dash = look(LOOKS[name])
                x = [int(context) for context in rows]
                axes.plot(x, y, color=color, marker=marker, linestyle=dash, label=label)
            axes.set_ylim(0, None)
            axes.set_xticks([int(context) for context in rows], [f"{int(c):,}" for c in rows], rotation=45)
            axes.set_xlabel("tokens in the cache")
            axes.set_title(title)
        grid[0, 1].legend(labelcolor="linecolor")


def main() -> None:
    """Measure, print, write the JSON and the figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a tiny model; written only with --out")
    parser.add_argument("--figure", action="store_true", help="only draw what was measured")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.figure:
        draw(json.loads((options.out or RESULTS).read_text()), FIGURE)
        return
    torch.set_num_threads(1)
    setting = TINY if options.small else CPU_SIZED
    config = setting.config
    record = {
        **about("a generated token on a CPU"),
        "few": setting.few,
        "heads": config.num_hidden_layers * config.num_attention_heads,
        "d_state": setting.d_state,
        "prefill_bytes": prefill_memory(setting),  # first: memory that decoding has left free would be used again
        "decoding": decoding(setting),
    }
    if out := options.out or (None if options.small else RESULTS):
        write(out, record)
    if out == RESULTS:
        draw(record, FIGURE)


if __name__ == "__main__":
    main()
