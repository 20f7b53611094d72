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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from hybrid_distill.export.check import Greedy

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "serving.json"
N_PROMPTS, NEW_TOKENS, BATCH = 64, 16, 8
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
Found = tuple[str, Record]
PROGRAMS: Record = runpy.run_path(str(ROOT / "hybrid_distill" / "export" / "programs.py"))  # without torch
Program: Any = PROGRAMS["Program"]


class Transformers(Program):
    """Eager transformers, with the folder's own code; batches are left-padded."""

    def __init__(self, folder: Path, context: int, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from hybrid_distill.model.layout import cache_argument, cache_of

        torch.set_grad_enabled(False)
        torch.set_num_threads(threads)
        options = {"trust_remote_code": True, "dtype": torch.float32}
        self.torch = torch
        self.cache_of = cache_of
        self.model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
        self.cache_name = cache_argument(self.model.forward)

    def begin(self, prompts: Tokens, every: bool = False) -> np.ndarray:
        ids, self.mask = map(self.torch.tensor, PROGRAMS["left_padded"](prompts))
        self.cache = None
        return self._read(ids, 0 if every else 1)

    def step(self, tokens: Sequence[int]) -> np.ndarray:
        self.mask = self.torch.nn.functional.pad(self.mask, (0, 1), value=1)
        return self._read(self.torch.tensor([[token] for token in tokens]), 1)

    def _read(self, ids: Any, keep: int) -> np.ndarray:
        places = (self.mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        options = {"attention_mask": self.mask, "position_ids": places, self.cache_name: self.cache}
        out = self.model(ids, use_cache=True, logits_to_keep=keep, **options)
        self.cache = self.cache_of(out)
        return out.logits.numpy()

    def nbytes(self) -> int:
        n_bytes = 0
        for layer in self.cache.layers:
            for value in vars(layer).values():
                if isinstance(value, self.torch.Tensor):
                    n_bytes += value.untyped_storage().nbytes()
        return n_bytes


ENGINES = {"transformers": Transformers, **PROGRAMS["PROGRAMS"]}


def work(engine: str, folder: Path, prompts: Tokens, threads: int) -> Record:
    """Run one engine on one folder, in this process."""
    model = ENGINES[engine](folder, CONTEXT + NEW_TOKENS, threads)
    started = time.perf_counter()
    tokens = model.generate(prompts, NEW_TOKENS)
    seconds = time.perf_counter() - started
    long = [5 + (7 * place) % 50 for place in range(CONTEXT)]
    times = []
    for _ in range(3):
        started = time.perf_counter()
        model.generate([long], 1)
        times.append(time.perf_counter() - started)
    logits = [model.logits(prompt) for prompt in prompts[:BATCH]]
    # Not resource.getrusage, whose peak includes that of the process which started this one.
    peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
    packages = ("torch", "transformers", "onnxruntime", "llama_cpp", "mlx_lm", "vllm")
    return {
        "tokens": tokens,
        "logits": [None if each is None else each[-1].tolist() for each in logits],
        "ms_to_first_token": round(1e3 * min(times), 1),
        "ms_of_next_token": least_ms_of_step(model, long[:128]),
        "tokens_per_second": round(len(prompts) * NEW_TOKENS / seconds, 1),
        "cache_bytes": model.cache_bytes(long),
        "peak_bytes": peak * 1024,
        "load": round(os.getloadavg()[0], 1),
        "versions": {name: sys.modules[name].__version__ for name in packages if name in sys.modules},
    }


def least_ms_of_step(model: Any, prompt: list[int]) -> float | None:
    """Time the steps behind a prompt, and take the least, which a busy machine disturbs least."""
    if type(model).generate is not Program.generate:  # by its own scheduler
        return None
    model.begin([prompt])
    times = []
    for _ in range(4 * NEW_TOKENS):
        started = time.perf_counter()
        model.step([7])
        times.append(time.perf_counter() - started)
    return round(1e3 * min(times), 2)


def make_prompts(vocab_size: int, longest: int) -> Tokens:
    """Draw prompts of lengths from 1 to ``longest``, none of the first few tokens, which are often special."""
    generator = np.random.default_rng(0)
    return [generator.integers(5, vocab_size, 1 + (37 * n) % longest).tolist() for n in range(N_PROMPTS)]


def expected(model: Any, prompts: Tokens) -> list[Greedy]:
    """Let the model itself continue the prompts: tokens [1, T], their leads and logits of each."""
    import torch

    from hybrid_distill.export.check import Greedy, greedy, left_padded

    continued = []
    for at in range(0, len(prompts), BATCH):
        ids = [torch.tensor(prompt) for prompt in prompts[at : at + BATCH]]
        out = greedy(model, *left_padded(ids), NEW_TOKENS, past_ends=True)
        for n in range(len(ids)):
            continued.append(Greedy(*(part[n : n + 1] for part in out)))
    return continued


def compare(made: Record, right: Sequence[Greedy]) -> Record:
    """Replace tokens and logits by how they compare with what is right."""
    compared = 0
    different = 0
    worst = 0.0
    scale = 0.0
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
    from hybrid_distill.plan import cache_bytes, container_bytes

    config = student.config
    sizes = {"length": CONTEXT, "head_dim": config.head_dim, "d_state": config.d_state, "bytes_per_element": 4}
    own = cache_bytes(plan, **sizes, conv_width=config.conv_width)
    if engine in OWN_LAYERS or (plan.keeps_all and engine in NATIVE):
        return own.total + own.conv
    states = container_bytes(plan, **sizes | {"length": 0})
    keys = container_bytes(plan, **sizes) - states
    if engine == "vllm":  # spreads small heads over larger ones
        keys *= json.loads((folder / "config.json").read_text())["head_dim"] // config.head_dim
    n_ssm = max(1, *(len(plan.replaced_in(layer)) for layer in range(plan.n_layers)))
    conv = n_ssm * (config.head_dim + 2 * config.d_state) * (config.conv_width - 1) * 4
    return keys + states + plan.n_layers * conv


def measure(run_folder: Path, pythons: dict[str, str], place: Path, longest: int, threads: int) -> Iterator[Found]:
    """Export student and teacher for each engine and run both. Yields a record of each engine."""
    import torch
    from records import read, write

    from hybrid_distill.export import export_checkpoint
    from hybrid_distill.pipeline import finished_run, trained_student
    from hybrid_distill.plan import HeadPlan
    from hybrid_distill.student.build import build_student

    torch.set_num_threads(threads)
    run = finished_run(run_folder)
    student, plan = trained_student(run)
    teacher = run.teacher.float().eval()
    options = {"d_state": student.config.d_state, "recurrence": student.config.recurrence}
    all_heads = build_student(teacher, HeadPlan.all(teacher), **options)[0].float().eval()
    models = {"student": (student.float().eval(), plan), "teacher": (all_heads, HeadPlan.all(teacher))}
    prompts = make_prompts(student.config.vocab_size, longest)
    (asked := place / "prompts.json").write_text(json.dumps(prompts))
    right = {name: expected(model, prompts) for name, (model, _) in models.items()}
    for engine, python in pythons.items():
        found: Record = {}
        for name, (model, heads) in models.items():
            folder, answer = place / f"{engine}-{name}", place / f"{engine}-{name}.json"
            try:
                if name == "teacher" and engine in NATIVE:
                    teacher.save_pretrained(folder)
                    if engine == "mlx":  # reads RoPE's settings by the names of transformers 4, which students have too
                        rope = {n: v for n, v in model.config.backbone.items() if n in ("rope_theta", "rope_scaling")}
                        write(folder / "config.json", read(folder / "config.json") | rope)
                else:
                    form: Any = "remote-code" if engine == "transformers" else engine
                    export_checkpoint(model, run.tokenizer, folder, plan=heads, export_format=form, gate=False)
                command = [python, __file__, "--worker", engine, str(folder), str(asked), str(answer), str(threads)]
                bare = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": str(threads)}
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
        engine, folder, prompts, answer, threads = sys.argv[2:]
        made = work(engine, Path(folder), json.loads(Path(prompts).read_text()), int(threads))
        Path(answer).write_text(json.dumps(made))
        return
    from records import about, read, write

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of a finished run")
    parser.add_argument("--engine", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--name", help="name of the student in the record; by default the folder's")
    parser.add_argument("--longest", type=int, default=256, help="prompts have from 1 to so many tokens")
    parser.add_argument("--threads", type=int, default=1, help="mlx-lm takes what it wants")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    pythons = {"transformers": sys.executable, **dict(pair.split("=", 1) for pair in options.engine)}
    if unknown := pythons.keys() - ENGINES.keys():
        parser.error(f"--engine {', '.join(unknown)} is not one of {', '.join(ENGINES)}")
    setting = {"prompts": N_PROMPTS, "new_tokens": NEW_TOKENS, "context": CONTEXT}
    different, own = 0, {"longest_prompt": options.longest, "threads": options.threads}
    with tempfile.TemporaryDirectory() as folder:
        for engine, found in measure(options.run, pythons, Path(folder), options.longest, options.threads):
            students = read(options.out).get("students", {})
            students.setdefault(options.name or options.run.name, {})[engine] = own | found
            write(options.out, about("students in other engines") | setting | {"students": students})
            different += sum(record.get("tokens_different", 0) for record in found.values())
    raise SystemExit(int(different > 0))


if __name__ == "__main__":
    main()
