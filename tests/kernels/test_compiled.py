"""Compiled kernels, without a GPU: resources on record, main loops of NVIDIA's, AMD's code.

With PROVE=1 (`make prove`, which prints the loops) for tiles of P = 64 on five devices; else for
two."""

from __future__ import annotations

import copy
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PROVE = os.environ.get("PROVE") == "1"


def resources_of(name: str, capability: int) -> tuple[dict[str, int], list[str]]:
    """Compile one configuration: its resources, and the promises that it breaks."""
    sys.path.append(str(BENCHMARKS))
    import kernel_resources as script
    import triton

    (found,) = (
        c
        for module in script.kernel_modules()
        for c in module.compilations(capability)
        if c.name == name
    )
    used = script.resources(found, capability)
    return used, script.broken_promises(found, capability, triton.__version__, used)


def checked(record: dict[str, Any]) -> tuple[list[str], list[str]]:
    sys.path.append(str(BENCHMARKS))
    import kernel_resources

    return kernel_resources.check(record)


@pytest.mark.parametrize(
    ("name", "capability"),
    [("ssd forward N=16 P=64 bfloat16", 90), ("ssd backward CBX N=16 P=16 bfloat16", 80)],
)
def test_a_kernel_compiled_now_keeps_its_promises(name: str, capability: int, compiled) -> None:
    used, broken = compiled(resources_of, name, capability)
    assert used["tensor_core_instructions"] > 0
    assert not broken


def test_configurations_on_record_keep_their_promises_and_others_are_found(compiled) -> None:
    record = json.loads((BENCHMARKS / "results" / "kernel_resources.json").read_text())
    broken, missing = compiled(checked, record)
    assert not broken
    if missing:
        pytest.skip(
            f"{len(missing)} configurations are not in the file: run benchmarks/kernel_resources.py"
        )
    name = "ssd forward N=64 P=64 bfloat16"
    for resource, value, problem in (
        ("spills", 1000, "1000 spill instructions"),
        ("resident", 1, "1 programs on a multiprocessor"),
        ("shared_bytes", 1 << 18, "shared memory"),
        ("tensor_core_instructions", 0, "tensor-core"),
    ):
        worse = copy.deepcopy(record)
        worse["triton 3.6.0"]["ssd_triton"]["sm_90"][name][resource] = value
        (found,), _ = compiled(checked, worse)
        assert found.startswith(f"sm_90 {name}: ")
        assert problem in found


def amd_code(names: list[str]) -> dict[str, tuple[int, int, int]]:
    """Compile for AMD's MI300 (gfx942): shared bytes, matrix products and bytes of code by
    kernel."""
    sys.path.append(str(BENCHMARKS))
    from kernel_resources import GPUTarget, compile_for, kernel_modules

    found = {}
    for kernel in (
        c for module in kernel_modules() for c in module.compilations(80) if c.name in names
    ):
        mode = {"gpu": "hip", "tf32x3": "ieee"}[str(kernel.arguments["MODE"])]
        kernel = kernel._replace(arguments={**kernel.arguments, "MODE": mode})
        code = compile_for(kernel, 80, GPUTarget("hip", "gfx942", 64))
        found[kernel.name] = (
            code.metadata.shared,
            code.asm["amdgcn"].count("v_mfma"),
            len(code.asm["hsaco"]),
        )
    return found


def test_kernels_compile_for_amd(compiled) -> None:
    """None has run on one: the test at first use decides."""
    names = [f"ssd {part} N=64 P=64 bfloat16" for part in ("forward", "segments", "backward CBX")]
    names += ["ssd forward N=16 P=16 float32", "ssd forward N=128 P=128 bfloat16"]
    names += ["conv backward K=4", "step N=16 P=64", "loss jsd"]
    found = compiled(amd_code, names)
    assert set(found) == set(names)
    for name, (shared, matrix_products, n_bytes) in found.items():
        assert shared <= 64 << 10, name
        assert n_bytes > 0, name
        assert (matrix_products > 0) == name.startswith("ssd"), name


# Of a multiprocessor
SHARED_BYTES = {80: 164 << 10, 89: 100 << 10, 90: 228 << 10, 100: 228 << 10, 120: 100 << 10}
N_WARPS = {80: 64, 89: 48, 90: 64, 100: 64, 120: 48}


def loops_of(capability: int, d_state: int, gated: bool, packed: bool) -> dict[str, dict[str, int]]:
    """Compile forward and backward as the launcher specializes them: facts of each main loop."""
    sys.path.append(str(BENCHMARKS))
    import test_ssd_kernel as interpreted
    from emulated_device import emulated
    from hybrid_kernels.ssd import ssd

    launches = []
    given = interpreted.problem(
        1, 160, 2, 64, d_state, dtype=torch.bfloat16, gated=gated, state=False
    )
    given = interpreted.in_dtype(given, torch.bfloat16)
    seq_idx = interpreted.documents(1, 160) if packed else None
    with emulated(capability, launches.append, machine_code=True):
        y, _ = ssd(*given[:4], D_H=given.D, z_BLHP=given.z, seq_idx_BL=seq_idx)
        torch.autograd.grad(y.float().sum(), given.leaves())
    return {
        f"{place} {launch.name}": loop_of(launch, capability)
        for place, launch in enumerate(launches)
    }


