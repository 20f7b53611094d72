"""Everything that needs a GPU, as a user runs it, in one command and one table. Needs no pytest.

    python benchmarks/gpu_check.py               # `make gpu-check`; about 20 minutes
    python benchmarks/gpu_check.py --rehearse    # `make gpu-rehearsal`: every row, on a CPU
    python benchmarks/gpu_check.py --list        # the rows
    python benchmarks/gpu_check.py --only launch # rows whose name has this expression

- the embedded teacher's run from scores to export, in float32 and bfloat16; `verify` of both;
- a step of alignment and of distillation with every file of launch/, some on two GPUs;
- attention over packed rows, values and gradients, against the mask of all pairs (`gpu_attention.py`);
- every kernel against its definition, its time against its goal (`gpu_kernels.py`, resumes);
- a training step of Llama-3.2-1B's shape: tokens a second, and share of the peak (`train_step.py`).

A row that cannot run says why: too few GPUs, a package that is missing. The output of each is in
OUT/logs. Exit status 0 if no row is wrong, 1 if one is, 2 where there is no GPU.
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
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
OK, WRONG, SKIPPED = "ok", "WRONG", "skipped"
LIMIT = 400
"""Seconds that a row may take; in a rehearsal, three times as many."""
KERNELS_LIMIT = 620
"""Seconds of `gpu_kernels.py`, which ends itself before."""
PROCESSES = {"cpu.yaml": 1, "single_gpu.yaml": 1}
"""Processes that a launch file is tried with; two with any other."""
SMALL = """
    --scoring.n-examples 4 --scoring.min-accuracy 0 --scoring.n-control-texts 2
    --align.steps 2 --align.batch-size 2 --distill.steps 2 --distill.batch-size 2
    --evaluation.n-pairs 8 --evaluation.n-examples 2 --evaluation.n-texts 2
""".split()
ONE_STEP = "--plan.selection random --align.steps 1 --distill.steps 1 --no-export".split()
BF16 = "--teacher.dtype bfloat16 --align.precision bf16 --distill.precision bf16".split()
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
        if self.rehearse:
            # A launch for GPUs must be told to use the CPU.
            variables["CUDA_VISIBLE_DEVICES"] = ""
            variables["ACCELERATE_USE_CPU"] = "true"
            variables["OMP_NUM_THREADS"] = "1"
        return variables


class Row(NamedTuple):
    name: str
    run: Callable[[Setting, str], Outcome]
    """Takes the setting and the row's name."""


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
    """Run the embedded teacher from scores to export, which checks itself in another process."""
    out = setting.folder(name)
    shutil.rmtree(out, ignore_errors=True)
    outcome = hybrid_distill(setting, name, "run", "tiny", "--out", str(out), *SMALL, *flags)
    if outcome.result == OK and not (out / "export" / "gate").is_dir():
        return Outcome(WRONG, f"no export in {out}; see {setting.log(name)}")
    return outcome


def verification(of: str, setting: Setting, name: str) -> Outcome:
    """Check an export once more, on the device that `verify` chooses."""
    export = setting.folder(of) / "export"
    if not export.is_dir():
        return Outcome(WRONG, f"{of!r} has left no export")
    return hybrid_distill(setting, name, "verify", str(export))


def launch(file: str, setting: Setting, name: str) -> Outcome:
    """Take a step of alignment and one of distillation with a launch file."""
    n = PROCESSES.get(file, 2)
    if not setting.rehearse and file != "cpu.yaml" and setting.n_gpus < n:
        return Outcome(SKIPPED, f"it needs {n} GPUs; this machine has {setting.n_gpus}")
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


def kernels(setting: Setting, name: str) -> Outcome:
    """Compare every kernel with its definition, and time it; a rehearsal interprets one case."""
    words = [str(BENCHMARKS / "gpu_kernels.py")]
    path = BENCHMARKS / "results" / "gpu_kernels.json"
    if setting.rehearse:
        path = setting.out / "rehearsed_kernels.json"
        words += ["--only", REHEARSED_KERNELS, "--again", "--out", str(path)]
    interpreted = str(int(setting.rehearse))
    limit = KERNELS_LIMIT
    outcome = program(setting, name, *words, limit=limit, TRITON_INTERPRET=interpreted)
    if not path.exists():
        return Outcome(WRONG, f"no case was run: {outcome.detail}; see {setting.log(name)}")
    record = json.loads(path.read_text())
    return Outcome(outcome.result, "; ".join(filter(None, [outcome.detail, *summary(record)])))


def summary(record: dict) -> Iterator[str]:
    """Yield what is known of the kernels: cases, further steps, times."""
    cases = record["cases"].values()
    n_right = sum(case["ok"] for case in cases)
    yield f"{n_right} of {len(cases)} cases right"
    for step, status in record["steps"].items():
        yield f"{step}: {status}"
    for goal, milliseconds in record["times"].items():
        if isinstance(milliseconds, float):
            yield f"{goal}: {milliseconds:.3f} ms"


def training_step(setting: Setting, name: str) -> Outcome:
    """Time a step of Llama-3.2-1B's shape; on a CPU, of a small one."""
    words = [str(BENCHMARKS / "train_step.py")]
    if setting.rehearse:
        words += ["--small", "--stages", "align"]
    outcome = program(setting, name, *words)
    if outcome.result != OK:
        return outcome
    measured = []
    for line in setting.log(name).read_text().splitlines():
        if line.startswith("{"):  # the others are warnings
            measured.append(speed(json.loads(line)))
    if not measured:
        return Outcome(WRONG, f"nothing measured; see {setting.log(name)}")
    return Outcome(OK, "; ".join(measured))


def speed(case: dict) -> str:
    ours = case["ours"]
    if "failed" in ours:
        return f"{case['case']}: {ours['failed']}"
    text = f"{case['case']}: {ours['tokens_per_s']:,.0f} tokens/s"
    if "mfu" in ours:
        text += f", {ours['mfu']:.0%} of the peak"
    return text


def rows() -> Iterator[Row]:
    """Yield all rows, in the order they run."""
    yield Row("device", device)
    for name, flags in (("run tiny", []), ("run tiny in bfloat16", BF16)):
        yield Row(name, partial(whole_run, flags))
        yield Row(f"verify of {name}", partial(verification, name))
    for path in sorted((ROOT / "launch").glob("*.yaml")):
        yield Row(f"launch/{path.name}", partial(launch, path.name))
    yield Row("packed attention", attention)
    yield Row("kernels", kernels)
    yield Row("training step", training_step)


def line(name: str, result: str, seconds: str, detail: str) -> str:
    return f"{name:<32} {result:<8} {seconds:>7}  {detail}".rstrip()


def check(setting: Setting, only: str = "") -> dict[str, Outcome]:
    """Run the rows whose name has the expression ``only``; print the table as it fills."""
    print(line("row", "result", "seconds", "detail"), flush=True)
    outcomes: dict[str, Outcome] = {}
    for row in rows():
        if not re.search(only, row.name):
            continue
        begun = time.monotonic()
        try:
            outcome = row.run(setting, row.name)
        except Exception as error:  # the other rows are worth more than a traceback
            outcome = Outcome(WRONG, f"{type(error).__name__}: {error}")
        outcomes[row.name] = outcome
        seconds = f"{time.monotonic() - begun:.0f}"
        print(line(row.name, outcome.result, seconds, outcome.detail), flush=True)
    counts = Counter(outcome.result for outcome in outcomes.values())
    print(", ".join(f"{counts[result]} {result}" for result in (OK, WRONG, SKIPPED)), flush=True)
    return outcomes


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
