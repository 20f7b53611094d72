"""Does vLLM generate from a Falcon-H1 container what transformers generates from it?

    python benchmarks/serve_vllm.py FOLDER                  # needs an NVIDIA GPU and vLLM; exit status 2 without
    python benchmarks/serve_vllm.py FOLDER --new-tokens 64

FOLDER is what `hybrid-distill export RUN --form falcon-h1` wrote. Both programs decode greedily in float32, with states
in float32, from the same token ids. Prints a row per prompt, and exits with status 1 where a token differs although the
best logit led the second by more than rounding.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM

LEAD = 1e-2
"""Lead of the best logit below which two programs may round to different tokens."""
PROMPT_LENGTHS = (1, 7, 64, 300)


class Continuation(NamedTuple):
    """Greedy tokens, and the lead of each over the second best logit."""

    tokens: list[int]
    leads: list[float]


def prompts(vocab_size: int) -> list[list[int]]:
    """Random token ids, none of the first three, which are often special."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]


def by_transformers(folder: Path, ids: list[list[int]], new_tokens: int) -> list[Continuation]:
    """On the CPU, so that the GPU is vLLM's."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for prompt in ids:
        asked = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": None}
        answer: Any = model.generate(torch.tensor([prompt]), return_dict_in_generate=True, output_logits=True, **asked)
        best = torch.cat(answer.logits).topk(2).values
        found.append(Continuation(answer.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist()))
    return found


def by_vllm(folder: Path, ids: list[list[int]], new_tokens: int) -> list[list[int]]:
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    engine = LLM(
        str(folder), dtype="float32", mamba_ssm_cache_dtype="float32", max_model_len=max(PROMPT_LENGTHS) + new_tokens
    )
    asked = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    answers = engine.generate([{"prompt_token_ids": prompt} for prompt in ids], asked)
    return [list(answer.outputs[0].token_ids) for answer in answers]


def first_difference(expected: Continuation, tokens: list[int]) -> int | None:
    """Find where two continuations part despite a clear lead; stop at the first token without one."""
    for place, (best, lead, token) in enumerate(zip(expected.tokens, expected.leads, tokens)):
        if best != token:
            return None if lead < LEAD else place
    return None


def main() -> None:
    """Compare, print; exit status 0 if all agree, 1 if not, 2 where nothing could be compared."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--new-tokens", type=int, default=32)
    options = parser.parse_args()
    if not torch.cuda.is_available() or importlib.util.find_spec("vllm") is None:
        print("benchmarks/serve_vllm.py: no CUDA device or no vLLM; nothing was compared.")
        raise SystemExit(2)
    config = AutoConfig.from_pretrained(options.folder)
    if config.attention_bias or config.mlp_bias:
        raise SystemExit(f"{options.folder}: vLLM's Falcon-H1 has no biases in attention and MLP and would drop them.")
    ids = prompts(config.vocab_size)
    expected = by_transformers(options.folder, ids, options.new_tokens)
    found = by_vllm(options.folder, ids, options.new_tokens)
    differences = [first_difference(one, tokens) for one, tokens in zip(expected, found)]
    for prompt, place in zip(ids, differences):
        print(f"prompt of {len(prompt)}: {'same' if place is None else f'differs at new token {place}'}")
    raise SystemExit(int(any(place is not None for place in differences)))


if __name__ == "__main__":
    main()
