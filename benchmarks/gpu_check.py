"""Everything that needs a GPU, as a user runs it, in one command and one table. Needs no pytest.

    python benchmarks/gpu_check.py               # `make gpu-check`; ten to twenty minutes
    python benchmarks/gpu_check.py --rehearse    # `make gpu-rehearsal`: every row, on a CPU
    python benchmarks/gpu_check.py --list        # the rows
    python benchmarks/gpu_check.py --only launch # rows whose name has this expression

- the embedded teacher's run from scores to export, with each recurrence, with windows, in float32
  and bfloat16, and `verify` of what it exports;
- a step of alignment and of distillation with every file of launch/, on two GPUs where there are two;
- attention over packed rows, values and gradients, against the mask of all pairs (`gpu_attention.py`);
- every kernel against its definition (`gpu_kernels.py --work checks`);
- alone on the device: every kernel's time against its goal (`gpu_kernels.py --work times`), and the
  recipe of a 1B model at its real size: tokens a second and share of the peak (`real_size.py`).

Rows that time nothing run side by side. A row that cannot run says why: too few GPUs, a package that
is missing. The output of each is in OUT/logs. Exit status 0 if no row is wrong, 1 if one is, 2 where
there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
OK = "ok"
WRONG = "WRONG"
SKIPPED = "skipped"
LIMIT = 400
"""Seconds that a row may take; in a rehearsal, three times as many."""
KERNELS_LIMIT = 620
"""Seconds of `gpu_kernels.py`, which ends itself before."""
SIDE_BY_SIDE = 5
"""Rows that run at the same time on a GPU; a rehearsal runs one after the other."""
PROCESSES = {"cpu.yaml": 1, "single_gpu.yaml": 1}
"""Processes that a launch file is tried with; two with any other."""
SMALL = """
    --scoring.n-examples 4 --scoring.min-accuracy 0 --scoring.n-control-texts 2
    --align.steps 2 --align.batch-size 2 --distill.steps 2 --distill.batch-size 2
    --evaluation.n-pairs 8 --evaluation.n-examples 2 --evaluation.n-texts 2
""".split()
ONE_STEP = "--plan.selection random --align.steps 1 --distill.steps 1 --no-export".split()
WINDOWS_ALONE = "--student.d-state 0 --student.window 32 --student.sinks 4 --stages distill".split()
BF16 = "--teacher.dtype bfloat16 --align.precision bf16 --distill.precision bf16".split()
RUNS = {
    "run tiny": [],
    "run tiny in bfloat16": BF16,
    "run tiny, discrete": ["--student.recurrence", "discrete"],
    "run tiny, mamba2 in bfloat16": ["--student.recurrence", "mamba2", *BF16],
    "run tiny, windows": "--student.recurrence discrete --student.window 32 --student.sinks 4".split(),
    "run tiny, windows alone in bfloat16": [*WINDOWS_ALONE, *BF16],
}
"""Rows that run the embedded teacher, and their flags."""
REHEARSED_KERNELS = "ssd float32 N=4 P=64 plain"
"""The case of `gpu_kernels.py` that a rehearsal interprets."""


class Outcome(NamedTuple):
    result: str
    detail: str = ""


class Setting(NamedTuple):
    """Where the rows run."""

    out: Path
    rehearse: bool
    n_gpus: int

    @property
    def device(self) -> str:
        return "cpu" if self.rehearse else "cuda"

    def folder(self, name: str) -> Path:
        return self.out / name.replace(" ", "-")

    def log(self, name: str) -> Path:
        path = self.out / "logs" / f"{name.replace('/', '-').replace(' ', '-')}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def environment(self, **more: str) -> dict[str, str]:
        path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
        variables = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **more}
        # Rows run side by side, and each may start compilers of its own.
        variables["OMP_NUM_THREADS"] = "1"
        variables["TORCHINDUCTOR_COMPILE_THREADS"] = "2"
        if self.rehearse:
            # A launch for GPUs must be told to use the CPU.
            variables["CUDA_VISIBLE_DEVICES"] = ""
            variables["ACCELERATE_USE_CPU"] = "true"
        return variables


class Row(NamedTuple):
    name: str
    run: Callable[[Setting, str], Outcome]
    """Takes the setting and the row's name."""
    alone: bool = False
    """It measures time: nothing else may use the device."""


def program(
    setting: Setting,
    name: str,
    *words: str,
    limit: float = LIMIT,
    **variables: str,
) -> Outcome:
    """Run Python with ``words``; its output goes to the row's log."""
    seconds = 3 * limit if setting.rehearse else limit
    log = setting.log(name)
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            env=setting.environment(**variables),
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
        try:
            status = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            # The whole group: a launcher that is killed alone leaves its processes behind.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return Outcome(WRONG, f"not finished after {seconds:.0f} s; see {log}")
    if status:
        return Outcome(WRONG, f"exit status {status}: {error_in(log)[:160]}; see {log}")
    return Outcome(OK)


