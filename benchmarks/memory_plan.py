"""Is the memory plan right? Every part that can be measured here, beside what `memory_plan` says of it.

    python benchmarks/memory_plan.py                 # CPU: about 3 minutes; writes benchmarks/results/memory_plan.json
    python benchmarks/memory_plan.py --device cuda   # a GPU: also the shape of Llama-3.2-1B, random weights
    python benchmarks/memory_plan.py --table         # the tables of docs/performance.md, from what is there

One process takes a step of two micro-batches. Parameters, gradients and AdamW's moments are summed tensor by tensor.
What is kept for the backward is what the forward leaves behind. The peak is the whole step's, models included. On a CPU
the profiler's record of every allocation says how much that is, on a GPU `torch.cuda.max_memory_allocated`.

With `--no-processes` left out, two processes then train the mid-size model on the CPU, over gloo, under DDP, ZeRO-1, 2
and 3 and FSDP2, and the peak of one of them is compared, with DeepSpeed's reduce bucket cut to a size that fits.

Exit status 1 if a part that is 2 % of the peak or more is more than 15 % away from its prediction.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from records import RESULTS, about, parser_of, read, write
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from hybrid_distill.assets import tiny_teacher_path
from hybrid_distill.data import Batch
from hybrid_distill.lab.memory.plan import GB, STRATEGIES, MemoryPlan, memory_plan
from hybrid_distill.lab.memory.shape import StageShape
from hybrid_distill.plan import HeadPlan
from hybrid_distill.student.build import build_student, empty_student
from hybrid_distill.train.config import Align, AlignMatrix, Distill, StageConfig
from hybrid_distill.train.end_to_end import EndToEnd
from hybrid_distill.train.optimizer import make_adamw, trainable
from hybrid_distill.train.stage import Stage
from hybrid_distill.train.stages import make_stage

RECORD = RESULTS / "memory_plan.json"
PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "triton")
TOLERANCE = 0.15
WORTH_COMPARING = 0.02
"""Share of the peak below which a part is shown but not judged."""
MB = 1e6
BUCKET = 100_000  # elements

SHAPES: dict[str, dict[str, Any]] = {
    "mid": {
        "vocab_size": 4000,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
    },
    "odd": {
        "vocab_size": 2500,
        "hidden_size": 384,
        "intermediate_size": 1000,
        "num_hidden_layers": 4,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "tie_word_embeddings": True,
    },
    "llama-3.2-1b": {
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}
ALIGN = Align()
DISTILL = Distill()
MATRIX = AlignMatrix()


class Case(NamedTuple):
    """A stage of a model, the dtype of its teacher, and a micro-batch."""

    model: str
    config: StageConfig
    dtype: torch.dtype = torch.float32
    kept: int = 10
    d_state: int = 16
    rows: int = 4
    length: int = 256
    recurrence: str = "discrete"
    window: int = 0

    @property
    def head_options(self) -> dict[str, Any]:
        """Options of the replaced heads."""
        return {
            "d_state": self.d_state,
            "conv_width": 4,
            "recurrence": self.recurrence,
            "window": self.window,
            "sinks": min(self.window, 4),
        }

    def named(self) -> str:
        config = self.config
        words = [self.model, config.name, getattr(config, "target", ""), config.precision]
        if self.recurrence != "discrete":
            words.append(self.recurrence)
        if self.window:
            words.append(f"window {self.window}")
        trained_part = getattr(config, "train", "")
        if trained_part and trained_part != getattr(type(config)(), "train", ""):
            words.append(f"train {trained_part}")
        if not getattr(config, "fused", True):
            words.append("unfused")
        if config.gradient_checkpointing:
            words.append("recompute")
        return " ".join(filter(None, words))


def cases(device: str) -> list[Case]:
    """Return alignment and end-to-end distillation, with and without recompute, float32 and bf16, and their options."""
    listed = []
    combinations = itertools.product(("tiny", "mid"), (ALIGN, DISTILL), (False, True))
    for model, config, recompute in combinations:
        whole = replace(config, gradient_checkpointing=recompute)
        half = replace(whole, precision="bf16")
        listed.append(Case(model, whole))
        listed.append(Case(model, half, dtype=torch.bfloat16))
    for config in (
        replace(ALIGN, target="head"),
        replace(ALIGN, target="layer"),
        replace(ALIGN, train="mixer"),
        replace(DISTILL, train="ssm"),
        replace(DISTILL, train="mixer"),
        replace(DISTILL, fused=False),
    ):
        listed.append(Case("mid", config))
    listed.append(Case("mid", MATRIX, kept=0))
    for config in (ALIGN, DISTILL):
        listed.append(Case("mid", config, recurrence="gdn"))
        listed.append(Case("mid", config, window=20, d_state=8))
    # Their heads read KV heads unevenly, and without recurrent heads the mixers are what is trained.
    for config in (replace(ALIGN, train="mixer"), DISTILL):
        listed.append(Case("mid", config, window=44, d_state=0))
        half = replace(config, precision="bf16")
        listed.append(Case("mid", half, torch.bfloat16, window=44, d_state=0))
    listed.append(Case("mid", replace(ALIGN, train="mixer"), window=20, d_state=8))
    for config, recompute in itertools.product((ALIGN, DISTILL), (False, True)):
        half = replace(config, gradient_checkpointing=recompute, precision="bf16")
        listed.append(Case("odd", half, torch.bfloat16, kept=24, d_state=64, rows=3, length=200))
    if device == "cuda":
        listed += large_cases("llama-3.2-1b")
    return listed


def large_cases(model: str, rows: tuple[int, int] = (8, 4)) -> Iterator[Case]:
    """Yield those of recipes/hybrid_llama_1b.py; ``rows`` of a micro-batch in alignment and distillation."""
    configs = (replace(ALIGN, target="layer"), DISTILL)
    for config, n_rows in zip(configs, rows):
        for recompute in (False, True):
            half = replace(config, gradient_checkpointing=recompute, precision="bf16")
            yield Case(model, half, torch.bfloat16, kept=20, d_state=64, rows=n_rows, length=2048)


def make_teacher(case: Case, device: str) -> PreTrainedModel:
    """Return a teacher on ``device``, or its shapes alone on ``meta``."""
    attention = "eager" if case.config.name == "matrix" else "sdpa"
    if case.model == "tiny":
        shape = LlamaConfig.from_pretrained(tiny_teacher_path())
    else:
        shape = LlamaConfig(**SHAPES[case.model])
    with torch.device(device):
        return AutoModelForCausalLM.from_config(
            shape, dtype=case.dtype, attn_implementation=attention
        )


def make_real_stage(case: Case, device: str) -> Stage:
    """Return a stage with weights, in training mode, as the loop sets it up."""
    torch.manual_seed(0)
    teacher = make_teacher(case, device)
    plan = HeadPlan.random(teacher.config, case.kept, seed=1)
    student, _ = build_student(teacher, plan, init="random", **case.head_options)
    stage = make_stage(case.config, student, teacher)
    stage.place(torch.device(device))
    stage.bf16 = case.config.precision == "bf16"
    return stage.train()


def predict(case: Case, device: str = "cpu", **options: Any) -> MemoryPlan:
    """Plan from the meta device; by default for one process."""
    teacher = make_teacher(case, "meta")
    plan = HeadPlan.random(teacher.config, case.kept, seed=1)
    student = empty_student(teacher, plan, **case.head_options)
    shape = StageShape(case.config, student, teacher)
    settings = {
        "world": 1,
        "strategy": "ddp",
        "micro_batch": case.rows,
        "seq_len": case.length,
        "device": device,
    }
    return memory_plan(shape, **{**settings, **options})


def make_batch(case: Case, vocabulary: int, device: str) -> Batch:
    """Draw rows of two documents each."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (case.rows, case.length), generator=generator).to(device)
    seq_idx = torch.zeros_like(ids)
    seq_idx[:, case.length // 3 :] = 1
    return {"input_ids": ids, "seq_idx": seq_idx, "mask": torch.ones_like(ids, dtype=torch.bool)}


@dataclass
class Allocated:
    """Bytes over what was there at the start: at the end, and at the fullest."""

    end: int = 0
    peak: int = 0


@contextmanager
def allocations(device: str) -> Iterator[Allocated]:
    """Yield an `Allocated` that is filled in at the end."""
    allocated = Allocated()
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield allocated
        torch.cuda.synchronize()
        allocated.end = torch.cuda.memory_allocated() - before
        allocated.peak = torch.cuda.max_memory_allocated() - before
        return
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as record:
        yield allocated
    for _, size in sorted(memory_events(record)):
        allocated.end += size
        allocated.peak = max(allocated.peak, allocated.end)


def memory_events(record: profile) -> list[tuple[int, int]]:
    """Return (time, bytes) of every allocation, and of every release as a negative number."""
    return [(event.start_ns(), event.nbytes()) for event in events_named(record, "[memory]")]


def events_named(record: profile, name: str) -> list[Any]:
    """Return the profiler's raw events of this name: torch's own list of events leaves out when memory was taken."""
    profiler: Any = record.profiler
    return [event for event in profiler.kineto_results.events() if event.name() == name]


def measure(stage: Stage, batch: Batch, device: str) -> dict[str, int]:
    """Return the bytes of each part, and of everything at the fullest moment of a step's second micro-batch."""
    # A first step makes the optimizer's moments; then the first micro-batch of the second.
    optimizer = make_adamw(stage, learning_rate=1e-4, betas=(0.9, 0.95), weight_decay=0.1)
    stage(batch).total.backward()
    optimizer.step()
    optimizer.zero_grad()
    stage(batch).total.backward()

    trained = list(trainable(stage).values())
    frozen = [p for p in stage.parameters() if not p.requires_grad]
    parts = {
        "trained": nbytes(trained),
        "frozen": nbytes(frozen),
        "gradients": nbytes(p.grad for p in trained if p.grad is not None),
        "optimizer": nbytes(moments(optimizer)),
        "teacher": nbytes(stage.teacher.parameters()),
    }
    lasting = sum(parts.values())
    kept = kept_by_forward(stage, batch, device)
    if isinstance(stage, EndToEnd):
        loss = loss_alone(stage, batch, device)
        parts["activations and bf16 copies"] = kept - loss.kept
        parts["loss"] = loss.peak
    else:
        parts["activations and bf16 copies"] = kept

    with allocations(device) as step:
        stage(batch).total.backward()
    return {**parts, "total": lasting + step.peak}


def moments(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return everything that an optimizer keeps between steps."""
    tensors = []
    for state in optimizer.state.values():
        tensors += state.values()
    return tensors


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Sum the bytes of the storages, each counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def kept_by_forward(stage: Stage, batch: Batch, device: str) -> int:
    """Sum the tensors saved for the backward and autocast's cached copies."""
    with torch.autocast(device, torch.bfloat16, enabled=stage.bf16):
        with allocations(device) as forward:
            waiting = stage(batch)
    del waiting
    return forward.end


def saved_tensors(stage: Stage, batch: Batch) -> int:
    """Count the same another way: the storages that autograd saves, but for parameters."""
    own = set()
    for model in (stage.student, *stage.teachers):
        own.update(p.untyped_storage().data_ptr() for p in model.parameters())
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in own:
            saved[place] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        waiting = stage(batch)
    del waiting
    return nbytes(saved.values())


class LossMemory(NamedTuple):
    """Bytes that the loss keeps for the backward, and that it needs at its fullest."""

    kept: int
    peak: int


def loss_alone(stage: EndToEnd, batch: Batch, device: str) -> LossMemory:
    """Measure the stage with both models replaced by their last hidden states."""
    student: Any = stage.student
    teacher = stage.teacher.base_model
    ids = batch["input_ids"]
    with torch.autocast(device, torch.bfloat16, enabled=stage.bf16), torch.no_grad():
        ours = student.model(input_ids=ids, seq_idx=batch["seq_idx"], use_cache=False)[0]
        theirs = teacher(input_ids=ids, use_cache=False)[0]
    ours = ours.detach().requires_grad_()
    student.model.forward = lambda *args, **kwargs: (ours,)
    teacher.forward = lambda *args, **kwargs: (theirs,)
    with allocations(device) as forward:
        loss = stage(batch).total
    with allocations(device) as backward:
        loss.backward()
    del student.model.forward, teacher.forward
    return LossMemory(forward.end, max(forward.peak, forward.end + backward.peak))


def predicted(plan: MemoryPlan) -> dict[str, int]:
    """Return a plan's parts under the names of `measure`."""
    parts = {
        "trained": plan["trained parameters"],
        "frozen": plan["frozen parameters"],
        "gradients": plan["gradients"],
        "optimizer": plan["optimizer"],
        "teacher": plan["teacher"],
        "activations and bf16 copies": plan["activations"] + plan["bf16 copies"],
    }
    if plan["loss chunk"]:
        parts["loss"] = plan["loss chunk"]
    return {**parts, "total": sum(plan.values())}


def compare(measured: dict[str, int], expected: dict[str, int]) -> dict[str, dict[str, float]]:
    """Return both figures of each part, and by how much the prediction is off, as a share of the measurement."""
    parts = {}
    for name, value in measured.items():
        if value:
            off = round(expected[name] / value - 1.0, 4)
        else:
            off = float(expected[name] > 0)
        parts[name] = {"measured": value, "predicted": expected[name], "off": off}
    return parts


def misses(parts: dict[str, dict[str, float]]) -> list[str]:
    """Return the parts that are too far off, of those that matter."""
    least = WORTH_COMPARING * parts["total"]["measured"]
    missed = []
    for name, part in parts.items():
        if part["measured"] >= least and abs(part["off"]) > TOLERANCE:
            missed.append(name)
    return missed


def one_process(case: Case, device: str) -> dict[str, Any]:
    """Measure and predict one case."""
    stage = make_real_stage(case, device)
    batch = make_batch(case, stage.teacher.config.vocab_size, device)
    measured = measure(stage, batch, device)
    plan = predict(case, device)
    parts = compare(measured, predicted(plan))
    record: dict[str, Any] = {
        "case": case.named(),
        "tokens": case.rows * case.length,
        "parts": parts,
        "misses": misses(parts),
    }
    if not case.config.gradient_checkpointing and not stage.bf16:
        record["saved_tensors"] = saved_tensors(stage, batch)
    return record


PROCESSES = 2
ACCELERATE = "accelerate.commands.launch"
LAUNCHERS = {
    "ddp": (ACCELERATE, "--multi_gpu", "--num_processes"),
    "zero1": (ACCELERATE, "--use_deepspeed", "--zero_stage", "1", "--num_processes"),
    "zero2": (ACCELERATE, "--use_deepspeed", "--zero_stage", "2", "--num_processes"),
    "zero3": (ACCELERATE, "--use_deepspeed", "--zero_stage", "3", "--num_processes"),
    "fsdp2": ("torch.distributed.run", "--nproc_per_node"),
}
"""Modules and their flags, the last of which takes the number of processes."""
DIVIDED = Case("mid", DISTILL, rows=2, length=128)
STEP = "memory_plan: a step"


def two_processes(strategy: str) -> dict[str, Any]:
    """Launch this script twice, and compare the peak of the first process."""
    launcher = [sys.executable, "-m", *LAUNCHERS[strategy]]
    command = [*launcher, str(PROCESSES), __file__, "--as-process", strategy]
    ended = subprocess.run(
        command,
        env=os.environ | {"ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    peaks = [line for line in ended.stdout.splitlines() if line.startswith("peak ")]
    if ended.returncode or not peaks:
        printed = f"{ended.stdout[-2000:]}\n{ended.stderr[-2000:]}"
        raise RuntimeError(f"{' '.join(command)} failed:\n{printed}")
    _, n_bytes = peaks[0].split()
    measured = int(n_bytes)
    plan = predict(DIVIDED, world=PROCESSES, strategy=strategy, reduce_bucket=BUCKET)
    parts = compare({"total": measured}, predicted(plan))
    return {
        "case": f"{DIVIDED.named()} {strategy}",
        "processes": PROCESSES,
        "parts": parts,
        "misses": misses(parts),
    }


def as_process(strategy: str) -> None:
    """Train two steps as one of several, and print the peak of the second if this is the first process."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as record:
        if strategy == "fsdp2":
            rank = _train_with_fsdp2()
        else:
            rank = _train_with_accelerate()
    begun = max(event.start_ns() for event in events_named(record, STEP))
    now = 0
    peak = 0
    for moment, size in sorted(memory_events(record)):
        now += size
        if moment > begun:
            peak = max(peak, now)
    if rank == 0:
        print(f"peak {peak}", flush=True)


def _train_with_accelerate() -> int:
    from hybrid_distill.distributed import make_accelerator
    from hybrid_distill.train.parallel.choice import is_deepspeed, set_batch

    _let_gloo_release_first()
    accelerator = make_accelerator()
    stage = make_real_stage(DIVIDED, "cpu")
    set_batch(accelerator, rows=2 * DIVIDED.rows, micro_batch_size=DIVIDED.rows, clip=1.0)
    if is_deepspeed(accelerator):
        plugin: Any = accelerator.state.deepspeed_plugin
        # Every parameter is divided, as in a model in which none is as small as here.
        sizes = {"reduce_bucket_size": BUCKET, "stage3_param_persistence_threshold": 0}
        plugin.deepspeed_config["zero_optimization"] |= sizes
    optimizer = make_adamw(stage, learning_rate=1e-4, betas=(0.9, 0.95), weight_decay=0.1)
    model, optimizer = accelerator.prepare(stage, optimizer)
    batch = make_batch(DIVIDED, stage.teacher.config.vocab_size, "cpu")

    def micro_batch() -> None:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).total)

    _two_steps(micro_batch, optimizer)
    return accelerator.process_index


def _train_with_fsdp2() -> int:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from hybrid_distill.train.parallel.fsdp2 import begin_micro_batch, sharded_stage, stay_gathered

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    stage = sharded_stage(make_real_stage(DIVIDED, "cpu"), mesh)
    optimizer = make_adamw(stage, learning_rate=1e-4, betas=(0.9, 0.95), weight_decay=0.1)
    batch = make_batch(DIVIDED, stage.teacher.config.vocab_size, "cpu")
    root: Any = stage
    stay_gathered(root)
    numbers = itertools.count()

    def micro_batch() -> None:
        begin_micro_batch(root, is_last=next(numbers) % 2 == 1)
        stage(batch).total.backward()

    _two_steps(micro_batch, optimizer)
    return dist.get_rank()


def _let_gloo_release_first() -> None:
    """Pause after each collective, so that this thread is the last to hold its tensors.

    The profiler sees only this thread's releases: a buffer that gloo's thread drops last counts as held forever.
    """
    import torch.distributed as dist

    def paused(collective: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(collective)
        def call(*args: Any, **options: Any) -> Any:
            work = collective(*args, **options)
            time.sleep(0.003)
            return work

        return call

    for name in ("all_reduce", "reduce", "all_gather_into_tensor", "reduce_scatter_tensor"):
        setattr(dist, name, paused(getattr(dist, name)))


def _two_steps(micro_batch: Callable[[], object], optimizer: Any) -> None:
    """Take two steps of two micro-batches, each behind a mark in the profiler's record."""
    for _ in range(2):
        gc.collect()
        with record_function(STEP):
            pass
        for _ in range(2):
            micro_batch()
        optimizer.step()
        optimizer.zero_grad()


def show(record: dict[str, Any]) -> str:
    """Return a line: the parts that matter, predicted / measured in MB."""
    total = record["parts"]["total"]["measured"]
    shown = []
    for name, part in record["parts"].items():
        if part["measured"] >= WORTH_COMPARING * total and abs(part["off"]) > 1e-4:
            shown.append(f"{name} {both(part)}")
    verdict = "   MISSES" if record["misses"] else ""
    return f"{record['case']:<34} {'; '.join(shown)}{verdict}"


def both(part: dict[str, float]) -> str:
    off = 100 * part["off"]
    return f"{part['predicted'] / MB:.1f} / {part['measured'] / MB:.1f} ({off:+.0f} %)"


GPUS = 8


def plans() -> list[dict[str, Any]]:
    """Predict the memory of large models on several GPUs from their shapes; nothing is measured."""
    planned: list[dict[str, Any]] = []
    for case in (*large_cases("llama-3.2-1b"), *large_cases("llama-3.1-8b", rows=(1, 1))):
        totals = {}
        for strategy in STRATEGIES:
            plan = predict(case, "cuda", world=GPUS, strategy=strategy)
            totals[strategy] = sum(plan.values())
        row = {
            "case": case.named(),
            "rows": case.rows,
            "length": case.length,
            "gpus": GPUS,
            "totals": totals,
        }
        planned.append(row)
    return planned


def tables(record: dict[str, Any]) -> str:
    """Return Markdown: predictions beside measurements, and plans of large models."""
    names = ("activations and bf16 copies", "loss", "total")
    lines = [f"| MB, predicted / measured | {' | '.join(names)} |", "|---" * 4 + "|"]
    for result in record["results"]:
        parts = result["parts"]
        cells = [both(parts[name]) if name in parts else "" for name in names]
        lines.append(f"| {result['case']} | {' | '.join(cells)} |")
    lines.append("")
    lines.append(f"| GB on each of {GPUS} GPUs | rows | {' | '.join(STRATEGIES)} |")
    lines.append("|---" * (2 + len(STRATEGIES)) + "|")
    for plan in record["plans"]:
        totals = " | ".join(f"{plan['totals'][strategy] / GB:.1f}" for strategy in STRATEGIES)
        lines.append(f"| {plan['case']} | {plan['rows']} | {totals} |")
    return "\n".join(lines)


def main() -> int:
    """Measure, print a line a case, write the JSON."""
    parser = parser_of(__doc__, RECORD)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--no-processes", action="store_true", help="one process only")
    parser.add_argument("--as-process", choices=STRATEGIES, help=argparse.SUPPRESS)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.as_process:
        as_process(options.as_process)
        return 0
    if options.table:
        print(tables(read(options.out)))
        return 0
    results = []
    for case in cases(options.device):
        if options.only in case.named():
            results.append(one_process(case, options.device))
            print(show(results[-1]), flush=True)
    if not options.no_processes and not options.only:
        for strategy in STRATEGIES:
            results.append(two_processes(strategy))
            print(show(results[-1]), flush=True)
    if not options.only:
        what = "bytes of one process: predicted from shapes, and measured"
        measured = {"tolerance": TOLERANCE, "results": results, "plans": plans()}
        write(options.out, about(what, options.device, PACKAGES) | measured)
    return int(any(result["misses"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
