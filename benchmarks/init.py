"""How recurrent heads should start: alignment loss at step 0, 50 and 300 for each way to start them.

    python benchmarks/init.py                 # writes benchmarks/results/init.json

A student without attention heads is aligned to the teacher, layer by layer, with the teacher's own inputs.
The figure is the normalized squared error of the heads' outputs on text that is not trained on, mean over
layers: 0 is the teacher, 1 is as good as heads that are silent.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from provenance import about, write
from transformers import PreTrainedModel

from hybrid_distill.data import Batch, DataConfig, PackedRows, open_rows
from hybrid_distill.plan import HeadPlan
from hybrid_distill.student.build import build_student
from hybrid_distill.student.init import INITS
from hybrid_distill.teacher import fingerprint, load_teacher
from hybrid_distill.train.config import AlignConfig
from hybrid_distill.train.optimizer import make_adamw, set_learning_rate, wsd
from hybrid_distill.train.stages import LayerAlignment

RESULTS = Path(__file__).parent / "results" / "init.json"
HELD_OUT_SEED = 12345


def nmse(stage: LayerAlignment, batch: Batch) -> float:
    """Mean over layers, without touching gradients."""
    with torch.no_grad():
        loss = stage(batch)
    return round(float(loss.total) / len(loss.per_layer), 4)


def align(
    teacher: PreTrainedModel, rows: PackedRows, held_out: Batch, init: str, options: argparse.Namespace
) -> dict[str, Any]:
    """Build and train one student; its error before the first step and after the steps asked for."""
    given = {"d_state": options.d_state, "init": init, "calibration": rows.batch(0, 8), "seed": options.seed}
    start = time.process_time()
    student, _ = build_student(teacher, HeadPlan.none(teacher), **given)
    seconds = time.process_time() - start
    measure = LayerAlignment(student, teacher, AlignConfig(target="head", loss="nmse"))
    stage = LayerAlignment(student, teacher, AlignConfig(target="head", loss="l2"))
    optimizer = make_adamw(stage, learning_rate=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    errors = {0: nmse(measure, held_out)}
    last = max(options.steps)
    for step in range(last):
        set_learning_rate(optimizer, options.learning_rate * wsd(step, last, 0.1, 0.1))
        stage(rows.batch(step, options.batch_size)).total.backward()
        torch.nn.utils.clip_grad_norm_(stage.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 in options.steps:
            errors[step + 1] = nmse(measure, held_out)
    return {"init": init, "nmse": errors, "build_cpu_seconds": round(seconds, 2)}


def main() -> None:
    """Align one student per start, print and write what came out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--teacher", default="tiny")
    parser.add_argument("--inits", nargs="+", default=list(INITS), choices=list(INITS))
    parser.add_argument("--steps", nargs="+", type=int, default=[50, 300])
    parser.add_argument("--d-state", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)

    teacher, tokenizer = load_teacher(options.teacher)
    rows = open_rows(DataConfig(sources=("tiny",), seq_len=256, seed=options.seed), tokenizer)
    held_out = open_rows(DataConfig(sources=("tiny:held_out",), seq_len=256, seed=HELD_OUT_SEED), tokenizer)
    results = []
    for init in options.inits:
        results.append(align(teacher, rows, held_out.batch(0, 16), init, options))
        print(json.dumps(results[-1]), flush=True)
    record = {
        **about("normalized squared error of recurrent heads, mean over layers, by optimizer step"),
        "teacher": options.teacher,
        "fingerprint": fingerprint(teacher),
        "d_state": options.d_state,
        "batch": f"{options.batch_size} rows of 256 tokens",
        "learning_rate": options.learning_rate,
        "seed": options.seed,
        "results": results,
    }
    write(options.out, record)


if __name__ == "__main__":
    main()
