"""Search the recurrence's tiles by modeled time: chunk, warps, stages, and the kernels the backward is cut into.

    python benchmarks/tile_search.py                      # what is missing; writes benchmarks/results/tile_search.json
    python benchmarks/tile_search.py --capability 90 --state 64 --head-dim 64
    python benchmarks/tile_search.py --table              # compile nothing: the entries for ssd_tiles.py

Each candidate is compiled with all options on (skip, first state, packed rows) and timed by `kernel_time` at 8 rows of
2,048 tokens and 32 heads, forward and backward; the winner with no option on as well. A later run compiles only what
the file does not have for these sources.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from pathlib import Path
from typing import Any, NamedTuple

import kernel_time
import torch
import triton
from hybrid_kernels import ssd_triton
from hybrid_kernels.ssd_tiles import BACKWARD_KERNELS, LARGEST_FP32_BLOCK, Launch
from kernel_resources import code_of, digest
from kernel_time import GPUS, bytes_of_chunk, milliseconds, programs_per_processor
from records import RESULTS, parser_of, read, write

RECORD = RESULTS / "tile_search.json"
PROGRAMS = 8 * 32
LENGTH = 2048
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SMALL_STATE = 4096
"""Elements of a state that 4 warps hold, and one backward kernel."""


class Winner(NamedTuple):
    """The fastest tile of a shape."""

    chunk: int
    forward: Launch
    backward: Launch
    n_backward: int

    @property
    def backward_kinds(self) -> list[str]:
        return [f"backward {gradients}" for gradients in BACKWARD_KERNELS[self.n_backward]]


class Search:
    """The candidates of one shape; what was timed goes to ``rows``."""

    def __init__(
        self, rows: dict[str, Any], dtype: str, capability: int, n: int, p: int, *, compiles: bool
    ) -> None:
        self.rows = rows
        self.dtype = dtype
        self.capability = capability
        self.n = n
        self.p = p
        self.compiles = compiles

    def chunks(self) -> tuple[int, int]:
        """Return the lengths worth compiling: larger states need shorter chunks."""
        if self.state_size() <= SMALL_STATE:
            return 32, 64
        return 16, 32

    def state_size(self) -> int:
        """Return the elements of a state, those in fp32 counted four times: they need three products, not one."""
        if self.dtype == "bf16":
            return self.n * self.p
        return 4 * self.n * self.p

    def launches(self) -> list[Launch]:
        """Return the warps and stages worth compiling: larger states need more warps."""
        size = self.state_size()
        warps = (4,) if size <= SMALL_STATE else (4, 8)
        if size > 2 * SMALL_STATE:
            warps = (8,)
        stages = (2, 3) if self.dtype == "bf16" else (1, 2)
        return [Launch(*pair) for pair in itertools.product(warps, stages)]

    def ways(self) -> list[int]:
        """Return into how many kernels the backward may be cut."""
        return [1] if self.n * self.p <= SMALL_STATE else [1, 2]

    def row(self, kind: str, chunk: int, launch: Launch, *, full: bool = True) -> dict[str, Any]:
        """Return the measurements of one kernel, empty if it does not compile or fit."""
        name = f"{self.dtype} sm_{self.capability} {self.n} {self.p} {kind} {chunk} "
        name += f"{launch.num_warps} {launch.num_stages}"
        if not full:
            name += " plain"
        if name not in self.rows and self.compiles:
            try:
                self.rows[name] = self.timed(kind, chunk, launch, full)
            except Exception as error:  # a candidate that the compiler refuses is not one
                self.rows[name] = {}
                print(f"{name}: {type(error).__name__}: {str(error)[:100]}", flush=True)
        return self.rows.get(name) or {}

    def timed(self, kind: str, chunk: int, launch: Launch, full: bool) -> dict[str, Any]:
        gpu = GPUS[self.capability]
        dtype = DTYPES[self.dtype]
        compilation = ssd_triton.compilation(
            kind, self.n, self.p, chunk, launch, dtype=dtype, full=full
        )
        code = code_of(compilation, self.capability)
        row: dict[str, Any] = {
            "resident": programs_per_processor(code, launch.num_warps, gpu),
            "registers": code.registers,
            "shared_bytes": code.shared_bytes,
            "spills": code.spills,
            "barriers": code.count("BAR"),
            "instructions": len(code.loop),
        }
        if row["resident"]:
            moved = bytes_of_chunk(kind, self.n, self.p, chunk, dtype.itemsize, full=full)
            time = milliseconds(
                code, gpu, launch.num_warps, PROGRAMS, math.ceil(LENGTH / chunk), moved
            )
            row["ms"] = round(time, 4)
        return row

    def best(self) -> Winner | None:
        """Return the fastest tile, or None if nothing runs."""
        tiles = [self.best_of_chunk(chunk) for chunk in self.chunks()]
        time, winner = min(tiles)
        return None if math.isinf(time) else winner

    def best_of_chunk(self, chunk: int) -> tuple[float, Winner]:
        """Return the milliseconds of the fastest tile of a chunk's length, and the tile."""
        forwards = []
        backwards = []
        for launch in self.launches():
            forwards.append((self.total(["forward"], chunk, launch), launch))
            for way in self.ways():
                kinds = [f"backward {gradients}" for gradients in BACKWARD_KERNELS[way]]
                backwards.append((self.total(kinds, chunk, launch), launch, way))
        forward_time, forward = min(forwards)
        backward_time, backward, way = min(backwards)
        return forward_time + backward_time, Winner(chunk, forward, backward, way)

    def total(self, kinds: list[str], chunk: int, launch: Launch, *, full: bool = True) -> float:
        """Return the milliseconds of some kernels, infinity if one does not run."""
        return sum(self.row(kind, chunk, launch, full=full).get("ms", math.inf) for kind in kinds)

    def entry(self, tile: Winner) -> str:
        """Return a line of the tile table; behind it forward and backward, with no option and with all."""
        forward = self.row("forward", tile.chunk, tile.forward)
        backward = [self.row(kind, tile.chunk, tile.backward) for kind in tile.backward_kinds]
        launches = [
            tile.forward._replace(resident=forward["resident"]),
            tile.backward._replace(resident=min(row["resident"] for row in backward)),
        ]
        words = ", ".join(f"Launch{tuple(launch)}" for launch in launches)
        spills = max(row["spills"] for row in [forward, *backward])
        times = []
        for full in (False, True):
            ahead = self.total(["forward"], tile.chunk, tile.forward, full=full)
            back = self.total(tile.backward_kinds, tile.chunk, tile.backward, full=full)
            times.append(f"{ahead:.3f} + {back:.3f}")
        shape = (self.capability, self.n, self.p)
        return f"    {shape}: Tile({tile.chunk}, {words}, {tile.n_backward}, {spills}),  # {', '.join(times)}"


