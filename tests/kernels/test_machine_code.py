"""Machine code of the recurrence's kernels, as the launcher specializes them: facts of each main loop, by device.

With PROVE=1 (`make prove`, which prints them) for tiles of P = 64 on five devices; else for two.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

ROOT = Path(__file__).parent.parent.parent
PROVE = os.environ.get("PROVE") == "1"
SHARED_BYTES = {80: 164 << 10, 89: 100 << 10, 90: 228 << 10, 100: 228 << 10, 120: 100 << 10}  # of a multiprocessor
N_WARPS = {80: 64, 89: 48, 90: 64, 100: 64, 120: 48}
STATES = (16, 64, 128) if PROVE else (16,)
DEVICES = (*SHARED_BYTES,) if PROVE else (80, 90)


class Loop(NamedTuple):
    """The main loop of a kernel."""

    resident: int
    """Programs that a multiprocessor holds at once."""
    registers: int
    spills: int
    barriers: int
    waits: int
    """Times that a warp stands for global memory, one after another; copies made ahead do not count."""
    loads: dict[int, int]
    """Instructions that load from global memory, by the bytes of a thread."""
    hgmma: int
    hmma: int
    tensor_memory: int
    """Products of Blackwell's tensor memory."""
    transposed: int
    """Sums of products that are transposed into the operand of a product: wrong on Hopper with triton 3.4 to 3.7.0."""


def loops_of(capability: int, d_state: int, gated: bool, packed: bool) -> dict[str, Loop]:
    """Compile forward and backward for a device."""
    sys.path.append(str(ROOT / "benchmarks"))
    import test_ssd_kernel as interpreted
    from emulated_device import emulated
    from hybrid_kernels.ssd import ssd

    launches = []
    given = interpreted.problem(1, 160, 2, 64, d_state, dtype=torch.bfloat16, gated=gated, state=False)
    given = interpreted.in_dtype(given, torch.bfloat16)
    seq_idx = interpreted.documents(1, 160) if packed else None
    with emulated(capability, launches.append, machine_code=True):
        y, _ = ssd(*given[:4], D_H=given.D, z_BLHP=given.z, seq_idx_BL=seq_idx)
        torch.autograd.grad(y.float().sum(), given.leaves())
    return {f"{place} {launch.name}": loop_of(launch, capability) for place, launch in enumerate(launches)}


def loop_of(launch, capability: int) -> Loop:
    from kernel_time import decode

    code = decode(launch.files["cubin"].read_bytes(), launch.shared_bytes)
    warps = launch.n_threads // 32
    by_registers = (1 << 16) // (-(-code.registers // 8) * 8 * launch.n_threads)
    by_shared = SHARED_BYTES[capability] // (launch.shared_bytes + 1024)
    waits, fresh, scoreboards = 0, False, set()
    loads: Counter[int] = Counter()
    for instruction in code.loop:
        waited = {board for board in scoreboards if instruction.waits >> board & 1}
        waits += bool(waited) and fresh
        fresh, scoreboards = fresh and not waited, scoreboards - waited
        if match := re.match(r"(LDG|LDGSTS)\b(.*)", instruction.operation):
            width = re.search(r"\.(U8|S8|U16|S16|64|128)\b", match[2])
            loads[{"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}[width[1]] if width else 4] += 1
            if match[1] == "LDG":
                fresh = True
                scoreboards.add(instruction.sets)
    return Loop(
        resident=min(by_registers, by_shared, N_WARPS[capability] // warps),
        registers=code.registers,
        spills=code.spills,
        barriers=code.count("BAR"),
        waits=waits,
        loads=dict(sorted(loads.items())),
        hgmma=code.count("HGMMA"),
        hmma=code.count("HMMA"),
        tensor_memory=code.count("UTCHMMA"),
        transposed=transposed_sums(launch.files["ttgir"].read_text()),
    )


def transposed_sums(ttgir: str) -> int:
    """Count the transpositions of values that come from a product by arithmetic or changes of layout alone."""
    sums: set[str] = set()
    found = 0
    for name, operation, rest in re.findall(r"(%[\w]+)(?::\d+)? = \"?([\w.]+)\"?(.*)", ttgir):
        operands = {operand.partition("#")[0] for operand in re.findall(r"%\w+(?:#\d+)?", rest)}
        if operation in ("tt.dot", "ttng.warp_group_dot", "ttng.warp_group_dot_wait"):
            sums.add(name)
        elif operands & sums:
            found += operation in ("tt.trans", "ttg.memdesc_trans")
            if operation.startswith(("arith.", "math.", "ttg.convert_layout", "ttg.local_alloc", "tt.fp_to_fp")):
                sums.add(name)
    return found


# (capability, N) -> forward, backward: programs resident at least, barriers and serial waits of the loop at most
BUDGETS = {
    (80, 16): ((2, 10, 1), (2, 35, 1)), (80, 64): ((2, 15, 1), (2, 45, 3)), (80, 128): ((1, 12, 1), (1, 36, 5)),
    (89, 16): ((2, 10, 1), (2, 35, 1)), (89, 64): ((2, 15, 1), (1, 45, 3)), (89, 128): ((1, 12, 1), (1, 36, 5)),
    (90, 16): ((2, 12, 1), (2, 36, 1)), (90, 64): ((2, 20, 1), (2, 46, 3)), (90, 128): ((2, 20, 1), (2, 48, 6)),
    (100, 16): ((2, 12, 1), (2, 36, 1)), (100, 64): ((2, 24, 1), (2, 46, 2)), (100, 128): ((2, 24, 2), (2, 52, 3)),
    (120, 16): ((2, 12, 1), (2, 36, 1)), (120, 64): ((2, 24, 1), (1, 46, 2)), (120, 128): ((2, 36, 3), (1, 58, 3)),
}  # fmt: skip


@pytest.mark.parametrize("capability", DEVICES)
@pytest.mark.parametrize("d_state", STATES)
@pytest.mark.parametrize(("gated", "packed"), [(False, False), (True, True)] if PROVE else [(True, True)])
def test_main_loops(capability: int, d_state: int, gated: bool, packed: bool, compiled) -> None:
    loops = compiled(loops_of, capability, d_state, gated, packed)
    of_products = {name: loop for name, loop in loops.items() if name.endswith(("_forward", "_backward"))}
    assert len(of_products) >= 2, loops
    for name, loop in of_products.items():
        resident, barriers, waits = BUDGETS[capability, d_state]["backward" in name]
        print(f"sm_{capability} N={d_state} gated={gated} packed={packed} {name}: {loop}")
        assert loop.resident >= resident, (name, loop)
        assert loop.barriers <= barriers, (name, loop)
        assert loop.waits <= waits, (name, loop)
        assert loop.hmma + loop.hgmma + loop.tensor_memory > 0, (name, loop)
        assert not loop.hgmma or capability == 90, (name, loop)
        assert not loop.transposed, (name, loop)
        assert min(loop.loads) >= 4, (name, loop)
