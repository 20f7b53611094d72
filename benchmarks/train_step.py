"""Measure a training step, aligned and end to end, against a naive loop.

    python benchmarks/train_step.py            # the device that is there; writes benchmarks/results/train_step.json
    python benchmarks/train_step.py --small    # two steps of each, written nowhere
    python benchmarks/train_step.py --waiting    # two processes on a CPU: what the loop waits for

`--waiting` trains a few steps of SmolLM2-135M's shape in the loop, on two processes (`train_loop_worker.py`), with
batches made by the loop itself and ahead of it by workers: the share of a step spent waiting for data, and how often a
step would wait for a device. It stops unless the losses of both are equal to the bit.

A step is one micro-batch: forward of teacher and student, backward, AdamW. Both contenders train the same weights of
the same models, and must say the same loss before they are timed:

- *ours*: the stage, as the training loop runs it;
- *plain*: the teacher's own forward with hidden states and all logits, then the student's layers one after the other on
  those hidden states (alignment), or the student's forward with all logits and the divergence of both (end to end).

On a CPU the models are the embedded teacher's and one with as many words as Llama 3, in float32 on one thread; on a GPU
they have the shape of Llama-3.2-1B, bfloat16, rows of 2048 tokens, and the goals are 50 % of the device's peak for
alignment, 45 % end to end, and 8 rows within 80 GB. Times are medians of steps that take turns; memory is the most that
is held at once, models included. The plain loop knows no packing: both contenders get rows that are one document.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from memory_plan import ALIGN, DISTILL, SHAPES, Case, allocations, large_cases, make_batch, make_real_stage, nbytes
from provenance import ROOT, about, environment, read, write
from torch import Tensor

from hybrid_distill.data import Batch
from hybrid_distill.train.end_to_end import EndToEnd
from hybrid_distill.train.losses import l2_norm_loss
from hybrid_distill.train.optimizer import make_adamw
from hybrid_distill.train.spikes import flops_per_token, peak_flops
from hybrid_distill.train.stage import Stage

RESULTS = Path(__file__).parent / "results" / "train_step.json"
PACKAGES = ("torch", "transformers", "triton")
AGREEMENT = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # of the losses, relative
GOALS = {"align": 0.50, "distill": 0.45}  # of the device's peak
STEPS = 15
WAITING_STEPS = 6
SHAPES["many words"] = SHAPES["mid"] | {"vocab_size": 128_256}
Loss = Callable[[Batch], Tensor]


def cases(device: str) -> list[Case]:
    """One alignment and one end-to-end step; on a GPU with and without recomputation."""
    if device == "cuda":
        return list(large_cases("llama-3.2-1b", rows=(8, 8)))
    configs = (replace(ALIGN, target="layer"), DISTILL)
    return [Case(model, config) for model, config in itertools.product(("tiny", "many words"), configs)]


def plain_alignment(stage: Stage) -> Loss:
    """Every student layer on the teacher's hidden states. A hook gets the last one before the final norm."""
    teacher: Any = stage.teacher
    blocks: Any = stage.student.model.layers
    last: list[Tensor] = []
    teacher.model.layers[-1].register_forward_hook(lambda module, args, output: last.__setitem__(slice(None), [output]))

    def loss(batch: Batch) -> Tensor:
        ids, mask = batch["input_ids"], batch["mask"]
        with torch.no_grad():
            hidden = [*teacher(ids, output_hidden_states=True, use_cache=False).hidden_states[:-1], *last]
        positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        rotary = teacher.model.rotary_emb(hidden[0], positions)
        outputs = [
            block(h, position_embeddings=rotary, position_ids=positions, attention_mask=None)
            for block, h in zip(blocks, hidden)
        ]
        return torch.stack([l2_norm_loss(y, target, mask) for y, target in zip(outputs, hidden[1:])]).sum()

    return loss


def plain_distillation(stage: Stage) -> Loss:
    """Forward KL of all logits at once, in float32."""

    def loss(batch: Batch) -> Tensor:
        with torch.no_grad():
            theirs_BLV = stage.teacher(batch["input_ids"], use_cache=False).logits
        ours_BLV = stage.student(batch["input_ids"], use_cache=False).logits
        log_q_BLV, log_p_BLV = (logits.float().log_softmax(-1) for logits in (ours_BLV, theirs_BLV))
        return F.kl_div(log_q_BLV, log_p_BLV, reduction="none", log_target=True).sum(-1).mean()

    return loss


def contenders(stage: Stage) -> dict[str, Loss]:
    plain = (plain_distillation if isinstance(stage, EndToEnd) else plain_alignment)(stage)

    def in_its_precision(batch: Batch) -> Tensor:
        with torch.autocast(batch["input_ids"].device.type, torch.bfloat16, enabled=stage.bf16):
            return plain(batch)

    return {"ours": lambda batch: stage(batch).total, "plain": in_its_precision}


