"""CPU time of a distillation step with layers as they are and compiled.

    python benchmarks/cpu_step.py                        # random weights of SmolLM2-135M's shape, ten minutes
    python benchmarks/cpu_step.py --layers 4 --steps 3   # a quick look

Each case trains in a process of its own, with the package's own training loop on one thread: 4 rows of 512 tokens in
two micro-batches, bfloat16 over fp32 weights, 12 KV groups kept, the other heads in windows of 44 + 4. The figure is
the median of the steps after the first two; the first compiles.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, Literal

import pandas as pd
import torch
from records import RESULTS, ROOT, about, environment, parser_of, write
from torch import nn
from window_speed import N_LAYERS, make_models

from hybrid_distill.lab.reporting import text_table
from hybrid_distill.model import HybridForCausalLM
from hybrid_distill.train.config import Distill
from hybrid_distill.train.loop import train_stage
from hybrid_distill.train.stages import make_stage

WINDOW = "window 44 + 4"
CASES = {"layers as they are": "off", "layers compiled": "on"}
N_ROWS = 4
ROW = 512
UNTIMED = 2
"""First steps, which allocate and compile."""


class TimedRows:
    """Random rows that note the process's CPU time whenever a step begins."""

    fingerprint = "random"
    seq_len = ROW

    def __init__(self) -> None:
        self.begins: list[float] = []

    def batch(self, step: int, batch_size: int, rank: int = 0, world: int = 1) -> Any:
        """Return the rows of a step."""
        self.begins.append(time.process_time())
        generator = torch.Generator().manual_seed(step)
        ids_BL = torch.randint(1000, (batch_size, ROW), generator=generator)
        everything_BL = torch.ones_like(ids_BL, dtype=torch.bool)
        return {
            "input_ids": ids_BL,
            "seq_idx": torch.zeros_like(ids_BL),
            "mask": everything_BL,
        }


def main() -> None:
    """Train each case in turn, print the table and write the record; or be the process of one case."""
    parser = parser_of(__doc__, RESULTS / "cpu_step.json")
    parser.add_argument("--layers", type=int, default=N_LAYERS)
    parser.add_argument("--steps", type=int, default=6, help="steps that count")
    parser.add_argument("--compile", choices=["on", "off"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.compile:
        print(json.dumps(train(options.layers, options.steps, options.compile)))
        return
    rows = []
    for name, compile_layers in CASES.items():
        arguments = ["--layers", str(options.layers), "--steps", str(options.steps)]
        process = subprocess.run(
            [sys.executable, __file__, "--compile", compile_layers, *arguments],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            env=environment(ROOT, ACCELERATE_USE_CPU="true"),
        )
        seconds = json.loads(process.stdout.splitlines()[-1])
        step = median(seconds[UNTIMED:])
        speed = N_ROWS * ROW / step
        row = {
            "case": name,
            "seconds": step,
            "first step": seconds[0],
            "tokens a second": speed,
        }
        rows.append(row)
    print(text_table(pd.DataFrame(rows).round(1)))
    record = {"rows": rows, "layers": options.layers, "steps": options.steps}
    write(options.out, {**record, **about("a distillation step on a CPU", threads=1)})


def train(n_layers: int, n_steps: int, compile_layers: Literal["on", "off"]) -> list[float]:
    """Return the CPU seconds of each step."""
    models = make_models(n_layers, [WINDOW])
    teacher = models["teacher"]
    student = models[WINDOW]
    assert isinstance(student, HybridForCausalLM)
    nn.Module.to(teacher, torch.bfloat16)
    config = Distill(
        steps=UNTIMED + n_steps + 1,
        batch_size=N_ROWS,
        micro_batch_size=N_ROWS // 2,
        precision="bf16",
        compile=compile_layers,
    )
    rows = TimedRows()
    with tempfile.TemporaryDirectory() as out:
        stage = make_stage(config, student, teacher)
        train_stage(stage, rows, Path(out) / "stage", progress=False)
    return [end - begin for begin, end in zip(rows.begins, rows.begins[1:])]


if __name__ == "__main__":
    main()
