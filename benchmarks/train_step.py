"""Measure a training step, aligned and end to end, against a naive loop.

    python benchmarks/train_step.py            # the device that is there; writes benchmarks/results/train_step.json
    python benchmarks/train_step.py --small    # two steps of each, written nowhere

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

import itertools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from memory_plan import (
    ALIGN,
    DISTILL,
    SHAPES,
    Case,
    allocations,
    large_cases,
    make_batch,
    make_real_stage,
    moments,
    nbytes,
)
from records import RESULTS, about, parser_of, read, write
from torch import Tensor

from hybrid_distill.data import Batch
from hybrid_distill.train.end_to_end import EndToEnd
from hybrid_distill.train.losses import l2_norm_loss
from hybrid_distill.train.meter import flops_per_token, peak_flops
from hybrid_distill.train.optimizer import make_adamw
from hybrid_distill.train.stage import Stage

RECORD = RESULTS / "train_step.json"
PACKAGES = ("torch", "transformers", "triton")
AGREEMENT = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # of the losses, relative
GOALS = {"align": 0.50, "distill": 0.45}  # of the device's peak
STEPS = 15
SHAPES["many words"] = SHAPES["mid"] | {"vocab_size": 128_256}
Loss = Callable[[Batch], Tensor]


def cases(device: str) -> list[Case]:
    """Return one alignment and one end-to-end step; on a GPU with and without recomputation."""
    if device == "cuda":
        return list(large_cases("llama-3.2-1b", rows=(8, 8)))
    models = ("tiny", "many words")
    configs = (replace(ALIGN, target="layer"), DISTILL)
    return [Case(model, config) for model, config in itertools.product(models, configs)]


def plain_alignment(stage: Stage) -> Loss:
    """Return the loss of every student layer on the teacher's hidden states."""
    teacher: Any = stage.teacher
    blocks: Any = stage.student.model.layers
    last: list[Tensor] = []

    # transformers gives out the last hidden state behind the final norm; the student's layer ends before it.
    def keep(module: Any, arguments: Any, output: Tensor) -> None:
        last[:] = [output]

    teacher.model.layers[-1].register_forward_hook(keep)

    def loss(batch: Batch) -> Tensor:
        ids = batch["input_ids"]
        with torch.no_grad():
            states = teacher(ids, output_hidden_states=True, use_cache=False).hidden_states
        hidden = [*states[:-1], *last]
        positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        rotary = teacher.model.rotary_emb(hidden[0], positions)
        shared: dict[str, Any] = {
            "position_embeddings": rotary,
            "position_ids": positions,
            "attention_mask": None,
        }
        layer_losses: list[Tensor] = []
        for block, before, after in zip(blocks, hidden, hidden[1:]):
            output = block(before, **shared)
            layer_losses.append(l2_norm_loss(output, after, batch["mask"]))
        return torch.stack(layer_losses).sum()

    return loss


def plain_distillation(stage: Stage) -> Loss:
    """Return the forward KL of all logits at once, in float32."""

    def loss(batch: Batch) -> Tensor:
        with torch.no_grad():
            theirs_BLV = stage.teacher(batch["input_ids"], use_cache=False).logits
        ours_BLV = stage.student(batch["input_ids"], use_cache=False).logits
        log_q_BLV = ours_BLV.float().log_softmax(-1)
        log_p_BLV = theirs_BLV.float().log_softmax(-1)
        kl_BLV = F.kl_div(log_q_BLV, log_p_BLV, reduction="none", log_target=True)
        return kl_BLV.sum(-1).mean()

    return loss


def contenders(stage: Stage) -> dict[str, Loss]:
    plain = plain_distillation(stage) if isinstance(stage, EndToEnd) else plain_alignment(stage)

    def in_its_precision(batch: Batch) -> Tensor:
        with torch.autocast(batch["input_ids"].device.type, torch.bfloat16, enabled=stage.bf16):
            return plain(batch)

    return {"ours": lambda batch: stage(batch).total, "plain": in_its_precision}


