"""Run one engine on one export, for `serving.py`, with the Python in which that engine is installed.

    PYTHON benchmarks/serving_worker.py ENGINE FOLDER PROMPTS.json ANSWER.json THREADS

That Python may have neither torch nor this package, so nothing of either is imported at the top.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

N_PROMPTS = 64
NEW_TOKENS = 16
BATCH = 8
CONTEXT = 512
"""Tokens of the prompt whose first token is timed, and of the cache that is weighed."""
PACKAGES = ("torch", "transformers", "onnxruntime", "llama_cpp", "mlx_lm", "vllm")

Tokens = list[list[int]]
PROGRAMS: dict[str, Any] = runpy.run_path(
    str(Path(__file__).resolve().parents[1] / "hybrid_distill" / "export" / "programs.py")
)
StepwiseProgram: Any = PROGRAMS["StepwiseProgram"]


class Transformers(StepwiseProgram):
    """Eager transformers, with the folder's own code; batches are left-padded."""

    def __init__(self, folder: Path, longest: int, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from hybrid_distill.model.layout import cache_argument, cache_of

        torch.set_grad_enabled(False)
        torch.set_num_threads(threads)
        model = AutoModelForCausalLM.from_pretrained(
            folder, trust_remote_code=True, dtype=torch.float32
        )
        self.torch = torch
        self.cache_of = cache_of
        self.model = model.eval()
        self.cache_name = cache_argument(self.model.forward)

    def begin(self, prompts: Tokens, every: bool = False) -> np.ndarray:
        rows = [self.torch.tensor(prompt) for prompt in prompts]
        ones = [self.torch.ones_like(row) for row in rows]
        pad = partial(self.torch.nn.utils.rnn.pad_sequence, batch_first=True, padding_side="left")
        self.mask = pad(ones)
        self.cache: Any = None
        return self._read(pad(rows), 0 if every else 1)

    def step(self, tokens: Sequence[int]) -> np.ndarray:
        self.mask = self.torch.nn.functional.pad(self.mask, (0, 1), value=1)
        return self._read(self.torch.tensor(tokens).unsqueeze(1), 1)

    def _read(self, ids: Any, keep: int) -> np.ndarray:
        positions = (self.mask.cumsum(-1) - 1).clamp(min=0)
        output = self.model(
            ids,
            attention_mask=self.mask,
            position_ids=positions[:, -ids.shape[1] :],
            use_cache=True,
            logits_to_keep=keep,
            **{self.cache_name: self.cache},
        )
        self.cache = self.cache_of(output)
        return output.logits.numpy()

    def cache_bytes(self, prompt: list[int]) -> int:
        self.begin([prompt])
        n_bytes = 0
        for layer in self.cache.layers:
            for value in vars(layer).values():
                if isinstance(value, self.torch.Tensor):
                    n_bytes += value.untyped_storage().nbytes()
        return n_bytes


ENGINES = {"transformers": Transformers, **PROGRAMS["PROGRAMS"]}


def measure(engine: str, folder: Path, prompts: Tokens, threads: int) -> dict[str, Any]:
    """Return the engine's tokens and logits, times, bytes and versions."""
    model = ENGINES[engine](folder, CONTEXT + NEW_TOKENS, threads)
    started = time.perf_counter()
    tokens = model.generate(prompts, NEW_TOKENS)
    seconds = time.perf_counter() - started

    long_prompt = [5 + (7 * place) % 50 for place in range(CONTEXT)]
    imported = [name for name in PACKAGES if name in sys.modules]
    load_of_a_minute, _, _ = os.getloadavg()
    return {
        "tokens": tokens,
        "logits": [last_logits(model, prompt) for prompt in prompts[:BATCH]],
        "ms_to_first_token": least_ms(lambda: model.generate([long_prompt], 1), times=3, digits=1),
        "ms_of_next_token": ms_of_step(model, long_prompt[:128]),
        "tokens_per_second": round(len(prompts) * NEW_TOKENS / seconds, 1),
        "cache_bytes": model.cache_bytes(long_prompt),
        "peak_bytes": peak_bytes(),
        "load": round(load_of_a_minute, 1),
        "versions": {name: sys.modules[name].__version__ for name in imported},
    }


def last_logits(model: Any, prompt: list[int]) -> list[float] | None:
    """Return the logits behind a prompt, where the engine shows them."""
    logits_LV = model.logits(prompt)
    if logits_LV is None:
        return None
    return logits_LV[-1].tolist()


def least_ms(work: Callable[[], object], times: int, digits: int) -> float:
    """Take the least of some times: a busy machine disturbs it least."""
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return round(1e3 * min(seconds), digits)


def ms_of_step(model: Any, prompt: list[int]) -> float | None:
    """Time the steps behind a prompt."""
    # An engine that generates by its own scheduler takes no single steps.
    if not isinstance(model, StepwiseProgram):
        return None
    model.begin([prompt])
    return least_ms(lambda: model.step([7]), times=4 * NEW_TOKENS, digits=2)


def peak_bytes() -> int:
    # Not resource.getrusage, whose peak includes that of the process which started this one.
    status = Path("/proc/self/status").read_text()
    kilobytes = status.split("VmHWM:")[1].split()[0]
    return 1024 * int(kilobytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("answer", type=Path)
    parser.add_argument("threads", type=int)
    options = parser.parse_args()
    prompts = json.loads(options.prompts.read_text())
    answer = measure(options.engine, options.folder, prompts, options.threads)
    options.answer.write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
