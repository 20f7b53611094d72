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
        text = output_of("nvdisasm", "-c", "-hex", file.name)
        usage = output_of("cuobjdump", "-res-usage", file.name)
    instructions, labels = parse(text)
    begin, end = longest_loop(instructions, labels)
    registers = int(re.findall(r"REG:(\d+)", usage)[0])
    stack = int(re.findall(r"STACK:(\d+)", usage)[0])
    return Code(instructions, begin, end, registers, shared_bytes, stack)


def output_of(tool: str, *arguments: str) -> str:
    return subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True).stdout


def parse(text: str) -> tuple[list[Instruction], dict[str, int]]:
    """Return the instructions of a disassembly, and which one each label stands before.

    An instruction is two lines: its text with the low half of its encoding, then the high half with the control bits.
    """
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    pending = ""
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif first := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);\s*/\* 0x", line):
            pending = first[1].strip()
        elif pending and (second := re.match(r"\s*/\* (0x[0-9a-f]+) \*/\s*$", line)):
            control = int(second[1], 16) >> 41
            instruction = Instruction(
                pending,
                stall=control & 15,
                sets=control >> 5 & 7,
                reads=control >> 8 & 7,
                waits=control >> 11 & 63,
            )
            instructions.append(instruction)
            pending = ""
    return instructions, labels


def longest_loop(instructions: list[Instruction], labels: dict[str, int]) -> tuple[int, int]:
    """Return where the longest stretch that a branch goes back over begins and ends."""
    begin = 0
    end = 0
    for place, instruction in enumerate(instructions):
        branch = re.search(r"BRA.*?`\((\.L_x_\d+)\)", instruction.text)
        if branch is None:
            continue
        target = labels[branch[1]]
        if target < place and place - target >= end - begin:
            begin = target
            end = place + 1
    return begin, end


