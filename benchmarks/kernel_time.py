"""Model the time of a compiled kernel from its machine code: no GPU is needed.

ptxas decides before a kernel runs when each instruction may issue: every instruction carries a stall count and up to
six scoreboards that it sets or waits for. `simulate` plays that schedule for the warps of one of a multiprocessor's
four schedulers, with the throughput of each pipe, barriers, asynchronous copies and products, a fixed latency of
memory and a quarter of the multiprocessor's share of bandwidth. `milliseconds` multiplies by waves.

Spilled registers stay in the first level of the cache if what shared memory leaves of it can hold them, else they go to
the second at 64 bytes a cycle. Unknown to the model: bank conflicts, other cache hits, clocks under load, imbalance
between multiprocessors. Compare two tiles by it, and measure on a GPU what a sentence in a paper depends on.
"""

from __future__ import annotations

import math
import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import triton

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SCHEDULERS = 4
BARRIER_CYCLES = 20
NOTHING = 7  # the number of no scoreboard


class Gpu(NamedTuple):
    """Rates of a device: clock in GHz, TB/s, latencies in cycles, FMA a cycle of a tensor core by instruction."""

    processors: int
    clock: float
    bandwidth: float
    latency: int
    cache_latency: int
    shared_bytes: int
    cache_bytes: int  # of the first level, shared memory included
    hmma: float
    hgmma: float
    fp32_cycles: int  # for which one instruction of a warp holds the pipe
    integer_multiply_cycles: int


# Bandwidth: what copies reach. Latency: 480 (Luo et al. 2024, pointer chasing) and half of it for a loaded bus.
# mma.sync reaches 0.62 of a Hopper tensor core's rate.
GPUS = {
    80: Gpu(108, 1.41, 1.75, 700, 280, 164 << 10, 192 << 10, 256, 256, 2, 2),
    90: Gpu(132, 1.755, 3.0, 700, 280, 228 << 10, 256 << 10, 320, 512, 1, 2),
}


class Instruction(NamedTuple):
    """One instruction with its control bits."""

    text: str
    stall: int
    sets: int  # scoreboard released when the result is there
    reads: int  # scoreboard released when the operands were read
    waits: int  # mask of scoreboards

    @property
    def operation(self) -> str:
        """Return the mnemonic without its predicate."""
        return re.sub(r"^@!?U?P\w+\s+", "", self.text).split()[0]


class Code(NamedTuple):
    """Instructions in order, and where the main loop begins and ends."""

    instructions: list[Instruction]
    begin: int
    end: int
    registers: int
    shared_bytes: int
    stack_bytes: int

    @property
    def loop(self) -> list[Instruction]:
        """Return the body of the main loop."""
        return self.instructions[self.begin : self.end]

    @property
    def spills(self) -> int:
        """Count the instructions that move registers to and from memory."""
        return sum(i.operation.split(".")[0] in ("STL", "LDL") for i in self.instructions)

    def count(self, *operations: str) -> int:
        """Count the main loop's instructions of these kinds."""
        return sum(i.operation.split(".")[0] in operations for i in self.loop)


