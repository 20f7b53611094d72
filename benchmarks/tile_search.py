"""Search the recurrence's tiles by modeled time: chunk, warps, stages, and the kernels the backward is cut into.

    python benchmarks/tile_search.py                      # what is missing; writes benchmarks/results/tile_search.json
    python benchmarks/tile_search.py --capability 90 --state 64 --head-dim 64
    python benchmarks/tile_search.py --table              # compile nothing: the entries for ssd_tiles.py

Each candidate is compiled with all options on (skip, first state, packed rows) and timed by `kernel_time` at 8 rows of
2,048 tokens and 32 heads, forward and backward; the winner with no option on as well. A later run compiles only what
the file does not have for these sources.
"""

from __future__ import annotations

import argparse
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
from provenance import read, write

RESULTS = Path(__file__).parent / "results" / "tile_search.json"
PROGRAMS, LENGTH = 8 * 32, 2048
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def candidates(d_state: int, head_dim: int, dtype: str) -> list[tuple[int, int, int]]:
    """Chunks, warps and stages worth compiling: larger states need more warps, and shorter chunks."""
    size = d_state * head_dim * (1 if dtype == "bf16" else 4)
    chunks = (32, 64) if size <= 4096 else (16, 32)
    warps = (4,) if size <= 4096 else (4, 8) if size <= 8192 else (8,)
    return list(itertools.product(chunks, warps, (2, 3) if dtype == "bf16" else (1, 2)))


def ways(d_state: int, head_dim: int) -> list[int]:
    """Return into how many kernels the backward may be cut."""
    return [1] if d_state * head_dim <= 4096 else [1, 2]


class Winner(NamedTuple):
    """The fastest tile of a shape."""

    chunk: int
    forward: Launch
    backward: Launch
    n_backward: int

    @property
    def kinds(self) -> dict[str, Launch]:
        """Return its kernels."""
        backward = {f"backward {gradients}": self.backward for gradients in BACKWARD_KERNELS[self.n_backward]}
        return {"forward": self.forward} | backward


class Search:
    """The candidates of one shape; what was timed goes to ``rows``."""

    def __init__(self, rows: dict[str, Any], dtype: str, capability: int, n: int, p: int, *, compiles: bool):
        self.rows, self.dtype, self.capability, self.n, self.p, self.compiles = rows, dtype, capability, n, p, compiles

    def row(self, kind: str, chunk: int, launch: Launch, *, full: bool = True) -> dict[str, Any]:
        """Return what is known of one kernel, empty if it does not compile or fit."""
        name = f"{self.dtype} sm_{self.capability} {self.n} {self.p} {kind} {chunk} "
        name += f"{launch.num_warps} {launch.num_stages}" + ("" if full else " plain")
        if name not in self.rows and self.compiles:
            try:
                self.rows[name] = self._timed(kind, chunk, launch, full)
            except Exception as error:  # a candidate that the compiler refuses is not one
                self.rows[name] = {}
                print(f"{name}: {type(error).__name__}: {str(error)[:100]}", flush=True)
        return self.rows.get(name) or {}

    def _timed(self, kind: str, chunk: int, launch: Launch, full: bool) -> dict[str, Any]:
        gpu, dtype = GPUS[self.capability], DTYPES[self.dtype]
        described = ssd_triton.compilation(kind, self.n, self.p, chunk, launch, dtype=dtype, full=full)
        code = code_of(described, self.capability)
        resident = programs_per_processor(code, launch.num_warps, gpu)
        found: dict[str, Any] = {"resident": resident, "registers": code.registers, "shared_bytes": code.shared_bytes}
        found |= {"spills": code.spills, "barriers": code.count("BAR"), "instructions": len(code.loop)}
        if resident:
            moved = bytes_of_chunk(kind, self.n, self.p, chunk, dtype.itemsize, full=full)
            time = milliseconds(code, gpu, launch.num_warps, PROGRAMS, math.ceil(LENGTH / chunk), moved)
            found["ms"] = round(time, 4)
        return found

    def best(self) -> Winner | None:
        """Return the fastest tile, or None if nothing runs."""
        tried = [(chunk, Launch(*launch)) for chunk, *launch in candidates(self.n, self.p, self.dtype)]
        found = []
        for chunk in dict.fromkeys(chunk for chunk, _ in tried):
            launches = [launch for other, launch in tried if other == chunk]
            forward = min((self.total(["forward"], chunk, launch), launch) for launch in launches)
            cuts = {way: [f"backward {name}" for name in BACKWARD_KERNELS[way]] for way in ways(self.n, self.p)}
            backward = min(
                (self.total(kinds, chunk, launch), launch, way) for launch in launches for way, kinds in cuts.items()
            )
            found.append((forward[0] + backward[0], Winner(chunk, forward[1], *backward[1:])))
        time, winner = min(found)
        return None if math.isinf(time) else winner

    def total(self, kinds: list[str], chunk: int, launch: Launch, *, full: bool = True) -> float:
        """Return the milliseconds of some kernels, infinity if one does not run."""
        return sum(self.row(kind, chunk, launch, full=full).get("ms", math.inf) for kind in kinds)

    def entry(self, tile: Winner) -> str:
        """One line of the tile table; behind it forward and backward, with no option and with all."""
        backward = [kind for kind in tile.kinds if kind != "forward"]
        rows = {kind: self.row(kind, tile.chunk, launch) for kind, launch in tile.kinds.items()}
        launches = [
            str(tuple(tile.forward._replace(resident=rows["forward"]["resident"]))),
            str(tuple(tile.backward._replace(resident=min(rows[kind]["resident"] for kind in backward)))),
        ]
        spills = max(row["spills"] for row in rows.values())
        times = [
            f"{self.total(['forward'], tile.chunk, tile.forward, full=full):.3f} + "
            f"{self.total(backward, tile.chunk, tile.backward, full=full):.3f}"
            for full in (False, True)
        ]
        key, words = (self.capability, self.n, self.p), ", ".join(f"Launch{launch}" for launch in launches)
        return f"    {key}: Tile({tile.chunk}, {words}, {tile.n_backward}, {spills}),  # {times[0]}, {times[1]}"


def main() -> None:
    """Compile and time what is missing, write the JSON, print the best tiles."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--capability", type=int, nargs="+", default=[90, 80])
    parser.add_argument("--state", type=int, nargs="+", default=[16, 64, 128, 32])
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128, 32, 16])
    parser.add_argument("--dtype", nargs="+", default=["bf16", "fp32"], choices=DTYPES)
    parser.add_argument("--table", action="store_true", help="compile nothing")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()

    record = read(options.out)
    model = hashlib.sha256(Path(kernel_time.__file__).read_bytes()).hexdigest()[:16]
    sources = f"triton {triton.__version__}, kernels {digest(ssd_triton)}, model {model}"
    rows: dict[str, Any] = record.get("rows", {}) if record.get("sources") == sources else {}
    shapes = itertools.product(options.dtype, options.capability, options.head_dim, options.state)
    for dtype, capability, p, n in shapes:
        if dtype == "fp32" and max(n, p) > LARGEST_FP32_BLOCK[capability]:
            continue
        search = Search(rows, dtype, capability, n, p, compiles=not options.table)
        if tile := search.best():
            print(dtype, search.entry(tile), flush=True)
        if not options.table:
            write(options.out, {"sources": sources, "rows": rows}, indent=0, sort_keys=True)


if __name__ == "__main__":
    main()
