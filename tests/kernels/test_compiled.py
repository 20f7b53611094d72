"""Compiled kernels, without a GPU: resources on record, main loops of NVIDIA's, AMD's code.

With PROVE=1 (`make prove`, which prints the loops) for tiles of P = 64 on five devices; else for
two."""

from __future__ import annotations

import ast
import copy
import json
import math
import os
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

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

    compilations = []
    for module in script.kernel_modules():
        compilations += module.compilations(capability)
    (compilation,) = [one for one in compilations if one.name == name]
    used = script.resources(compilation, capability)
    broken = script.broken_promises(compilation, capability, triton.__version__, used)
    return used, broken


def checked(record: dict[str, Any]) -> tuple[list[str], list[str]]:
    sys.path.append(str(BENCHMARKS))
    import kernel_resources

    return kernel_resources.check(record)


def trees_of(code: str) -> tuple[Any, Any]:
    """Return the tree of a function as it is hashed, and that of a Python with one field more."""
    sys.path.append(str(BENCHMARKS))
    from kernel_resources import tree_of

    function = ast.parse(code).body[0]
    newer = ast.parse(code).body[0]
    newer._fields = (*newer._fields, "type_params")
    newer.type_params = []
    return tree_of(function), tree_of(newer)


def test_sources_have_the_same_digest_under_any_python(compiled) -> None:
    older, newer = compiled(trees_of, "def f(x): return x + 1")
    other, _ = compiled(trees_of, "def f(x): return x + 2")
    assert older == newer
    assert older != other


@pytest.mark.parametrize(
    ("name", "capability"),
    [("ssd forward N=16 P=64 bfloat16", 90), ("ssd backward CBX N=16 P=16 bfloat16", 80)],
)
def test_a_kernel_compiled_now_keeps_its_promises(name: str, capability: int, compiled) -> None:
    used, broken = compiled(resources_of, name, capability)
    assert used["tensor_core_instructions"] > 0
    assert not broken


# A resource, a value that breaks its promise, and what the report says.
WORSE = (
    ("spills", 1000, "1000 spill instructions"),
    ("resident", 1, "1 programs on a multiprocessor"),
    ("shared_bytes", 1 << 18, "shared memory"),
    ("tensor_core_instructions", 0, "tensor-core"),
)


def test_configurations_on_record_keep_their_promises_and_others_are_found(compiled) -> None:
    record = json.loads((BENCHMARKS / "results" / "kernel_resources.json").read_text())
    broken, missing = compiled(checked, record)
    assert not broken
    if missing:
        pytest.skip(
            f"{len(missing)} configurations are not in the file: run benchmarks/kernel_resources.py"
        )
    name = "ssd forward N=64 P=64 bfloat16"
    for resource, value, problem in WORSE:
        worse = copy.deepcopy(record)
        worse["triton 3.6.0"]["ssd_triton"]["sm_90"][name][resource] = value
        (report,), _ = compiled(checked, worse)
        assert report.startswith(f"sm_90 {name}: ")
        assert problem in report


AMD_MODES = {"gpu": "hip", "tf32x3": "ieee"}
"""Modes that stand for those of NVIDIA's GPUs."""
FOR_AMD = (
    "ssd forward N=64 P=64 bfloat16",
    "ssd segments N=64 P=64 bfloat16",
    "ssd backward CBX N=64 P=64 bfloat16",
    "ssd forward N=16 P=16 float32",
    "ssd forward N=128 P=128 bfloat16",
    "conv backward K=4",
    "step N=16 P=64",
    "loss jsd",
)


class AmdCode(NamedTuple):
    """Facts of a kernel that was compiled for AMD."""

    shared_bytes: int
    matrix_products: int
    n_bytes: int


def amd_code(names: tuple[str, ...]) -> dict[str, AmdCode]:
    """Compile kernels for AMD's MI300 (gfx942)."""
    sys.path.append(str(BENCHMARKS))
    from kernel_resources import GPUTarget, compile_for, kernel_modules

    mi300 = GPUTarget("hip", "gfx942", 64)
    codes = {}
    for module in kernel_modules():
        for kernel in module.compilations(80):
            if kernel.name not in names:
                continue
            mode = AMD_MODES[str(kernel.arguments["MODE"])]
            kernel = kernel._replace(arguments={**kernel.arguments, "MODE": mode})
            code = compile_for(kernel, 80, mi300)
            codes[kernel.name] = AmdCode(
                shared_bytes=code.metadata.shared,
                matrix_products=code.asm["amdgcn"].count("v_mfma"),
                n_bytes=len(code.asm["hsaco"]),
            )
    return codes


def test_kernels_compile_for_amd(compiled) -> None:
    """None has run on one: the test at first use decides."""
    codes = compiled(amd_code, FOR_AMD)
    assert set(codes) == set(FOR_AMD)
    for name, code in codes.items():
        # An MI300's program has 64 KiB.
        assert code.shared_bytes <= 64 << 10, name
        assert code.n_bytes > 0, name
        assert (code.matrix_products > 0) == name.startswith("ssd"), name


# Main loops of NVIDIA's code. Facts of a multiprocessor, by capability:
SHARED_BYTES = {80: 164 << 10, 89: 100 << 10, 90: 228 << 10, 100: 228 << 10, 120: 100 << 10}
N_WARPS = {80: 64, 89: 48, 90: 64, 100: 64, 120: 48}
REGISTERS = 1 << 16
RESERVED_BYTES = 1024
"""Shared memory that the driver takes of each program."""
LOAD = re.compile(r"(LDG|LDGSTS)\b(.*)")
"""Loads of global memory: into registers, and copies made ahead into shared memory."""
LOAD_WIDTH = re.compile(r"\.(U8|S8|U16|S16|64|128)\b")
WIDTH_BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


