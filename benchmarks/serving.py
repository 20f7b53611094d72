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
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
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
OWN_LAYERS = ("transformers", "onnx", "mlx")
"""Engines in which each layer of a student holds what its own heads need."""

Tokens = list[list[int]]
Record = dict[str, Any]


class Engine:
    """A program with a student loaded: `begin` reads prompts, `step` a token of each. Both return logits [B, V] after
    the last token, and the state; `nbytes` are those of the state of one prompt."""

    batch = BATCH
    begin: Callable[[Tokens], tuple[np.ndarray, Any]]
    step: Callable[[Sequence[int], Any], tuple[np.ndarray, Any]]
    nbytes: Callable[[Any], int]

    def generate(self, prompts: Tokens, new_tokens: int) -> Tokens:
        logits_BV, state = self.begin(prompts)
        rows = [[int(token)] for token in logits_BV.argmax(-1)]
        while len(rows[0]) < new_tokens:
            logits_BV, state = self.step([row[-1] for row in rows], state)
            rows = [[*row, int(token)] for row, token in zip(rows, logits_BV.argmax(-1))]
        return rows

    def logits(self, prompt: list[int]) -> list[float] | None:
        return self.begin([prompt])[0][0].tolist()

    def cache_bytes(self, prompt: list[int]) -> int:
        return self.nbytes(self.begin([prompt])[1])


def left_padded(prompts: Tokens) -> tuple[np.ndarray, np.ndarray]:
    longest = max(map(len, prompts))
    rows = [([0] * (longest - len(prompt)) + prompt, longest - len(prompt)) for prompt in prompts]
    return np.array([row for row, _ in rows]), np.array([[0] * n + [1] * (longest - n) for _, n in rows])


class Transformers(Engine):
    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_grad_enabled(False)
        self.torch, options = torch, {"trust_remote_code": True, "dtype": torch.float32}
        self.model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()

    def begin(self, prompts: Tokens) -> tuple[np.ndarray, Any]:
        ids, mask = map(self.torch.tensor, left_padded(prompts))
        return self._read(ids, mask, None)

    def step(self, tokens: Sequence[int], state: Any) -> tuple[np.ndarray, Any]:
        mask = self.torch.nn.functional.pad(state[0], (0, 1), value=1)
        return self._read(self.torch.tensor([[token] for token in tokens]), mask, state[1])

    def _read(self, ids: Any, mask: Any, cache: Any) -> tuple[np.ndarray, Any]:
        places = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        options = {"attention_mask": mask, "position_ids": places, "past_key_values": cache, "logits_to_keep": 1}
        out = self.model(ids, use_cache=True, **options)
        return out.logits[:, -1].numpy(), (mask, out.past_key_values)

    def nbytes(self, state: Any) -> int:
        held = [value for layer in state[1].layers for value in vars(layer).values()]
        return sum(t.untyped_storage().nbytes() for t in held if isinstance(t, self.torch.Tensor))


class Onnx(Engine):
    """By the Session of generate.py, which lies beside the graph."""

    def __init__(self, folder: Path) -> None:
        self.session = runpy.run_path(str(folder / "generate.py"))["Session"](folder, threads=1)

    def begin(self, prompts: Tokens) -> tuple[np.ndarray, Any]:
        return self._read(*left_padded(prompts), self.session.first_states(len(prompts)))

    def step(self, tokens: Sequence[int], state: Any) -> tuple[np.ndarray, Any]:
        return self._read(np.array([tokens]).T, np.pad(state[0], ((0, 0), (0, 1)), constant_values=1), state[1])

    def _read(self, ids: np.ndarray, mask: np.ndarray, states: Any) -> tuple[np.ndarray, Any]:
        logits, states = self.session.run(ids, mask, states, keep=1)
        return logits[:, -1], (mask, states)

    def nbytes(self, state: Any) -> int:
        return sum(value.numpy().nbytes for value in state[1].values())


