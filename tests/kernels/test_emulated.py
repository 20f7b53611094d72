"""Every kernel, compiled as the launcher compiles it and run in the emulator of `ptx_emulator`, equals float64.

Values, gradients, bounds and races in shared memory. A few tiles; all of them with PROVE=1 (`make prove`).
"""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from hybrid_kernels.ssd_tiles import TILES

PROVE = os.environ.get("PROVE") == "1"
QUICK = [(torch.bfloat16, 90, 64, 64), (torch.bfloat16, 80, 16, 64), (torch.float32, 80, 16, 16)]


def run_ssd(key: tuple[torch.dtype, int, int, int], gated: bool, packed: bool) -> None:
    """Compare values and gradients of two heads with the recurrence in float64."""
    import test_ssd_kernel as interpreted
    from emulated_device import emulated

    dtype, capability, d_state, head_dim = key
    torch.manual_seed(0)
    given = interpreted.problem(1, 70, 2, head_dim, d_state, dtype=dtype, gated=gated, state=gated)
    seq_idx = interpreted.documents(1, 70) if packed else None
    with emulated(capability):
        interpreted.check(given, dtype=dtype, seq_idx=seq_idx)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("key", TILES if PROVE else QUICK, ids=lambda key: "-".join(map(str, key)))
def test_a_tile_of_the_recurrence(key, gated: bool, packed: bool, compiled) -> None:
    compiled(run_ssd, key, gated, packed)
