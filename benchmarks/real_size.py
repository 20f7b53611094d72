"""The recipe of a 1B model at its real size: every step of a run, with random weights of Llama-3.2-1B's shape.

    python benchmarks/real_size.py --runs runs/real_size    # a CPU needs 20 GB of memory and 12 GB of disk

Scores a few heads, then runs recipes/hybrid_llama_1b.py with its student, stages and precision. On a GPU its
micro-batches are the recipe's, and a stage takes 16 of them; on a CPU a stage takes two steps of short rows, and end
to end the mixers alone: AdamW over a whole 1B student takes 20 GB by itself. Evaluates, exports, and verifies the
export. The record has the seconds of each phase, the peak of the process's memory until its end, the memory that the
dry run plans for each stage, and a stage's speed once it is warm. Random weights answer no question: only time and
memory are measured here.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from build_speed import N_LAYERS, SHAPES
from records import RESULTS, ROOT, about, environment, parser_of, write
from transformers import LlamaConfig, LlamaForCausalLM

from hybrid_distill.teacher import load_teacher

SHAPE = "Llama-3.2-1B"
RECIPE = str(ROOT / "recipes" / "hybrid_llama_1b.py")
ON_CPU = """
    --data.seq-len 256
    --align.steps 2 --align.batch-size 2 --align.micro-batch-size 1
    --distill.steps 2 --distill.batch-size 2 --distill.micro-batch-size 1 --distill.train mixer
    """
ON_GPU = """
    --data.seq-len 2048
    --align.steps 16 --align.batch-size 8 --align.micro-batch-size 8 --align.compile on
    --distill.steps 16 --distill.batch-size 4 --distill.micro-batch-size 4 --distill.compile on
    """
COLD = 6
"""Steps of a stage, at most, that compile and allocate: left out of its speed."""
POLL = 0.2
"""Seconds between two readings of the memory."""
PHASE = re.compile(r"^(.*?):?(?: \d+ of \d+ steps,)? in \d+:\d\d")
SCORE = """
import sys
from hybrid_distill.probes.registry import make_probe
from hybrid_distill.scoring import score_heads
from hybrid_distill.teacher import load_teacher

model, tokenizer = load_teacher(sys.argv[1], dtype="bfloat16")
model.to(sys.argv[2])
heads = [(0, 0), (model.config.num_hidden_layers - 1, 31)]
probe = make_probe("kv", pairs=8, seed=0)
score_heads(model, tokenizer, probe, n_examples=4, heads=heads, min_accuracy=0.0)
"""


def main() -> None:
    """Run all parts, print the phases and write the record."""
    parser = parser_of(__doc__, RESULTS / "real_size.json")
    parser.add_argument("--runs", type=Path, default=Path("runs/real_size"))
    parser.add_argument("--layers", type=int, default=N_LAYERS[SHAPE], help="a shallower model")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    teacher = options.runs / "teacher"
    if not (teacher / "config.json").exists():
        make_teacher(teacher, options.layers, device)
    run = options.runs / "run"
    recipe = [RECIPE, *flags(teacher, run, device)]
    planned = plan_of(recipe)
    phases = phases_of(["-c", SCORE, str(teacher), device], "score 2 heads on 4 prompts")
    phases += phases_of(recipe, "report")
    phases += phases_of(["-m", "hybrid_distill", "verify", str(run / "export")], "verify")
    for phase in phases:
        print(f"{phase['phase']}: {phase['seconds']:.0f} s, peak {phase['peak_gb']:.1f} GB")
    record = {"phases": phases, "planned": planned, "speed": speeds(run)}
    record["minutes"] = sum(phase["seconds"] for phase in phases) / 60
    what = f"the recipe with random weights of {SHAPE}'s shape, {options.layers} layers"
    write(options.out, {**record, **about(what, device)})


def make_teacher(folder: Path, n_layers: int, device: str) -> None:
    """Write a teacher of the shape with random weights, in bfloat16, and the embedded teacher's tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPES[SHAPE], num_hidden_layers=n_layers)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    _, tokenizer = load_teacher("tiny")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def flags(teacher: Path, run: Path, device: str) -> list[str]:
    """Return what differs from the recipe."""
    common = f"""
        --teacher {teacher} --out {run} --trackers --gpus 1
        --plan.selection random --plan.k 20
        --data.sources tiny --data.weights 1
        --align.log-every 1 --distill.log-every 1
        --evaluation.n-pairs 10 --evaluation.n-examples 2 --evaluation.n-texts 2
        """
    return (common + (ON_GPU if device == "cuda" else ON_CPU)).split()


