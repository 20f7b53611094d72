"""How fast is the recurrence on a GPU, against mamba-ssm, flash-linear-attention, torch and the limit?

    python benchmarks/ssd.py            # adds to benchmarks/results/ssd.json; rows already measured are kept

bf16, one B and C per head, no gate and no skip, so that all compute the same function. Every contender must agree with
the recurrence in fp32 before it is timed. Times are medians with a cold cache, by `triton.testing.do_bench`. A
contender that is absent, refuses or fails is named with its reason. The limit is that of benchmarks/traffic.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from provenance import about, read, write
from torch import Tensor
from traffic import DEVICES, Shape, limit
from traffic import milliseconds as predicted_milliseconds

from hybrid_distill.model.ssd import log_decay, ssd_scan

RESULTS = Path(__file__).parent / "results" / "ssd.json"
AGREEMENT = 2e-2  # relative to the largest output, bf16
SHAPES = [
    Shape(B, L, H, 64, N, H)
    for B, L, H in ((8, 2048, 32), (8, 8192, 32), (8, 2048, 29), (1, 32768, 32))
    for N in (4, 8, 16, 64, 128)
]
PASSES = ("forward", "forward + backward")
PACKAGES = ("torch", "triton", "mamba-ssm", "flash-linear-attention", "fla-core")

Scan = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Contender(NamedTuple):
    """``load`` imports it; ``prepare`` turns x and the raw decay into what it takes, outside the timed region."""

    load: Callable[[], Scan]
    prepare: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = lambda x, raw: (x, raw)


def ours() -> Scan:
    from hybrid_kernels.ssd import ssd

    return lambda x, raw, b, c: ssd(x, raw, b, c)[0]


def expected_outputs(args: list[Tensor]) -> Tensor:
    """Run the recurrence in fp32."""
    with torch.no_grad():
        x, raw, b, c = args
        return ssd_scan(x.float(), log_decay(raw), b.float(), c.float(), impl="torch")[0].bfloat16()


def ours_milliseconds(s: Shape) -> float | str:
    """Return the time of our forward and backward at a shape, or why there is none."""
    args = draw(s, "cuda")
    return measure(CONTENDERS["ours"], args, expected_outputs(args))[PASSES[1]]


def ours_gated_milliseconds(s: Shape) -> float | str:
    """Return the same with a skip and a gate."""
    from hybrid_kernels.ssd import ssd
    from triton.testing import do_bench

    given = [*draw(s, "cuda"), torch.ones(s.H, device="cuda"), torch.randn_like(draw(s, "cuda")[0])]
    leaves = [t.requires_grad_() for t in given]
    upstream = torch.randn_like(leaves[0])

    def step() -> None:
        y, _ = ssd(*leaves[:4], D_H=leaves[4], z_BLHP=leaves[5])
        torch.autograd.grad(y, leaves, upstream)

    try:
        return do_bench(step, return_mode="median")
    except Exception as error:  # it belongs into the table
        return f"{type(error).__name__}: {error}"[:160]


def plain_torch() -> Scan:
    return lambda x, raw, b, c: ssd_scan(x, log_decay(raw), b, c, impl="torch")[0]


def mamba_ssm() -> Scan:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    return lambda x, dt, b, c: mamba_chunk_scan_combined(x, dt, -torch.ones(x.shape[2], device="cuda"), b, c, 128)


def as_mamba(x: Tensor, raw: Tensor) -> tuple[Tensor, Tensor]:
    """It scales x by dt and decays by exp(-dt)."""
    dt = -log_decay(raw)
    return (x / dt.unsqueeze(-1)).to(x.dtype), dt


def fla() -> Scan:
    from fla.ops.simple_gla import chunk_simple_gla

    return lambda x, log_a, b, c: chunk_simple_gla(q=c, k=b, v=x, g=log_a, scale=1.0)[0]


CONTENDERS = {
    "ours": Contender(ours),
    "mamba-ssm": Contender(mamba_ssm, as_mamba),
    "fla": Contender(fla, lambda x, raw: (x, log_decay(raw))),
    "torch": Contender(plain_torch),
}


def draw(s: Shape, device: str) -> list[Tensor]:
    """x, raw decays, B and C."""
    generator = torch.Generator(device).manual_seed(0)
    sizes = ((s.H, s.P), (s.H,), (s.H, s.N), (s.H, s.N))
    x, raw, b, c = (torch.randn(s.B, s.L, *size, generator=generator, device=device) for size in sizes)
    return [x.bfloat16(), raw, b.bfloat16(), c.bfloat16()]


def measure(contender: Contender, args: list[Tensor], expected: Tensor) -> dict[str, float | str]:
    """Milliseconds of either pass, or why there are none."""
    from triton.testing import do_bench

    found: dict[str, float | str] = {}
    try:
        scan = contender.load()
        args = [t.detach().requires_grad_() for t in (*contender.prepare(*args[:2]), *args[2:])]
        with torch.no_grad():
            error = ((scan(*args) - expected).abs().max() / expected.abs().max()).item()
            if not error < AGREEMENT:
                return dict.fromkeys(PASSES, f"differs by {error:.1e} of the largest output; not timed")
            found[PASSES[0]] = do_bench(lambda: scan(*args), return_mode="median")
        upstream = torch.randn_like(expected)
        found[PASSES[1]] = do_bench(lambda: torch.autograd.grad(scan(*args), args, upstream), return_mode="median")
    except Exception as error:  # of somebody else's package, or out of memory: it belongs into the table
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        found |= {name: reason[:160] for name in PASSES if name not in found}
    torch.cuda.empty_cache()
    return found


def measure_row(s: Shape) -> dict[str, Any]:
    """All contenders at one shape."""
    args = draw(s, "cuda")
    expected = expected_outputs(args)
    return {name: measure(contender, args, expected) for name, contender in CONTENDERS.items()}


def cell(found: dict[str, Any], name: str) -> str:
    value = found.get(name, "")
    return f"{value:.3f}" if isinstance(value, float) else "-"


def table(record: dict[str, Any]) -> str:
    """Milliseconds of every row measured so far, and the fraction of the limit that ours reaches."""
    rates = DEVICES["H200" if "H200" in record.get("device", "") else "H100"]
    lines = []
    for index, name in enumerate(PASSES):
        lines.append(f"{name}, ms on {record.get('device', 'no device yet')}")
        lines.append(
            f"{'B':>3}{'L':>7}{'H':>4}{'N':>5}" + "".join(f"{c:>12}" for c in (*CONTENDERS, "limit", "of limit"))
        )
        for s in SHAPES:
            found = record.get("rows", {}).get(str(tuple(s)))
            if found is None:
                continue
            bound = predicted_milliseconds(s, limit(s), rates, backward=index == 1)
            own = found["ours"].get(name)
            share = f"{bound / own:.0%}" if isinstance(own, float) else "-"
            cells = [cell(found[c], name) for c in CONTENDERS] + [f"{bound:.3f}", share]
            lines.append(f"{s.B:>3}{s.L:>7}{s.H:>4}{s.N:>5}" + "".join(f"{text:>12}" for text in cells))
    for shape, found in record.get("rows", {}).items():
        for contender, times in found.items():
            lines += [f"{shape} {contender}, {p}: {why}" for p, why in times.items() if isinstance(why, str)]
    return "\n".join(lines)


def main() -> None:
    """Measure what is missing, print the table; exit status 2 where there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--report", action="store_true", help="only print what was measured")
    parser.add_argument("--again", action="store_true", help="measure every row anew")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    record = read(options.out)
    if options.report:
        print(table(record))
        return
    if not torch.cuda.is_available():
        print("benchmarks/ssd.py: no CUDA device; nothing was measured.")
        raise SystemExit(2)
    head = about("milliseconds, bf16, median, cold cache", "cuda", PACKAGES)
    if options.again or any(record.get(name) != head[name] for name in ("device", "versions")):
        record = {"rows": {}}
    record |= head
    for s in SHAPES:
        if str(tuple(s)) not in record["rows"]:
            record["rows"][str(tuple(s))] = measure_row(s)
            write(options.out, record)
    print(table(record))


if __name__ == "__main__":
    main()