class Contender:
    """A way to compute the loss, and the seconds of the steps that it took."""

    def __init__(self, loss: Loss, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
        self.loss = loss
        self.optimizer = optimizer
        self.batch = batch
        self.seconds: list[float] = []
        self.is_too_large = False

    def step(self) -> None:
        synchronize = torch.cuda.synchronize if self.batch["input_ids"].is_cuda else lambda: None
        synchronize()
        begun = time.perf_counter()
        try:
            self.loss(self.batch).backward()
            self.optimizer.step()
            synchronize()
            self.seconds.append(time.perf_counter() - begun)
        except torch.OutOfMemoryError:
            self.is_too_large = True
        self.optimizer.zero_grad()


def measure(case: Case, device: str, steps: int) -> dict[str, Any]:
    """Return tokens a second, memory and share of the peak of both contenders, from the same models."""
    stage = make_real_stage(case, device)
    batch = one_document(make_batch(case, stage.teacher.config.vocab_size, device))
    optimizer = make_adamw(stage, learning_rate=1e-6, betas=(0.9, 0.95), weight_decay=0.1)
    losses = contenders(stage)
    values = {name: loss(batch).item() for name, loss in losses.items()}
    tolerance = AGREEMENT[torch.bfloat16 if stage.bf16 else torch.float32]
    if abs(values["ours"] / values["plain"] - 1) > tolerance:
        raise SystemExit(f"{case.named()}: the losses differ, nothing was timed: {values}")

    taking_turns = {name: Contender(loss, optimizer, batch) for name, loss in losses.items()}
    # One more: the first step of each warms up.
    for _ in range(steps + 1):
        for contender in taking_turns.values():
            if not contender.is_too_large:
                contender.step()

    held = nbytes([*parameters(stage), *moments(optimizer)])
    is_teacher_forced = not isinstance(stage, EndToEnd)
    flops = flops_per_token(stage.student, stage.teachers, teacher_forced=is_teacher_forced)
    n_tokens = batch["input_ids"].numel()
    record: dict[str, Any] = {
        "case": case.named(),
        "rows": case.rows,
        "tokens": n_tokens,
        "losses": values,
    }
    for name, contender in taking_turns.items():
        if contender.is_too_large:
            torch.cuda.empty_cache()
            record[name] = {"failed": "out of memory"}
            continue
        _, *timed = contender.seconds
        with allocations(device) as allocated:
            contender.step()
        speed = n_tokens / statistics.median(timed)
        record[name] = {"tokens_per_s": round(speed, 1), "peak_bytes": held + allocated.peak}
        if peak := peak_flops(torch.device(device)):
            record[name]["mfu"] = round(speed * flops / peak, 3)
    return record | compared(record["ours"], record["plain"], GOALS[case.config.name])


def compared(ours: dict[str, Any], plain: dict[str, Any], goal: float) -> dict[str, Any]:
    """Return how many times ours is as fast and takes the memory, and whether it reaches the goal."""
    comparison: dict[str, Any] = {}
    if "failed" not in ours and "failed" not in plain:
        comparison["times_as_fast"] = round(ours["tokens_per_s"] / plain["tokens_per_s"], 2)
        comparison["times_the_memory"] = round(ours["peak_bytes"] / plain["peak_bytes"], 2)
    if "mfu" in ours:
        comparison["goal"] = {"mfu": goal, "met": ours["mfu"] >= goal}
    return comparison


def one_document(batch: Batch) -> Batch:
    """Return a batch whose rows are one document each: the plain loop knows no packing."""
    return {**batch, "seq_idx": torch.zeros_like(batch["seq_idx"])}


def parameters(stage: Stage) -> list[Tensor]:
    return [*stage.student.parameters(), *stage.teacher.parameters()]


def main() -> None:
    """Print each case as it is measured, write the JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("--small", action="store_true", help="two steps of each, written nowhere")
    parser.add_argument(
        "--stages", nargs="+", choices=["align", "distill"], default=["align", "distill"]
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results = []
    for case in cases(device):
        if case.config.name in options.stages:
            results.append(measure(case, device, 2 if options.small else STEPS))
            print(json.dumps(results[-1]), flush=True)
    if not options.small:
        what = "one training step; tokens a second are medians, peak_bytes all that is held at once"
        record = read(RECORD) | {device: about(what, device, PACKAGES) | {"results": results}}
        write(RECORD, record)


if __name__ == "__main__":
    main()
