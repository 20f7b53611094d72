"""Are the kernels right on this GPU, and how fast are they? At most 10 minutes; a part of `gpu_check.py`.

    python benchmarks/gpu_kernels.py            # a second call goes on where the first stopped
    python benchmarks/gpu_kernels.py --list     # the cases; needs triton, but no GPU
    python benchmarks/gpu_kernels.py --report   # the tables from what is there; needs neither
    TRITON_INTERPRET=1 python benchmarks/gpu_kernels.py --only "N=4 P=64 plain"     # a case in the interpreter

1. At the same time, in processes of their own: every configuration of the recurrence's tile table against the
   recurrence in fp64, outputs, final state and every gradient; the same bits twice; forward and backward at offsets
   beyond 2^31 elements; the kernels' test at first use; where pytest is installed, tests/kernels on the device instead
   of the interpreter; and, where compute-sanitizer is installed, the smallest case under its memory checker and its
   race checker.
2. Alone on the device: the kernels at the shapes that goals are set for, then a table of these.

One result per case goes to benchmarks/results/gpu_kernels.json, which belongs to one device, one version of triton and
one state of the sources. Peers are timed by `ssd.py`, `distillation_loss.py`, `decode.py` and `train_step.py`.

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
from pathlib import Path
from typing import Any, NamedTuple

import torch
from provenance import ROOT, read, write
from torch import Tensor

from hybrid_distill.model.ssd import log_decay

RESULTS = ROOT / "benchmarks" / "results" / "gpu_kernels.json"
TESTED_ON_THE_DEVICE = ("conv_kernel", "step_kernel", "loss_kernel", "model_on_kernels")
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
# dtype of the inputs -> largest error, relative to the largest element of the expected tensor
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
BATCH, LENGTH, HEADS = 2, 200, 3
HUGE = 1 << 31
HUGE_BYTES = 16 * HUGE  # of all tensors together
SECONDS = {"all": 570, "checks": 390}  # until checks are cut off, and the whole
TESTS = "tests of the other kernels"
SKIPPED = "skipped: "
PARTS = 6  # processes that share the cases: compiling is what takes time


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
        words = ["ssd", str(self.dtype).removeprefix("torch."), f"N={self.d_state}", f"P={self.head_dim}"]
        words += ["full" if self.full else "plain"]
        words += [f"{self.n_segments} segments"] if self.n_segments > 1 else []
        words += [] if self.softplus else ["log decays"]
        words += [f"H={self.heads}"] if self.heads != HEADS else []
        return " ".join(words)


def ssd_cases() -> list[Case]:
    """Every entry of the tile table, masked sizes, and each option at least once."""
    from hybrid_kernels.ssd_tiles import TILES

    found = list(dict.fromkeys(Case(dtype, n, p) for dtype, _, n, p in TILES))  # the device picks among them
    for dtype in (torch.bfloat16, torch.float32):
        found += [Case(dtype, n, 64) for n in (4, 8, 12)]
        found += [Case(dtype, 16, p) for p in (20, 48, 80, 96)]
        found += [Case(dtype, n, 64, full=False) for n in (4, 16, 64, 128)]
        found += [Case(dtype, n, 64, n_segments=3) for n in (4, 16, 64, 128)]
        found += [Case(dtype, 16, 64, softplus=False)]
    found += [Case(torch.bfloat16, n, 64, full=full, heads=16) for n in (16, 64) for full in (False, True)]
    return found


def check_ssd(case: Case) -> dict[str, Any]:
    """The errors of every output and gradient, relative to the largest expected element."""
    sys.path.append(str(ROOT / "tests" / "kernels"))
    import ssd_problem as interpreted

    torch.manual_seed(0)
    sizes = BATCH, LENGTH, case.heads, case.head_dim, case.d_state
    with torch.device(DEVICE):
        given = interpreted.problem(*sizes, dtype=case.dtype, gated=case.full, state=case.full)
        if not case.softplus:
            given = given._replace(a=log_decay(given.a).detach().float().double().requires_grad_())
        options: dict[str, Any] = {"dtype": case.dtype, "softplus": case.softplus, "n_segments": case.n_segments}
        options["seq_idx"] = interpreted.documents(BATCH, LENGTH) if case.full else None
        runs = []
        for _ in range(2):
            torch.manual_seed(1)
            runs.append(interpreted.compare(given, **options))
    (actual, expected), (again, _) = runs
    errors = {name: interpreted.relative_error(actual[name], wanted) for name, wanted in expected.items()}
    same_bits = all(torch.equal(actual[name], again[name]) for name in actual)
    return {"ok": same_bits and max(errors.values()) < TOLERANCE[case.dtype], "same_bits": same_bits, "errors": errors}


def check_huge_offsets() -> dict[str, Any]:
    """The end of a row of more than 2^31 elements is what it is when that end is run alone, from the state before."""
    from hybrid_kernels.ssd import ssd

    if torch.cuda.get_device_properties(0).total_memory < HUGE_BYTES:
        return {"ok": True, "skipped": f"needs {HUGE_BYTES / 1e9:.0f} GB"}
    heads, head_dim, tail = 32, 64, 256
    length = HUGE // (heads * head_dim) + 2 * tail
    sizes = dict(x=(heads, head_dim), a=(heads,), b=(heads, 4), c=(heads, 4), z_BLHP=(heads, head_dim))
    args = {n: torch.randn(1, length, *size, device=DEVICE, dtype=torch.bfloat16) for n, size in sizes.items()}
    options = {"D_H": torch.ones(heads, device=DEVICE)}

    def run(tokens: slice, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x, a, b, c, z = (t[:, tokens] for t in args.values())
        return ssd(x, a, b, c, z_BLHP=z, state_BHPN=state, **options)

    def run_with_gradients(tokens: slice, state: Tensor | None = None) -> list[Tensor]:
        leaves = [t.requires_grad_() for t in args.values()]
        y, final = run(tokens, state)
        weights = torch.linspace(-1, 1, tail, device=DEVICE, dtype=y.dtype).view(1, -1, 1, 1)
        gradients = torch.autograd.grad((y[:, -tail:] * weights).sum() + final.sum(), leaves)
        return [y[:, -tail:].detach(), final.detach(), *(gradient[:, -tail:].clone() for gradient in gradients)]

    with torch.no_grad():
        _, before = run(slice(None, -tail))
    expected = run_with_gradients(slice(-tail, None), before)
    actual = run_with_gradients(slice(None))
    names = ["y", "final", *(f"d{name[0]}" for name in args)]
    errors = {n: ((a - e).abs().max() / e.abs().max()).item() for n, a, e in zip(names, actual, expected)}
    return {"ok": max(errors.values()) < TOLERANCE[torch.bfloat16], "errors": errors}


def check_first_use(dtype: torch.dtype) -> dict[str, Any]:
    """The test that users' own devices are put to."""
    from hybrid_kernels.definitions import difference as mistake

    calls = {
        "recurrence": ((64, 16), {"gated": True, "packed": True}),
        "convolution": ((4,), {"packed": True}),
        "decoding step": ((64, 16, 4), {"masked": True}),
    }
    for kernel, (sizes, options) in calls.items():
        if found := mistake(kernel, torch.device(DEVICE), dtype, *sizes, training=True, **options):
            return {"ok": False, "error": found}
    return {"ok": True}


