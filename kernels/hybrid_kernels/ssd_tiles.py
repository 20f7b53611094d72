"""Tiles of the recurrence's kernels: chunk lengths, warps and stages by architecture, dtype, N and P."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton

LARGEST_STATE = 128
LARGEST_HEAD_DIM = 128
# From 64 on, a product is Hopper's own instruction, and triton 3.6.0's tf32x3 by it read illegal
# addresses on an H200, or gave other bits each time.
LARGEST_FP32_BLOCK = 32
"""Largest N and P in one program."""
SMALLEST_BLOCK = 16
"""Smallest size of a dimension that a product contracts."""
MIN_CHUNKS_PER_SEGMENT = 4
SEGMENT_PASS = 0.35
"""Cost of finding the states of segments first, as a share of the kernel that follows."""
START_CHUNKS = 1.5
"""Cost of what a program does once, in chunks."""
BACKWARD_KERNELS = {1: ("CBX",), 2: ("C", "BX"), 3: ("C", "B", "X")}
"""Gradients that each kernel of a backward finds, in order, by the number of its kernels."""


class Launch(NamedTuple):
    """Launch of a kernel."""

    num_warps: int
    num_stages: int
    """Chunks that it holds in flight."""
    resident: int = 1
    """Programs that a multiprocessor holds."""

    @property
    def options(self) -> dict[str, int]:
        """Return the options of the compiler."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


DECAYS = Launch(4, 1)
"""Launch of the kernels that have no loop."""
DECAY_HEADS = 16
"""Heads in one program of theirs."""


class Tile(NamedTuple):
    """One entry of the tile table."""

    chunk: int
    forward: Launch
    backward: Launch
    n_backward: int = 1
    """Kernels into which the backward is cut: the more, the fewer values each holds."""
    spills: int = 0
    """Spill instructions that are known and accepted."""


