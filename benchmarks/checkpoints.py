"""Measure what a save costs: seconds that training waits, seconds in the background and bytes each process writes.

    python benchmarks/checkpoints.py                     # two processes over gloo; results/checkpoints.json
    python benchmarks/checkpoints.py --against 80d2131   # also the code of an older commit, before shares
    python benchmarks/checkpoints.py --table             # the formula's tables for 1B and 8B, in docs/training.md

Each run distills a student of random weights for four steps and saves after three of them; a save begins when the one
before is complete. `--as-process OUT` is one process of a run, with the hybrid_distill of PYTHONPATH. Bytes are those
that a process wrote to disks during a save (/proc/self/io), the memory what its saves added to its peak.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from provenance import ROOT, about, environment, older_tree, write

RESULTS = Path(__file__).parent / "results" / "checkpoints.json"
PACKAGES = ("torch", "safetensors", "accelerate", "deepspeed")
LAUNCHERS = {
    "ddp": ("--multi_gpu",),
    "zero2": ("--use_deepspeed", "--zero_stage", "2"),
    "fsdp2": ("--config_file", str(ROOT / "launch" / "fsdp2.yaml")),
}
SHAPE: dict[str, Any] = {
    "vocab_size": 16_384, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
}  # fmt: skip
MB, GB = 1e6, 1e9
TO_HOST, HASH, DISK, FILE_SYSTEM = 6.0, 1.5, 2.0, 10.0
"""GB/s: from a GPU to pageable memory, sha256 of a core, one process's writing, what all processes write together."""
BYTES = 12
"""A trained parameter's weight and two moments, in float32."""
PARAMETERS = {"1B, align": 0.27e9, "1B, distill": 1.42e9, "8B, align": 1.58e9, "8B, distill": 8.8e9}
"""Trained by a student of Llama-3.2-1B or Llama-3.1-8B, state 64, 2 % of the heads kept."""


def as_process(out: Path) -> None:
    """Train, and write down what this process's saves cost."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from hybrid_distill.distributed import connect
    from hybrid_distill.plan import HeadPlan
    from hybrid_distill.student.build import build_student
    from hybrid_distill.train import loop
    from hybrid_distill.train.config import DistillConfig
    from hybrid_distill.train.stages import make_stage

    torch.set_num_threads(1)
    rank = connect().process_index
    torch.manual_seed(0)
    teacher = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE))
    student, _ = build_student(teacher, HeadPlan.random(teacher.config, 4, seed=1), d_state=16, init="random")
    ids = torch.randint(SHAPE["vocab_size"], (1, 64))
    batch = {"input_ids": ids, "seq_idx": torch.zeros_like(ids), "mask": torch.ones_like(ids, dtype=torch.bool)}
    rows: Any = SimpleNamespace(fingerprint="random", batch=lambda *_: batch)
    config = DistillConfig(steps=4, batch_size=2, micro_batch_size=1, checkpoint_every=1)
    stage = make_stage(config, student, teacher)
    save, saves = loop._Training._save, []

    def timed(training: Any) -> Path:
        wait = getattr(training.checkpoints, "wait", lambda: None)  # an older commit waits in `_save`
        written, peak, begun = bytes_written(), peak_bytes(), time.perf_counter()
        path = save(training)
        stalled = time.perf_counter() - begun
        wait()
        seconds = time.perf_counter() - begun
        saves.append(
            {"stall_s": stalled, "complete_s": seconds, "bytes": bytes_written() - written,
             "peak_bytes": peak_bytes() - peak}
        )  # fmt: skip
        return path

    loop._Training._save = timed
    loop.train_stage(stage, rows, out, progress=False)
    trained = sum(p.numel() for p in student.parameters())
    (out / f"saves-{rank}.json").write_text(json.dumps({"parameters": trained, "saves": saves}))


def bytes_written() -> int:
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["write_bytes"])


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def launch(strategy: str, processes: int, tree: Path) -> dict[str, Any]:
    """Run on some processes with the code of a tree; for each rank its fastest save, the first one's memory."""
    with tempfile.TemporaryDirectory() as name:
        out = Path(name)
        command = [sys.executable, "-m", "accelerate.commands.launch", *LAUNCHERS[strategy]]
        command += ["--num_processes", str(processes), __file__, "--as-process", str(out)]
        on_cpu = environment(tree, ACCELERATE_USE_CPU="true")
        done = subprocess.run(command, env=on_cpu, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
        ranks = [json.loads((out / f"saves-{rank}.json").read_text()) for rank in range(processes)]
    row: dict[str, Any] = {"strategy": strategy, "parameters": ranks[0]["parameters"]}
    for key in ("stall_s", "complete_s"):
        row[key] = round(max(min(save[key] for save in rank["saves"]) for rank in ranks), 2)
    row["mb_by_rank"] = [round(rank["saves"][-1]["bytes"] / MB, 1) for rank in ranks]
    row["peak_mb_by_rank"] = [round(max(save["peak_bytes"] for save in rank["saves"]) / MB) for rank in ranks]
    return row


def model(parameters: float, processes: int) -> dict[str, float]:
    """Seconds of a save by `TO_HOST`, `HASH`, `DISK` and `FILE_SYSTEM`; before, main process alone and all waiting."""
    total = BYTES * parameters / GB
    share = total / processes
    writing = max(share / DISK, total / FILE_SYSTEM)
    return {
        "gb": total,
        "before_s": total / TO_HOST + total / DISK + total / HASH,
        "stall_s": share / TO_HOST,
        "background_s": writing + share / HASH,
        "share_gb": share,
    }


def table() -> None:
    """Print the table of docs/training.md."""
    print("| seconds | GB | before: all wait | 8 GPUs: wait | then | 64 GPUs: wait | then |")
    print("|---|---|---|---|---|---|---|")
    for name, parameters in PARAMETERS.items():
        few, many = model(parameters, 8), model(parameters, 64)
        figures = [few["before_s"], *(x for y in (few, many) for x in (y["stall_s"], y["background_s"]))]
        print(f"| {name} | {few['gb']:.0f} | " + " | ".join(f"{seconds:.3g}" for seconds in figures) + " |")


def main() -> None:
    """Print each case as it is measured, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", metavar="COMMIT", help="measure the code of an older commit too")
    parser.add_argument("--strategies", nargs="+", choices=LAUNCHERS, default=list(LAUNCHERS))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--table", action="store_true", help="print the formula's table and measure nothing")
    parser.add_argument("--as-process", type=Path, metavar="OUT", help="be one process of a run")
    options = parser.parse_args()
    if options.as_process:
        as_process(options.as_process)
        return
    if options.table:
        table()
        return
    results = []
    with older_tree(options.against) if options.against else nullcontext() as older:
        trees = {"now": ROOT, "before": older} if older else {"now": ROOT}
        for strategy, (side, tree) in itertools.product(options.strategies, trees.items()):
            results.append({"side": side, **launch(strategy, options.processes, tree)})
            print(json.dumps(results[-1]), flush=True)
    head = about("a save of a distilled student: slowest process, fastest of three saves", packages=PACKAGES, threads=1)
    write(RESULTS, {**head, "against": options.against, "results": results})


if __name__ == "__main__":
    main()