def error_in(log: Path) -> str:
    """Return the last line of a log that names an error, or else its last line."""
    lines = [line for line in log.read_text().splitlines() if line.strip()]
    for line in reversed(lines):
        if "Error" in line or line.startswith("error"):
            return line
    return lines[-1] if lines else ""


def hybrid_distill(setting: Setting, name: str, *words: str) -> Outcome:
    return program(setting, name, "-m", "hybrid_distill", *words)


def device(setting: Setting, name: str) -> Outcome:
    """Say what the other rows belong to."""
    import triton

    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, triton {triton.__version__}"
    if setting.rehearse:
        return Outcome(OK, f"a CPU, rehearsing; {versions}")
    gpu = torch.cuda.get_device_name(0)
    driver = "unknown"
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        printed = subprocess.run(query, capture_output=True, text=True, check=False).stdout
        driver = printed.partition("\n")[0]
    return Outcome(OK, f"{setting.n_gpus} x {gpu}, driver {driver}, {versions}")


def whole_run(flags: list[str], setting: Setting, name: str) -> Outcome:
    """Run the embedded teacher from scores to export, which checks itself; then check it again."""
    out = setting.folder(name)
    shutil.rmtree(out, ignore_errors=True)
    outcome = hybrid_distill(setting, name, "run", "tiny", "--out", str(out), *SMALL, *flags)
    if outcome.result != OK:
        return outcome
    export = out / "export"
    if not (export / "gate").is_dir():
        return Outcome(WRONG, f"no export in {out}; see {setting.log(name)}")
    # Once more, on the device that `verify` chooses.
    return hybrid_distill(setting, f"verify of {name}", "verify", str(export))


