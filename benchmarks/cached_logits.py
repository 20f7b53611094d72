"""Distilling from the teacher's logits on disk against distilling from the teacher: the curves, and what they cost.

    python benchmarks/cached_logits.py        # writes benchmarks/results/cached_logits.json

The same student is trained on the same rows by the whole teacher, by its K likeliest tokens as it computes them, and by
the same from disk. What a curve says of another loss is not comparable, so each student is also measured by the whole
teacher's KL on text that is not trained on. On a CPU, speed is in seconds of one thread's own time.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from provenance import about, write

from hybrid_distill.cli.cache_logits import CacheJob, cache_logits
from hybrid_distill.config import RunConfig
from hybrid_distill.data import (
    Batch,
    CachedLogitsDataset,
    DataConfig,
    LogitHeader,
    PackedRows,
    Rows,
    open_logits,
    open_rows,
)
from hybrid_distill.data.caching import top_k_of
from hybrid_distill.pipeline import RunInputs
from hybrid_distill.plan import HeadPlan
from hybrid_distill.student.build import build_student
from hybrid_distill.teacher import fingerprint
from hybrid_distill.train.config import Distill
from hybrid_distill.train.optimizer import make_adamw, set_learning_rate, wsd
from hybrid_distill.train.stages import make_stage
from hybrid_distill.vocabulary import vocabulary_size

RESULTS = Path(__file__).parent / "results" / "cached_logits.json"
HELD_OUT_ROWS = 16
CURVE = 2e-3
"""Relative, of a loss from disk and the same from the live teacher: rounding to float16, and what AdamW makes of it."""


class LiveTopK:
    """Rows with the teacher's top k as it computes them, not rounded."""

    def __init__(self, run: RunInputs, rows: PackedRows, k: int) -> None:
        self.run, self.rows, self.k = run, rows, k

    def batch(self, *place: int) -> Any:
        batch = self.rows.batch(*place)
        known = top_k_of(self.run.teacher, batch, self.k, vocab_size=vocabulary_size(self.run.tokenizer))
        return {**batch, "teacher_ids_BLK": known.ids_BLK, "teacher_log_probs_BLK": known.log_probs_BLK}


def train(run: RunInputs, rows: Rows | LiveTopK, config: Distill, held_out: Batch, d_state: int) -> dict[str, Any]:
    """One student from its start; its losses, what the whole teacher says of it then, and its speed."""
    plan = HeadPlan.random(run.teacher, run.config.plan.k, seed=0)
    calibration = cast(Batch, open_rows(run.config.data, run.tokenizer).batch(0, 8))
    student, _ = build_student(run.teacher, plan, d_state=d_state, calibration=calibration)
    stage = make_stage(config, student, run.teacher, vocab_size=vocabulary_size(run.tokenizer))
    optimizer = make_adamw(stage, learning_rate=config.learning_rate, betas=config.betas, weight_decay=0.1)
    losses, began = [], time.process_time()
    for step in range(config.steps):
        set_learning_rate(optimizer, config.learning_rate * wsd(step, config.steps, config.warmup, config.decay))
        loss = stage(rows.batch(step, config.batch_size)).total
        loss.backward()
        torch.nn.utils.clip_grad_norm_(stage.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    seconds = time.process_time() - began
    with torch.no_grad():
        n_ids = vocabulary_size(run.tokenizer)
        whole = make_stage(Distill(), student, run.teacher, vocab_size=n_ids)(held_out).total.item()
    return {
        "losses": [round(loss, 6) for loss in losses],
        "held_out_kl": round(whole, 6),
        "tokens_per_cpu_second": round(config.rows_read * run.config.data.seq_len / seconds, 1),
    }


def curves(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All contenders, by name; logits are written below ``folder``."""
    config = Distill(
        steps=options.steps, batch_size=options.batch_size, micro_batch_size=options.batch_size, learning_rate=1e-3
    )
    run = RunInputs(RunConfig(data=DataConfig(seq_len=256), stages=(config,)))
    rows = cast(PackedRows, open_rows(run.config.data, run.tokenizer))
    held_out_rows = open_rows(DataConfig(sources=("tiny:held_out",), seq_len=256, seed=1), run.tokenizer)
    held_out = held_out_rows.batch(0, HELD_OUT_ROWS)

    def contender(rows: Rows | LiveTopK, config: Distill) -> dict[str, Any]:
        return train(run, rows, config, held_out, options.d_state)

    found: dict[str, Any] = {"fingerprint": fingerprint(run.teacher), "whole teacher": contender(rows, config)}
    for k in options.top_k:
        cached = replace(config, teacher_logits=folder / str(k))
        began = time.process_time()
        cache_logits(CacheJob(replace(run.config, distill=cached), top_k=k))
        seconds = time.process_time() - began
        logits = open_logits(folder / str(k))
        header: LogitHeader = logits.header
        found[f"top {k}, live"] = contender(LiveTopK(run, rows, k), cached)
        found[f"top {k}, from disk"] = {
            **contender(CachedLogitsDataset(rows, logits), cached),
            "bytes_a_token": header.bytes_per_token,
            "written_tokens_per_cpu_second": round(header.rows * header.seq_len / seconds, 1),
            "measured": header.measured,
        }
    return found


def differences(found: dict[str, Any], options: argparse.Namespace) -> dict[str, float]:
    """The largest relative difference between a curve from disk and the live one; raises where that is not rounding."""
    largest = {}
    for k in options.top_k:
        pairs = zip(found[f"top {k}, live"]["losses"], found[f"top {k}, from disk"]["losses"])
        largest[f"top {k}"] = round(max(abs(b / a - 1) for a, b in pairs), 7)
    worst = max(largest.values())
    if worst > CURVE:
        raise RuntimeError(f"a loss from disk is {worst:.1e} away from the live one, relative; no figures are written.")
    return largest


def main() -> None:
    """Train, compare, print and write what came out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--top-k", nargs="+", type=int, default=[8, 64])
    parser.add_argument("--d-state", type=int, default=8)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with tempfile.TemporaryDirectory() as folder:
        found = curves(options, Path(folder))
    record = {
        **about("distillation by the teacher and by its stored logits; nats a token"),
        "teacher": "tiny",
        "batch": f"{options.batch_size} rows of 256 tokens",
        "d_state": options.d_state,
        "largest_relative_difference_of_a_loss": differences(found, options),
        "results": found,
    }
    write(options.out, record)
    for name, result in found.items():
        if isinstance(result, dict):
            figures = {key: value for key, value in result.items() if key != "losses"}
            print(f"{name}: loss {result['losses'][0]} to {result['losses'][-1]}, {figures}")
    print(record["largest_relative_difference_of_a_loss"])


if __name__ == "__main__":
    main()