def step_of(loss: Loss, optimizer: torch.optim.Optimizer, batch: Batch) -> Callable[[], float]:
    """One whole step; returns its seconds."""
    synchronize = torch.cuda.synchronize if batch["input_ids"].is_cuda else lambda: None

    def step() -> float:
        synchronize()
        begun = time.perf_counter()
        loss(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        synchronize()
        return time.perf_counter() - begun

    return step


def measure(case: Case, device: str, steps: int) -> dict[str, Any]:
    """Tokens a second, memory and share of the peak of both contenders, from the same models."""
    stage = make_real_stage(case, device)
    batch = one_document(make_batch(case, stage.teacher.config.vocab_size, device))
    optimizer = make_adamw(stage, learning_rate=1e-6, betas=(0.9, 0.95), weight_decay=0.1)
    losses = contenders(stage)
    values = {name: loss(batch).item() for name, loss in losses.items()}
    tolerance = AGREEMENT[torch.bfloat16 if stage.bf16 else torch.float32]
    if abs(values["ours"] / values["plain"] - 1) > tolerance:
        raise SystemExit(f"{case.named()}: the losses differ, nothing was timed: {values}")

    flops = flops_per_token(stage.student, stage.teachers, teacher_forced=not isinstance(stage, EndToEnd))
    tokens = batch["input_ids"].numel()
    record: dict[str, Any] = {"case": case.named(), "rows": case.rows, "tokens": tokens, "losses": values}
    seconds: dict[str, list[float]] = {name: [] for name in losses}
    taking_turns = {name: step_of(loss, optimizer, batch) for name, loss in losses.items()}
    failed: dict[str, str] = {}
    for turn in range(steps + 1):
        for name, step in taking_turns.items():
            try:
                took = step()
            except torch.OutOfMemoryError:
                failed[name] = "out of memory"
                optimizer.zero_grad()
                torch.cuda.empty_cache()
                continue
            if turn:  # the first one warms up
                seconds[name].append(took)
    held = nbytes([*parameters(stage), *(t for state in optimizer.state.values() for t in state.values())])
    for name, step in taking_turns.items():
        if name in failed:
            record[name] = {"failed": failed[name]}
            continue
        with allocations(device) as taken:
            step()
        speed = tokens / statistics.median(seconds[name])
        record[name] = {"tokens_per_s": round(speed, 1), "peak_bytes": held + taken.peak}
        if peak := peak_flops(torch.device(device)):
            record[name]["mfu"] = round(speed * flops / peak, 3)
    if not failed:
        record["times_as_fast"] = round(record["ours"]["tokens_per_s"] / record["plain"]["tokens_per_s"], 2)
        record["times_the_memory"] = round(record["ours"]["peak_bytes"] / record["plain"]["peak_bytes"], 2)
    if "mfu" in record["ours"]:
        record["goal"] = {"mfu": GOALS[case.config.name], "met": record["ours"]["mfu"] >= GOALS[case.config.name]}
    return record


def waiting(stages: list[str], steps: int) -> list[dict[str, Any]]:
    """Train in the loop on two processes, with and without workers that make batches ahead."""
    rows = []
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    for name in stages:
        losses = []
        for workers in (0, 2):
            with tempfile.TemporaryDirectory() as out:
                arguments = [out, name, str(workers), str(steps)]
                command = [*launcher, str(Path(__file__).with_name("train_loop_worker.py")), *arguments]
                on_cpu = environment(ROOT, CUDA_VISIBLE_DEVICES="", ACCELERATE_USE_CPU="true")
                subprocess.run(command, env=on_cpu, check=True, stdout=subprocess.DEVNULL)
                lines = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
                reads = json.loads((Path(out) / "reads.json").read_text())
            losses.append([line["loss"] for line in lines])
            seconds = [after["seconds"] - before["seconds"] for before, after in itertools.pairwise(lines)]
            found = {
                "seconds_a_step": round(statistics.median(seconds), 2),
                "share_waiting_for_data": statistics.median(line["data_wait"] for line in lines[1:]),
                "waits_for_the_device": max(sum(step.values()) for step in reads),
                "where": sorted({place for step in reads for place in step}),
            }
            rows.append({"stage": name, "processes": 2, "workers": workers, "last_loss": losses[-1][-1]} | found)
            print(json.dumps(rows[-1]), flush=True)
        if losses[0] != losses[1]:
            raise SystemExit(f"{name}: the losses differ: {losses}")
    return rows


def one_document(batch: Batch) -> Batch:
    """The plain loop knows no packing."""
    return {**batch, "seq_idx": torch.zeros_like(batch["seq_idx"])}


def parameters(stage: Stage) -> list[Tensor]:
    return [p for model in (stage.student, stage.teacher) for p in model.parameters()]


def main() -> None:
    """Print each case as it is measured, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="two steps of each, written nowhere")
    parser.add_argument("--waiting", action="store_true", help="what the loop waits for, on two processes of a CPU")
    parser.add_argument("--stages", nargs="+", choices=["align", "distill"], default=["align", "distill"])
    options = parser.parse_args()
    record, device = read(RESULTS), "cpu"
    if options.waiting:
        part, what = "waiting", "the loop on two processes with one thread each; medians of the steps after the first"
        found = {"shape": "SmolLM2-135M", "results": waiting(options.stages, 2 if options.small else WAITING_STEPS)}
    else:
        torch.set_num_threads(1)
        part = device = "cuda" if torch.cuda.is_available() else "cpu"
        what = "one training step; tokens a second are medians, peak_bytes all that is held at once"
        found: dict[str, Any] = {"results": []}
        for case in cases(device):
            found["results"].append(measure(case, device, 2 if options.small else STEPS))
            print(json.dumps(found["results"][-1]), flush=True)
    if not options.small:
        record[part] = about(what, device, PACKAGES) | found
        write(RESULTS, record)


if __name__ == "__main__":
    main()
