"""Everything that needs a GPU, in one command: are the kernels right on this device, and how fast are they?

    python benchmarks/gpu_check.py            # `make gpu-check`; a second call goes on where the first stopped
    python benchmarks/gpu_check.py --list     # the cases; needs triton, but no GPU
    python benchmarks/gpu_check.py --report   # the table from what is there; needs neither

1. Every configuration of the recurrence's tile table against the recurrence in fp64, outputs, final state and every
   gradient; the same bits twice; offsets beyond 2^31 elements. One result per case goes to
   benchmarks/results/gpu_check.json, which belongs to one device, one version of triton and one state of the sources.
2. The smallest cases under compute-sanitizer, where it is installed.
3. The kernels' own tests (tests/kernels) on the device instead of the interpreter: convolution, decoding step, loss,
   and the whole student.
4. The benchmarks. They run only if nothing before them failed.

Exit status 0 if all is right, 1 if something is wrong, 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid_distill.model.ssd import log_decay, ssd_scan

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "gpu_check.json"
BENCHMARKS = ("ssd.py", "distillation_loss.py", "decode.py", "train_step.py")  # those that are there
TESTED_ON_THE_DEVICE = ("conv_kernel", "step_kernel", "loss_kernel", "model_on_kernels")
# dtype of the inputs -> largest error, relative to the largest element of the expected tensor
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
BATCH, LENGTH, HEADS = 2, 200, 3
HUGE = 1 << 31


class Case(NamedTuple):
    """One call of `ssd`. ``full`` has gate, skip, initial state and packed documents, else it has none of them."""

    dtype: torch.dtype
    d_state: int
    head_dim: int
    full: bool = True
    n_segments: int = 1
    softplus: bool = True

    @property
    def name(self) -> str:
        words = ["ssd", str(self.dtype).removeprefix("torch."), f"N={self.d_state}", f"P={self.head_dim}"]
        words += ["full" if self.full else "plain"]
        words += [f"{self.n_segments} segments"] if self.n_segments > 1 else []
        words += [] if self.softplus else ["log decays"]
        return " ".join(words)


def ssd_cases() -> list[Case]:
    """Every entry of the tile table, masked sizes, and each option at least once."""
    from hybrid_kernels.ssd_tiles import TILES

    found = list(
        dict.fromkeys(Case(dtype, n, p) for dtype, _, n, p in TILES)
    )  # the device's architecture picks among them
    for dtype in (torch.bfloat16, torch.float32):
        found += [Case(dtype, n, 64) for n in (4, 8, 12)]
        found += [Case(dtype, 16, p) for p in (20, 48, 80, 96)]
        found += [Case(dtype, n, 64, full=False) for n in (4, 16, 64, 128)]
        found += [Case(dtype, n, 64, n_segments=3) for n in (4, 16, 64, 128)]
        found += [Case(dtype, 16, 64, softplus=False)]
    return found


def leaves(case: Case) -> dict[str, Tensor | None]:
    """fp64 tensors that hold what the case's dtype can represent."""
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device="cuda").to(case.dtype).double()

    tokens = (BATCH, LENGTH, HEADS)
    raw = 2 * draw(*tokens)
    found: dict[str, Tensor | None] = {
        "x": draw(*tokens, case.head_dim),
        "a": raw if case.softplus else log_decay(raw).float().double(),
        "b": draw(*tokens, case.d_state),
        "c": draw(*tokens, case.d_state),
        "D": draw(HEADS) if case.full else None,
        "z": draw(*tokens, case.head_dim) if case.full else None,
        "state": draw(BATCH, HEADS, case.head_dim, case.d_state) if case.full else None,
    }
    return found


