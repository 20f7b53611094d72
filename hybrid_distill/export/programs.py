"""Adapters to programs that run exports: token ids in, logits and tokens out.

The gate and benchmarks/serving.py use them. Everything is computed in float32. An export for one of
these programs contains this file next to check.py, so it imports only numpy and that program.

Shapes: B batch, L length, S tokens so far (past and input), V vocabulary.
"""

from __future__ import annotations

import os
import runpy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np

Tokens = Sequence[Sequence[int]]
Logits = Sequence[np.ndarray] | np.ndarray
"""Logits [L, V] of each prompt."""


class Program(ABC):
    """Export loaded by a program: logits, greedy continuations, bytes of its cache.

    Subclasses take the ``folder``, ``longest`` (tokens of the longest sequence), and ``threads``:
    the number of cores, if the program lets us set it; 0 means all.
    """

    batch = 8
    """Most sequences that it runs together."""

    @abstractmethod
    def logits(self, prompt: Sequence[int]) -> np.ndarray | None:
        """Compute logits [L, V] of a prompt; None if the program does not expose them."""

    @abstractmethod
    def generate(self, prompts: Tokens, new_tokens: int) -> list[list[int]]:
        """Continue prompts greedily."""

    @abstractmethod
    def cache_bytes(self, prompt: Sequence[int]) -> int:
        """Count the bytes allocated for the states of one sequence after ``prompt``."""


class StepwiseProgram(Program):
    """Program that reads prompts, then one token of each per call, up to ``batch`` together."""

    @abstractmethod
    def begin(self, prompts: Tokens, every: bool = False) -> Logits:
        """Read prompts; return the logits of each one's last token, with ``every`` of all tokens."""

    @abstractmethod
    def step(self, tokens: Sequence[int]) -> Logits:
        """Read one more token of each prompt; return its logits."""

    def logits(self, prompt: Sequence[int]) -> np.ndarray:
        return self.begin([prompt], every=True)[0]

    def generate(self, prompts: Tokens, new_tokens: int) -> list[list[int]]:
        continuations: list[list[int]] = []
        for start in range(0, len(prompts), self.batch):
            batch = prompts[start : start + self.batch]
            tokens = best(self.begin(batch))
            batch_continuations = [[token] for token in tokens]
            for _ in range(new_tokens - 1):
                tokens = best(self.step(tokens))
                for continuation, token in zip(batch_continuations, tokens):
                    continuation.append(token)
            continuations += batch_continuations
        return continuations


def best(logits: Logits) -> list[int]:
    """Return the most likely next token of each prompt."""
    return [int(logits_LV[-1].argmax()) for logits_LV in logits]


class OnnxRuntime(StepwiseProgram):
    """ONNX Runtime, through the Session in the export's generate.py."""

    def __init__(self, folder: Path, longest: int, threads: int = 0) -> None:
        # By its path: the export is not a package.
        module = runpy.run_path(str(folder / "generate.py"))
        self.session = module["Session"](folder, threads)
        self.left_padded = module["left_padded"]

    def begin(self, prompts: Tokens, every: bool = False) -> Logits:
        ids_BL, self.mask_BS = self.left_padded(prompts)
        self.states = self.session.first_states(len(prompts))
        # 0 keeps the logits of all tokens.
        logits_BLV = self._read(ids_BL, keep=0 if every else 1)
        without_padding = []
        for logits_LV, prompt in zip(logits_BLV, prompts):
            without_padding.append(logits_LV[-len(prompt) :])
        return without_padding

    def step(self, tokens: Sequence[int]) -> Logits:
        self.mask_BS = np.pad(self.mask_BS, ((0, 0), (0, 1)), constant_values=1)
        ids_B1 = np.array(tokens)[:, None]
        return self._read(ids_B1, keep=1)

    def _read(self, ids_BL: np.ndarray, keep: int) -> np.ndarray:
        logits_BLV, self.states = self.session.run(ids_BL, self.mask_BS, self.states, keep=keep)
        return logits_BLV

    def cache_bytes(self, prompt: Sequence[int]) -> int:
        self.begin([prompt])
        return sum(value.numpy().nbytes for value in self.states.values())


class LlamaCpp(StepwiseProgram):
    """llama.cpp through its C API, which can keep keys and values in float32 instead of 16 bits."""

    def __init__(self, folder: Path, longest: int, threads: int = 0) -> None:
        import llama_cpp

        self.lib = llama_cpp
        self.longest = longest
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
        options.n_ctx = self.longest * n_prompts
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
        # By row: the indices in the batch whose logits llama.cpp computes.
        indices_by_row: list[list[int]] = []
        for sequence, row in enumerate(rows):
            indices: list[int] = []
            for position, token in enumerate(row):
                index = batch.n_tokens
                batch.token[index] = token
                batch.pos[index] = self.lengths[sequence] + position
                batch.n_seq_id[index] = 1
                batch.seq_id[index][0] = sequence
                has_logits = every or position == len(row) - 1
                batch.logits[index] = has_logits
                if has_logits:
                    indices.append(index)
                batch.n_tokens += 1
            self.lengths[sequence] += len(row)
            indices_by_row.append(indices)
        status = self.lib.llama_decode(self.context, batch)
        if status:
            raise RuntimeError(f"llama_decode ended with status {status}")
        self.lib.llama_batch_free(batch)
        logits = []
        for indices in indices_by_row:
            logits.append(np.stack([self._logits(index) for index in indices]))
        return logits

    def _logits(self, index: int) -> np.ndarray:
        address = self.lib.llama_get_logits_ith(self.context, index)
        return np.ctypeslib.as_array(address, (self.n_vocab,))

    def cache_bytes(self, prompt: Sequence[int]) -> int:
        """Count the bytes that llama.cpp writes to save the sequence, metadata included."""
        self.begin([prompt])
        return self.lib.llama_state_seq_get_size(self.context, 0)


class MlxLm(StepwiseProgram):
    """mlx-lm, one prompt at a time. Reads all tokens but the last without logits, as mlx-lm does."""

    batch = 1

    def __init__(self, folder: Path, longest: int, threads: int = 0) -> None:
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
            # mlx is lazy: without this, the prompt would be computed along with the last token.
            self.mx.eval([layer_cache.state for layer_cache in self.cache])
        return self._read(prompt[-1:])

    def step(self, tokens: Sequence[int]) -> Logits:
        return self._read(tokens)

    def _read(self, tokens: Sequence[int]) -> np.ndarray:
        logits = self.model(self.mx.array([tokens]), cache=self.cache)
        return np.array(logits)

    def cache_bytes(self, prompt: Sequence[int]) -> int:
        self.begin([prompt])
        return sum(layer_cache.nbytes for layer_cache in self.cache)


class Vllm(Program):
    """vLLM in this process, through its scheduler, which exposes neither logits nor states."""

    def __init__(self, folder: Path, longest: int, threads: int = 0) -> None:
        # vLLM reads these when it is imported. `cache_bytes` needs the engine in this process.
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
            max_model_len=longest,
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
