"""Milliseconds a token of an exported student on a CPU, as it is and compiled.

    python benchmarks/decode_cpu.py --model runs/hybrid_smollm2_135m/export

One row in bfloat16 after a prompt of 128 tokens. All variants take turns in one process and give the same tokens. Each
figure is the best of the rounds: others may use the machine meanwhile. The first call of a compiled variant takes
minutes, and is shown apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pandas as pd
import torch
from records import RESULTS, about, parser_of, write
from torch import Tensor
from transformers import AutoModelForCausalLM

from hybrid_distill.lab.reporting import text_table

PROMPT, NEW_TOKENS = 128, 64
FEW_TOKENS = 8
"""Tokens of a shorter call: the difference leaves out the prompt."""


def main() -> None:
    """Time every variant, print a table and write the record."""
    parser = parser_of(__doc__, RESULTS / "decode_cpu.json")
    parser.add_argument("--model", required=True, help="folder of a remote-code export")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    prompt = torch.randint(1000, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    calls = {
        "eager": generator_of(load(options.model)),
        "eager, static cache": generator_of(load(options.model), cache_implementation="static"),
        "compiled, static cache": generator_of(
            compiled(load(options.model)), cache_implementation="static"
        ),
    }
    first, best = {}, {}
    expected = calls["eager"](prompt, NEW_TOKENS)
    for name, call in calls.items():
        started = time.perf_counter()
        tokens = call(prompt, NEW_TOKENS)
        call(prompt, FEW_TOKENS)
        first[name] = time.perf_counter() - started
        same = (tokens == expected).float().mean().item()
        print(f"{name}: first calls {first[name]:.0f} s, {same:.0%} of the tokens of eager")
    for _ in range(options.rounds):
        for name, call in calls.items():
            seconds = seconds_of(call, prompt, NEW_TOKENS) - seconds_of(call, prompt, FEW_TOKENS)
            best[name] = min(best.get(name, seconds), seconds)
    per_token = 1000 / (NEW_TOKENS - FEW_TOKENS)
    table = pd.DataFrame(
        {
            "variant": list(calls),
            "ms a token": [round(per_token * best[name], 1) for name in calls],
            "first calls, s": [round(first[name]) for name in calls],
        }
    )
    print(text_table(table))
    record = {"rows": table.to_dict("records"), "rounds": options.rounds}
    write(options.out, {**record, **about("decoding on a CPU", threads=options.threads)})


def load(folder: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, dtype=torch.bfloat16
    )
    return model.eval()


def compiled(model: Any) -> Any:
    model.forward = torch.compile(model.forward, fullgraph=True)
    return model


def generator_of(model: Any, **options: str) -> Callable[[Tensor, int], Tensor]:
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


def seconds_of(call: Callable[[Tensor, int], Tensor], prompt: Tensor, n_tokens: int) -> float:
    started = time.perf_counter()
    call(prompt, n_tokens)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
