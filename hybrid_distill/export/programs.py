"""Adapters to programs that run exports: token ids in, logits and tokens out.

The gate and benchmarks/serving.py use them. Everything is computed in float32. An export for one of
these programs contains this file next to check.py, so it imports only numpy and the program that it
runs.

Shapes: L length, V vocabulary.
"""

from __future__ import annotations

import os
import runpy
from collections.abc import Sequence
from pathlib import Path

import numpy as np

Tokens = Sequence[Sequence[int]]
Logits = Sequence[np.ndarray] | np.ndarray
"""Logits by prompt: [positions, vocabulary]."""


class Program:
    """Export loaded by a program.

    It runs up to ``batch`` sequences of ``context`` tokens together. ``threads`` is the number of
    cores, if the program lets us set it; 0 means all.
    """

    batch = 8

    def begin(self, prompts: Tokens, every: bool = False) -> Logits:
        """Read prompts; return logits of each one's last token, or with ``every`` of all tokens."""
        raise NotImplementedError

    def step(self, tokens: Sequence[int]) -> Logits:
        """Read one more token of each prompt; return its logits."""
        raise NotImplementedError

    def nbytes(self) -> int:
        """Count the bytes allocated for the states of the first prompt."""
        raise NotImplementedError

    def logits(self, prompt: Sequence[int]) -> np.ndarray | None:
        """Compute logits [L, V] of a prompt; None if the program does not expose them."""
        return self.begin([prompt], every=True)[0]

    def generate(self, prompts: Tokens, new_tokens: int) -> list[list[int]]:
        """Continue prompts greedily, in batches of ``batch``."""
        continued: list[list[int]] = []
        for start in range(0, len(prompts), self.batch):
            batch = prompts[start : start + self.batch]
            tokens = best(self.begin(batch))
            # One list a step; the texts are its columns.
            steps = [tokens]
            while len(steps) < new_tokens:
                tokens = best(self.step(tokens))
                steps.append(tokens)
            continued += map(list, zip(*steps))
        return continued

    def cache_bytes(self, prompt: Sequence[int]) -> int:
        """Count the cache bytes of one sequence after ``prompt``."""
        self.begin([prompt])
        return self.nbytes()


def best(logits: Logits) -> list[int]:
    """Return the most likely next token of each prompt."""
    return [int(logits_LV[-1].argmax()) for logits_LV in logits]


def left_padded(prompts: Tokens) -> tuple[np.ndarray, np.ndarray]:
    """Left-pad prompts into one batch; return token ids and mask."""
    longest = max(map(len, prompts))
    ids = np.zeros((len(prompts), longest), int)
    mask = np.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = 1
    return ids, mask


class OnnxRuntime(Program):
    """ONNX Runtime, through the Session in the export's generate.py."""

    def __init__(self, folder: Path, context: int, threads: int = 0) -> None:
        runner = runpy.run_path(str(folder / "generate.py"))
        self.session = runner["Session"](folder, threads)

    def begin(self, prompts: Tokens, every: bool = False) -> Logits:
        ids, self.mask = left_padded(prompts)
        self.states = self.session.first_states(len(prompts))
        # 0 keeps the logits of all tokens.
        logits = self._read(ids, keep=0 if every else 1)
        return [logits_LV[-len(prompt) :] for logits_LV, prompt in zip(logits, prompts)]

    def step(self, tokens: Sequence[int]) -> Logits:
        self.mask = np.pad(self.mask, ((0, 0), (0, 1)), constant_values=1)
        return self._read(np.array([tokens]).T, keep=1)

    def _read(self, ids: np.ndarray, keep: int) -> np.ndarray:
        logits, self.states = self.session.run(ids, self.mask, self.states, keep=keep)
        return logits

    def nbytes(self) -> int:
        return sum(value.numpy().nbytes for value in self.states.values())