class LlamaCpp(Engine):
    """By llama.cpp's C functions; keys and values in 32 bit. Rows of a batch need no padding."""

    def __init__(self, folder: Path) -> None:
        import llama_cpp

        self.lib: Any = llama_cpp
        self.lib.llama_backend_init()
        file = str(folder / "model.gguf").encode()
        self.model = self.lib.llama_model_load_from_file(file, self.lib.llama_model_default_params())
        self.n_vocab = self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(self.model))
        self.context = None

    def begin(self, prompts: Tokens) -> tuple[np.ndarray, Any]:
        if self.context is not None:
            self.lib.llama_free(self.context)
        options = self.lib.llama_context_default_params()
        options.n_seq_max, options.n_threads, options.n_threads_batch = len(prompts), 1, 1
        options.n_ctx = len(prompts) * (max(map(len, prompts)) + NEW_TOKENS)
        options.n_batch, options.flash_attn_type, options.type_k, options.type_v = sum(map(len, prompts)), 0, 0, 0
        self.context = self.lib.llama_init_from_model(self.model, options)
        return self._read(prompts, [0] * len(prompts))

    def step(self, tokens: Sequence[int], state: Any) -> tuple[np.ndarray, Any]:
        return self._read([[token] for token in tokens], state)

    def _read(self, rows: Tokens, starts: list[int]) -> tuple[np.ndarray, Any]:
        batch, last = self.lib.llama_batch_init(sum(map(len, rows)), 0, 1), []
        for n, (row, start) in enumerate(zip(rows, starts)):
            for at, token in enumerate(row):
                index = batch.n_tokens
                batch.token[index], batch.pos[index], batch.n_seq_id[index] = token, start + at, 1
                batch.seq_id[index][0], batch.logits[index] = n, at == len(row) - 1
                batch.n_tokens += 1
            last.append(batch.n_tokens - 1)
        assert self.lib.llama_decode(self.context, batch) == 0
        self.lib.llama_batch_free(batch)
        found = [self.lib.llama_get_logits_ith(self.context, at) for at in last]
        logits_BV = np.stack([np.ctypeslib.as_array(row, (self.n_vocab,)) for row in found])
        return logits_BV, [start + len(row) for start, row in zip(starts, rows)]

    def nbytes(self, state: Any) -> int:
        """Count what llama.cpp writes to save the sequence, its own few numbers included."""
        return self.lib.llama_state_seq_get_size(self.context, 0)


class Mlx(Engine):
    batch = 1

    def __init__(self, folder: Path) -> None:
        import mlx.core as mx
        from mlx_lm.models.cache import make_prompt_cache
        from mlx_lm.utils import load_model

        self.mx, self.make_cache = mx, make_prompt_cache
        self.model, _ = load_model(folder, trust_remote_code=True)
        self.model.set_dtype(mx.float32)

    def begin(self, prompts: Tokens) -> tuple[np.ndarray, Any]:
        return self._read(prompts, self.make_cache(self.model))

    def step(self, tokens: Sequence[int], state: Any) -> tuple[np.ndarray, Any]:
        return self._read([list(tokens)], state)

    def _read(self, rows: Tokens, cache: Any) -> tuple[np.ndarray, Any]:
        return np.array(self.model(self.mx.array(rows), cache=cache)[:, -1]), cache

    def nbytes(self, state: Any) -> int:
        return sum(layer.nbytes for layer in state)