def cases() -> dict[str, Callable[[], dict[str, Any]]]:
    """All checks by name, in the order they run."""
    found: dict[str, Callable[[], dict[str, Any]]] = {"ssd offsets beyond 2^31": check_huge_offsets}
    for dtype in TOLERANCE:
        found[f"first use {str(dtype).removeprefix('torch.')}"] = lambda dtype=dtype: check_first_use(dtype)
    for case in ssd_cases():
        found[case.name] = lambda case=case: check_ssd(case)
    return found


def run_cases(names: list[str], out: Path) -> None:
    """Run cases by name; an exception is a result. Each line of ``out`` is a name and what was found."""
    known = cases()
    for name in names:
        start = time.perf_counter()
        try:
            result = known[name]()
        except Exception as error:  # a kernel that does not compile is a finding, the others go on
            result = {"ok": False, "error": f"{type(error).__name__}: {error}"[:500]}
        result["seconds"] = round(time.perf_counter() - start, 1)
        with out.open("a") as file:
            file.write(json.dumps([name, result]) + "\n")
        if "CUDA error" in result.get("error", ""):
            raise SystemExit("the device is in an error state; the other cases of this process were not run.")


def line(name: str, result: dict[str, Any]) -> str:
    verdict = "ok   " if result["ok"] else "WRONG"
    detail = result.get("error") or result.get("skipped")
    detail = detail or " ".join(f"{n} {e:.0e}" for n, e in result.get("errors", {}).items())
    bits = "" if result.get("same_bits", True) else " not the same bits twice"
    return f"{verdict} {name:<45} {detail}{bits}"


