"""Does a run survive `kill -9`? Twenty kills of one run; after each the same command is started again.

    python benchmarks/soak.py       # 14 minutes on two busy cores; writes benchmarks/results/soak.json

The run is a small one of two stages on the embedded teacher, with a checkpoint every second step. Kills come while the
program starts, at any moment of a step, while a checkpoint is being written (a folder without a record) and while a
stage's result is written. Thrice something else is wrong before the next start: the newest checkpoint is cut short, its
record was edited, the disk is full (a tmpfs; left out where it may not be mounted).

An uninterrupted run is the measure. After every start the metrics and the rows that were read are compared with its
own, to the last bit; rows are known by the hash of their tokens, written down when the training takes them. In the end
weights and records must be the same, and every row must have been trained on once.

Exit status 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from records import RESULTS, about, parser_of, write

PACKAGES = ("torch", "transformers", "accelerate", "safetensors")
ROWS = "rows.jsonl"
STAGES = ("1-align", "2-distill")
TIMINGS = ("tokens_per_s", "data_wait", "memory_bytes", "seconds")
"""Metrics of the machine, not of the training."""
STEPS = 60
BATCH_SIZE = 2
KILLS_OF_A_STAGE = 10
DISK_MB = 256
LEFT_KB = 200
PATIENCE_S = 600.0
LONGEST_DELAY = {"start": 8.0, "step": 0.3, "checkpoint": 0.02, "result": 0.02}
"""Seconds, by the moment that they are counted from."""


class Kill(NamedTuple):
    """When a process is killed: at a moment of this kind, after it has read so many batches."""

    at: str
    after: int
    delay: float
    """Seconds from that moment."""


def kills(seed: int) -> list[Kill]:
    """Ten in each stage, the last of them while the result is written."""
    draw = random.Random(seed)
    plan = []
    for _ in STAGES:
        kinds = ["start", *["step"] * 4, *["checkpoint"] * 4]
        draw.shuffle(kinds)
        for kind in [*kinds, "result"]:
            after = 0 if kind == "start" else draw.randint(1, 5)
            plan.append(Kill(kind, after, draw.uniform(0, LONGEST_DELAY[kind])))
    return plan


# The program that is killed.


@dataclass
class NotedRows:
    """Rows that write down what is read from them: which step, by which process, the hash of every row."""

    rows: Any
    path: Path

    def __post_init__(self) -> None:
        self.fingerprint = self.rows.fingerprint
        self.seq_len = self.rows.seq_len

    def batch(self, step: int, batch_size: int, rank: int = 0, world: int = 1) -> Any:
        batch = self.rows.batch(step, batch_size, rank, world)
        hashes: list[str] = []
        for row in batch["input_ids"]:
            digest = blake2b(row.numpy().tobytes(), digest_size=8)
            hashes.append(digest.hexdigest())
        line = {"pid": os.getpid(), "step": step, "rows": hashes}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return batch


def train(out: Path) -> None:
    """The run, as any recipe would start it, on noted rows."""
    from hybrid_distill.cli import run_recipe
    from hybrid_distill.config import (
        EvaluationConfig,
        PlanConfig,
        RunConfig,
        ScoringConfig,
        StudentConfig,
    )
    from hybrid_distill.pipeline import run as steps
    from hybrid_distill.train.config import Align, Distill
    from hybrid_distill.train.loop import train_stage

    def noting(stage: Any, rows: Any, folder: Path, **options: Any) -> Any:
        folder.mkdir(parents=True, exist_ok=True)
        return train_stage(stage, NotedRows(rows, folder / ROWS), folder, progress=False, **options)

    steps.train_stage = noting
    often: Any = {
        "steps": STEPS,
        "batch_size": BATCH_SIZE,
        "micro_batch_size": BATCH_SIZE,
        "checkpoint_every": 2,
        "log_every": 1,
    }
    config = RunConfig(
        out=out,
        scoring=ScoringConfig(n_control_texts=2),
        plan=PlanConfig("random", k=3),
        student=StudentConfig(d_state=4, init="teacher"),
        stages=(
            Align(**often, target="head", learning_rate=3e-3),
            Distill(**often, learning_rate=5e-4),
        ),
        evaluation=EvaluationConfig(n_pairs=(4,), n_examples=4, n_texts=2),
        export=False,
    )
    run_recipe(config, [])


# What it left.


def lines(path: Path) -> list[dict[str, Any]]:
    """Return those of a JSON-lines file; a last line that was cut by a kill is left out."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def metrics(out: Path, stage: str) -> list[dict[str, Any]]:
    """Return a stage's metrics without `TIMINGS`."""
    logged = lines(out / "stages" / stage / "metrics.jsonl")
    for line in logged:
        for name in TIMINGS:
            line.pop(name, None)
    return logged


def evaluation(out: Path) -> dict[str, Any]:
    """Return the evaluation without its date."""
    record = json.loads((out / "evaluation.json").read_text())
    del record["provenance"]["date"]
    return record


