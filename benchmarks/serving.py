"""Run one student, and its teacher, through every engine that is installed: the same tokens, at what cost?

    python benchmarks/serving.py RUN --engine onnx=PYTHON --engine gguf=PYTHON --engine mlx=PYTHON --engine vllm=PYTHON
    python benchmarks/serving.py RUN --out results.json      # of its own engine, transformers; merged into --out

RUN is the folder of a finished run. Its student is exported in the format of each engine, which then runs in a process
of its own (`serving_worker.py`), with the Python that is named: 64 prompts of different lengths, greedily, in batches
of 8 (left-padded where the engine pads). Tokens are compared with those that the student itself computes, up to the
first whose lead over the second best may be rounding; logits where the engine shows them. Bytes of cache are those that
the engine has allocated for one sequence, beside what `cache_bytes` or `falcon_h1_cache_bytes` says. The teacher runs
in the same engine: as it is where the engine reads Hugging Face folders, else as the student that keeps all heads. An
engine that is not installed, or whose format refuses the student, is left out with the reason. Exit status 1 where an
engine computes other tokens.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import serving_worker
import torch
from records import RESULTS, about, parser_of, read, write
from serving_worker import BATCH, CONTEXT, ENGINES, N_PROMPTS, NEW_TOKENS, Tokens
from transformers import PreTrainedModel

from hybrid_distill.cache_size import cache_bytes, falcon_h1_cache_bytes
from hybrid_distill.export import export_checkpoint
from hybrid_distill.export.check import Greedy, greedy, left_padded
from hybrid_distill.model import HybridForCausalLM
from hybrid_distill.pipeline import RunInputs, finished_run, trained_student
from hybrid_distill.plan import HeadPlan
from hybrid_distill.student.build import build_student

LEAD = 1e-3
"""Lead of the best logit over the second, relative to the largest, below which two programs may round apart."""
NATIVE = ("transformers", "vllm", "mlx")
"""Engines that read the teacher's own folder."""
OWN_LAYERS = ("transformers", "onnx", "mlx")
"""Engines in which each layer of a student holds what its own heads need."""
ROPE = ("rope_theta", "rope_scaling")
Record = dict[str, Any]


class Contender(NamedTuple):
    """A model to export, with its heads, and what it says to the prompts itself."""

    name: str
    model: HybridForCausalLM
    plan: HeadPlan
    right: list[Greedy]


def make_prompts(vocab_size: int, longest: int) -> Tokens:
    """Draw prompts of lengths from 1 to ``longest``, none of the first few tokens, which are often special."""
    generator = np.random.default_rng(0)
    prompts = []
    for n in range(N_PROMPTS):
        length = 1 + (37 * n) % longest
        prompts.append(generator.integers(5, vocab_size, length).tolist())
    return prompts


def continued(model: PreTrainedModel, prompts: Tokens) -> list[Greedy]:
    """Let the model itself continue the prompts: tokens [1, T], their leads and logits of each."""
    answers = []
    for start in range(0, len(prompts), BATCH):
        ids = [torch.tensor(prompt) for prompt in prompts[start : start + BATCH]]
        batch = greedy(model, *left_padded(ids), NEW_TOKENS, past_ends=True)
        for n in range(len(ids)):
            answers.append(Greedy(*(tensor[n : n + 1] for tensor in batch)))
    return answers


def compared(measured: Record, right: Sequence[Greedy]) -> Record:
    """Replace the tokens and logits of a measurement by how they compare with what is right."""
    n_compared = 0
    n_different = 0
    tokens = measured.pop("tokens")
    logits = measured.pop("logits")
    for row, expected in zip(tokens, right, strict=True):
        logits_TV = expected.logits_BTV[0].numpy()
        is_clear_T = expected.leads_BT[0].numpy() > LEAD * abs(logits_TV).max()
        # Behind a token that may be rounded apart, the two may rightly say different things.
        is_comparable_T = is_clear_T.cumprod().astype(bool)
        is_other_T = np.array(row) != expected.tokens_BT[0].numpy()
        n_compared += int(is_comparable_T.sum())
        n_different += int(is_other_T[is_comparable_T].sum())
    comparison: Record = {"tokens_compared": n_compared, "tokens_different": n_different}
    error = error_of_logits(logits, right)
    if error is not None:
        comparison["logits_differ"] = error
    return comparison | measured


def error_of_logits(logits: Sequence[Any], right: Sequence[Greedy]) -> float | None:
    """Return the largest error relative to the largest logit; None if the engine shows no logits."""
    largest_error = 0.0
    largest_logit = 0.0
    # Of the first prompts alone.
    for row, expected in zip(logits, right):
        if row is None:
            continue
        expected_V = expected.logits_BTV[0, 0].numpy()
        error = abs(np.array(row) - expected_V).max()
        largest_error = max(largest_error, float(error))
        largest_logit = max(largest_logit, float(abs(expected_V).max()))
    if not largest_logit:
        return None
    return float(f"{largest_error / largest_logit:.2g}")