def main() -> None:
    """Compile and time what is missing, write the JSON, print the best tiles."""
    parser = parser_of(__doc__, RECORD)
    parser.add_argument("--capability", type=int, nargs="+", default=[90, 80])
    parser.add_argument("--state", type=int, nargs="+", default=[16, 64, 128, 32])
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128, 32, 16])
    parser.add_argument("--dtype", nargs="+", default=["bf16", "fp32"], choices=DTYPES)
    parser.add_argument("--table", action="store_true", help="compile nothing")
    options = parser.parse_args()

    record = read(options.out)
    model = hashlib.sha256(Path(kernel_time.__file__).read_bytes()).hexdigest()[:16]
    sources = f"triton {triton.__version__}, kernels {digest(ssd_triton)}, model {model}"
    rows: dict[str, Any] = {}
    if record.get("sources") == sources:
        rows = record["rows"]
    shapes = itertools.product(options.dtype, options.capability, options.head_dim, options.state)
    for dtype, capability, p, n in shapes:
        if dtype == "fp32" and max(n, p) > LARGEST_FP32_BLOCK:
            continue
        search = Search(rows, dtype, capability, n, p, compiles=not options.table)
        if tile := search.best():
            print(dtype, search.entry(tile), flush=True)
        if not options.table:
            write(options.out, {"sources": sources, "rows": rows}, indent=0, sort_keys=True)


if __name__ == "__main__":
    main()
