"""Model the recurrence's forward and backward at whole shapes, beside the limit and the peers of traffic.py.

    python benchmarks/kernel_table.py                               # prints all rows; docs/performance.md has eight
    PYTHONPATH=FOLDER_OF_TRITON python benchmarks/kernel_table.py   # adds another triton

Every kernel of a call counts: the main ones by `kernel_time`, compiled as the tile table says, the small ones (decays,
gate, states of segments carried over) by their bytes, each at least SMALLEST milliseconds. The gate is the only option.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache

import torch
import triton
from hybrid_kernels import ssd_triton
from hybrid_kernels.ssd_tiles import BACKWARD_KERNELS, Launch, segments, tile_for
from kernel_resources import code_of
from kernel_time import GPUS, Code, Gpu, bytes_of_chunk, milliseconds
from records import RESULTS, parser_of, read, write
from traffic import Shape, limit, mamba_ssm

RECORD = RESULTS / "kernel_table.json"
NAMES = {90: "H100", 80: "A100"}
SMALLEST = 0.003  # of a kernel that does next to nothing, with its launch


def shapes() -> list[Shape]:
    """Return the rows of the table: heads of 64 channels, then of 128."""
    listed = []
    for B, L in ((8, 2048), (1, 2048), (1, 32768)):
        listed += [Shape(B, L, 32, 64, N, 32) for N in (4, 16, 64, 128)]
    listed += [Shape(8, 2048, 32, 128, N, 32) for N in (16, 64, 128)]
    return listed


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
    gpu = GPUS[capability]
    tile = tile_for(capability, torch.bfloat16, s.N, s.P)
    backward = [f"backward {gradients}" for gradients in BACKWARD_KERNELS[tile.n_backward]]
    n_chunks = math.ceil(s.L / tile.chunk)
    heads = s.B * s.H
    times = {}
    for direction, launch, kinds in (
        ("forward", tile.forward, ["forward"]),
        ("backward", tile.backward, backward),
    ):
        n_segments = segments(heads, n_chunks, launch.resident * gpu.processors)
        chunks = math.ceil(n_chunks / n_segments)
        programs = heads * math.ceil(n_chunks / chunks)
        launches = dict.fromkeys(kinds, launch)
        if n_segments > 1:
            launches["segments"] = tile.forward
            times[f"{direction}: carry"] = moving(gpu, 2 * programs * s.N * s.P * 4)
        for kind, launch_of_kind in launches.items():
            code = compiled(capability, kind, s.N, s.P, tile.chunk, launch_of_kind)
            moved = bytes_of_chunk(kind, s.N, s.P, tile.chunk, 2, full=False)
            time = milliseconds(code, gpu, launch_of_kind.num_warps, programs, chunks, moved)
            times[f"{direction}: {kind}"] = time
        times[f"{direction}: decays"] = moving(gpu, 4 * s.decay())
    times["backward: decay gradients"] = moving(gpu, 4 * s.decay())
    return times


def row(s: Shape, capability: int) -> dict[str, object]:
    """Compare one shape with its limit; the gate reads and writes x-sized tensors, in the limit once each."""
    gpu = GPUS[capability]

    def at_the_bus(n_bytes: float) -> float:
        return n_bytes / gpu.bandwidth / 1e9

    times = passes(s, capability)
    plain = sum(times.values())
    least = at_the_bus(limit(s).bytes_(backward=True))
    gate_forward = moving(gpu, 3 * s.x())
    gate_backward = moving(gpu, 5 * s.x())
    gated = plain + gate_forward + gate_backward
    gated_least = least + at_the_bus(3 * s.x())
    return {
        "device": NAMES[capability],
        **s._asdict(),
        "limit": least,
        "plain": plain,
        "of the limit": least / plain,
        "gated": gated,
        "of the gated limit": gated_least / gated,
        "mamba-ssm": at_the_bus(mamba_ssm(s).bytes_(backward=True)),
        "kernels": times,
    }


def table(record: dict[str, list[dict]]) -> Iterator[str]:
    """Format the rows of all versions of triton side by side; mamba-ssm's traffic beside the last one's time."""
    versions = sorted(key for key in record if key.startswith("triton"))
    heads = ["GPU", "rows x length", "$P$", "$N$", "limit"]
    for version in versions:
        heads += [version, f"{version}, gated"]
    heads.append("mamba-ssm")
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for by_version in zip(*(record[version] for version in versions), strict=True):
        last = by_version[-1]
        shape = f"{last['B']} × {last['L']:,}"
        cells = [last["device"], shape, last["P"], last["N"], f"{last['limit']:.3f}"]
        for times in by_version:
            cells.append(f"{times['plain']:.3f} ({times['of the limit']:.0%})")
            cells.append(f"{times['gated']:.3f} ({times['of the gated limit']:.0%})")
        slower = last["mamba-ssm"] / last["plain"]
        cells.append(f"{last['mamba-ssm']:.2f} ({slower:.1f} ×)")
        row_text = " | ".join(map(str, cells)).replace("%", " %")
        yield f"| {row_text} |"


def main() -> None:
    """Add this triton's rows to the JSON and print the table."""
    parser = parser_of(__doc__, RECORD)
    parser.add_argument("--shapes", type=int, help="only the first few; by default all")
    options = parser.parse_args()
    rows = []
    for capability in NAMES:
        rows += [row(shape, capability) for shape in shapes()[: options.shapes]]
    record = read(options.out) | {
        "what": "a model, no measurement",
        f"triton {triton.__version__}": rows,
    }
    write(options.out, record)
    print(*table(record), sep="\n")


if __name__ == "__main__":
    main()