def loop_of(launch, capability: int) -> dict[str, int]:
    """Return facts of a kernel's main loop.

    ``resident`` counts the programs that a multiprocessor holds at once, ``waits`` the times that a
    warp stands for global memory, one after another (copies made ahead do not count), ``narrowest``
    the bytes of a thread's smallest load, ``transposed`` the sums of products that are transposed
    into the operand of a product: wrong on Hopper with triton 3.4 to 3.7.0."""
    from kernel_time import decode

    code = decode(launch.files["cubin"].read_bytes(), launch.shared_bytes)
    by_registers = (1 << 16) // (-(-code.registers // 8) * 8 * launch.n_threads)
    by_shared = SHARED_BYTES[capability] // (launch.shared_bytes + 1024)
    waits = 0
    fresh = False
    scoreboards = set()
    narrowest = 16
    for instruction in code.loop:
        waited = {board for board in scoreboards if instruction.waits >> board & 1}
        waits += bool(waited) and fresh
        fresh = fresh and not waited
        scoreboards = scoreboards - waited
        if match := re.match(r"(LDG|LDGSTS)\b(.*)", instruction.operation):
            width = re.search(r"\.(U8|S8|U16|S16|64|128)\b", match[2])
            narrowest = min(
                narrowest,
                {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}[width[1]]
                if width
                else 4,
            )
            if match[1] == "LDG":
                fresh = True
                scoreboards.add(instruction.sets)
    return {
        "resident": min(by_registers, by_shared, N_WARPS[capability] * 32 // launch.n_threads),
        "barriers": code.count("BAR"),
        "waits": waits,
        "narrowest": narrowest,
        "products": code.count("HMMA", "HGMMA", "UTCHMMA"),
        "of Hopper": code.count("HGMMA"),
        "transposed": transposed_sums(launch.files["ttgir"].read_text()),
    }


def transposed_sums(ttgir: str) -> int:
    """Count the transpositions of values that come from a product by arithmetic or changes of
    layout alone."""
    sums: set[str] = set()
    found = 0
    for name, operation, rest in re.findall(r"(%[\w]+)(?::\d+)? = \"?([\w.]+)\"?(.*)", ttgir):
        operands = {operand.partition("#")[0] for operand in re.findall(r"%\w+(?:#\d+)?", rest)}
        if operation in ("tt.dot", "ttng.warp_group_dot", "ttng.warp_group_dot_wait"):
            sums.add(name)
        elif operands & sums:
            found += operation in ("tt.trans", "ttg.memdesc_trans")
            if operation.startswith(
                ("arith.", "math.", "ttg.convert_layout", "ttg.local_alloc", "tt.fp_to_fp")
            ):
                sums.add(name)
    return found


# (capability, N) -> forward, backward: programs resident at least, barriers and serial waits of the
# loop at most
BUDGETS = {
    (80, 16): ((2, 10, 1), (2, 35, 1)),
    (80, 64): ((2, 15, 1), (2, 45, 3)),
    (80, 128): ((2, 14, 1), (2, 36, 2)),
    (89, 16): ((2, 10, 1), (2, 35, 1)),
    (89, 64): ((2, 15, 1), (1, 45, 3)),
    (89, 128): ((2, 14, 1), (2, 36, 4)),
    (90, 16): ((2, 12, 1), (2, 36, 1)),
    (90, 64): ((2, 20, 1), (2, 46, 3)),
    (90, 128): ((2, 20, 1), (2, 48, 6)),
    (100, 16): ((2, 12, 1), (2, 36, 1)),
    (100, 64): ((2, 24, 1), (2, 46, 2)),
    (100, 128): ((2, 24, 2), (2, 52, 3)),
    (120, 16): ((2, 12, 1), (2, 36, 1)),
    (120, 64): ((2, 24, 1), (1, 46, 2)),
    (120, 128): ((2, 36, 3), (1, 58, 3)),
}


@pytest.mark.parametrize(("capability", "d_state"), BUDGETS if PROVE else [(80, 16), (90, 16)])
@pytest.mark.parametrize(
    ("gated", "packed"), [(False, False), (True, True)] if PROVE else [(True, True)]
)
def test_main_loops(capability: int, d_state: int, gated: bool, packed: bool, compiled) -> None:
    loops = compiled(loops_of, capability, d_state, gated, packed)
    of_products = {
        name: loop for name, loop in loops.items() if name.endswith(("_forward", "_backward"))
    }
    assert len(of_products) >= 2, loops
    for name, loop in of_products.items():
        resident, barriers, waits = BUDGETS[capability, d_state]["backward" in name]
        print(f"sm_{capability} N={d_state} gated={gated} packed={packed} {name}: {loop}")
        assert loop["resident"] >= resident, (name, loop)
        assert loop["barriers"] <= barriers, (name, loop)
        assert loop["waits"] <= waits, (name, loop)
        assert loop["products"] > 0, (
            name,
            loop,
        )
        assert loop["narrowest"] >= 4, (
            name,
            loop,
        )
        assert not loop["transposed"], (
            name,
            loop,
        )
        assert not loop["of Hopper"] or capability == 90, (name, loop)
