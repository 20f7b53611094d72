"""Are the kernels right on this GPU, and how fast are they? Ten minutes at most; a part of `gpu_check.py`.

    python benchmarks/gpu_kernels.py            # a second call runs what was not reached or was wrong
    python benchmarks/gpu_kernels.py --work checks    # or times: one of the two parts below
    python benchmarks/gpu_kernels.py --list     # the cases; needs triton, but no GPU
    TRITON_INTERPRET=1 python benchmarks/gpu_kernels.py --only "N=4 P=64 plain"     # a case in the interpreter

1. Checks. At the same time, in processes of their own: every configuration of the recurrence's tile table against the
   recurrence in fp64, outputs, final state and every gradient; the same bits twice; a training step's rows together
   and alone; forward and backward at offsets
   beyond 2^31 elements; the kernels' test at first use; where pytest is installed, tests/kernels on the device instead
   of the interpreter; and, where compute-sanitizer is installed, the smallest case under its memory checker and its
   race checker.
2. Times. Alone on the device: our kernels at the shapes that goals are set for, then other libraries' (`gpu_times.py`).

One result per case goes to benchmarks/results/gpu_kernels.json, which belongs to one device, one version of triton and
one state of the sources.

Exit status 0 if all is right, 1 if something is wrong or was not reached, 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpu_times import goals, peers
from records import RESULTS, ROOT, parser_of, read, write
from torch import Tensor

from hybrid_distill.model.decays import log_decay

RECORD = RESULTS / "gpu_kernels.json"
TESTED_ON_THE_DEVICE = ("conv_kernel", "step_kernel", "loss_kernel", "model_on_kernels")
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
# dtype of the inputs -> largest error, relative to the largest element of the expected tensor
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
BATCH = 2
LENGTH = 200
HEADS = 3
HUGE = 1 << 31
HUGE_BYTES = 16 * HUGE  # of all tensors together
SECONDS = {"checks": 390, "times": 180}  # after which a part is cut off
DEVICE_IS_LOST = ("CUDA error", "[CUDA]")
"""In the message of an exception after which a process cannot use its device any more."""
SKIPPED = "skipped: "
NOT_REACHED = "not reached: run again to go on"
# Processes that share the cases: compiling is what takes time.
PARTS = max(6, min(12, (os.cpu_count() or 1) // 2 - 1))
Result = dict[str, Any]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Case(NamedTuple):
    """One call of `ssd`. ``full`` has gate, skip, initial state and packed documents, else it has none of them."""

    dtype: torch.dtype
    d_state: int
    head_dim: int
    full: bool = True
    n_segments: int = 1
    softplus: bool = True
    heads: int = HEADS  # 16 compile to what any multiple of 16 does

    @property
    def name(self) -> str:
        words = ["ssd", name_of(self.dtype), f"N={self.d_state}", f"P={self.head_dim}"]
        words.append("full" if self.full else "plain")
        if self.n_segments > 1:
            words.append(f"{self.n_segments} segments")
        if not self.softplus:
            words.append("log decays")
        if self.heads != HEADS:
            words.append(f"H={self.heads}")
        return " ".join(words)


def ssd_cases() -> list[Case]:
    """Return every entry of the tile table, masked sizes, and each option at least once."""
    from hybrid_kernels.ssd_tiles import TILES

    # An entry for each architecture; the device picks among them.
    listed = list(dict.fromkeys(Case(dtype, n, p) for dtype, _, n, p in TILES))
    for dtype in (torch.bfloat16, torch.float32):
        listed += [Case(dtype, n, 64) for n in (4, 8, 12)]
        listed += [Case(dtype, 16, p) for p in (20, 48, 80, 96)]
        listed += [Case(dtype, n, 64, full=False) for n in (4, 16, 64, 128)]
        listed += [Case(dtype, n, 64, n_segments=3) for n in (4, 16, 64, 128)]
        listed += [Case(dtype, 16, 64, softplus=False)]
    for n in (16, 64):
        listed += [Case(torch.bfloat16, n, 64, full=full, heads=16) for full in (False, True)]
    return listed


def check_ssd(case: Case) -> Result:
    """Return the errors of every output and gradient, relative to the largest expected element."""
    sys.path.append(str(ROOT / "tests" / "kernels"))
    import ssd_problem

    torch.manual_seed(0)
    sizes = (BATCH, LENGTH, case.heads, case.head_dim, case.d_state)
    with torch.device(DEVICE):
        problem = ssd_problem.problem(*sizes, dtype=case.dtype, gated=case.full, state=case.full)
        if not case.softplus:
            decays = log_decay(problem.a).detach().float().double()
            problem = problem._replace(a=decays.requires_grad_())
        options: dict[str, Any] = {
            "dtype": case.dtype,
            "softplus": case.softplus,
            "n_segments": case.n_segments,
            "seq_idx": ssd_problem.documents(BATCH, LENGTH) if case.full else None,
        }
        torch.manual_seed(1)
        actual, expected = ssd_problem.compare(problem, **options)
        torch.manual_seed(1)
        again, _ = ssd_problem.compare(problem, **options)

    errors = {}
    for name, tensor in expected.items():
        errors[name] = ssd_problem.relative_error(actual[name], tensor)
    same_bits = all(torch.equal(actual[name], again[name]) for name in actual)
    is_right = same_bits and max(errors.values()) < TOLERANCE[case.dtype]
    return {"ok": is_right, "same_bits": same_bits, "errors": errors}


def check_training_size(d_state: int) -> Result:
    """Compare a training step's rows, run together, with each run alone: the same bits, and the same twice."""
    from hybrid_kernels.ssd import ssd

    batch = 8
    length = 2048
    heads = 32
    head_dim = 64
    torch.manual_seed(0)
    sizes = ((heads, head_dim), (heads,), (heads, d_state), (heads, d_state))
    inputs = [torch.randn(batch, length, *size, device=DEVICE).bfloat16() for size in sizes]
    dy = torch.randn(batch, length, heads, head_dim, device=DEVICE).bfloat16()

    def run(rows: slice) -> list[Tensor]:
        leaves = [t[rows].clone().requires_grad_() for t in inputs]
        y, final = ssd(*leaves, n_segments=1)
        gradients = torch.autograd.grad((y, final), leaves, (dy[rows], torch.ones_like(final)))
        return [y.detach(), final.detach(), *gradients]

    together = run(slice(None))
    again = run(slice(None))
    same_bits = all(map(torch.equal, together, again))
    names = ("y", "final", "dx", "da", "db", "dc")
    errors = dict.fromkeys(names, 0.0)
    for row in range(batch):
        alone = run(slice(row, row + 1))
        for name, ours, expected in zip(names, together, alone):
            own_row = ours[row : row + 1]
            difference = (own_row.float() - expected.float()).abs().max()
            errors[name] = max(errors[name], difference.item())
    is_right = same_bits and not any(errors.values())
    return {"ok": is_right, "same_bits": same_bits, "errors": errors}