class LlamaCpp(Program):
    """llama.cpp through its C API, which can keep keys and values in float32 instead of 16 bits."""

    def __init__(self, folder: Path, context: int, threads: int = 0) -> None:
        import llama_cpp

        self.lib = llama_cpp
        self.n_context = context
        self.threads = threads
        self.context = None
        self.lib.llama_backend_init()
        file = folder / "model.gguf"
        options = self.lib.llama_model_default_params()
        self.model = self.lib.llama_model_load_from_file(str(file).encode(), options)
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {file}")
        self.vocab = self.lib.llama_model_get_vocab(self.model)
        self.n_vocab = self.lib.llama_vocab_n_tokens(self.vocab)

    def begin(self, prompts: Tokens, every: bool = False) -> Logits:
        if self.context is not None:
            self.lib.llama_free(self.context)
        options = self.lib.llama_context_default_params()
        n_prompts = len(prompts)
        n_tokens = sum(map(len, prompts))
        options.n_ctx = self.n_context * n_prompts
        options.n_seq_max = n_prompts
        # All prompts at once: llama_decode refuses a batch that is longer than this.
        options.n_batch = max(n_tokens, n_prompts)
        # ggml's type 0 is float32; the default is 16 bits.
        options.type_k = 0
        options.type_v = 0
        options.flash_attn_type = 0  # off
        if self.threads:
            options.n_threads = self.threads
            options.n_threads_batch = self.threads
        self.context = self.lib.llama_init_from_model(self.model, options)
        self.lengths = [0] * len(prompts)
        return self._read(prompts, every)

    def step(self, tokens: Sequence[int]) -> Logits:
        return self._read([[token] for token in tokens], every=False)

    def _read(self, rows: Tokens, every: bool) -> Logits:
        n_tokens = sum(map(len, rows))
        batch = self.lib.llama_batch_init(n_tokens, 0, 1)
        # By row: the places in the batch whose logits llama.cpp computes.
        places_by_row: list[list[int]] = []
        for sequence, row in enumerate(rows):
            places: list[int] = []
            for position, token in enumerate(row):
                place = batch.n_tokens
                batch.token[place] = token
                batch.pos[place] = self.lengths[sequence] + position
                batch.n_seq_id[place] = 1
                batch.seq_id[place][0] = sequence
                has_logits = every or position == len(row) - 1
                batch.logits[place] = has_logits
                if has_logits:
                    places.append(place)
                batch.n_tokens += 1
            self.lengths[sequence] += len(row)
            places_by_row.append(places)
        status = self.lib.llama_decode(self.context, batch)
        if status:
            raise RuntimeError(f"llama_decode ended with status {status}")
        self.lib.llama_batch_free(batch)
        logits = []
        for places in places_by_row:
            logits.append(np.stack([self._logits(place) for place in places]))
        return logits

    def _logits(self, place: int) -> np.ndarray:
        address = self.lib.llama_get_logits_ith(self.context, place)
        return np.ctypeslib.as_array(address, (self.n_vocab,))

    def nbytes(self) -> int:
        """Count the bytes llama.cpp writes to save the sequence, including its few metadata."""
        return self.lib.llama_state_seq_get_size(self.context, 0)


class MlxLm(Program):
    """mlx-lm, one prompt at a time. Reads all tokens except the last without logits, as it does."""

    batch = 1

    def __init__(self, folder: Path, context: int, threads: int = 0) -> None:
        import mlx.core as mx
        from mlx_lm.models.cache import make_prompt_cache
        from mlx_lm.utils import load_model

        self.mx = mx
        self.make_cache = make_prompt_cache
        # The model file is ours: verify_export checks it.
        self.model, _ = load_model(folder, trust_remote_code=True)
        self.model.set_dtype(mx.float32)

    def begin(self, prompts: Tokens, every: bool = False) -> Logits:
        (prompt,) = prompts
        self.cache = self.make_cache(self.model)
        if every:
            return self._read(prompt)
        if len(prompt) > 1:
            self.model(self.mx.array([prompt[:-1]]), cache=self.cache)
            # mlx is lazy: nothing of the prompt would be computed before the last token is.
            self.mx.eval([layer_cache.state for layer_cache in self.cache])
        return self._read(prompt[-1:])

    def step(self, tokens: Sequence[int]) -> Logits:
        return self._read(tokens)

    def _read(self, tokens: Sequence[int]) -> np.ndarray:
        logits = self.model(self.mx.array([tokens]), cache=self.cache)
        return np.array(logits)

    def nbytes(self) -> int:
        return sum(layer_cache.nbytes for layer_cache in self.cache)


class Vllm(Program):
    """vLLM in this process, through its scheduler, which exposes neither logits nor states."""

    def __init__(self, folder: Path, context: int, threads: int = 0) -> None:
        # Read by vLLM when it is imported; `cache_bytes` looks into the engine of this process.
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
        from vllm import LLM, SamplingParams  # pyright: ignore

        self.sampling = SamplingParams
        self.engine = LLM(
            str(folder),
            dtype="float32",
            mamba_ssm_cache_dtype="float32",
            max_model_len=context,
            max_num_seqs=self.batch,
            enforce_eager=True,
            # On CPUs it fails for prompts of more than 128 tokens.
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            # The default is nearly all of the machine's memory.
            kv_cache_memory_bytes=2**28,
        )

    def logits(self, prompt: Sequence[int]) -> None:
        return None

    def generate(self, prompts: Tokens, new_tokens: int) -> list[list[int]]:
        options = self.sampling(
            temperature=0,
            max_tokens=new_tokens,
            ignore_eos=True,
            detokenize=False,
        )
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        answers = self.engine.generate(requests, options, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    def cache_bytes(self, prompt: Sequence[int]) -> int:
        """Count the bytes of pages, over all layers, that a sequence of full length takes."""
        engine = self.engine.llm_engine
        # Private, and in this process only because `__init__` has switched vLLM's own process off.
        scheduler = engine.engine_core.engine_core.scheduler
        n_bytes = 0
        for group in scheduler.kv_cache_config.kv_cache_groups:
            bytes_of_layer = group.kv_cache_spec.max_memory_usage_bytes(engine.vllm_config)
            n_bytes += len(group.layer_names) * bytes_of_layer
        return n_bytes


PROGRAMS = {"vllm": Vllm, "gguf": LlamaCpp, "mlx": MlxLm, "onnx": OnnxRuntime}