# By architecture and the blocks of N and P. An entry with figures is the fastest of what
# benchmarks/tile_search.py compiles with triton 3.6.0, by modeled milliseconds at 8 rows of 2,048
# tokens and 32 heads. Its comment has these, forward + backward: without optional inputs, then with
# all of them. Spills are accepted where the model says so. An entry without figures is the first of
# (chunk, n_backward) = (32, 1), (16, 1), (32, 2), (16, 2), (32, 3), (16, 3) that kept its values in
# registers when the table was made.
_BF16_TILES = {
    (90, 16, 16): Tile(32, Launch(4, 2), Launch(4, 1)),
    (90, 16, 32): Tile(16, Launch(4, 2), Launch(4, 1)),
    (90, 16, 64): Tile(32, Launch(4, 3, 2), Launch(4, 3, 2), 1, 16),  # 0.081 + 0.188, 0.098 + 0.203
    # 0.137 + 0.324, 0.164 + 0.311
    (90, 16, 128): Tile(32, Launch(4, 3, 2), Launch(4, 3, 2), 1, 42),
    (90, 32, 16): Tile(16, Launch(4, 2), Launch(4, 1)),
    (90, 32, 32): Tile(16, Launch(4, 2), Launch(4, 1)),
    (90, 32, 64): Tile(32, Launch(4, 3, 2), Launch(4, 2, 2), 1, 22),  # 0.100 + 0.266, 0.141 + 0.289
    # 0.203 + 0.343, 0.215 + 0.450
    (90, 32, 128): Tile(32, Launch(4, 2, 2), Launch(4, 3, 2), 1, 139),
    (90, 64, 16): Tile(16, Launch(4, 2), Launch(8, 1)),
    (90, 64, 32): Tile(16, Launch(4, 2), Launch(4, 1)),
    (90, 64, 64): Tile(32, Launch(4, 3, 2), Launch(4, 3, 2), 1, 80),  # 0.144 + 0.261, 0.147 + 0.333
    # 0.239 + 0.556, 0.243 + 0.646
    (90, 64, 128): Tile(32, Launch(4, 3, 2), Launch(4, 2, 2), 1, 369),
    (90, 128, 16): Tile(16, Launch(4, 2), Launch(4, 1), n_backward=2),
    (90, 128, 32): Tile(16, Launch(4, 2), Launch(8, 1)),
    # 0.284 + 0.639, 0.244 + 0.677
    (90, 128, 64): Tile(32, Launch(4, 3, 2), Launch(4, 3, 2), 1, 500),
    # 0.498 + 1.442, 0.554 + 1.463
    (90, 128, 128): Tile(32, Launch(8, 3, 1), Launch(8, 3, 1), 1, 386),
    (80, 16, 16): Tile(32, Launch(4, 2), Launch(8, 1)),
    (80, 16, 32): Tile(16, Launch(4, 2), Launch(4, 1)),
    (80, 16, 64): Tile(32, Launch(4, 3, 2), Launch(4, 3, 2), 1, 4),  # 0.232 + 0.453, 0.257 + 0.546
    # 0.333 + 0.796, 0.391 + 0.800
    (80, 16, 128): Tile(32, Launch(4, 3, 2), Launch(4, 3, 2), 1, 103),
    (80, 32, 16): Tile(16, Launch(4, 2), Launch(4, 1)),
    (80, 32, 32): Tile(16, Launch(4, 2), Launch(4, 1)),
    (80, 32, 64): Tile(32, Launch(4, 3, 2), Launch(4, 3, 2), 1, 14),  # 0.253 + 0.596, 0.277 + 0.663
    # 0.403 + 0.970, 0.427 + 0.978
    (80, 32, 128): Tile(32, Launch(4, 3, 2), Launch(4, 3, 2), 1, 146),
    (80, 64, 16): Tile(16, Launch(4, 2), Launch(4, 1)),
    (80, 64, 32): Tile(16, Launch(4, 2), Launch(4, 1)),
    # 0.359 + 0.946, 0.371 + 0.983
    (80, 64, 64): Tile(32, Launch(4, 3, 2), Launch(4, 3, 2), 1, 249),
    # 0.732 + 1.630, 0.688 + 1.644
    (80, 64, 128): Tile(32, Launch(4, 2, 2), Launch(4, 2, 2), 1, 420),
    (80, 128, 16): Tile(16, Launch(4, 2), Launch(4, 1), n_backward=2),
    (80, 128, 32): Tile(16, Launch(4, 2), Launch(4, 1), n_backward=3, spills=18),
    # 0.849 + 2.141, 0.877 + 2.193
    (80, 128, 64): Tile(16, Launch(4, 3, 2), Launch(4, 2, 2), 1, 219),
    # 1.719 + 3.978, 1.757 + 4.414
    (80, 128, 128): Tile(16, Launch(8, 3, 1), Launch(8, 2, 1), 1, 241),
}
# To check by, not to train with: three products for one take twice the registers, so larger states
# run in blocks.
_FP32_TILES = {
    (90, 16, 16): Tile(16, Launch(8, 1), Launch(8, 1), n_backward=2),
    (90, 16, 32): Tile(16, Launch(8, 1), Launch(8, 1), n_backward=1, spills=15),
    (90, 32, 16): Tile(16, Launch(8, 1), Launch(8, 1), n_backward=3),
    (90, 32, 32): Tile(16, Launch(8, 1), Launch(8, 1), n_backward=3),
    (80, 16, 16): Tile(16, Launch(8, 1), Launch(8, 1), n_backward=1, spills=15),
    (80, 16, 32): Tile(16, Launch(8, 1), Launch(8, 1), n_backward=2),
    (80, 32, 16): Tile(16, Launch(8, 1), Launch(8, 1), n_backward=3),
    (80, 32, 32): Tile(16, Launch(8, 1), Launch(8, 1), n_backward=3),
}
TILES = {(torch.bfloat16, *key): tile for key, tile in _BF16_TILES.items()}
TILES |= {(torch.float32, *key): tile for key, tile in _FP32_TILES.items()}


def tile_for(capability: int, dtype: torch.dtype, d_state: int, head_dim: int) -> Tile:
    """Return the entry of the tile table. Raises ValueError where there is none."""
    key = (dtype, architecture_of(capability), block_of(d_state), block_of(head_dim))
    if key not in TILES:
        raise ValueError(
            f"the float32 state has N={d_state} and P={head_dim}; one kernel holds at most "
            f"{LARGEST_FP32_BLOCK} of each: call `ssd`, which runs it in blocks."
        )
    return TILES[key]


@lru_cache(maxsize=1024)
def segments(programs: int, n_chunks: int, places: int) -> int:
    """Return the number of segments into which to cut each row, so that the last program ends first.

    ``programs`` is the number of rows times heads, ``places`` how many programs the device runs at
    once."""

    def time(n_segments: int) -> float:
        """Estimate the time in chunks: waves of programs, times the chunks of each."""
        chunks = triton.cdiv(n_chunks, n_segments)
        # Not n_segments: rounding up the chunks may leave fewer.
        n_programs = programs * triton.cdiv(n_chunks, chunks)
        waves = triton.cdiv(n_programs, places)
        in_chunks = waves * (chunks + START_CHUNKS)
        if n_segments == 1:
            return in_chunks
        return in_chunks * (1.0 + SEGMENT_PASS)

    most = max(1, n_chunks // MIN_CHUNKS_PER_SEGMENT)
    # Ties go to fewer segments: min returns the first.
    return min(range(1, most + 1), key=time)


def block_of(size: int) -> int:
    """Return the block that holds a dimension of this size."""
    return max(SMALLEST_BLOCK, triton.next_power_of_2(size))


def architecture_of(capability: int) -> int:
    """Return the architecture whose tiles are used: newer devices take those of Hopper."""
    return 90 if capability >= 90 else 80