def outputs_and_gradients(
    run: Callable[[dict[str, Any]], tuple[Tensor, Tensor]], given: dict[str, Tensor | None], dtype: torch.dtype
) -> dict[str, Tensor]:
    """y, the final state, and the gradient of each leaf for fixed upstream gradients."""
    known = {name: tensor.detach().requires_grad_() for name, tensor in given.items() if tensor is not None}
    y, final = run({name: known.get(name) for name in given})
    generator = torch.Generator("cuda").manual_seed(1)
    to_y, to_final = (torch.randn(t.shape, generator=generator, device="cuda") for t in (y, final))
    loss = (y * to_y.to(dtype).to(y.dtype)).sum() + (final * to_final.to(final.dtype)).sum()
    gradients = torch.autograd.grad(loss, list(known.values()))
    return {"y": y.detach(), "final": final.detach()} | {f"d{n}": g for n, g in zip(known, gradients)}


def check_ssd(case: Case) -> dict[str, Any]:
    """The errors of every output and gradient, relative to the largest expected element."""
    from hybrid_kernels.ssd import ssd

    seq_idx = None
    if case.full:
        starts = torch.rand(BATCH, LENGTH, generator=torch.Generator().manual_seed(2)) < 0.03
        seq_idx = starts.long().cumsum(-1).cuda()

    def reference(t: dict[str, Any]) -> tuple[Tensor, Tensor]:
        log_a = log_decay(t["a"]) if case.softplus else t["a"]
        y, final = ssd_scan(t["x"], log_a, t["b"], t["c"], state_BHPN=t["state"], seq_idx_BL=seq_idx, impl="reference")
        return ((y + t["D"].unsqueeze(-1) * t["x"]) * F.silu(t["z"]) if case.full else y), final

    def kernels(t: dict[str, Any]) -> tuple[Tensor, Tensor]:
        return ssd(
            t["x"], t["a"], t["b"], t["c"], D_H=t["D"], z_BLHP=t["z"], state_BHPN=t["state"], seq_idx_BL=seq_idx,
            softplus=case.softplus, n_segments=case.n_segments,
        )  # fmt: skip

    exact = leaves(case)
    kept_in_fp32 = {"a"}
    narrow = {
        name: None if t is None else t.to(torch.float32 if name in kept_in_fp32 else case.dtype)
        for name, t in exact.items()
    }
    expected = outputs_and_gradients(reference, exact, case.dtype)
    actual = outputs_and_gradients(kernels, narrow, case.dtype)
    again = outputs_and_gradients(kernels, narrow, case.dtype)
    errors = {}
    for name, wanted in expected.items():
        difference = (actual[name].double() - wanted).abs().max() / wanted.abs().max().clamp_min(1e-12)
        errors[name] = difference.nan_to_num(float("inf")).item()
    same_bits = all(torch.equal(actual[name], again[name]) for name in actual)
    return {"ok": same_bits and max(errors.values()) < TOLERANCE[case.dtype], "same_bits": same_bits, "errors": errors}


def check_huge_offsets() -> dict[str, Any]:
    """The end of a row of more than 2^31 elements is what it is when that end is run alone, from the state before."""
    from hybrid_kernels.ssd import ssd_forward

    heads, head_dim, tail = 32, 64, 256
    length = HUGE // (heads * head_dim) + 2 * tail
    sizes = ((heads, head_dim), (heads,), (heads, 4), (heads, 4))
    args = [torch.randn(1, length, *size, device="cuda", dtype=torch.bfloat16) for size in sizes]
    y, final, _ = ssd_forward(*args, save_chunk_states=False)
    _, before, _ = ssd_forward(*(t[:, :-tail] for t in args), save_chunk_states=False)
    y_tail, final_tail, _ = ssd_forward(*(t[:, -tail:] for t in args), state_BHPN=before, save_chunk_states=False)
    error = ((y[:, -tail:] - y_tail).abs().max() / y_tail.abs().max()).item()
    error = max(error, ((final - final_tail).abs().max() / final_tail.abs().max()).item())
    return {"ok": error < TOLERANCE[torch.bfloat16], "errors": {"y, final": error}}


def cases() -> dict[str, Callable[[], dict[str, Any]]]:
    """All checks by name, in the order they run."""
    found: dict[str, Callable[[], dict[str, Any]]] = {}
    for case in ssd_cases():
        found[case.name] = lambda case=case: check_ssd(case)
    return found | {"ssd offsets beyond 2^31": check_huge_offsets}