def launch(file: str, setting: Setting, name: str) -> Outcome:
    """Take a step of alignment and one of distillation with a launch file."""
    n = PROCESSES.get(file, 2)
    if not setting.rehearse:
        n = min(n, setting.n_gpus)
    if file.startswith("zero") and find_spec("deepspeed") is None:
        reason = "deepspeed is not installed; pip install 'hybrid-distill[deepspeed]'"
        return Outcome(SKIPPED, reason)
    out = setting.folder(f"with-{file}")
    shutil.rmtree(out, ignore_errors=True)
    launcher = ["-m", "accelerate.commands.launch", "--config_file", str(ROOT / "launch" / file)]
    launcher += ["--num_processes", str(n), "--main_process_port", str(free_port())]
    if setting.rehearse and n == 1:
        launcher.append("--cpu")  # for one process, accelerate overrides the variable
    run = ["-m", "hybrid_distill", "run", "tiny", "--out", str(out), *SMALL, *ONE_STEP]
    outcome = program(setting, name, *launcher, *run)
    if outcome.result != OK:
        return outcome
    n_steps = 0
    for path in out.glob("stages/*/metrics.jsonl"):
        n_steps += len(path.read_text().splitlines())
    if n_steps != 2:
        return Outcome(WRONG, f"{n_steps} steps were taken, expected 2; see {setting.log(name)}")
    return Outcome(OK, f"processes: {n}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def attention(setting: Setting, name: str) -> Outcome:
    """Compare attention over packed rows with its mask."""
    outcome = program(setting, name, str(BENCHMARKS / "gpu_attention.py"), setting.device)
    if outcome.result != OK:
        return outcome
    return Outcome(OK, setting.log(name).read_text().splitlines()[-1])


def kernels(work: str, setting: Setting, name: str) -> Outcome:
    """Compare every kernel with its definition, or time it; a rehearsal interprets one case."""
    path = setting.out / "gpu_kernels.json"
    words = [str(BENCHMARKS / "gpu_kernels.py"), "--work", work, "--out", str(path)]
    if setting.rehearse:
        words += ["--only", REHEARSED_KERNELS]
        if work == "checks":
            words.append("--again")
    interpreted = str(int(setting.rehearse))
    outcome = program(setting, name, *words, limit=KERNELS_LIMIT, TRITON_INTERPRET=interpreted)
    if not path.exists():
        return Outcome(WRONG, f"no case was run: {outcome.detail}; see {setting.log(name)}")
    lines = summary(json.loads(path.read_text()), work)
    return Outcome(outcome.result, "; ".join(filter(None, [outcome.detail, *lines])))


def summary(record: dict, work: str) -> Iterator[str]:
    """Yield what is known of the kernels: cases and further steps, or times."""
    if work == "checks":
        cases = record["cases"].values()
        n_right = sum(case["ok"] for case in cases)
        yield f"{n_right} of {len(cases)} cases right"
        for step, status in record["steps"].items():
            yield f"{step}: {status}"
        return
    for timed, milliseconds in (record["times"] | record["peers"]).items():
        if isinstance(milliseconds, float):
            yield f"{timed}: {milliseconds:.3f} ms"


def real_size(setting: Setting, name: str) -> Outcome:
    """Run the recipe of a 1B model with random weights; a rehearsal runs one of its layers."""
    path = setting.out / "real_size.json"
    words = [str(BENCHMARKS / "real_size.py"), "--out", str(path)]
    words += ["--runs", str(setting.folder(name))]
    if setting.rehearse:
        words += ["--layers", "1"]
    outcome = program(setting, name, *words)
    if outcome.result != OK:
        return outcome
    record = json.loads(path.read_text())
    measured = []
    for stage, speed in record["speed"].items():
        text = f"{stage}: {speed['tokens_per_s']:,.0f} tokens/s"
        if speed.get("mfu"):
            text += f", {speed['mfu']:.0%} of the peak"
        measured.append(text)
    return Outcome(OK, "; ".join(measured))


def rows() -> Iterator[Row]:
    """Yield all rows: those that may share the device, then those that measure time."""
    yield Row("device", device)
    yield Row("kernels", partial(kernels, "checks"))
    for name, flags in RUNS.items():
        yield Row(name, partial(whole_run, flags))
    for path in sorted((ROOT / "launch").glob("*.yaml")):
        yield Row(f"launch/{path.name}", partial(launch, path.name))
    yield Row("packed attention", attention)
    yield Row("kernel times", partial(kernels, "times"), alone=True)
    yield Row("recipe at its real size", real_size, alone=True)


def line(name: str, result: str, seconds: str, detail: str) -> str:
    return f"{name:<32} {result:<8} {seconds:>7}  {detail}".rstrip()


def check(setting: Setting, only: str = "") -> dict[str, Outcome]:
    """Run the rows whose name has the expression ``only``; print the table as it fills."""
    print(line("row", "result", "seconds", "detail"), flush=True)
    chosen = [row for row in rows() if re.search(only, row.name)]
    sharing = [row for row in chosen if not row.alone]
    alone = [row for row in chosen if row.alone]
    side_by_side = 1 if setting.rehearse else SIDE_BY_SIDE
    outcomes = run_rows(sharing, setting, side_by_side) | run_rows(alone, setting, 1)
    counts = Counter(outcome.result for outcome in outcomes.values())
    print(", ".join(f"{counts[result]} {result}" for result in (OK, WRONG, SKIPPED)), flush=True)
    return outcomes


def run_rows(chosen: list[Row], setting: Setting, n_workers: int) -> dict[str, Outcome]:
    """Run rows, several at a time; print each as it ends."""
    outcomes: dict[str, Outcome] = {}
    with ThreadPoolExecutor(n_workers) as pool:
        running = {pool.submit(timed, row, setting): row.name for row in chosen}
        for finished in as_completed(running):
            name = running[finished]
            outcome, seconds = finished.result()
            outcomes[name] = outcome
            print(line(name, outcome.result, f"{seconds:.0f}", outcome.detail), flush=True)
    return outcomes


def timed(row: Row, setting: Setting) -> tuple[Outcome, float]:
    """Run a row; return its outcome and its seconds."""
    begun = time.monotonic()
    try:
        outcome = row.run(setting, row.name)
    except Exception as error:  # the other rows are worth more than a traceback
        outcome = Outcome(WRONG, f"{type(error).__name__}: {error}")
    return outcome, time.monotonic() - begun


def main() -> None:
    """See the module docstring."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--rehearse", action="store_true", help="run every row on the CPU")
    parser.add_argument("--list", action="store_true", help="name the rows")
    parser.add_argument("--only", default="", help="rows whose name has this regular expression")
    default = ROOT / "runs" / "gpu_check"
    parser.add_argument("--out", type=Path, default=default, help="folder of runs and logs")
    options = parser.parse_args()
    if options.list:
        print("\n".join(row.name for row in rows()))
        return
    if not options.rehearse and not torch.cuda.is_available():
        print("gpu-check: no CUDA device that this Python can use; nothing was checked.")
        raise SystemExit(2)
    n_gpus = 0 if options.rehearse else torch.cuda.device_count()
    outcomes = check(Setting(options.out.resolve(), options.rehearse, n_gpus), options.only)
    results = {outcome.result for outcome in outcomes.values()}
    raise SystemExit(1 if not results or WRONG in results else 0)


if __name__ == "__main__":
    main()
