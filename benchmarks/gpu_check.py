"""Everything that needs a GPU, as a user runs it, in one command and one table. Needs no pytest.

    python benchmarks/gpu_check.py               # `make gpu-check`; about 20 minutes
    python benchmarks/gpu_check.py --rehearse    # `make gpu-rehearsal`: every row, on a CPU
    python benchmarks/gpu_check.py --list        # the rows
    python benchmarks/gpu_check.py --only launch # rows whose name has this expression

- the embedded teacher's run from scores to export, in float32 and bfloat16; `verify` of both;
- a step of alignment and of distillation with every file of launch/, some on two GPUs;
- attention over packed rows, values and gradients, against the mask of all pairs;
- every kernel against its definition, its time against its goal (`gpu_kernels.py`, resumes);
- a training step of Llama-3.2-1B's shape: tokens a second, and share of the peak.

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
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[1]
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
HEADS, WIDTH = (8, 2), 64
"""Query and key heads of the attention that is compared, and their width."""
ROWS_OF = {"cuda": ((2, 2048, 700), (2, 1900, 60)), "cpu": ((2, 300, 150),)}
"""Batch, length, and mean length of the documents of these rows."""
TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 3e-2}  # float32 may be computed in TF32


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

    def environment(self, **more: str) -> dict[str, str]:
        path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
        variables = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **more}
        if self.rehearse:
            # A launch for GPUs must be told to use the CPU.
            on_cpu = {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
            variables |= {**on_cpu, "OMP_NUM_THREADS": "1"}
        return variables


class Row(NamedTuple):
    name: str
    run: Callable[[Setting, str], Outcome]
    """Takes the setting and the row's name."""


def program(
    setting: Setting, name: str, *words: str, limit: float = LIMIT, **variables: str
) -> Outcome:
    """Run Python with ``words``; its output goes to the row's log."""
    seconds = limit * (3 if setting.rehearse else 1)
    log = log_of(setting, name)
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, env=setting.environment(**variables),
            stdout=file, stderr=file, start_new_session=True,
        )  # fmt: skip
        try:
            status = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return Outcome(WRONG, f"not finished after {seconds:.0f} s; see {log}")
    if status:
        lines = [line for line in log.read_text().splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line or line.startswith("error")] or lines[
            -1:
        ]
        return Outcome(WRONG, f"exit status {status}: {' '.join(errors[-1:])[:160]}; see {log}")
    return Outcome(OK)


def log_of(setting: Setting, name: str) -> Path:
    path = setting.out / "logs" / f"{name.replace('/', '-').replace(' ', '-')}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def hybrid_distill(setting: Setting, name: str, *words: str) -> Outcome:
    return program(setting, name, "-m", "hybrid_distill", *words)


def device(setting: Setting, name: str) -> Outcome:
    """Say what the other rows belong to."""
    import triton

    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, triton {triton.__version__}"
    if setting.rehearse:
        return Outcome(OK, f"a CPU, rehearsing; {versions}")
    names = [torch.cuda.get_device_name(i) for i in range(setting.n_gpus)]
    driver = "unknown"
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split(
            "\n"
        )[0]
    return Outcome(OK, f"{len(names)} x {names[0]}, driver {driver}, {versions}")


def whole_run(flags: list[str], setting: Setting, name: str) -> Outcome:
    """Run the embedded teacher from scores to export, which checks itself in another process."""
    out = folder_of(setting, name)
    shutil.rmtree(out, ignore_errors=True)
    outcome = hybrid_distill(setting, name, "run", "tiny", "--out", str(out), *SMALL, *flags)
    if outcome.result == OK and not (out / "export" / "gate").is_dir():
        return Outcome(WRONG, f"no export in {out}; see {log_of(setting, name)}")
    return outcome


def folder_of(setting: Setting, name: str) -> Path:
    return setting.out / name.replace(" ", "-")


def verification(of: str, setting: Setting, name: str) -> Outcome:
    """Check an export once more, on the device that `verify` chooses."""
    export = folder_of(setting, of) / "export"
    if not export.is_dir():
        return Outcome(WRONG, f"{of!r} has left no export")
    return hybrid_distill(setting, name, "verify", str(export))


