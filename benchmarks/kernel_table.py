"""Model the recurrence's forward and backward at whole shapes, beside the limit and the peers of traffic.py.

    python benchmarks/kernel_table.py                               # prints docs/performance.md's table
    PYTHONPATH=FOLDER_OF_TRITON python benchmarks/kernel_table.py   # adds another triton

Every kernel of a call counts: the main ones by `kernel_time`, compiled as the tile table says, the small ones (decays,
gate, states of segments carried over) by their bytes, each at least SMALLEST milliseconds. The gate is the only option.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
import triton
from hybrid_kernels import ssd_triton
from hybrid_kernels.ssd_tiles import BACKWARD_KERNELS, Launch, segments, tile_for
from kernel_resources import code_of
from kernel_time import GPUS, Code, Gpu, bytes_of_chunk, milliseconds
from provenance import read, write
from traffic import Shape, limit, mamba_ssm

RESULTS = Path(__file__).parent / "results" / "kernel_table.json"
NAMES = {90: "H100", 80: "A100"}
SHAPES = tuple(Shape(B, L, 32, 64, N, 32) for B, L in ((8, 2048), (1, 2048), (1, 32768)) for N in (4, 16, 64, 128))
SHAPES += tuple(Shape(8, 2048, 32, 128, N, 32) for N in (16, 64, 128))
SMALLEST = 0.003  # of a kernel that does next to nothing, with its launch


@cache
def compiled(capability: int, kind: str, n: int, p: int, chunk: int, launch: Launch) -> Code:
    """Compile and decode one kernel without options, but with x, B and C in one row, as a student has them."""
    plain = ssd_triton.compilation(kind, n, p, chunk, launch, full=False)
    in_row = {"IN_ROW": True} if kind.startswith("backward") else {}
    return code_of(plain._replace(arguments={**plain.arguments, **in_row}), capability)


def moving(gpu: Gpu, n_bytes: float) -> float:
    """Return the milliseconds of a kernel that only moves bytes."""
    return max(SMALLEST, n_bytes / gpu.bandwidth / 1e9)


def passes(s: Shape, capability: int) -> dict[str, float]:
    """Return the milliseconds of every kernel of a call."""
    gpu, tile, times = GPUS[capability], tile_for(capability, torch.bfloat16, s.N, s.P), {}
    n_chunks, heads = math.ceil(s.L / tile.chunk), s.B * s.H
    backward = tuple(f"backward {gradients}" for gradients in BACKWARD_KERNELS[tile.n_backward])
    for direction, launch, kinds in (("forward", tile.forward, ("forward",)), ("backward", tile.backward, backward)):
        wanted = segments(heads, n_chunks, launch.resident * gpu.processors)
        chunks = math.ceil(n_chunks / wanted)
        programs = heads * math.ceil(n_chunks / chunks)
        runs = dict.fromkeys(kinds, launch)
        if wanted > 1:
            runs |= {"segments": tile.forward}
            times[f"{direction}: carry"] = moving(gpu, 2 * programs * s.N * s.P * 4)
        for kind, of_kind in runs.items():
            code = compiled(capability, kind, s.N, s.P, tile.chunk, of_kind)
            moved = bytes_of_chunk(kind, s.N, s.P, tile.chunk, 2, full=False)
            times[f"{direction}: {kind}"] = milliseconds(code, gpu, of_kind.num_warps, programs, chunks, moved)
        times[f"{direction}: decays"] = moving(gpu, 4 * s.decay())
    times["backward: decay gradients"] = moving(gpu, 4 * s.decay())
    return times


def row(s: Shape, capability: int) -> dict[str, object]:
    """Compare one shape with its limit; the gate reads and writes x-sized tensors, in the limit once each."""
    gpu, times = GPUS[capability], passes(s, capability)
    plain, least = sum(times.values()), limit(s).bytes_(backward=True) / gpu.bandwidth / 1e9
    gate = moving(gpu, 3 * s.x()) + moving(gpu, 5 * s.x())
    gated_least = least + 3 * s.x() / gpu.bandwidth / 1e9
    return {
        "device": NAMES[capability],
        **s._asdict(),
        "limit": least,
        "plain": plain,
        "of the limit": least / plain,
        "gated": plain + gate,
        "of the gated limit": gated_least / (plain + gate),
        "mamba-ssm": mamba_ssm(s).bytes_(backward=True) / gpu.bandwidth / 1e9,
        "kernels": times,
    }


def table(record: dict[str, list[dict]]) -> Iterator[str]:
    """Format the rows of all versions of triton side by side; mamba-ssm's traffic beside the last one's time."""
    versions = sorted(key for key in record if key.startswith("triton"))
    columns = [f"{version}{gate}" for version in versions for gate in ("", ", gated")]
    yield f"| {' | '.join(['GPU', 'rows x length', '$P$', '$N$', 'limit', *columns, 'mamba-ssm'])} |"
    yield "|---" * (len(columns) + 6) + "|"
    for rows in zip(*(record[version] for version in versions), strict=True):
        r = rows[-1]
        cells = [r["device"], f"{r['B']} × {r['L']:,}", r["P"], r["N"], f"{r['limit']:.3f}"]
        for of in rows:
            cells.append(f"{of['plain']:.3f} ({of['of the limit']:.0%})")
            cells.append(f"{of['gated']:.3f} ({of['of the gated limit']:.0%})")
        cells.append(f"{r['mamba-ssm']:.2f} ({r['mamba-ssm'] / r['plain']:.1f} ×)")
        yield f"| {' | '.join(map(str, cells))} |".replace("%", " %")


def main() -> None:
    """Add this triton's rows to the JSON and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    found = [row(shape, capability) for capability in NAMES for shape in SHAPES]
    record = read(options.out) | {"what": "a model, no measurement", f"triton {triton.__version__}": found}
    write(options.out, record)
    print(*table(record), sep="\n")


if __name__ == "__main__":
    main()