def programs_per_processor(code: Code, num_warps: int, gpu: Gpu) -> int:
    """Return how many programs are resident at once, by registers, shared memory and warps."""
    registers = math.ceil(code.registers / 8) * 8 * 32 * num_warps
    by_registers = (1 << 16) // registers
    by_shared_memory = gpu.shared_bytes // (code.shared_bytes + 1024)
    return min(by_registers, by_shared_memory, 64 // num_warps)


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
    """Return the bytes per lane of a load or store."""
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
    waits: tuple[int, ...] = ()
    pipe: str = ""
    held: float = 0.0  # cycles for which the pipe takes nothing else
    latency: int = 0
    moved: float = 0.0  # bytes to or from memory
    depth: int = 0  # groups that a wait leaves in flight

    @property
    def narrow(self) -> bool:
        """Return True for a load of the decays, which were written just before."""
        return 0 < self.moved < 512


def _timed(instruction: Instruction, gpu: Gpu, *, spills_stay: bool) -> _Timed:
    operation = instruction.operation
    base = operation.split(".")[0]
    timed = _Timed(
        base,
        stall=max(1, instruction.stall),
        sets=instruction.sets,
        reads=instruction.reads,
        waits=_waits(instruction),
        latency=_LATENCIES.get(base, 20),
    )
    if base in ("LDL", "STL") and not spills_stay:
        return timed._replace(
            pipe="second level", held=2 * _width(operation), latency=gpu.cache_latency
        )
    if base in ("LDS", "STS", "LDL", "STL"):
        return timed._replace(pipe="shared", held=_width(operation))
    if base in ("LDSM", "STSM"):
        matrices = int(operation[-1]) if operation[-1] in "24" else 1
        return timed._replace(pipe="shared", held=4 * matrices)
    if base == "SHFL":
        return timed._replace(pipe="shared", held=4)
    if base in ("LDG", "STG", "LDGSTS"):
        return timed._replace(pipe="shared", held=4, moved=32.0 * _width(operation))
    if base == "MUFU":
        return timed._replace(pipe="mufu", held=8)
    if base == "HMMA":
        inner = 8 if ".1688" in operation else 16
        return timed._replace(pipe="tensor", held=16 * 8 * inner / gpu.hmma)
    if base == "HGMMA":
        return _timed_group(timed, instruction, gpu)
    if base in _FMA:
        return timed._replace(pipe="fma", held=gpu.fp32_cycles)
    if base in _INTEGER_MULTIPLY:
        return timed._replace(pipe="fma", held=gpu.integer_multiply_cycles)
    if base in _ALU:
        return timed._replace(pipe="alu", held=2)
    if base == "DEPBAR" or operation.startswith("WARPGROUP.DEPBAR"):
        left = re.search(r", 0x([0-9a-f]+)", instruction.text)  # DEPBAR.LE SB0, 0x2, {4,1}
        if left is None:  # DEPBAR {4,1}: scoreboards alone
            return timed._replace(kind="none")
        kind = "wait copies" if base == "DEPBAR" else "wait products"
        return timed._replace(kind=kind, depth=int(left[1], 16))
    if base == "BAR" and "SYNC" not in operation:
        return timed._replace(kind="none")
    return timed


def _timed_group(timed: _Timed, instruction: Instruction, gpu: Gpu) -> _Timed:
    """Return the facts of a product by a group of four warps."""
    sizes = re.findall(r"\.(\d+)x(\d+)x(\d+)", instruction.operation)[0]
    rows, columns, inner = map(int, sizes)
    operands = columns
    # The left operand comes from shared memory too.
    if re.search(r"HGMMA\S* R\d+, gdesc", instruction.text):
        operands += rows
    multiplying = rows * columns * inner / SCHEDULERS / gpu.hgmma
    reading = operands * inner * 2 / 128
    kind = "HGMMA.last" if "gsb0" in instruction.text else "HGMMA"
    return timed._replace(kind=kind, pipe="tensor", held=max(multiplying, reading), latency=30)


def _waits(instruction: Instruction) -> tuple[int, ...]:
    """Return the scoreboards that an instruction waits for: those of its mask, and those that a DEPBAR names."""
    named = re.search(r"DEPBAR.*\{([\d,]+)\}", instruction.text)
    also = set(map(int, named[1].split(","))) if named else set()
    return tuple(k for k in range(6) if instruction.waits >> k & 1 or k in also)


class _Warp:
    def __init__(self, program: int) -> None:
        self.program = program
        self.place = 0
        self.ready = 0.0
        self.blocked = False
        self.scoreboards = [0.0] * 6
        # When what was begun of the open group is done, and when each committed group is.
        self.copied = 0.0
        self.copies: list[float] = []
        self.multiplied = 0.0
        self.products: list[float] = []

    def earliest(self, step: _Timed, free: dict[str, float]) -> float:
        """Return the first cycle in which this warp can issue its next instruction."""
        moment = max(self.ready, free.get(step.pipe, 0.0))
        for k in step.waits:
            if self.scoreboards[k] > moment:
                moment = self.scoreboards[k]
        if step.kind == "wait copies" and len(self.copies) > step.depth:
            moment = max(moment, self.copies[-1 - step.depth])
        elif step.kind == "wait products" and len(self.products) > step.depth:
            moment = max(moment, self.products[-1 - step.depth])
        return moment

    def issue(self, step: _Timed, at: float, done: float) -> None:
        """Take an instruction whose result is there at ``done``."""
        if step.kind == "LDGSTS":
            self.copied = max(self.copied, done)
            done = at + step.latency
        elif step.kind == "LDGDEPBAR":
            self.copies.append(self.copied)
        elif step.kind.startswith("HGMMA"):
            self.multiplied = at + step.held + step.latency
            if step.kind == "HGMMA.last":
                self.products.append(self.multiplied)
        if step.sets != NOTHING:
            self.scoreboards[step.sets] = max(self.scoreboards[step.sets], done)
        if step.reads != NOTHING:
            self.scoreboards[step.reads] = max(
                self.scoreboards[step.reads], at + min(step.latency, 20)
            )
        self.ready = at + step.stall
        self.place += 1


class _Scheduler:
    """One of a multiprocessor's four schedulers: its warps, its pipes, and its share of the bus."""

    def __init__(
        self, trace: list[_Timed], gpu: Gpu, warps: int, programs: int, bytes_scale: float
    ) -> None:
        self.trace = trace
        self.gpu = gpu
        self.per_cycle = gpu.bandwidth * 1e3 / gpu.clock / gpu.processors / SCHEDULERS
        self.bytes_scale = bytes_scale
        self.running: list[_Warp] = []
        for program in range(programs):
            for _ in range(max(1, warps // SCHEDULERS)):
                self.running.append(_Warp(program))
        self.free: dict[str, float] = {"": 0.0}
        self.bus = 0.0
        self.now = 0.0
        self.last: _Warp | None = None

    def step(self) -> None:
        """Issue the next instruction: of the warp that can go first, if several can of the one that just went."""
        warp, at = self.next_warp()
        step = self.trace[warp.place]
        self.last = warp
        self.now = at + 1
        if step.pipe:
            self.free[step.pipe] = at + step.held
        warp.issue(step, at, self.done(step, at))
        if step.kind == "BAR":
            self.wait_at_barrier(warp, at)
        if warp.place == len(self.trace):
            self.running.remove(warp)

    def next_warp(self) -> tuple[_Warp, float]:
        best = None
        at = math.inf
        for warp in self.running:
            if warp.blocked:
                continue
            earliest = max(warp.earliest(self.trace[warp.place], self.free), self.now)
            if earliest < at or (earliest == at and warp is self.last):
                best = warp
                at = earliest
        if best is None:
            raise RuntimeError("every warp waits at a barrier: the trace does not fit the launch")
        return best, at

    def done(self, step: _Timed, at: float) -> float:
        """Return when an instruction's result is there; what moves bytes also waits for the bus."""
        if not step.moved:
            return at + step.latency
        self.bus = max(self.bus, at) + step.moved * self.bytes_scale / self.per_cycle
        if step.kind == "STG":
            return at + step.latency
        latency = self.gpu.cache_latency if step.narrow else self.gpu.latency
        return max(self.bus, at) + latency

    def wait_at_barrier(self, warp: _Warp, at: float) -> None:
        """Block a warp until the last one of its program arrives."""
        warp.blocked = True
        own = [other for other in self.running if other.program == warp.program]
        if all(other.blocked for other in own):
            for other in own:
                other.blocked = False
                other.ready = max(other.ready, at + BARRIER_CYCLES)


def simulate(trace: list[_Timed], gpu: Gpu, warps: int, programs: int, bytes_scale: float) -> float:
    """Return the cycles in which a multiprocessor runs a trace in each warp of ``programs`` programs.

    A memory instruction moves its bytes, times ``bytes_scale``.
    """
    scheduler = _Scheduler(trace, gpu, warps, programs, bytes_scale)
    while scheduler.running:
        scheduler.step()
    return max(scheduler.now, scheduler.bus)


class Cycles(NamedTuple):
    """Cycles of a program: once, and per iteration of its main loop."""

    once: float
    loop: float


def cycles(
    code: Code, gpu: Gpu, num_warps: int, programs: int, bytes_of_iteration: float | None = None
) -> Cycles:
    """Model ``programs`` resident programs, of which an iteration moves ``bytes_of_iteration`` to and from memory."""
    first_level = gpu.cache_bytes - programs * (code.shared_bytes + 1024)
    spills_stay = programs * num_warps * 32 * code.stack_bytes <= first_level
    timed = [_timed(i, gpu, spills_stay=spills_stay) for i in code.instructions]
    exits = [k for k, i in enumerate(code.instructions) if i.text == "EXIT" and k >= code.end]
    last = exits[0] if exits else len(timed)
    before = timed[: code.begin]
    loop = timed[code.begin : code.end]
    after = timed[code.end : last]
    scale = 1.0
    if bytes_of_iteration is not None:
        moved = sum(step.moved for step in loop) * num_warps
        scale = bytes_of_iteration / moved
    # The difference of two counts of iterations leaves out what is done once.
    few, many = 2, 5
    of_few = simulate(before + loop * few + after, gpu, num_warps, programs, scale)
    of_many = simulate(before + loop * many + after, gpu, num_warps, programs, scale)
    per_loop = (of_many - of_few) / (many - few)
    return Cycles(of_few - few * per_loop, per_loop)


def bytes_of_chunk(
    kind: str, d_state: int, head_dim: int, chunk: int, element: int, *, full: bool
) -> int:
    """Count what one iteration of a kernel of the recurrence moves to and from memory."""
    x = chunk * head_dim * element
    b = chunk * d_state * element
    vector = chunk * 4
    state = d_state * head_dim * element
    name, _, gradients = kind.partition(" ")
    if name == "segments":
        return x + b + vector
    moved = 2 * x + 2 * b + state + 3 * vector
    if full:
        moved += 2 * vector
    if name == "backward":
        moved += ("C" in gradients) * (b + vector)
        moved += ("B" in gradients) * b
        moved += ("X" in gradients) * (x + vector)
    return moved


def milliseconds(
    code: Code,
    gpu: Gpu,
    num_warps: int,
    programs: int,
    chunks: int,
    bytes_of_iteration: float | None = None,
) -> float:
    """Return the time of a kernel whose programs run ``chunks`` iterations each."""
    most = programs_per_processor(code, num_warps, gpu)
    total = 0.0
    left = programs
    while left > 0:
        resident = min(most, math.ceil(left / gpu.processors))
        waves = max(1, left // (resident * gpu.processors))
        once, loop = cycles(code, gpu, num_warps, resident, bytes_of_iteration)
        total += waves * (once + loop * chunks)
        left -= waves * resident * gpu.processors
    return total / gpu.clock / 1e6