def launch(file: str, setting: Setting, name: str) -> Outcome:
    """Take a step of alignment and one of distillation with a launch file."""
    n = PROCESSES.get(file, 2)
    if not setting.rehearse and file != "cpu.yaml" and setting.n_gpus < n:
        return Outcome(SKIPPED, f"it needs {n} GPUs; this machine has {setting.n_gpus}")
    if file.startswith("zero") and find_spec("deepspeed") is None:
        return Outcome(
            SKIPPED, "deepspeed is not installed; pip install 'hybrid-distill[deepspeed]'"
        )
    out = folder_of(setting, f"with-{file}")
    shutil.rmtree(out, ignore_errors=True)
    launcher = ["-m", "accelerate.commands.launch", "--config_file", str(ROOT / "launch" / file)]
    launcher += ["--num_processes", str(n), "--main_process_port", str(free_port())]
    if setting.rehearse and n == 1:
        launcher += ["--cpu"]  # for one process, accelerate overrides the variable
    run = ["-m", "hybrid_distill", "run", "tiny", "--out", str(out), *SMALL, *ONE_STEP]
    outcome = program(setting, name, *launcher, *run)
    if outcome.result != OK:
        return outcome
    metrics = [path.read_text() for path in out.glob("stages/*/metrics.jsonl")]
    n_steps = sum(len(text.splitlines()) for text in metrics)
    if n_steps != 2:
        return Outcome(WRONG, f"{n_steps} steps were taken, expected 2; see {log_of(setting, name)}")
    return Outcome(OK, f"{n} process{'es' * (n > 1)}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def attention(setting: Setting, name: str) -> Outcome:
    """Compare attention over packed rows in a process of its own."""
    outcome = program(setting, name, str(Path(__file__)), "--attention", setting.device)
    if outcome.result != OK:
        return outcome
    *_, line = log_of(setting, name).read_text().splitlines()
    return Outcome(OK, line)


def compare_attention(device: str) -> str:
    """Compare packed rows, each way that this machine has, with their mask; gradients too on a GPU.

    Return the largest errors. Raise SystemExit with them if one is too large.
    """
    from hybrid_distill.model import document_kernels, document_mask

    flash = document_kernels.flash_function()
    ways = {"flex": None} if flash is None else {"flex": None, "flash-attn": flash}
    errors: dict[str, float] = {}
    wrong: list[str] = []
    torch.manual_seed(0)
    for dtype, first, window in packed_cases(device):
        batch, length = first.shape
        sizes = [(batch, n, length, WIDTH) for n in (HEADS[0], HEADS[1], HEADS[1])]
        heads = [torch.randn(size, device=device, dtype=dtype) for size in sizes]
        expected = attended(heads, document_mask.visible(first).unsqueeze(1))
        for way, function in ways.items():
            document_kernels.flash_function = lambda function=function: function
            found = attended(heads, document_mask.DocumentMask.of(first, None, window))
            for what, actual, wanted in zip(("out", "dq", "dk", "dv"), found, expected):
                error = ((actual - wanted).abs().max() / wanted.abs().max()).item()
                name = f"{way} {what} {str(dtype).removeprefix('torch.')}"
                errors[name] = max(errors.get(name, 0.0), error)
                if not error < TOLERANCE[dtype]:
                    wrong.append(name)
    document_kernels.flash_function = lambda: flash
    text = ", ".join(f"{name} {error:.0e}" for name, error in errors.items())
    if wrong:
        raise SystemExit(f"Error: packed attention differs from its mask in {wrong[0]}: {text}")
    return text


def packed_cases(device: str) -> Iterator[tuple[torch.dtype, torch.Tensor, int | None]]:
    """Yield dtype, first token that each token sees, [B, L], and window, of random documents."""
    for dtype in TOLERANCE:
        for batch, length, mean in ROWS_OF[device]:
            for window in (None, 200):
                place = torch.arange(length)
                starts = torch.rand(batch, length) < 1 / mean
                starts[:, 0] = True
                first = torch.where(starts, place, 0).cummax(1).values
                if window is not None:
                    first = first.maximum(place - window + 1)
                yield dtype, first.to(device), window


def attended(heads: list[torch.Tensor], mask: torch.Tensor) -> list[torch.Tensor]:
    """Return attention's output, and on a GPU its gradients: FlexAttention has none on a CPU."""
    train = heads[0].device.type == "cuda"
    leaves = [t.detach().requires_grad_(train) for t in heads]
    out = torch.nn.functional.scaled_dot_product_attention(*leaves, attn_mask=mask, enable_gqa=True)
    if not train:
        return [out.float()]
    weights = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=out.dtype).view(out.shape)
    gradients = torch.autograd.grad((out * weights).sum(), leaves)
    return [t.float() for t in (out.detach(), *gradients)]


