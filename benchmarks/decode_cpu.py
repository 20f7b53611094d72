"""Milliseconds a token of a student and of its teacher on a CPU: as they are, compiled, packed, in 8 bits.

    python benchmarks/decode_cpu.py --teacher smollm2 --model runs/hybrid_smollm2_135m/export

One row in bfloat16 after a prompt of 128 tokens. Each variant has a process of its own, since torch would compile
another one's step only once, and all take turns. The student's give the same tokens, but for those in 8 bits (torchao's
weights, as docs/publishing.md makes them). Each figure is the best of the rounds: CPU time of one thread, as others may
use the machine, or wall time of several. "Products alone" multiplies each weight of the teacher by one vector, in
torch's own way. "Packed" lets inductor reorder the weights and choose its own products (docs/serving.md). Operators are
those that compute or copy, by layer: on a GPU each is the launch of a kernel. The first call of a compiled variant is
shown apart: it compiles one graph, of a token's step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any
from unittest import mock

import pandas as pd
import torch
import torch._inductor.config as inductor
import torch.nn.functional as F
from counting import CountOperators, Counts
from records import RESULTS, about, parser_of, write
from torch import Tensor, nn
from torchao.quantization import Int8WeightOnlyConfig
from transformers import AutoModelForCausalLM, CompileConfig, TorchAoConfig

from hybrid_distill.lab.reporting import text_table
from hybrid_distill.model.layout import CACHE_NAMES

PROMPT = 128
NEW_TOKENS = 64
FEW_TOKENS = 8
"""Tokens of a shorter call: the difference leaves out the prompt."""
Call = Callable[[Tensor, int], Tensor]
"""Continues a prompt by so many tokens."""


def main() -> None:
    """Time every variant, print a table and write the record."""
    parser = parser_of(__doc__, RESULTS / "decode_cpu.json")
    parser.add_argument("--teacher", required=True, help="folder of the teacher")
    parser.add_argument("--model", required=True, help="folder of a student's remote-code export")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    variants: dict[str, ProcessPoolExecutor] = {}
    for name in VARIANTS:
        folder = options.model if name.startswith("student") else options.teacher
        variants[name] = process_of(name, folder, options.threads)
    expected = variants["student"].submit(first_tokens).result()
    first: dict[str, float] = {}
    for name, process in variants.items():
        started = time.perf_counter()
        tokens = process.submit(first_tokens).result()
        first[name] = time.perf_counter() - started
        same = (tokens == expected).float().mean().item()
        print(f"{name}: first call {first[name]:.0f} s, {same:.0%} of the student's tokens")
    # Of each length by itself: the difference of two calls, one of them disturbed, could be anything.
    best: dict[tuple[str, int], float] = {}
    for _ in range(options.rounds):
        for name, process in variants.items():
            for length in (FEW_TOKENS, NEW_TOKENS):
                seconds = process.submit(seconds_of, length).result()
                best[name, length] = min(best.get((name, length), seconds), seconds)
    milliseconds = {}
    for name in variants:
        seconds = best[name, NEW_TOKENS] - best[name, FEW_TOKENS]
        milliseconds[name] = round(1000 * seconds / (NEW_TOKENS - FEW_TOKENS), 1)
    operators = {
        name: variants[name].submit(operators_a_layer).result() for name in ("teacher", "student")
    }
    table = pd.DataFrame(
        {
            "variant": list(variants),
            "ms a token": list(milliseconds.values()),
            "operators a layer": [operators.get(name, "") for name in variants],
            "first call, s": [round(first[name]) for name in variants],
        }
    )
    print(text_table(table))
    record = {"rows": table.to_dict("records"), "rounds": options.rounds}
    write(options.out, {**record, **about("decoding on a CPU", threads=options.threads)})


# In a variant's own process


def process_of(variant: str, folder: str, threads: int) -> ProcessPoolExecutor:
    """Start the process that holds one variant's model."""
    # Not a copy of this process: torch's threads do not survive in one.
    return ProcessPoolExecutor(1, get_context("spawn"), prepare, (variant, folder, threads))


def prepare(variant: str, folder: str, threads: int) -> None:
    """Load a variant in its process."""
    global model, call, clock
    torch.set_num_threads(threads)
    clock = time.process_time if threads == 1 else time.perf_counter
    model = load_in_8_bits(folder) if variant.endswith("8 bits") else load(folder)
    call = VARIANTS[variant](model)