class Vllm(Engine):
    """By its own scheduler, which shows neither logits nor states."""

    def __init__(self, folder: Path) -> None:
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        from vllm import LLM, SamplingParams

        self.sampling = SamplingParams
        shape = {"max_model_len": CONTEXT + NEW_TOKENS, "max_num_seqs": BATCH, "kv_cache_memory_bytes": 2**28}
        options = {"enforce_eager": True, "enable_prefix_caching": False, "skip_tokenizer_init": True, **shape}
        self.engine = LLM(str(folder), dtype="float32", mamba_ssm_cache_dtype="float32", **options)

    def generate(self, prompts: Tokens, new_tokens: int) -> Tokens:
        asked = self.sampling(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        found = self.engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], asked, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in found]

    def logits(self, prompt: list[int]) -> None:
        return None

    def cache_bytes(self, prompt: list[int]) -> int:
        """Count the pages of all layers that a sequence of full length takes."""
        groups = self.engine.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups
        config = self.engine.llm_engine.vllm_config
        return sum(len(one.layer_names) * one.kv_cache_spec.max_memory_usage_bytes(config) for one in groups)


ENGINES = {"transformers": Transformers, "onnx": Onnx, "gguf": LlamaCpp, "mlx": Mlx, "vllm": Vllm}


def work(engine: str, folder: Path, prompts: Tokens) -> Record:
    """Run one engine on one folder, in this process."""
    model, started = ENGINES[engine](folder), time.perf_counter()
    batches = [prompts[at : at + model.batch] for at in range(0, len(prompts), model.batch)]
    tokens = [row for batch in batches for row in model.generate(batch, NEW_TOKENS)]
    seconds = time.perf_counter() - started
    long, times = [5 + (7 * place) % 50 for place in range(CONTEXT)], []
    for _ in range(3):
        started = time.perf_counter()
        model.generate([long], 1)
        times.append(time.perf_counter() - started)
    # Not resource.getrusage, whose peak includes that of the process which started this one.
    peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
    packages = ("torch", "transformers", "onnxruntime", "llama_cpp", "mlx_lm", "vllm")
    return {
        "tokens": tokens,
        "logits": [model.logits(prompt) for prompt in prompts[:BATCH]],
        "ms_to_first_token": round(1e3 * min(times), 1),
        "tokens_per_second": round(len(prompts) * NEW_TOKENS / seconds, 1),
        "cache_bytes": model.cache_bytes(long),
        "peak_bytes": peak * 1024,
        "versions": {name: sys.modules[name].__version__ for name in packages if name in sys.modules},
    }


def make_prompts(vocab_size: int) -> Tokens:
    """Draw prompts of all lengths up to 256, none of the first few tokens, which are often special."""
    generator = np.random.default_rng(0)
    return [generator.integers(5, vocab_size, 1 + (37 * n) % LONGEST).tolist() for n in range(N_PROMPTS)]


def expected(model: Any, prompts: Tokens) -> list[Any]:
    """Let the model itself continue each prompt alone: tokens [T], their leads and logits."""
    import torch

    from hybrid_distill.export.check import greedy

    return [greedy(model, torch.tensor([prompt]), None, NEW_TOKENS, past_ends=True) for prompt in prompts]


def compare(made: Record, right: Sequence[Any]) -> Record:
    """Replace tokens and logits by how they compare with what is right."""
    compared = different = 0
    worst, scale = 0.0, 0.0
    logits = made.pop("logits")
    for n, (row, out) in enumerate(zip(made.pop("tokens"), right, strict=True)):
        logits_TV = out.logits_BTV[0].numpy()
        clear_T = (out.leads_BT[0].numpy() > LEAD * abs(logits_TV).max()).cumprod().astype(bool)
        compared += int(clear_T.sum())
        different += int((np.array(row) != out.tokens_BT[0].numpy())[clear_T].sum())
        if n < len(logits) and logits[n] is not None:
            worst = max(worst, float(abs(np.array(logits[n]) - logits_TV[0]).max()))
            scale = max(scale, float(abs(logits_TV[0]).max()))
    shown = {"logits_differ": float(f"{worst / scale:.2g}")} if scale else {}
    return {"tokens_compared": compared, "tokens_different": different, **shown, **made}