class MainLoop(NamedTuple):
    """Facts of a kernel's main loop."""

    resident: int
    """Programs that a multiprocessor holds at once."""
    barriers: int
    waits: int
    """Times that a warp stands for global memory, one after another; copies made ahead do not
    count."""
    narrowest: int
    """Bytes of a thread's smallest load."""
    products: int
    of_hopper: int
    """Products by instructions that only Hopper has."""
    transposed: int
    """Sums of products that are transposed into the operand of a product: wrong on Hopper with
    triton 3.4 to 3.7.0."""


def loops_of(capability: int, d_state: int, gated: bool, packed: bool) -> dict[str, MainLoop]:
    """Compile forward and backward as the launcher specializes them: facts of each main loop."""
    sys.path.append(str(BENCHMARKS))
    import test_ssd_kernel as interpreted
    from emulated_device import emulated
    from hybrid_kernels.ssd import ssd

    launches = []
    length = 160
    given = interpreted.problem(
        1, length, 2, 64, d_state, dtype=torch.bfloat16, gated=gated, state=False
    )
    given = interpreted.in_dtype(given, torch.bfloat16)
    seq_idx = interpreted.documents(1, length) if packed else None
    with emulated(capability, launches.append, machine_code=True):
        y, _ = ssd(*given[:4], D_H=given.D, z_BLHP=given.z, seq_idx_BL=seq_idx)
        torch.autograd.grad(y.float().sum(), given.leaves())
    loops = {}
    for place, launch in enumerate(launches):
        loops[f"{place} {launch.name}"] = loop_of(launch, capability)
    return loops


def loop_of(launch, capability: int) -> MainLoop:
    from kernel_time import decode

    code = decode(launch.files["cubin"].read_bytes(), launch.shared_bytes)
    # Registers are given out by eights.
    registers_of_thread = math.ceil(code.registers / 8) * 8
    by_registers = REGISTERS // (registers_of_thread * launch.n_threads)
    by_shared = SHARED_BYTES[capability] // (launch.shared_bytes + RESERVED_BYTES)
    by_warps = N_WARPS[capability] * 32 // launch.n_threads
    return MainLoop(
        resident=min(by_registers, by_shared, by_warps),
        barriers=code.count("BAR"),
        waits=serial_waits(code.loop),
        narrowest=narrowest_load(code.loop),
        products=code.count("HMMA", "HGMMA", "UTCHMMA"),
        of_hopper=code.count("HGMMA"),
        transposed=transposed_sums(launch.files["ttgir"].read_text()),
    )


def serial_waits(loop) -> int:
    """Count the waits for loads: several loads that are waited for together are one.

    A load sets a scoreboard; an instruction names those that it waits for in a bit mask."""
    n_waits = 0
    loaded_since = False
    scoreboards = set()
    for instruction in loop:
        waited = {board for board in scoreboards if instruction.waits >> board & 1}
        if waited:
            n_waits += loaded_since
            loaded_since = False
        scoreboards -= waited
        load = LOAD.match(instruction.operation)
        if load and load[1] == "LDG":
            loaded_since = True
            scoreboards.add(instruction.sets)
    return n_waits


def narrowest_load(loop) -> int:
    narrowest = 16
    for instruction in loop:
        if load := LOAD.match(instruction.operation):
            width = LOAD_WIDTH.search(load[2])
            n_bytes = WIDTH_BYTES[width[1]] if width else 4
            narrowest = min(narrowest, n_bytes)
    return narrowest


TTGIR_LINE = re.compile(r"(%[\w]+)(?::\d+)? = \"?([\w.]+)\"?(.*)")
TTGIR_OPERAND = re.compile(r"%\w+(?:#\d+)?")
DOTS = ("tt.dot", "ttng.warp_group_dot", "ttng.warp_group_dot_wait")
TRANSPOSITIONS = ("tt.trans", "ttg.memdesc_trans")
ARITHMETIC_OR_LAYOUT = ("arith.", "math.", "ttg.convert_layout", "ttg.local_alloc", "tt.fp_to_fp")


def transposed_sums(ttgir: str) -> int:
    """Count the transpositions of values that come from a product by arithmetic or changes of
    layout alone."""
    sums: set[str] = set()
    n_transposed = 0
    for name, operation, rest in TTGIR_LINE.findall(ttgir):
        operands = {operand.partition("#")[0] for operand in TTGIR_OPERAND.findall(rest)}
        if operation in DOTS:
            sums.add(name)
        elif operands & sums:
            n_transposed += operation in TRANSPOSITIONS
            if operation.startswith(ARITHMETIC_OR_LAYOUT):
                sums.add(name)
    return n_transposed


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
    forward, backward = BUDGETS[capability, d_state]
    loops = compiled(loops_of, capability, d_state, gated, packed)
    n_checked = 0
    for name, loop in loops.items():
        if not name.endswith(("_forward", "_backward")):
            continue
        n_checked += 1
        resident, barriers, waits = backward if "backward" in name else forward
        facts = f"sm_{capability} N={d_state} {gated=} {packed=} {name}: {loop}"
        print(facts)
        assert loop.resident >= resident, facts
        assert loop.barriers <= barriers, facts
        assert loop.waits <= waits, facts
        assert loop.products > 0, facts
        assert loop.narrowest >= 4, facts
        assert not loop.transposed, facts
        assert not loop.of_hopper or capability == 90, facts
    assert n_checked >= 2, loops
