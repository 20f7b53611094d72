"""Milliseconds a token of a student and of its teacher on a CPU: as they are, compiled, in 8 bits.

    python benchmarks/decode_cpu.py --teacher smollm2 --model runs/hybrid_smollm2_135m/export

One row in bfloat16 after a prompt of 128 tokens. All variants take turns in one process; the student's give the same
tokens, but for those in 8 bits (torchao's weights, as docs/publishing.md makes them). Each figure is the best of the
rounds: CPU time of one thread, as others may use the machine, or wall time of several. "Products alone" multiplies
each weight of the teacher by one vector, which no variant can do without. Operators are those that compute or copy,
by layer: on a GPU each is the launch of a kernel. The first call of a compiled variant takes minutes, and is shown
apart: it compiles one graph, of a token's step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pandas as pd
import torch
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


def main() -> None:
    """Time every variant, print a table and write the record."""
    parser = parser_of(__doc__, RESULTS / "decode_cpu.json")
    parser.add_argument("--teacher", required=True, help="folder of the teacher")
    parser.add_argument("--model", required=True, help="folder of a student's remote-code export")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    prompt = torch.randint(1000, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    teacher = load(options.teacher)
    student = load(options.model)
    calls = {
        "products alone": products(teacher),
        "teacher": generator_of(teacher),
        "teacher, compiled, static cache": compiled(load(options.teacher)),
        "teacher, 8 bits, compiled, static cache": compiled(load_in_8_bits(options.teacher)),
        "student": generator_of(student),
        "student, static cache": generator_of(load(options.model), cache_implementation="static"),
        "student, compiled, static cache": compiled(load(options.model)),
        "student, 8 bits, compiled, static cache": compiled(load_in_8_bits(options.model)),
    }
    first = first_calls(calls, prompt)
    best = best_seconds(calls, prompt, clock, options.rounds)
    operators = {
        "teacher": operators_a_layer(teacher, prompt),
        "student": operators_a_layer(student, prompt),
    }
    milliseconds = 1000 / (NEW_TOKENS - FEW_TOKENS)
    table = pd.DataFrame(
        {
            "variant": list(calls),
            "ms a token": [round(milliseconds * best[name], 1) for name in calls],
            "operators a layer": [operators.get(name, "") for name in calls],
            "first calls, s": [round(first[name]) for name in calls],
        }
    )
    print(text_table(table))
    record = {"rows": table.to_dict("records"), "rounds": options.rounds}
    write(options.out, {**record, **about("decoding on a CPU", threads=options.threads)})


def first_calls(calls: dict[str, Call], prompt: Tensor) -> dict[str, float]:
    """Return the wall seconds of each variant's first two calls, which compile; compare its tokens."""
    expected = calls["student"](prompt, NEW_TOKENS)
    first: dict[str, float] = {}
    for name, call in calls.items():
        started = time.perf_counter()
        tokens = call(prompt, NEW_TOKENS)
        call(prompt, FEW_TOKENS)
        first[name] = time.perf_counter() - started
        same = (tokens == expected).float().mean().item()
        print(f"{name}: first calls {first[name]:.0f} s, {same:.0%} of the student's tokens")
    return first


def best_seconds(
    calls: dict[str, Call], prompt: Tensor, clock: Callable[[], float], rounds: int
) -> dict[str, float]:
    """Return each variant's least seconds for the tokens that a long call has beyond a short one."""
    best: dict[str, float] = {}
    for _ in range(rounds):
        for name, call in calls.items():
            long = seconds_of(call, prompt, NEW_TOKENS, clock)
            short = seconds_of(call, prompt, FEW_TOKENS, clock)
            best[name] = min(best.get(name, long - short), long - short)
    return best


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
    """Return a function that compiles a token's step, and reads the prompt as it is."""
    compile_config: Any = CompileConfig(fullgraph=True, mode="default")
    # transformers compiles on GPUs alone without this.
    compile_config._compile_all_devices = True
    return generator_of(model, cache_implementation="static", compile_config=compile_config)


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


def seconds_of(call: Call, prompt: Tensor, n_tokens: int, clock: Callable[[], float]) -> float:
    started = clock()
    call(prompt, n_tokens)
    return clock() - started


@torch.no_grad()
def operators_a_layer(model: Any, prompt: Tensor) -> float:
    """Count the operators of one decoded token, by decoder layer."""
    outputs = model(prompt, use_cache=True)
    name = next(name for name in CACHE_NAMES if outputs.get(name) is not None)
    cache = {name: outputs[name]}
    model(prompt[:, -1:], use_cache=True, **cache)
    counts = Counts()
    with CountOperators(counts):
        model(prompt[:, -1:], use_cache=True, **cache)
    return round(counts.n_operators / model.config.num_hidden_layers, 1)


if __name__ == "__main__":
    main()