def run_cases(record: dict[str, Any], only: str, save: Callable[[], None]) -> None:
    """Those without a result; an exception is one."""
    for name, check in cases().items():
        if only in name and name not in record["cases"]:
            start = time.perf_counter()
            try:
                result = check()
            except Exception as error:  # a kernel that does not compile is a finding, the others go on
                result = {"ok": False, "error": f"{type(error).__name__}: {error}"[:500]}
            record["cases"][name] = result | {"seconds": round(time.perf_counter() - start, 1)}
            print(line(name, record["cases"][name]), flush=True)
            save()
            if "CUDA error" in result.get("error", ""):
                raise SystemExit("the device is in an error state: run again to go on after this case.")


def line(name: str, result: dict[str, Any]) -> str:
    verdict = "ok   " if result["ok"] else "WRONG"
    detail = result.get("error", " ".join(f"{n} {e:.0e}" for n, e in result.get("errors", {}).items()))
    bits = "" if result.get("same_bits", True) else " not the same bits twice"
    return f"{verdict} {name:<45} {detail}{bits}"


def run_command(record: dict[str, Any], name: str, command: list[str]) -> None:
    """A further step, by its exit status."""
    if record["steps"].get(name) != 0:
        print(f"$ {' '.join(command)}", flush=True)
        environment = {**os.environ, "TRITON_INTERPRET": "0"}
        record["steps"][name] = subprocess.run(command, cwd=HERE.parent, env=environment).returncode


def conditions() -> dict[str, Any]:
    """Return the device and versions that the results belong to."""
    import triton
    from kernel_resources import digest, kernel_modules

    return {
        "device": torch.cuda.get_device_name(),
        "capability": list(torch.cuda.get_device_capability()),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "sources": {module.__name__: digest(module) for module in kernel_modules()},
    }


def report(record: dict[str, Any]) -> bool:
    """Print the table; is everything right so far?"""
    results = record.get("cases", {})
    print("\n".join(line(name, result) for name, result in results.items()))
    for name, status in record.get("steps", {}).items():
        print(f"{'ok   ' if status == 0 else 'WRONG'} {name}")
    wrong = [name for name, result in results.items() if not result["ok"]]
    wrong += [name for name, status in record.get("steps", {}).items() if status]
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
    options = parser.parse_args()
    record = json.loads(options.out.read_text()) if options.out.exists() else {}
    if options.list:
        print("\n".join(cases()))
        return
    if options.report:
        report(record)
        return
    if not torch.cuda.is_available():
        print("gpu-check: no CUDA device; nothing was checked.")
        raise SystemExit(2)

    current = conditions()
    if options.again or {name: record.get(name) for name in current} != current:
        record = current | {"cases": {}, "steps": {}}
    record["date"] = datetime.date.today().isoformat()

    def save() -> None:
        options.out.write_text(json.dumps(record, indent=1) + "\n")

    run_cases(record, options.only, save)
    if not options.only:
        if sanitizer := shutil.which("compute-sanitizer"):
            with tempfile.TemporaryDirectory() as folder:
                alone = [sys.executable, __file__, "--only", "N=16 P=16 ", "--out", f"{folder}/results.json"]
                run_command(record, "memory checker", [sanitizer, "--error-exitcode", "1", *alone])
        tests = [f"tests/kernels/test_{name}.py" for name in TESTED_ON_THE_DEVICE]
        pytest = [sys.executable, "-m", "pytest", "-q", "-k", "not bad_input", *tests]
        run_command(record, "tests of the other kernels", pytest)
        save()
    right = report(record)
    if right and not options.only:
        for script in BENCHMARKS:
            if (HERE / script).exists():
                record["steps"].pop(script, None)  # it keeps its own results, and prints its table last
                run_command(record, script, [sys.executable, str(HERE / script)])
                save()
        right = not any(record["steps"].values())
    raise SystemExit(0 if right else 1)


if __name__ == "__main__":
    main()