def rows_read(out: Path, stage: str) -> list[dict[str, Any]]:
    return lines(out / "stages" / stage / ROWS)


def batches_read(out: Path) -> int:
    """Count what all processes have read so far."""
    return sum(path.read_bytes().count(b"\n") for path in out.glob(f"stages/*/{ROWS}"))


def half_written(out: Path) -> bool:
    """Return True if a killed process left an unfinished checkpoint or result."""
    return begun_checkpoint(out) or any(out.glob("stages/*/.*.tmp"))


def begun_checkpoint(out: Path) -> bool:
    """Return True if a checkpoint is being written, or was when its process was killed."""
    for path in out.glob("stages/*/checkpoints/step-*"):
        has_record = any(path.glob("rank-*.json"))
        if not has_record:
            return True
    return False


def agrees(out: Path, reference: Path) -> bool:
    """Return True if everything logged and read so far equals the uninterrupted run."""
    for stage in STAGES:
        logged = metrics(out, stage)
        if logged != metrics(reference, stage)[: len(logged)]:
            return False
        expected = {line["step"]: line["rows"] for line in rows_read(reference, stage)}
        if any(line["rows"] != expected[line["step"]] for line in rows_read(out, stage)):
            return False
    return True


def account(out: Path, reference: Path) -> dict[str, Any]:
    """Compare the finished run with the uninterrupted one."""
    totals = dict.fromkeys(("rows_trained_on", "rows_twice_in_a_stage", "tokens"), 0)
    equal = dict.fromkeys(("metrics_equal", "steps_contiguous", "files_equal", "rows_equal"), True)
    for stage in STAGES:
        logged = metrics(out, stage)
        trained_on = rows_trained_on(out, stage)
        steps = [line["step"] for line in logged]
        equal["metrics_equal"] &= logged == metrics(reference, stage)
        equal["steps_contiguous"] &= steps == list(range(1, STEPS + 1))
        equal["files_equal"] &= has_same_files(out, reference, stage)
        equal["rows_equal"] &= trained_on == rows_trained_on(reference, stage)
        totals["rows_trained_on"] += len(trained_on)
        totals["rows_twice_in_a_stage"] += STEPS * BATCH_SIZE - len(set(trained_on))
        totals["tokens"] += logged[-1]["tokens"]
    return {
        **equal,
        "evaluation_equal": evaluation(out) == evaluation(reference),
        **totals,
        "batches_read_again": batches_read(out) - batches_read(reference),
    }


def has_same_files(out: Path, reference: Path, stage: str) -> bool:
    """Return True if a stage's result is the same to the byte."""
    for name in ("model.safetensors", "manifest.json"):
        file = Path("stages", stage, name)
        if (out / file).read_bytes() != (reference / file).read_bytes():
            return False
    return True


def rows_trained_on(out: Path, stage: str) -> list[str]:
    """Return the rows in the order of the steps.

    What was read after the last checkpoint of a killed process counts when it is read again.
    """
    last = {line["step"]: line["rows"] for line in rows_read(out, stage)}
    trained_on = []
    for step in sorted(last):
        trained_on += last[step]
    return trained_on


# The soak.


class Soak:
    """One run, killed again and again."""

    def __init__(self, out: Path, reference: Path) -> None:
        self.out = out
        self.reference = reference
        self.printed = ""

    def start(self) -> subprocess.Popen[str]:
        command = [sys.executable, __file__, "--train", str(self.out)]
        return subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )

    def killed(self, kill: Kill, n_stage: int) -> dict[str, Any]:
        """Start the run and kill it; return what was seen. Raises RuntimeError when it ends before."""
        before = batches_read(self.out)
        process = self.start()
        for has_come in self._moments(kill, n_stage, before):
            if process.poll() is not None:
                _, printed = process.communicate()
                raise RuntimeError(f"the run ended by itself, before {kill}:\n{printed[-2000:]}")
            if has_come:
                break
            time.sleep(0.002)
        time.sleep(kill.delay)
        process.kill()
        _, printed = process.communicate()

        steps = self.steps_of(process)
        return {
            "killed_at": kill.at,
            "went_on_from_step": steps[0] if steps else None,
            "batches_read": len(steps),
            "left_half_written": half_written(self.out),
            "exact": agrees(self.out, self.reference),
            "warned": "Resuming from step-" in printed,
        }

    def steps_of(self, process: subprocess.Popen[str]) -> list[int]:
        """Return the steps whose batches a process has read."""
        steps: list[int] = []
        for stage in STAGES:
            for line in rows_read(self.out, stage):
                if line["pid"] == process.pid:
                    steps.append(line["step"])
        return steps

    def _moments(self, kill: Kill, n_stage: int, before: int) -> Iterator[bool]:
        """Yield whether the moment to kill has come; polled."""
        if kill.at == "start":
            yield True
        while batches_read(self.out) - before < kill.after:
            yield False
        if kill.at == "step":
            yield True
        folder = self.out / "stages" / STAGES[n_stage]
        signs = (folder / ".model.safetensors.tmp", folder / "manifest.json")
        while True:
            if kill.at == "checkpoint":
                yield begun_checkpoint(self.out)
            else:
                yield any(path.exists() for path in signs)

    def finished(self) -> int:
        """Run it to its end; return the exit status."""
        process = self.start()
        _, self.printed = process.communicate(timeout=PATIENCE_S)
        return process.returncode