model: Any
call: Call
clock: Callable[[], float]


def prompt() -> Tensor:
    return torch.randint(1000, (1, PROMPT), generator=torch.Generator().manual_seed(0))


def first_tokens() -> Tensor:
    """Return the tokens of a variant's first calls, which compile."""
    tokens = call(prompt(), NEW_TOKENS)
    call(prompt(), FEW_TOKENS)
    return tokens


def seconds_of(n_tokens: int) -> float:
    """Time one call."""
    started = clock()
    call(prompt(), n_tokens)
    return clock() - started


@torch.no_grad()
def operators_a_layer() -> float:
    """Count the operators of one decoded token, by decoder layer."""
    outputs = model(prompt(), use_cache=True)
    name = next(name for name in CACHE_NAMES if outputs.get(name) is not None)
    cache = {name: outputs[name]}
    last = prompt()[:, -1:]
    model(last, use_cache=True, **cache)
    counts = Counts()
    with CountOperators(counts):
        model(last, use_cache=True, **cache)
    return round(counts.n_operators / model.config.num_hidden_layers, 1)


# Variants


def load(folder: str, **options: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, dtype=torch.bfloat16, **options
    )
    return model.eval()


def load_in_8_bits(folder: str) -> Any:
    """Load a model whose linear layers, except the output embedding, have 8-bit weights."""
    config = TorchAoConfig(Int8WeightOnlyConfig(), modules_to_not_convert=["lm_head", "a_proj"])
    return load(folder, quantization_config=config)


def compiled(model: Any) -> Call:
    """Return a function that compiles a token's step, with a static cache, and reads the prompt as it is."""
    compile_config: Any = CompileConfig(fullgraph=True, mode="default")
    # transformers compiles on GPUs alone without this.
    compile_config._compile_all_devices = True
    return generator_of(model, cache_implementation="static", compile_config=compile_config)


def packed(model: Any) -> Call:
    """Return a compiled function whose weights inductor has packed for its own products."""
    generate = compiled(model)

    def call(prompt: Tensor, n_tokens: int) -> Tensor:
        with inductor.patch(freezing=True, max_autotune=True):
            return generate(prompt, n_tokens)

    return call


def teacher_packed(model: Any) -> Call:
    """Return `packed` for a model of transformers' own, whose static cache must not be marked as static.

    Its step would write outside of the cache otherwise. A student's cache needs no such help.
    """
    generate = packed(model)

    def call(prompt: Tensor, n_tokens: int) -> Tensor:
        with mock.patch.object(torch._dynamo, "mark_static_address"):
            return generate(prompt, n_tokens)

    return call


def generator_of(model: Any, **options: Any) -> Call:
    """Return a function that continues a prompt by exactly so many tokens."""

    def call(prompt: Tensor, n_tokens: int) -> Tensor:
        return model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=n_tokens,
            min_new_tokens=n_tokens,
            do_sample=False,
            **options,
        )

    return call


def products(model: nn.Module) -> Call:
    """Return a function that multiplies all weights of linear layers by a vector, so many times."""
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    vectors: dict[int, Tensor] = {}
    for weight in weights:
        width = weight.shape[1]
        vectors[width] = torch.ones(1, width, dtype=weight.dtype)

    @torch.inference_mode()
    def call(prompt: Tensor, n_tokens: int) -> Tensor:
        for _ in range(n_tokens):
            for weight in weights:
                F.linear(vectors[weight.shape[1]], weight)
        return prompt[:, :0].new_zeros(1, prompt.shape[1] + n_tokens)

    return call


VARIANTS: dict[str, Callable[[Any], Call]] = {
    "products alone": products,
    "teacher": generator_of,
    "teacher, compiled": compiled,
    "teacher, compiled, packed": teacher_packed,
    "teacher, compiled, packed, 8 bits": teacher_packed,
    "student": generator_of,
    "student, static cache": partial(generator_of, cache_implementation="static"),
    "student, compiled": compiled,
    "student, compiled, packed": packed,
    "student, compiled, packed, 8 bits": packed,
}


if __name__ == "__main__":
    main()
