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
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from records import RESULTS, about, cpu_time, parser_of, write

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

SEQ_LEN = 256
HELD_OUT_ROWS = 16
CURVE = 2e-3
"""Relative, of a loss from disk and the same from the live teacher: rounding to float16, and what AdamW makes of it."""


class LiveTopK:
    """Rows with the teacher's top k as it computes them, not rounded."""

    def __init__(self, run: RunInputs, rows: PackedRows, k: int) -> None:
        self.run = run
        self.rows = rows
        self.k = k

    def batch(self, *place: int) -> Any:
        batch = self.rows.batch(*place)
        n_ids = vocabulary_size(self.run.tokenizer)
        top = top_k_of(self.run.teacher, batch, self.k, vocab_size=n_ids)
        return {**batch, "teacher_ids_BLK": top.ids_BLK, "teacher_log_probs_BLK": top.log_probs_BLK}


def train(
    run: RunInputs, rows: Rows | LiveTopK, config: Distill, held_out: Batch, d_state: int
) -> dict[str, Any]:
    """Train one student from its start; return its losses, its distance to the whole teacher then, and its speed."""
    n_ids = vocabulary_size(run.tokenizer)
    plan = HeadPlan.random(run.teacher, run.config.plan.k, seed=0)
    calibration = cast(Batch, open_rows(run.config.data, run.tokenizer).batch(0, 8))
    student, _ = build_student(run.teacher, plan, d_state=d_state, calibration=calibration)
    stage = make_stage(config, student, run.teacher, vocab_size=n_ids)
    optimizer = make_adamw(
        stage,
        learning_rate=config.learning_rate,
        betas=config.betas,
        weight_decay=0.1,
    )

    def steps() -> list[float]:
        losses: list[float] = []
        for step in range(config.steps):
            schedule = wsd(step, config.steps, config.warmup, config.decay)
            set_learning_rate(optimizer, config.learning_rate * schedule)
            loss = stage(rows.batch(step, config.batch_size)).total
            loss.backward()
            torch.nn.utils.clip_grad_norm_(stage.parameters(), config.clip)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    losses, seconds = cpu_time(steps)
    with torch.no_grad():
        to_whole_teacher = make_stage(Distill(), student, run.teacher, vocab_size=n_ids)
        held_out_kl = to_whole_teacher(held_out).total.item()
    n_tokens = config.rows_read * run.config.data.seq_len
    return {
        "losses": [round(loss, 6) for loss in losses],
        "held_out_kl": round(held_out_kl, 6),
        "tokens_per_cpu_second": round(n_tokens / seconds, 1),
    }


def curves(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return all contenders, by name; logits are written below ``folder``."""
    config = Distill(
        steps=options.steps,
        batch_size=options.batch_size,
        micro_batch_size=options.batch_size,
        learning_rate=1e-3,
    )
    run = RunInputs(RunConfig(data=DataConfig(seq_len=SEQ_LEN), stages=(config,)))
    rows = cast(PackedRows, open_rows(run.config.data, run.tokenizer))
    not_trained_on = DataConfig(sources=("tiny:held_out",), seq_len=SEQ_LEN, seed=1)
    held_out_rows = open_rows(not_trained_on, run.tokenizer)
    held_out = held_out_rows.batch(0, HELD_OUT_ROWS)

    def contender(rows: Rows | LiveTopK, config: Distill) -> dict[str, Any]:
        return train(run, rows, config, held_out, options.d_state)

    results = {"whole teacher": contender(rows, config)}
    for k in options.top_k:
        cached = replace(config, teacher_logits=folder / str(k))
        job = CacheJob(replace(run.config, stages=(cached,)), top_k=k)
        _, seconds = cpu_time(lambda job=job: cache_logits(job))
        logits = open_logits(folder / str(k))
        header: LogitHeader = logits.header
        n_tokens = header.rows * header.seq_len
        results[f"top {k}, live"] = contender(LiveTopK(run, rows, k), cached)
        results[f"top {k}, from disk"] = {
            **contender(CachedLogitsDataset(rows, logits), cached),
            "bytes_a_token": header.bytes_per_token,
            "written_tokens_per_cpu_second": round(n_tokens / seconds, 1),
            "measured": header.measured,
        }
    return {"fingerprint": fingerprint(run.teacher), **results}


def differences(results: dict[str, Any], options: argparse.Namespace) -> dict[str, float]:
    """Return the largest relative difference of a curve from disk and the live one; raise if that is not rounding."""
    largest = {}
    for k in options.top_k:
        live = results[f"top {k}, live"]["losses"]
        from_disk = results[f"top {k}, from disk"]["losses"]
        relative = [abs(stored / exact - 1) for exact, stored in zip(live, from_disk)]
        largest[f"top {k}"] = round(max(relative), 7)
    worst = max(largest.values())
    if worst > CURVE:
        raise RuntimeError(
            f"a loss from disk is {worst:.1e} away from the live one, relative; no figures are written."
        )
    return largest


def main() -> None:
    """Train, compare, print and write what came out."""
    parser = parser_of(__doc__, RESULTS / "cached_logits.json")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--top-k", nargs="+", type=int, default=[8, 64])
    parser.add_argument("--d-state", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with tempfile.TemporaryDirectory() as folder:
        results = curves(options, Path(folder))
    record = {
        **about("distillation by the teacher and by its stored logits; nats a token"),
        "teacher": "tiny",
        "batch": f"{options.batch_size} rows of {SEQ_LEN} tokens",
        "d_state": options.d_state,
        "largest_relative_difference_of_a_loss": differences(results, options),
        "results": results,
    }
    write(options.out, record)
    for name, result in results.items():
        if isinstance(result, dict):
            figures = {key: value for key, value in result.items() if key != "losses"}
            print(f"{name}: loss {result['losses'][0]} to {result['losses'][-1]}, {figures}")
    print(record["largest_relative_difference_of_a_loss"])


if __name__ == "__main__":
    main()
