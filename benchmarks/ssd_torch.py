"""How fast is the matmul form of the recurrence, against the loop, other chunk sizes and transformers' own?

    python benchmarks/ssd_torch.py            # writes benchmarks/results/ssd_torch.json

Every contender must agree with the reference before it is timed. Times are for forward + backward, the
fastest of many runs, contenders taking turns; on CPU one thread's own time, so that other processes disturb
little.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from provenance import about, write
from torch import Tensor

from hybrid_distill.model.ssd import CHUNK_SIZE, log_decay, ssd_scan

RESULTS = Path(__file__).parent / "results" / "ssd_torch.json"
CHUNK_SIZES = (16, 32, 64)
AGREEMENT = 1e-3  # relative to the largest output, fp32
MIN_SPEEDUP, MAX_OVER_BEST = 8.0, 1.3

Scan = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Shape(NamedTuple):
    """B batch, L length, H heads, P head dim, N state size."""

    B: int
    L: int
    H: int
    P: int
    N: int


SHAPES = (
    Shape(4, 512, 8, 32, 16),
    Shape(8, 256, 8, 16, 8),
    Shape(4, 512, 8, 64, 64),
    Shape(1, 2048, 32, 64, 16),
)


def draw(shape: Shape, device: str) -> list[Tensor]:
    """x, log a, B, C as leaves."""
    batch, length, heads, head_dim, state = shape
    generator = torch.Generator().manual_seed(0)
    sizes = ((heads, head_dim), (heads,), (heads, state), (heads, state))
    x, raw, b, c = (torch.randn(batch, length, *size, generator=generator).to(device) for size in sizes)
    return [t.requires_grad_() for t in (x, log_decay(raw), b, c)]


def ours(*args: Tensor, **kwargs: object) -> Tensor:
    """`ssd_scan`, outputs only."""
    return ssd_scan(*args, **kwargs)[0]  # type: ignore[arg-type]


def of_transformers(x: Tensor, log_a: Tensor, b: Tensor, c: Tensor, *, chunk_size: int) -> Tensor:
    """The same function by transformers' Mamba-2, which scales x by dt and decays by exp(-dt)."""
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    minus_one = -torch.ones(x.shape[2], device=x.device)
    return mamba2_chunk_scan(x / -log_a.unsqueeze(-1), -log_a, minus_one, b, c, chunk_size)


def contenders() -> dict[str, Scan]:
    """By name; transformers' only where this version has it as a function."""
    from transformers.models.mamba2 import modeling_mamba2

    found: dict[str, Scan] = {"reference": partial(ours, impl="reference")}
    found |= {f"chunk {size}": partial(ours, impl="torch", chunk_size=size) for size in CHUNK_SIZES}
    if not hasattr(modeling_mamba2, "mamba2_chunk_scan"):
        return found
    return found | {f"transformers, chunk {size}": partial(of_transformers, chunk_size=size) for size in CHUNK_SIZES}


def check(name: str, scan: Scan, args: list[Tensor], expected: Tensor) -> None:
    """Refuse to time what computes something else."""
    error = (scan(*args) - expected).abs().max() / expected.abs().max()
    if not error < AGREEMENT:
        raise SystemExit(f"{name} differs from the reference by {error:.1e} of its largest output; nothing is timed.")


def milliseconds(scan: Scan, args: list[Tensor]) -> float:
    """One forward + backward."""
    if args[0].is_cuda:
        torch.cuda.synchronize()
    now = time.perf_counter if args[0].is_cuda else time.thread_time
    start = now()
    torch.autograd.grad(scan(*args).square().sum(), args)
    if args[0].is_cuda:
        torch.cuda.synchronize()
    return 1e3 * (now() - start)


def measure(shape: Shape, repeats: int, device: str) -> dict[str, float]:
    """Fastest milliseconds of each contender."""
    args, scans = draw(shape, device), contenders()
    expected = scans["reference"](*args).detach()
    for name, scan in scans.items():
        check(name, scan, args, expected)
    fastest = dict.fromkeys(scans, float("inf"))
    for turn in range(repeats):
        for name, scan in scans.items():
            if name != "reference" or turn < 3:  # the loop is slow and steady
                fastest[name] = min(fastest[name], milliseconds(scan, args))
    return {name: round(value, 2) for name, value in fastest.items()}


def judge(times: dict[str, float]) -> dict[str, float]:
    """The two figures that are promised."""
    default = times[f"chunk {CHUNK_SIZE}"]
    best = min(times[f"chunk {size}"] for size in CHUNK_SIZES)
    return {
        "default_faster_than_reference": round(times["reference"] / default, 1),
        "default_over_best_chunk": round(default / best, 2),
    }


def main() -> None:
    """Measure, print, write the JSON; exit code 1 when a promise is not kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)

    rows = []
    for shape in SHAPES:
        times = measure(shape, options.repeats, options.device)
        rows.append({"shape": shape._asdict(), "milliseconds": times, **judge(times)})
        print(json.dumps(rows[-1]), flush=True)
    record = {
        **about("forward + backward, fp32, fastest run", options.device),
        "default_chunk_size": CHUNK_SIZE,
        "rows": rows,
    }
    write(options.out, record)
    if rows[0]["default_faster_than_reference"] < MIN_SPEEDUP or any(
        row["default_over_best_chunk"] > MAX_OVER_BEST for row in rows
    ):
        raise SystemExit(f"expected {MIN_SPEEDUP}x the loop on the first shape, {MAX_OVER_BEST}x the best chunk on all")


if __name__ == "__main__":
    main()