def whole_checkpoints(out: Path) -> list[Path]:
    """Return the records of those that a start would find, oldest first."""
    return sorted(out.glob("stages/*/checkpoints/step-*/rank-*.json"))


def cut_short(out: Path) -> None:
    path = whole_checkpoints(out)[-1].with_suffix(".safetensors")
    os.truncate(path, path.stat().st_size // 2)


def edit_record(out: Path) -> None:
    path = whole_checkpoints(out)[-1]
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "step": record["step"] - 1}))


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Mount a tmpfs at this folder; yield False where it may not be mounted."""
    folder.mkdir()
    is_mounted = False
    if shutil.which("mount") is not None:
        options = ["-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(folder)]
        is_mounted = subprocess.run(["mount", *options], check=False).returncode == 0
    try:
        yield is_mounted
    finally:
        if is_mounted:
            subprocess.run(["umount", str(folder)], check=True)


def with_a_full_disk(soak: Soak, disk: Path) -> dict[str, Any]:
    """Start once on a disk that is filled up but for `LEFT_KB`."""
    filler = disk / "filler"
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(disk).free - LEFT_KB * 1024)
    status = soak.finished()
    filler.unlink()
    error = soak.printed.strip().splitlines()[-1].replace(str(soak.out), "OUT")
    return {"status": status, "said": error, "exact": agrees(soak.out, soak.reference)}


def soak_on(disk: Path, reference: Path, seed: int, full: bool) -> dict[str, Any]:
    """Kill, damage, go on, and account for it all."""
    soak = Soak(disk / "run", reference)
    damages = {"newest checkpoint cut short": cut_short, "its record edited": edit_record}
    starts = []
    faults = {}
    damaged = None
    for number, kill in enumerate(kills(seed)):
        stage, number_in_stage = divmod(number, KILLS_OF_A_STAGE)
        seen = soak.killed(kill, stage)
        starts.append(seen)
        print(f"{number + 1:2}", seen, flush=True)
        # In the middle of a stage, and with a checkpoint before the one that is damaged.
        can_damage = 3 <= number_in_stage < 9 and len(whole_checkpoints(soak.out)) >= 2
        if damaged and kill.at != "start":
            faults[damaged] = {"previous_checkpoint_used": seen["warned"], "exact": seen["exact"]}
            damaged = None
        elif damages and not damaged and can_damage:
            damaged, damage = damages.popitem()
            damage(soak.out)
        if full and number == 13:
            faults["disk full"] = with_a_full_disk(soak, disk)
            print("disk full", faults["disk full"], flush=True)
    is_finished = soak.finished() == 0
    # The first start resumes nothing; the last resume is the one that finishes.
    resumes_exact = sum(seen["exact"] for seen in starts[1:])
    resumes_exact += is_finished and agrees(soak.out, reference)
    return {
        "kills": len(starts),
        "resumes_exact": resumes_exact,
        "kills_in_the_middle_of_writing": sum(seen["left_half_written"] for seen in starts),
        "faults": faults,
        **account(soak.out, reference),
        "starts": starts,
    }


def passed(record: dict[str, Any]) -> bool:
    """Return True if nothing was lost."""
    for fault in record["faults"].values():
        is_met = fault.get("previous_checkpoint_used") or fault.get("status") == 2
        if not (fault["exact"] and is_met):
            return False
    equal = [value for name, value in record.items() if name.endswith(("_equal", "_contiguous"))]
    resumed = record["resumes_exact"] == record["kills"]
    return all(equal) and resumed and not record["rows_twice_in_a_stage"]


def main() -> None:
    """Run the reference, then the soak; print and write what came out."""
    parser = parser_of(__doc__, RESULTS / "soak.json")
    # Makes this the program that is killed.
    parser.add_argument("--train", type=Path, metavar="OUT", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.train is not None:
        train(options.train)
        return

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        whole = Soak(work / "whole", work / "whole")
        if whole.finished():
            sys.exit(f"the uninterrupted run failed:\n{whole.printed}")
        with small_disk(work / "disk") as full:
            found = soak_on(work / "disk", work / "whole", options.seed, full)
    record = {
        **about("one run killed with SIGKILL again and again", packages=PACKAGES, threads=1),
        "run": f"align and distill, {STEPS} steps of {BATCH_SIZE} rows each, a checkpoint every 2 steps",
        "seed": options.seed,
        "minutes": round((time.monotonic() - begun) / 60, 1),
        **found,
    }
    write(options.out, record)
    print(f"{record['resumes_exact']} of {record['kills']} resumes exact; {options.out}")
    sys.exit(not passed(record))


if __name__ == "__main__":
    main()
