"""Training speed on the CPU by number of threads and how long they spin at a barrier, idle and beside a busy process.

    python benchmarks/threads.py [--steps N]

Needs an otherwise idle machine. The row "as a program" is what the command line and recipes set.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

SETTINGS: dict[str, dict[str, str]] = {
    "one thread": {"OMP_NUM_THREADS": "1"},
    "libgomp's default": {"GOMP_SPINCOUNT": "300000"},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "as a program": {},
}
MEASURED = ("align", "distill")
WARM_UP = 2
"""Steps before those that are timed."""
READ_BY_LIBGOMP = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def steps_per_second(steps: int) -> dict[str, float]:
    """Measure the stages of recipes/hybrid_tiny.py in this process."""
    import hybrid_distill.cli  # noqa: F401, I001  before torch, as a program does
    from hybrid_distill.student.build import build_student
    from hybrid_distill.data import DataConfig, open_rows
    from hybrid_distill.train.config import Align, Distill
    from hybrid_distill.train.stages import make_stage
    from hybrid_distill.plan import HeadPlan
    from hybrid_distill.teacher import load_teacher
    from hybrid_distill.vocabulary import vocabulary_size
    import torch

    teacher, tokenizer = load_teacher("tiny")
    student, _ = build_student(teacher, HeadPlan.random(teacher, 6, 0), d_state=16, init="teacher")
    rows = open_rows(DataConfig(sources=("tiny",), seq_len=256), tokenizer)
    speed = {}
    for config in (Align(steps=1, batch_size=8, target="head"), Distill(steps=1, batch_size=8)):
        stage = make_stage(config, student, teacher, vocab_size=vocabulary_size(tokenizer))
        optimizer = torch.optim.AdamW([p for p in stage.parameters() if p.requires_grad], lr=1e-4)
        begun = 0.0
        for step in range(WARM_UP + steps):
            if step == WARM_UP:
                begun = time.perf_counter()
            stage(rows.batch(step, 8)).total.backward()
            optimizer.step()
            optimizer.zero_grad()
        speed[config.name] = round(steps / (time.perf_counter() - begun), 2)
    return speed


@contextmanager
def busy_process() -> Iterator[None]:
    """Keep one core busy; begins when the load of the last minute shows it, as it does on a machine that others use."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        while os.getloadavg()[0] < 0.8:
            time.sleep(1)
        yield
    finally:
        process.kill()
        process.wait()


def measure(steps: int, settings: dict[str, str]) -> dict[str, float]:
    """`steps_per_second` of a fresh process under these variables."""
    environment = {name: value for name, value in os.environ.items() if name not in READ_BY_LIBGOMP}
    command = [sys.executable, __file__, "--here", "--steps", str(steps)]
    ran = subprocess.run(
        command, env=environment | settings, capture_output=True, text=True, check=True
    )
    return json.loads(ran.stdout.splitlines()[-1])


def measure_all(steps: int) -> dict[str, dict[str, float]]:
    """Measure every setting; print each row as it is measured."""
    rows = {}
    for name, settings in SETTINGS.items():
        rows[name] = measure(steps, settings)
        print(name, rows[name], flush=True)
    return rows


def times_slower(results: dict[str, dict[str, dict[str, float]]]) -> dict[str, float]:
    """Return how many times slower than the best row a program is, by load and stage."""
    slower = {}
    for load, rows in results.items():
        for stage in MEASURED:
            best = max(row[stage] for row in rows.values())
            slower[f"{load}, {stage}"] = round(best / rows["as a program"][stage], 2)
    return slower


def main() -> None:
    """Measure on an idle machine, then beside a busy process; write the JSON."""
    # This process only starts others, which import the package before torch: so it imports neither at the top.
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=12, help="steps timed of each stage")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(steps_per_second(options.steps)))
        return
    results = {"idle": measure_all(options.steps)}
    with busy_process():
        results["beside a busy process"] = measure_all(options.steps)
    slower = times_slower(results)
    print(slower)

    from records import RESULTS, about, write

    what = "steps a second on the embedded teacher; how many times slower than the best row a program is"
    record = about(what, threads=os.cpu_count()) | {
        "results": results,
        "times_slower_than_best": slower,
    }
    write(RESULTS / "threads.json", record)


if __name__ == "__main__":
    main()