def has_pytest() -> bool:
    try:
        import pytest  # noqa: F401  a broken one counts as none
    except ImportError:
        return False
    return True


def is_right(status: str) -> bool:
    return status == "ok" or status.startswith(SKIPPED)


def run_checks(record: dict[str, Any], only: str, deadline: float) -> None:
    """Run what is missing in processes side by side, and end those that are not done at the deadline."""
    missing = [name for name in cases() if only in name and name not in record["cases"]]
    own = [sys.executable, str(Path(__file__).resolve())]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        commands: dict[str, list[str]] = {}
        for part in range(min(PARTS, len(missing))):
            (folder / f"{part}.json").write_text(json.dumps(missing[part::PARTS]))
            commands[f"part {part}"] = [*own, "--part", str(folder / f"{part}.json")]
        if not only:
            (folder / "smallest.json").write_text(json.dumps([Case(torch.bfloat16, 16, 16).name]))
            smallest = [*own, "--part", str(folder / "smallest.json")]
            if sanitizer := shutil.which("compute-sanitizer"):
                for tool in ("memcheck", "racecheck"):
                    commands[tool] = [sanitizer, "--tool", tool, "--error-exitcode", "1", *smallest]
            tests = [f"tests/kernels/test_{name}.py" for name in TESTED_ON_THE_DEVICE]
            pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not bad_input", *tests]
            if has_pytest():
                commands[TESTS] = pytest
            else:
                record["steps"][TESTS] = f"{SKIPPED}pytest is not installed"
        running = {}
        for name, command in commands.items():
            if record["steps"].get(name) != "ok":
                log = (folder / f"{name}.log").open("w")
                environment = {**os.environ, "TRITON_INTERPRET": str(int(DEVICE == "cpu"))}
                running[name] = subprocess.Popen(
                    command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
                )
        for name, process in running.items():
            try:
                status = process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                status = None
            if status or not name.startswith("part"):
                print((folder / f"{name}.log").read_text(), flush=True)
            if not name.startswith("part"):
                record["steps"][name] = "ok" if status == 0 else "out of time" if status is None else f"exit {status}"
        for found in folder.glob("*.jsonl"):
            if found.stem != "smallest":
                record["cases"] |= dict(json.loads(row) for row in found.read_text().splitlines())
    for name in missing:
        record["cases"].setdefault(name, {"ok": False, "error": "not reached: run again to go on"})


class Goal(NamedTuple):
    """Bounds that a training step's forward and backward, or the loss, must reach; ``most`` in milliseconds."""

    name: str
    milliseconds: Callable[[], float | str]
    most: float


def goals() -> list[Goal]:
    """Return the goals: shares of the limit of benchmarks/traffic.py, a third of mamba-ssm's traffic, 53 ms a loss."""
    from ssd import ours_gated_milliseconds, ours_milliseconds
    from traffic import DEVICES, Shape, limit, mamba_ssm, milliseconds

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "H100"
    rates = next((rate for known, rate in DEVICES.items() if known in name), DEVICES["H100"])
    found = []
    for batch, length, d_state, share, gated in (
        (8, 2048, 4, None, False), (8, 2048, 16, 0.5, False), (8, 2048, 64, 0.7, False), (8, 2048, 64, 0.5, True),
        (8, 2048, 128, None, False), (1, 32768, 64, 0.6, False),
    ):  # fmt: skip
        shape = Shape(batch, length, 32, 64, d_state, 32)
        bound = milliseconds(shape, limit(shape), rates, backward=True)
        bound += 3e3 * shape.x() / rates.bandwidth if gated else 0.0  # z twice, its gradient once
        third = milliseconds(shape, mamba_ssm(shape), rates, backward=True) / 3
        most = third if share is None else min(bound / share, third)
        words = f"B={batch} L={length} N={d_state}{' gated' if gated else ''}"
        why = "a third of mamba-ssm's traffic" if most == third else f"{share:.0%} of the limit"
        run = ours_gated_milliseconds if gated else ours_milliseconds
        found.append(Goal(f"ssd {words}, {why}", lambda run=run, shape=shape: run(shape), most))
    return [*found, Goal("loss, 16,384 tokens, 128,256 words", loss_milliseconds, 53.0)]