def kernels(setting: Setting, name: str) -> Outcome:
    """Compare every kernel with its definition, and time it; a rehearsal interprets one case."""
    script = str(ROOT / "benchmarks" / "gpu_kernels.py")
    path = setting.out / "rehearsed_kernels.json"
    words, variables = [script], {"TRITON_INTERPRET": "0"}
    if setting.rehearse:
        words += ["--only", REHEARSED_KERNELS, "--again", "--out", str(path)]
        variables = {"TRITON_INTERPRET": "1"}
    else:
        path = ROOT / "benchmarks" / "results" / "gpu_kernels.json"
    outcome = program(setting, name, *words, limit=KERNELS_LIMIT, **variables)
    record = (
        json.loads(path.read_text()) if path.exists() else {"cases": {}, "steps": {}, "times": {}}
    )
    cases = record["cases"].values()
    right = sum(case["ok"] for case in cases)
    steps = [f"{step}: {status}" for step, status in record["steps"].items()]
    times = [
        f"{goal}: {ms:.3f} ms" for goal, ms in record["times"].items() if isinstance(ms, float)
    ]
    detail = "; ".join([f"{right} of {len(cases)} cases right", *steps, *times])
    if outcome.result == OK and not cases:
        return Outcome(WRONG, f"no case was run; see {log_of(setting, name)}")
    return Outcome(outcome.result, "; ".join(filter(None, [outcome.detail, detail])))


def training_step(setting: Setting, name: str) -> Outcome:
    """Time a step of Llama-3.2-1B's shape; on a CPU, of a small one."""
    words = [str(ROOT / "benchmarks" / "train_step.py")]
    if setting.rehearse:
        words += ["--small", "--stages", "align"]
    outcome = program(setting, name, *words)
    if outcome.result != OK:
        return outcome
    measured = []
    for line in log_of(setting, name).read_text().splitlines():
        if line.startswith("{"):
            case = json.loads(line)
            ours = case["ours"]
            speed = ours.get("failed") or f"{ours['tokens_per_s']:,.0f} tokens/s"
            share = f", {ours['mfu']:.0%} of the peak" if "mfu" in ours else ""
            measured.append(f"{case['case']}: {speed}{share}")
    return Outcome(
        OK if measured else WRONG,
        "; ".join(measured) or f"nothing measured; see {log_of(setting, name)}",
    )


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
            outcomes[row.name] = row.run(setting, row.name)
        except Exception as error:  # the other rows are worth more than a traceback
            outcomes[row.name] = Outcome(WRONG, f"{type(error).__name__}: {error}")
        seconds = f"{time.monotonic() - begun:.0f}"
        print(
            line(row.name, outcomes[row.name].result, seconds, outcomes[row.name].detail),
            flush=True,
        )
    counts = {
        result: sum(o.result == result for o in outcomes.values())
        for result in (OK, WRONG, SKIPPED)
    }
    print(", ".join(f"{n} {result}" for result, n in counts.items()), flush=True)
    return outcomes


def main() -> None:
    """See the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rehearse", action="store_true", help="run every row on the CPU, to test this script"
    )
    parser.add_argument("--list", action="store_true", help="name the rows")
    parser.add_argument("--only", default="", help="rows whose name has this regular expression")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "runs" / "gpu_check", help="folder of runs and logs"
    )
    parser.add_argument("--attention", choices=ROWS_OF, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.list:
        print("\n".join(row.name for row in rows()))
        return
    if options.attention:
        print(compare_attention(options.attention))
        return
    n_gpus = 0 if options.rehearse else torch.cuda.device_count()
    if not options.rehearse and not torch.cuda.is_available():
        print("gpu-check: no CUDA device that this Python can use; nothing was checked.")
        raise SystemExit(2)
    outcomes = check(Setting(options.out.resolve(), options.rehearse, n_gpus), options.only)
    raise SystemExit(
        1 if not outcomes or any(outcome.result == WRONG for outcome in outcomes.values()) else 0
    )


if __name__ == "__main__":
    main()