def predicted_bytes(engine: str, contender: Contender, folder: Path) -> int:
    """Count the bytes of one sequence's cache in float32, convolution states included."""
    config = contender.model.config
    plan = contender.plan
    sizes = {"head_dim": config.head_dim, "d_state": config.d_state, "bytes_per_element": 4}
    if engine in OWN_LAYERS or (plan.keeps_all and engine in NATIVE):
        own = cache_bytes(plan, **sizes, length=CONTEXT, conv_width=config.conv_width)
        return own.total + own.conv
    states = falcon_h1_cache_bytes(plan, **sizes, length=0)
    keys = falcon_h1_cache_bytes(plan, **sizes, length=CONTEXT) - states
    if engine == "vllm":  # spreads small heads over larger ones
        exported = read(folder / "config.json")
        keys *= exported["head_dim"] // config.head_dim
    # Every layer has the heads of the one that needs most, and at least one.
    n_recurrent = [len(plan.replaced_in(layer)) for layer in range(plan.n_layers)]
    n_channels = config.head_dim + 2 * config.d_state
    conv_of_head = n_channels * (config.conv_width - 1) * 4
    conv_of_layer = max(1, *n_recurrent) * conv_of_head
    return keys + states + plan.n_layers * conv_of_layer


class Comparison:
    """Student and teacher of one run, and the prompts, in a folder for exports."""

    def __init__(self, run: RunInputs, folder: Path, longest: int, threads: int) -> None:
        self.folder = folder
        self.threads = threads
        self.tokenizer = run.tokenizer
        self.teacher = run.teacher.float().eval()
        student, plan = trained_student(run)
        all_heads = HeadPlan.all(self.teacher)
        copy, _ = build_student(
            self.teacher,
            all_heads,
            d_state=student.config.d_state,
            recurrence=student.config.recurrence,
        )
        prompts = make_prompts(student.config.vocab_size, longest)
        self.prompts = folder / "prompts.json"
        write(self.prompts, prompts)
        self.contenders = []
        for name, model, heads in (("student", student, plan), ("teacher", copy, all_heads)):
            model = model.float().eval()
            self.contenders.append(Contender(name, model, heads, continued(model, prompts)))

    def run(self, engine: str, python: str) -> Record:
        """Return what both models do in an engine, or why they are left out."""
        records = {}
        for contender in self.contenders:
            try:
                records[contender.name] = self.measure(engine, python, contender)
            except (ValueError, OSError) as error:
                records[contender.name] = {"left_out": str(error)}
            print(engine, contender.name, json.dumps(records[contender.name]), flush=True)
        return records

    def measure(self, engine: str, python: str, contender: Contender) -> Record:
        folder = self.folder / f"{engine}-{contender.name}"
        if contender.name == "teacher" and engine in NATIVE:
            self.save_teacher(engine, folder)
        else:
            export_format: Any = "remote-code" if engine == "transformers" else engine
            export_checkpoint(
                contender.model,
                self.tokenizer,
                folder,
                plan=contender.plan,
                export_format=export_format,
                gate=False,
            )
        measured = compared(self.work(engine, python, folder), contender.right)
        return {**measured, "cache_bytes_said": predicted_bytes(engine, contender, folder)}

    def save_teacher(self, engine: str, folder: Path) -> None:
        self.teacher.save_pretrained(folder)
        if engine == "mlx":
            # It reads RoPE's settings by the names of transformers 4, which students still have.
            backbone = self.contenders[0].model.config.backbone
            rope = {name: backbone[name] for name in ROPE if name in backbone}
            write(folder / "config.json", read(folder / "config.json") | rope)

    def work(self, engine: str, python: str, folder: Path) -> Record:
        """Run an engine in a process of its own. Raises ValueError with the last line that it printed."""
        answer = folder.with_suffix(".json")
        command = [
            python,
            serving_worker.__file__,
            engine,
            folder,
            self.prompts,
            answer,
            self.threads,
        ]
        # Another Python must not find this one's packages.
        bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        bare["OMP_NUM_THREADS"] = str(self.threads)
        process = subprocess.run(
            [str(word) for word in command],
            capture_output=True,
            text=True,
            env=bare,
            cwd=self.folder,
        )
        if not answer.exists():
            printed = (process.stderr or process.stdout).strip()
            reason = f"ended with status {process.returncode}"
            if printed:
                reason = printed.splitlines()[-1]
            raise ValueError(reason)
        return read(answer)


def main() -> None:
    """Measure and write the JSON."""
    parser = parser_of(__doc__, RESULTS / "serving.json")
    parser.add_argument("run", type=Path, help="folder of a finished run")
    parser.add_argument("--engine", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--name", help="name of the student in the record; by default the folder's")
    parser.add_argument(
        "--longest", type=int, default=256, help="prompts have from 1 to so many tokens"
    )
    parser.add_argument("--threads", type=int, default=1, help="mlx-lm takes what it wants")
    options = parser.parse_args()
    pythons = {"transformers": sys.executable}
    for pair in options.engine:
        engine, _, python = pair.partition("=")
        if engine not in ENGINES:
            parser.error(f"--engine {pair}: {engine} is not one of {', '.join(ENGINES)}")
        pythons[engine] = python
    torch.set_num_threads(options.threads)
    n_different = 0
    setting = {"longest_prompt": options.longest, "threads": options.threads}
    student = options.name or options.run.name
    with tempfile.TemporaryDirectory() as folder:
        run = finished_run(options.run)
        comparison = Comparison(run, Path(folder), options.longest, options.threads)
        for engine, python in pythons.items():
            measured = comparison.run(engine, python)
            for record in measured.values():
                n_different += record.get("tokens_different", 0)
            save(options.out, student, engine, setting | measured)
    raise SystemExit(int(n_different > 0))


def save(path: Path, student: str, engine: str, record: Record) -> None:
    """Put a record beside those of other students and engines."""
    students = read(path).get("students", {})
    students.setdefault(student, {})[engine] = record
    setting = {"prompts": N_PROMPTS, "new_tokens": NEW_TOKENS, "context": CONTEXT}
    write(path, {**about("students in other engines"), **setting, "students": students})


if __name__ == "__main__":
    main()