def loss_milliseconds() -> float | str:
    from distillation_loss import FULL, draw, measure, ours

    found = measure(ours, "jsd", draw(FULL, DEVICE), 5)
    return found.get("milliseconds", found.get("failed", "no time"))


def time_goals(record: dict[str, Any], deadline: float) -> None:
    """Fill ``record["times"]`` until the deadline: milliseconds, or why there are none."""
    for goal in goals():
        if not isinstance(record["times"].get(goal.name), float):
            late = time.monotonic() > deadline
            record["times"][goal.name] = "not reached: run again to go on" if late else goal.milliseconds()


def conditions() -> dict[str, Any]:
    """Return the device and versions that the results belong to."""
    import triton
    from kernel_resources import digest, kernel_modules

    return {
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "interpreter",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "sources": {module.__name__: digest(module) for module in kernel_modules()},
    }


def report(record: dict[str, Any]) -> bool:
    """Print the tables; is everything right, and was everything reached? Goals that are missed are not mistakes."""
    results, steps, times = (record.get(name, {}) for name in ("cases", "steps", "times"))
    print("\n".join(line(name, result) for name, result in results.items()))
    print("\n".join(f"{'ok   ' if is_right(status) else 'WRONG'} {name}: {status}" for name, status in steps.items()))
    if times:
        print(f"\n{'':<64}{'ms':>9}{'goal':>9}")
        for goal in goals():
            found = times.get(goal.name, "not reached")
            cells = (
                f"{found:>9.3f}{goal.most:>9.3f}  {'met' if found <= goal.most else 'missed'}"
                if isinstance(found, float)
                else found
            )
            print(f"{goal.name:<64}{cells}")
    wrong = [name for name, result in results.items() if not result["ok"]]
    wrong += [name for name, status in steps.items() if not is_right(status)]
    wrong += [name for name, found in times.items() if isinstance(found, str)]
    print(f"{record.get('device', 'no device yet')}: {len(results)} cases, {len(wrong)} failures")
    return not wrong


def main() -> None:
    """See the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="name the cases")
    parser.add_argument("--report", action="store_true", help="print what is known")
    parser.add_argument("--only", default="", help="cases whose name contains this; no further steps")
    parser.add_argument("--again", action="store_true", help="forget what is known")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)  # run the cases that this file names
    options = parser.parse_args()
    start = time.monotonic()
    record = read(options.out)
    if options.list:
        print("\n".join(cases()))
        return
    if options.report:
        report(record)
        return
    if DEVICE == "cuda" and not torch.cuda.is_available():
        print("gpu_kernels: no CUDA device; nothing was checked.")
        raise SystemExit(2)
    if options.part:
        run_cases(json.loads(options.part.read_text()), options.part.with_suffix(".jsonl"))
        return

    current = conditions()
    if options.again or {name: record.get(name) for name in current} != current:
        record = {**current, "cases": {}, "steps": {}, "times": {}}
    record["date"] = datetime.date.today().isoformat()
    record["cases"] = {n: r for n, r in record["cases"].items() if "not reached" not in r.get("error", "")}
    run_checks(record, options.only, start + SECONDS["checks"])
    if not options.only:
        time_goals(record, start + SECONDS["all"] - 60)  # which the last one may take
    write(options.out, record)
    raise SystemExit(0 if report(record) else 1)


if __name__ == "__main__":
    main()