def decode(cubin: bytes, shared_bytes: int) -> Code:
    """Disassemble a kernel; its main loop is the longest one."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([TOOLS / "nvdisasm", "-c", "-hex", file.name], capture_output=True, text=True).stdout
        usage = subprocess.run([TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True).stdout
    found: list[Instruction] = []
    labels: dict[str, int] = {}
    pending = ""
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(found)
        elif first := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);\s*/\* 0x", line):
            pending = first[1].strip()
        elif pending and (second := re.match(r"\s*/\* (0x[0-9a-f]+) \*/\s*$", line)):
            control = int(second[1], 16) >> 41
            fields = control & 15, control >> 5 & 7, control >> 8 & 7, control >> 11 & 63
            found.append(Instruction(pending, *fields))
            pending = ""
    begin, end = 0, 0
    for place, instruction in enumerate(found):
        branch = re.search(r"BRA.*?`\((\.L_x_\d+)\)", instruction.text)
        if branch and (target := labels[branch[1]]) < place and place - target >= end - begin:
            begin, end = target, place + 1
    registers, stack = (int(re.findall(rf"{name}:(\d+)", usage)[0]) for name in ("REG", "STACK"))
    return Code(found, begin, end, registers, shared_bytes, stack)


def programs_per_processor(code: Code, num_warps: int, gpu: Gpu) -> int:
    """Return how many programs are resident at once, by registers, shared memory and warps."""
    registers = math.ceil(code.registers / 8) * 8 * 32 * num_warps
    return min((1 << 16) // registers, gpu.shared_bytes // (code.shared_bytes + 1024), 64 // num_warps)


# Operation -> cycles until its result is there.
_LATENCIES = {
    "LDS": 30, "LDSM": 33, "STS": 20, "STSM": 24, "SHFL": 25, "MUFU": 22, "HMMA": 33, "LDL": 35, "STL": 20, "STG": 20,
    "LDGSTS": 20, "LDC": 40, "ULDC": 40, "S2R": 30, "S2UR": 30, "R2UR": 12,
}  # fmt: skip
_FMA = {"FFMA", "FMUL", "FADD"}
_INTEGER_MULTIPLY = {"IMAD", "IMUL"}
_ALU = {
    "IADD3", "LOP3", "ISETP", "FSETP", "FMNMX", "IMNMX", "SEL", "FSEL", "SHF", "PRMT", "F2FP", "LEA", "MOV", "PLOP3",
    "IABS", "POPC", "I2F", "F2I", "VIADD", "VIMNMX",
}  # fmt: skip


def _width(operation: str) -> int:
    """Bytes per lane of a load or store."""
    for suffix, width in ((".128", 16), (".64", 8), (".U16", 2), (".S16", 2), (".U8", 1)):
        if suffix in operation:
            return width
    return 4


class _Timed(NamedTuple):
    """Facts of an instruction that the simulation needs."""

    kind: str
    stall: int
    sets: int
    reads: int
    waits: tuple[int, ...]
    pipe: str
    held: float  # cycles for which the pipe takes nothing else
    latency: int
    moved: float  # bytes to or from memory
    depth: int  # groups that a wait leaves in flight
    narrow: bool  # a load of the decays, which were written just before


def _timed(instruction: Instruction, gpu: Gpu, *, spills_stay: bool) -> _Timed:
    operation = instruction.operation
    base = operation.split(".")[0]
    kind, pipe, held, moved, depth = base, "", 0.0, 0.0, 0
    latency = _LATENCIES.get(base, 20)
    if base in ("LDL", "STL") and not spills_stay:
        pipe, held, latency = "second level", 2 * _width(operation), gpu.cache_latency
    elif base in ("LDS", "STS", "LDL", "STL"):
        pipe, held = "shared", _width(operation)
    elif base in ("LDSM", "STSM"):
        pipe, held = "shared", 4 * int(operation[-1] if operation[-1] in "24" else 1)
    elif base == "SHFL":
        pipe, held = "shared", 4
    elif base in ("LDG", "STG", "LDGSTS"):
        pipe, held, moved = "shared", 4, 32.0 * _width(operation)
    elif base == "MUFU":
        pipe, held = "mufu", 8
    elif base == "HMMA":
        rows, columns, inner = (16, 8, 8) if ".1688" in operation else (16, 8, 16)
        pipe, held = "tensor", rows * columns * inner / gpu.hmma
    elif base == "HGMMA":
        rows, columns, inner = map(int, re.findall(r"\.(\d+)x(\d+)x(\d+)", operation)[0])
        operands = columns + (rows if re.search(r"HGMMA\S* R\d+, gdesc", instruction.text) else 0)
        pipe, held = "tensor", max(rows * columns * inner / SCHEDULERS / gpu.hgmma, operands * inner * 2 / 128)
        kind = "HGMMA.last" if "gsb0" in instruction.text else "HGMMA"
        latency = 30
    elif base in _FMA:
        pipe, held = "fma", gpu.fp32_cycles
    elif base in _INTEGER_MULTIPLY:
        pipe, held = "fma", gpu.integer_multiply_cycles
    elif base in _ALU:
        pipe, held = "alu", 2
    elif base == "DEPBAR" or operation.startswith("WARPGROUP.DEPBAR"):
        kind = "wait copies" if base == "DEPBAR" else "wait products"
        left = re.search(r", 0x([0-9a-f]+)", instruction.text)  # DEPBAR.LE SB0, 0x2, {4,1}
        kind, depth = (kind, int(left[1], 16)) if left else ("none", 0)  # DEPBAR {4,1}: scoreboards alone
    elif base == "BAR":
        kind = "BAR" if "SYNC" in operation else "none"
    named = re.search(r"DEPBAR.*\{([\d,]+)\}", instruction.text)
    also = set(map(int, named[1].split(","))) if named else set()
    waits = tuple(k for k in range(6) if instruction.waits >> k & 1 or k in also)
    return _Timed(
        kind,
        max(1, instruction.stall),
        instruction.sets,
        instruction.reads,
        waits,
        pipe,
        held,
        latency,
        moved,
        depth,
        0 < moved < 512,
    )


class _Warp:
    def __init__(self, program: int):
        self.program, self.place, self.ready, self.blocked = program, 0, 0.0, False
        self.scoreboards = [0.0] * 6
        self.copied, self.copies = 0.0, []  # of the open group, of those committed
        self.multiplied, self.products = 0.0, []


def simulate(trace: list[_Timed], gpu: Gpu, warps: int, programs: int, bytes_scale: float) -> float:
    """Return the cycles in which a multiprocessor runs a trace in each warp of ``programs`` programs.

    A memory instruction moves its bytes, times ``bytes_scale``.
    """
    per_cycle = gpu.bandwidth * 1e3 / gpu.clock / gpu.processors / SCHEDULERS
    everyone = [_Warp(program) for program in range(programs) for _ in range(max(1, warps // SCHEDULERS))]
    running = list(everyone)
    free: dict[str, float] = {"": 0.0}
    bus, now, last = 0.0, 0.0, None
    while running:
        best, at = None, math.inf
        for warp in running:
            if warp.blocked:
                continue
            step = trace[warp.place]
            earliest = max(warp.ready, free.get(step.pipe, 0.0))
            for k in step.waits:
                if warp.scoreboards[k] > earliest:
                    earliest = warp.scoreboards[k]
            if step.kind == "wait copies" and len(warp.copies) > step.depth:
                earliest = max(earliest, warp.copies[-1 - step.depth])
            elif step.kind == "wait products" and len(warp.products) > step.depth:
                earliest = max(earliest, warp.products[-1 - step.depth])
            earliest = max(earliest, now)
            if earliest < at or (earliest == at and warp is last):
                best, at = warp, earliest
        if best is None:
            raise RuntimeError("every warp waits at a barrier: the trace does not fit the launch")
        step, last, now = trace[best.place], best, at + 1
        if step.pipe:
            free[step.pipe] = at + step.held
        done = at + step.latency
        if step.moved:
            bus = max(bus, at) + step.moved * bytes_scale / per_cycle
            if step.kind != "STG":
                done = max(bus, at) + (gpu.cache_latency if step.narrow else gpu.latency)
        if step.kind == "LDGSTS":
            best.copied, done = max(best.copied, done), at + step.latency
        elif step.kind == "LDGDEPBAR":
            best.copies.append(best.copied)
        elif step.kind.startswith("HGMMA"):
            best.multiplied = at + step.held + step.latency
            if step.kind == "HGMMA.last":
                best.products.append(best.multiplied)
        if step.sets != NOTHING:
            best.scoreboards[step.sets] = max(best.scoreboards[step.sets], done)
        if step.reads != NOTHING:
            best.scoreboards[step.reads] = max(best.scoreboards[step.reads], at + min(step.latency, 20))
        best.ready = at + step.stall
        best.place += 1
        if step.kind == "BAR":
            best.blocked = True
            own = [warp for warp in running if warp.program == best.program]
            if all(warp.blocked for warp in own):
                for warp in own:
                    warp.blocked, warp.ready = False, max(warp.ready, at + BARRIER_CYCLES)
        if best.place == len(trace):
            running.remove(best)
    return max(now, bus)


class Cycles(NamedTuple):
    """Cycles of a program: once, and per iteration of its main loop."""

    once: float
    loop: float


def cycles(code: Code, gpu: Gpu, num_warps: int, programs: int, bytes_of_iteration: float | None = None) -> Cycles:
    """Model ``programs`` resident programs, of which an iteration moves ``bytes_of_iteration`` to and from memory."""
    first_level = gpu.cache_bytes - programs * (code.shared_bytes + 1024)
    spills_stay = programs * num_warps * 32 * code.stack_bytes <= first_level
    timed = [_timed(i, gpu, spills_stay=spills_stay) for i in code.instructions]
    exits = [k for k, i in enumerate(code.instructions) if i.text == "EXIT" and k >= code.end]
    before, loop = timed[: code.begin], timed[code.begin : code.end]
    after = timed[code.end : exits[0] if exits else len(timed)]
    scale = 1.0
    if bytes_of_iteration is not None:
        moved = sum(step.moved for step in loop) * num_warps
        scale = bytes_of_iteration / moved
    few, many = 2, 5
    times = [simulate(before + loop * n + after, gpu, num_warps, programs, scale) for n in (few, many)]
    per_loop = (times[1] - times[0]) / (many - few)
    return Cycles(times[0] - few * per_loop, per_loop)


def bytes_of_chunk(kind: str, d_state: int, head_dim: int, chunk: int, element: int, *, full: bool) -> int:
    """Count what one iteration of a kernel of the recurrence moves to and from memory."""
    x, b, vector = chunk * head_dim * element, chunk * d_state * element, chunk * 4
    state = d_state * head_dim * element
    name, _, gradients = kind.partition(" ")
    if name == "segments":
        return x + b + vector
    moved = 2 * x + 2 * b + state + 3 * vector + (2 * vector if full else 0)
    if name == "backward":
        moved += ("C" in gradients) * (b + vector) + ("B" in gradients) * b + ("X" in gradients) * (x + vector)
    return moved


def milliseconds(
    code: Code, gpu: Gpu, num_warps: int, programs: int, chunks: int, bytes_of_iteration: float | None = None
) -> float:
    """Return the time of a kernel whose programs run ``chunks`` iterations each."""
    most = programs_per_processor(code, num_warps, gpu)
    total, left = 0.0, programs
    while left > 0:
        resident = min(most, math.ceil(left / gpu.processors))
        waves = max(1, left // (resident * gpu.processors))
        once, loop = cycles(code, gpu, num_warps, resident, bytes_of_iteration)
        total += waves * (once + loop * chunks)
        left -= waves * resident * gpu.processors
    return total / gpu.clock / 1e6