def speeds(run: Path) -> dict[str, dict[str, float]]:
    """Return each stage's median tokens a second, share of the device's peak, and largest memory."""
    of_stages = {}
    for path in sorted(run.glob("stages/*/metrics.jsonl")):
        rows = [json.loads(row) for row in path.read_text().splitlines()]
        warm = rows[min(COLD, len(rows) // 2) :]
        figures = {
            "tokens_per_s": statistics.median(row["tokens_per_s"] for row in warm),
            "memory_bytes": max(row["memory_bytes"] for row in rows),
        }
        if "mfu" in warm[0]:
            figures["mfu"] = statistics.median(row["mfu"] for row in warm)
        of_stages[path.parent.name] = figures
    return of_stages


def plan_of(recipe: list[str]) -> dict[str, float]:
    """Return the memory that the dry run plans, in GB by stage."""
    process = subprocess.run(
        [sys.executable, *recipe, "--dry-run"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=environment(ROOT),
    )
    planned = {}
    stage = ""
    scale = 1.0
    for line in process.stdout.splitlines():
        title = re.match(r"  (\w+): micro-batches", line)
        unit = re.fullmatch(r"    ([MG])B *", line)
        total = re.match(r"    total +([\d.]+)", line)
        if title:
            stage = title[1]
        elif unit:
            scale = {"M": 1e-3, "G": 1.0}[unit[1]]
        elif total:
            planned[stage] = scale * float(total[1])
    if not planned:
        sys.exit(
            "the dry run prints no memory in the form that plan_of reads (cli/launch_plan.py)."
        )
    return planned


def phases_of(command: list[str], rest: str) -> list[dict[str, Any]]:
    """Run a command; return the seconds and the peak memory of each phase that it logs, and of the ``rest``."""
    alone = environment(ROOT, PYTHONUNBUFFERED="1", HF_HUB_OFFLINE="1")
    if not torch.cuda.is_available():
        alone["ACCELERATE_USE_CPU"] = "true"
    process = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**alone, "OMP_NUM_THREADS": str(torch.get_num_threads())},
    )
    assert process.stdout is not None
    phases: list[dict[str, Any]] = []
    began = time.monotonic()
    with peak_memory(process.pid) as peak:

        def end(name: str) -> None:
            nonlocal began
            now = time.monotonic()
            peak_gb = max(peak) / 1e9
            peak[:] = peak[-1:]
            phases.append({"phase": name, "seconds": now - began, "peak_gb": peak_gb})
            began = now

        for line in process.stdout:
            print(line, end="", flush=True)
            phase = PHASE.match(line)
            if phase:
                end(phase[1])
        end(rest)
    if len(phases) == 1:
        sys.exit("the command logs no phase in the form that PHASE reads (progress.py).")
    if process.wait():
        sys.exit(f"{' '.join(command[:2])} failed with status {process.returncode}")
    return phases


@contextmanager
def peak_memory(pid: int) -> Iterator[list[int]]:
    """Yield a list to which the resident bytes of a process and its children are added while it is open."""
    readings = [0]
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(POLL):
            readings.append(resident_bytes(pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    yield readings
    ended.set()
    watcher.join()


def resident_bytes(pid: int) -> int:
    """Return the resident bytes of a process and its children."""
    total = 0
    folder = Path(f"/proc/{pid}")
    try:
        for line in (folder / "status").read_text().splitlines():
            if line.startswith("VmRSS"):
                total = 1024 * int(line.split()[1])
        children = (folder / "task" / str(pid) / "children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        # It has ended.
        return total
    return total + sum(resident_bytes(int(child)) for child in children)


if __name__ == "__main__":
    main()