def said_bytes(engine: str, student: Any, plan: Any, folder: Path) -> int:
    """Count the bytes of one sequence's cache in float32, convolution states included."""
    from hybrid_distill.export.falcon_h1 import Container, configuration
    from hybrid_distill.plan import cache_bytes

    if engine in OWN_LAYERS or (plan.keeps_all and engine in NATIVE):
        sizes = {"length": CONTEXT, "head_dim": student.config.head_dim, "d_state": student.config.d_state}
        said = cache_bytes(plan, **sizes, bytes_per_element=4, conv_width=student.config.conv_width)
        return said.total + said.conv
    config = json.loads((folder / "config.json").read_text()) if engine == "vllm" else configuration(student)
    channels = config["mamba_d_ssm"] + 2 * config["mamba_n_groups"] * config["mamba_d_state"]
    conv = config["num_hidden_layers"] * channels * (config["mamba_d_conv"] - 1) * 4
    return Container(config, {}).cache_bytes(CONTEXT, 4) + conv


def measure(run_folder: Path, pythons: dict[str, str], place: Path) -> Iterator[tuple[str, Record]]:
    """Export student and teacher for each engine and run both. Yields a record of each engine."""
    import torch

    from hybrid_distill.export import export_checkpoint
    from hybrid_distill.pipeline import finished_run
    from hybrid_distill.plan import HeadPlan
    from hybrid_distill.student.build import build_student

    torch.set_num_threads(1)
    run = finished_run(run_folder)
    (student, plan), teacher = run.trained_student(), run.teacher.float().eval()
    options = {"d_state": student.config.d_state, "recurrence": student.config.recurrence}
    all_heads = build_student(teacher, HeadPlan.all(teacher), **options)[0].float().eval()
    models = {"student": (student.float().eval(), plan), "teacher": (all_heads, HeadPlan.all(teacher))}
    prompts = make_prompts(student.config.vocab_size)
    (asked := place / "prompts.json").write_text(json.dumps(prompts))
    right = {name: expected(model, prompts) for name, (model, _) in models.items()}
    for engine, python in pythons.items():
        found: Record = {}
        for name, (model, heads) in models.items():
            folder, answer = place / f"{engine}-{name}", place / f"{engine}-{name}.json"
            try:
                if name == "teacher" and engine in NATIVE:
                    teacher.save_pretrained(folder)
                else:
                    form: Any = "remote-code" if engine == "transformers" else engine
                    export_checkpoint(model, run.tokenizer, folder, plan=heads, form=form, gate=False)
                command = [python, __file__, "--worker", engine, str(folder), str(asked), str(answer)]
                bare = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
                done = subprocess.run(command, capture_output=True, text=True, env=bare, cwd=place)
                if not answer.exists():
                    lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
                    raise ValueError(lines[-1] if lines else f"ended with status {done.returncode}")
                record = compare(json.loads(answer.read_text()), right[name])
                found[name] = record | {"cache_bytes_said": said_bytes(engine, model, heads, folder)}
            except (ValueError, OSError) as error:
                found[name] = {"left_out": str(error)}
            print(engine, name, json.dumps(found[name]), flush=True)
        yield engine, found


def main() -> None:
    """Measure and write the JSON; exit status 1 where an engine computes other tokens."""
    if sys.argv[1:2] == ["--worker"]:
        engine, folder, prompts, answer = sys.argv[2:]
        Path(answer).write_text(json.dumps(work(engine, Path(folder), json.loads(Path(prompts).read_text()))))
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
    different, setting = 0, {"prompts": N_PROMPTS, "new_tokens": NEW_TOKENS, "context": CONTEXT}
    with tempfile.TemporaryDirectory() as folder:
        for engine, found in measure(options.run, pythons, Path(folder)):
            students = read(options.out).get("students", {})
            students.setdefault(options.name or options.run.name, {})[engine] = found
            write(options.out, about("students in other engines") | setting | {"students": students})
            different += sum(record.get("tokens_different", 0) for record in found.values())
    raise SystemExit(int(different > 0))


if __name__ == "__main__":
    main()