def check_huge_offsets() -> Result:
    """Compare the end of a row of more than 2^31 elements with that end run alone, from the state before."""
    from hybrid_kernels.ssd import ssd

    if torch.cuda.get_device_properties(0).total_memory < HUGE_BYTES:
        return {"ok": True, "skipped": f"needs {HUGE_BYTES / 1e9:.0f} GB"}
    heads = 32
    head_dim = 64
    tail = 256
    length = HUGE // (heads * head_dim) + 2 * tail
    sizes = {
        "x": (heads, head_dim),
        "a": (heads,),
        "b": (heads, 4),
        "c": (heads, 4),
        "z": (heads, head_dim),
    }
    inputs = {}
    for name, size in sizes.items():
        inputs[name] = torch.randn(1, length, *size, device=DEVICE, dtype=torch.bfloat16)
    skip = torch.ones(heads, device=DEVICE)

    def run(tokens: slice, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x, a, b, c, z = (t[:, tokens] for t in inputs.values())
        return ssd(x, a, b, c, D_H=skip, z_BLHP=z, state_BHPN=state)

    def run_with_gradients(tokens: slice, state: Tensor | None = None) -> list[Tensor]:
        leaves = [t.requires_grad_() for t in inputs.values()]
        y, final = run(tokens, state)
        end = y[:, -tail:]
        weights = torch.linspace(-1, 1, tail, device=DEVICE, dtype=y.dtype).view(1, -1, 1, 1)
        gradients = torch.autograd.grad((end * weights).sum() + final.sum(), leaves)
        # Clones: views would keep the whole gradients alive.
        of_tail = [gradient[:, -tail:].clone() for gradient in gradients]
        return [end.detach(), final.detach(), *of_tail]

    with torch.no_grad():
        _, before = run(slice(None, -tail))
    expected = run_with_gradients(slice(-tail, None), before)
    actual = run_with_gradients(slice(None))

    names = ["y", "final", *(f"d{name}" for name in inputs)]
    errors = {}
    for name, ours, right in zip(names, actual, expected):
        error = (ours - right).abs().max() / right.abs().max()
        errors[name] = error.item()
    return {"ok": max(errors.values()) < TOLERANCE[torch.bfloat16], "errors": errors}


def check_first_use(dtype: torch.dtype) -> Result:
    """Run the test that users' own devices are put to."""
    from hybrid_kernels.definitions import mistake_of

    calls = {
        "recurrence": ((64, 16), {"gated": True, "packed": True}),
        "convolution": ((4,), {"packed": True}),
        "decoding step": ((64, 16, 4), {"masked": True}),
    }
    for kernel, (sizes, options) in calls.items():
        error = mistake_of(kernel, torch.device(DEVICE), dtype, *sizes, training=True, **options)
        if error is not None:
            return {"ok": False, "error": error}
    return {"ok": True}


def check_delta_rule() -> Result:
    """Run that test of flash-linear-attention's kernel for the gated delta rule, where it is installed."""
    from hybrid_kernels import delta_rule
    from hybrid_kernels.definitions import mistake_of

    reason = delta_rule.unusable()
    if reason is None and DEVICE == "cpu":
        reason = "the interpreter does not multiply bfloat16"
    if reason is not None:
        return {"ok": True, "skipped": reason}
    error = mistake_of(
        "gated delta rule",
        torch.device(DEVICE),
        torch.bfloat16,
        64,
        16,
        packed=True,
        training=True,
    )
    if error is not None:
        return {"ok": False, "error": error}
    return {"ok": True}


def cases() -> dict[str, Callable[[], Result]]:
    """Return all checks by name, in the order they run."""
    checks: dict[str, Callable[[], Result]] = {"ssd offsets beyond 2^31": check_huge_offsets}
    for dtype in TOLERANCE:
        checks[f"first use {name_of(dtype)}"] = partial(check_first_use, dtype)
    checks["first use gated delta rule"] = check_delta_rule
    if DEVICE == "cuda":
        for d_state in (16, 64, 128):
            checks[f"ssd 8 x 2,048, 32 heads, N={d_state}"] = partial(check_training_size, d_state)
    for case in ssd_cases():
        checks[case.name] = partial(check_ssd, case)
    return checks


def run_cases(names: list[str], out: Path) -> None:
    """Run cases by name; an exception is a result. Each line of ``out`` is a name and its result."""
    checks = cases()
    for name in names:
        start = time.perf_counter()
        try:
            result = checks[name]()
        except Exception as error:  # a kernel that does not compile is a finding, the others go on
            result = {"ok": False, "error": f"{type(error).__name__}: {error}"[:500]}
        result["seconds"] = round(time.perf_counter() - start, 1)
        with out.open("a") as file:
            file.write(json.dumps([name, result]) + "\n")
        if any(sign in result.get("error", "") for sign in DEVICE_IS_LOST):
            raise SystemExit(
                "the device is in an error state; the other cases of this process were not run."
            )


def line(name: str, result: Result) -> str:
    verdict = "ok   " if result["ok"] else "WRONG"
    detail = result.get("error") or result.get("skipped")
    if not detail:
        errors = result.get("errors", {})
        detail = " ".join(f"{tensor} {error:.0e}" for tensor, error in errors.items())
    bits = "" if result.get("same_bits", True) else " not the same bits twice"
    return f"{verdict} {name:<45} {detail}{bits}"


def is_right(status: str) -> bool:
    return status == "ok" or status.startswith(SKIPPED)


def commands_of_parts(missing: list[str], folder: Path) -> dict[str, list[str]]:
    """Return the command of each process that runs a share of the missing cases."""
    commands = {}
    for part in range(min(PARTS, len(missing))):
        commands[f"part {part}"] = own_command(folder / f"{part}.json", missing[part::PARTS])
    return commands


def own_command(file: Path, names: list[str]) -> list[str]:
    """Return the command that runs these cases, named in a file, in a process of its own."""
    file.write_text(json.dumps(names))
    return [sys.executable, str(Path(__file__).resolve()), "--part", str(file)]


def commands_of_steps(folder: Path) -> dict[str, list[str]]:
    """Return the commands of the sanitizers and of the other kernels' tests, of those that are installed."""
    commands = {}
    smallest = own_command(folder / "smallest.json", [Case(torch.bfloat16, 16, 16).name])
    if sanitizer := shutil.which("compute-sanitizer"):
        for tool in ("memcheck", "racecheck"):
            commands[tool] = [sanitizer, "--tool", tool, "--error-exitcode", "1", *smallest]
    if has_pytest():
        flags = ["-q", "-p", "no:cacheprovider", "-k", "not bad_input"]
        for name in TESTED_ON_THE_DEVICE:
            test = f"tests/kernels/test_{name}.py"
            commands[test] = [sys.executable, "-m", "pytest", *flags, test]
    return commands


def has_pytest() -> bool:
    try:
        import pytest  # noqa: F401  a broken one counts as none
    except ImportError:
        return False
    return True


def run_checks(record: Result, only: str, deadline: float) -> None:
    """Run what is missing in processes side by side, and end those that are not done at the deadline."""
    missing = [name for name in cases() if only in name and name not in record["cases"]]
    steps = record["steps"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)

        def log_of(name: str) -> Path:
            return folder / f"{name.replace('/', '-')}.log"

        further: dict[str, list[str]] = {}
        if not only:
            further = commands_of_steps(folder)
            if not has_pytest():
                steps["tests/kernels"] = f"{SKIPPED}pytest is not installed"
        running = {}
        for name, command in (commands_of_parts(missing, folder) | further).items():
            if steps.get(name) != "ok":
                running[name] = start(command, log_of(name))
        for name, process in running.items():
            status = status_of(process, deadline)
            if status != "ok" or name in further:
                print(log_of(name).read_text(), flush=True)
            if name in further:
                steps[name] = status
        for path in folder.glob("*.jsonl"):
            if path.stem != "smallest":  # which the sanitizers slow down
                record["cases"] |= dict(json.loads(row) for row in path.read_text().splitlines())
    for name in missing:
        record["cases"].setdefault(name, {"ok": False, "error": NOT_REACHED})


def start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    variables = {
        **os.environ,
        "TRITON_INTERPRET": str(int(DEVICE == "cpu")),
        "OMP_NUM_THREADS": "1",
    }
    with log.open("w") as file:
        return subprocess.Popen(
            command, cwd=ROOT, env=variables, stdout=file, stderr=file, start_new_session=True
        )


def status_of(process: subprocess.Popen[bytes], deadline: float) -> str:
    """Wait for a process and return how it ended; kill it with its children at the deadline."""
    try:
        status = process.wait(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return "out of time"
    return f"exit {status}" if status else "ok"


def time_goals(record: Result, deadline: float) -> None:
    """Fill ``record["times"]`` and ``["peers"]`` until the deadline: milliseconds, or why there are none."""
    ours = {goal.name: goal.measure for goal in goals()}
    for part, timed in (("times", ours), ("peers", peers())):
        values = record[part]
        for name, measure in timed.items():
            if not isinstance(values.get(name), float):
                is_late = time.monotonic() > deadline
                values[name] = NOT_REACHED if is_late else measure()
                print(f"{name}: {values[name]}", flush=True)


def conditions() -> Result:
    """Return the device and versions that the results belong to."""
    import triton
    from kernel_resources import digest, kernel_modules

    return {
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "interpreter",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "sources": {module.__name__: digest(module) for module in kernel_modules()},
    }


def report(record: Result, work: str) -> bool:
    """Print the tables of what was worked on; return True if everything is right and was reached.

    A goal that is missed, or a library that is absent, is not a mistake.
    """
    wrong = []
    if work != "times":
        wrong += report_checks(record)
    if work != "checks":
        wrong += report_times(record)
    print(f"{record['device']}: {len(record['cases'])} cases, {len(wrong)} failures")
    return not wrong


def report_checks(record: Result) -> list[str]:
    """Print a line a case and a step; return the names of what is wrong."""
    wrong = []
    for name, result in record["cases"].items():
        print(line(name, result))
        if not result["ok"]:
            wrong.append(name)
    for name, status in record["steps"].items():
        print(f"{'ok   ' if is_right(status) else 'WRONG'} {name}: {status}")
        if not is_right(status):
            wrong.append(name)
    return wrong


def report_times(record: Result) -> list[str]:
    """Print a line a goal and another library; return the goals that have no time."""
    wrong = []
    most = {goal.name: goal.most for goal in goals()}
    for name, value in record["times"].items():
        if isinstance(value, str):
            wrong.append(name)
            print(f"{name:<64}{value}")
        else:
            verdict = "met" if value <= most[name] else "missed"
            print(f"{name:<64}{value:>9.3f} ms, goal {most[name]:.3f}: {verdict}")
    for name, value in record["peers"].items():
        print(f"{name:<64}{value if isinstance(value, str) else f'{value:>9.3f} ms'}")
    return wrong


def main() -> None:
    """See the module docstring."""
    parser = parser_of(__doc__, RECORD)
    parser.add_argument("--list", action="store_true", help="name the cases")
    parser.add_argument(
        "--only", default="", help="cases whose name contains this; no further steps"
    )
    parser.add_argument("--again", action="store_true", help="forget what is known")
    parser.add_argument("--work", choices=["all", *SECONDS], default="all")
    parser.add_argument("--seconds", type=float, help="of each part, in place of the usual")
    # Runs the cases that this file names: a child process of this program.
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.list:
        print("\n".join(cases()))
        return
    if DEVICE == "cuda" and not torch.cuda.is_available():
        print("gpu_kernels: no CUDA device; nothing was checked.")
        raise SystemExit(2)
    if options.part:
        run_cases(json.loads(options.part.read_text()), options.part.with_suffix(".jsonl"))
        return

    record = read(options.out)
    current = conditions()
    recorded = {name: record.get(name) for name in current}
    if options.again or recorded != current:
        record = {**current, "cases": {}, "steps": {}, "times": {}, "peers": {}}
    record["date"] = datetime.date.today().isoformat()
    if options.work != "times":
        # What was wrong may have been repaired outside the kernels' sources.
        for name, case in list(record["cases"].items()):
            if options.only in name and not case["ok"]:
                del record["cases"][name]
        seconds = options.seconds or SECONDS["checks"]
        run_checks(record, options.only, time.monotonic() + seconds)
    if options.work != "checks" and not options.only:
        seconds = options.seconds or SECONDS["times"]
        time_goals(record, time.monotonic() + seconds)
    write(options.out, record)
    raise SystemExit(0 if report(record, options.work) else 1)


if __name__ == "__main__":
    main()
