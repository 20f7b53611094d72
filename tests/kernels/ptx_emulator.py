"""An emulator of the PTX that triton emits for sm_80 and sm_90: one program at a time, a numpy lane
for each thread.

`Program` translates each basic block into a Python function; `Program.run` executes a grid. Besides
the arithmetic it models what a compiled kernel can get wrong without an error message:

- every access to global memory lies inside an argument, every one to shared memory inside what was
  allocated;
- two warps meet at a barrier between a write and another access of the same bytes (`Memory`);
- `cp.async` delivers at its wait and not before; until then nobody reads or writes its bytes;
- `wgmma` reads shared memory until its wait, of what was stored only what a proxy fence has
  published; its sums are NaN until then;
- registers and shared memory hold junk before the first write.

Lanes of one warp count as ordered. What ptxas makes of the PTX is not checked, nor is the
approximation of exp2."""

from __future__ import annotations

import copy
import functools
import re
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

U8 = np.uint8
U16 = np.uint16
U32 = np.uint32
U64 = np.uint64
I16 = np.int16
I32 = np.int32
I64 = np.int64
F32 = np.float32
F64 = np.float64
TYPES = {
    "pred": bool,
    "b8": U8,
    "u8": U8,
    "b16": U16,
    "u16": U16,
    "s16": I16,
    "bf16": U16,
    "b32": U32,
    "u32": U32,
    "s32": I32,
    "f32": F32,
    "b64": U64,
    "u64": U64,
    "s64": I64,
}
REGISTER_TYPES = {"%p": bool, "%rs": U16, "%r": U32, "%f": U32, "%rd": U64}
# A NaN where it can be one
JUNK = {bool: False, U16: 0x7FC1, U32: 0x7FC0BAD1, U64: 0xDEADBEEFDEADBEEF}
NAN = np.array(0x7FFFFFFF, U32).view(F32)[()]
WARP = 32
COLUMNS = 16  # most warps of a program: each has a byte, so that several can note an access at once
LONGEST_RUN = 100_000  # basic blocks of one program


class Fault(Exception):
    """An access out of bounds, a collective instruction without all threads, an endless loop."""


class Instruction(NamedTuple):
    """One PTX statement and the line of the kernel that it comes from."""

    guard: str  # "%p3", "!%p3" or ""
    op: str
    operands: tuple[str, ...]
    line: str

    def __str__(self) -> str:
        return f"{self.line}: {self.op} {', '.join(self.operands)}"[:100]


def parse(ptx: str) -> tuple[list[str], list[Instruction | str]]:
    """Return the names of the kernel's parameters, and its instructions and labels in order."""
    head, body = ptx.split("\n{\n", 1)
    parameters = re.findall(r"\.param [^,)]*?(\w+_param_\d+)", head)
    found: list[Instruction | str] = []
    line = ""
    for text in body[: body.rindex("\n}")].split("\n"):
        if match := re.match(r"\s*\.loc\s.*// (\S+)", text):
            line = match[1]
        text = text.split("//")[0].strip()
        if match := re.match(r"([$\w]+):$", text):
            found.append(match[1])
            continue
        for statement in text.split(";"):
            match = re.match(r"(?:@(!?%\w+)\s+)?([a-z][\w.:]*)\s*(.*)", statement.strip(), re.S)
            if match:
                operands = re.findall(
                    r"(?:\{[^}]*\}|\[[^\]]*\]|[^,\s{[])+", match[3].replace("|", ",")
                )
                found.append(Instruction(match[1] or "", match[2], tuple(operands), line))
    return parameters, found


def members(operand: str) -> list[str]:
    """Return the registers of "{%r1, %r2}", or of a single one."""
    return [part.strip() for part in operand.strip("{} ").split(",")]


def register_type(name: str) -> type:
    """Return the unsigned type that holds a register's bits."""
    return REGISTER_TYPES.get(name.rstrip("0123456789"), U32)


def others(warp: np.ndarray) -> np.ndarray:
    """Mask `Memory.read_by` and `written_by` for all warps but one in each row."""
    mask = np.full((len(warp), COLUMNS), 255, U8)
    mask[np.arange(len(warp)), warp] = 0
    return mask.view(U64)[:, None]


class Memory:
    """Bytes, and which warps have read and written each of them since the last barrier."""

    def __init__(self, data: np.ndarray, name: str) -> None:
        self.data = data
        self.name = name
        size = len(data)
        self.readers = np.zeros((size, COLUMNS), U8)
        self.writers = np.zeros((size, COLUMNS), U8)
        self.read_by, self.written_by = self.readers.view(U64), self.writers.view(U64)
        self.landing = np.zeros(size, I16)  # cp.async that will write a byte
        self.pinned = np.zeros(size, I16)  # wgmma that may still read a byte
        self.unpublished = np.zeros(size, bool)  # written, and not yet seen by wgmma
        self.touched: list[np.ndarray] = []

    def forget(self) -> None:
        """Pass a barrier."""
        for index in self.touched:
            self.read_by[index] = self.written_by[index] = 0
        self.touched = []

    def read(
        self, index: np.ndarray, warp: np.ndarray, report: Callable[[str], None]
    ) -> np.ndarray:
        """Return the bytes at ``index``, [n, width]; row i is read by ``warp[i]``."""
        if (self.written_by[index] & others(warp)).any():
            report("reads what another warp wrote since the last barrier")
        if self.landing[index].any():
            report("reads what cp.async has not delivered")
        self.readers[index, warp[:, None]] = 1
        self.touched.append(index)
        return self.data[index]

    def claim(
        self,
        index: np.ndarray,
        warp: np.ndarray,
        changed: np.ndarray,
        report: Callable[[str], None],
    ) -> None:
        """Check that these warps may write here; ``changed`` says which bytes would get another
        value."""
        if ((self.written_by[index] & others(warp)).any(-1) & changed).any():
            report("writes what another warp wrote since the last barrier")
        if (self.read_by[index] & others(warp)).any():
            report("writes what another warp read since the last barrier")
        if self.landing[index].any():
            report("writes where cp.async will deliver")
        if self.pinned[index].any():
            report("writes what wgmma may still read")

    def write(
        self, index: np.ndarray, warp: np.ndarray, values: np.ndarray, report: Callable[[str], None]
    ) -> None:
        """Store ``values`` [n, width]; row i is written by ``warp[i]``."""
        self.claim(index, warp, self.data[index] != values, report)
        self.data[index] = values
        self.writers[index, warp[:, None]] = 1
        if ((self.written_by[index] & others(warp)).any(-1) & (self.data[index] != values)).any():
            report("writes one value, and another warp another")
        self.unpublished[index] = True
        self.touched.append(index)


class Registers(dict):
    """Values by register name; those never written hold junk."""

    def __init__(self, n_threads: int) -> None:
        super().__init__()
        self.n_threads = n_threads

    def __missing__(self, name: str) -> np.ndarray:
        kind = register_type(name)
        return np.full(self.n_threads, JUNK[kind], kind)


class CTA:
    """The state of one program and the instructions that are more than an expression. R maps names
    to registers."""

    def __init__(
        self, program: Program, shared_bytes: int, buffers: Sequence[tuple[int, Memory]]
    ) -> None:
        self.program = program
        self.n_threads = program.n_threads
        self.buffers = buffers
        self.R = Registers(self.n_threads)
        self.shared = Memory(np.full(max(shared_bytes, 16), 0xCD, U8), "shared")
        self.thread = np.arange(self.n_threads)
        self.warp = self.thread // WARP
        self.active = np.ones(self.n_threads, bool)
        # Cp.async: committed groups, the last one open
        self.copies: list[list[Callable[[], None]]] = [[]]
        self.sums: dict[str, np.ndarray] = {}  # of wgmma in flight, by register
        # Wgmma, as `copies`
        self.products: list[list[tuple[dict[str, np.ndarray], list[np.ndarray]]]] = [[]]

    def report(self, number: int) -> Callable[[str], None]:
        """Return a function that notes what is wrong with an instruction."""
        return lambda what: self.program.findings.update(
            [f"{self.program.instructions[number]} {what}"]
        )

    def together(self, number: int) -> None:
        """Raise unless every thread takes part."""
        if not self.active.all():
            raise Fault(f"not every thread reaches {self.program.instructions[number]}")

    def barrier(self, number: int) -> None:
        self.together(number)
        self.shared.forget()
        for _, memory in self.buffers:
            memory.forget()

    # Loads and stores

    def places(
        self, space: str, address: np.ndarray, width: int, mask: np.ndarray, number: int
    ) -> list[tuple[Memory, np.ndarray, np.ndarray]]:
        """For each memory that is accessed: the threads that do it, and the index of their bytes,
        [n, width]."""
        found = []
        left = mask
        if (address[mask] % width).any():
            raise Fault(f"misaligned: {self.program.instructions[number]}")
        for base, memory in [(0, self.shared)] if space == "shared" else self.buffers:
            inside = left & (address >= base) & (address + width <= base + len(memory.data))
            if inside.any():
                threads = np.flatnonzero(inside)
                found.append(
                    (memory, threads, (address[threads] - base)[:, None] + np.arange(width))
                )
                left = left & ~inside
        if left.any():
            raise Fault(
                f"out of bounds: {self.program.instructions[number]}, thread "
                f"{np.flatnonzero(left)[0]}"
            )
        return found

    def load(
        self, space: str, address: np.ndarray, width: int, mask: np.ndarray, number: int
    ) -> np.ndarray:
        """Return the bytes of each thread, [threads, width]."""
        data = np.zeros((self.n_threads, width), U8)
        for memory, threads, index in self.places(space, address, width, mask, number):
            data[threads] = memory.read(index, self.warp[threads], self.report(number))
        return data

    def store(
        self, space: str, address: np.ndarray, data: np.ndarray, mask: np.ndarray, number: int
    ) -> None:
        for memory, threads, index in self.places(space, address, data.shape[1], mask, number):
            memory.write(index, self.warp[threads], data[threads], self.report(number))

    def copy(
        self,
        to: np.ndarray,
        source: np.ndarray,
        width: int,
        size: np.ndarray,
        mask: np.ndarray,
        number: int,
    ):
        """cp.async: ``size`` bytes of each thread, zeros up to ``width``."""
        data = self.load("global", source, width, mask & (size > 0), number)
        data[np.arange(width) >= size.astype(I64)[:, None]] = 0
        for memory, threads, index in self.places("shared", to, width, mask, number):
            memory.claim(index, self.warp[threads], np.ones(index.shape, bool), self.report(number))
            memory.landing[index] += 1

            def deliver(
                memory: Memory = memory, threads: np.ndarray = threads, index: np.ndarray = index
            ) -> None:
                memory.landing[index] -= 1
                memory.write(index, self.warp[threads], data[threads], self.report(number))
                # NVIDIA's and triton's own products have no fence for them
                memory.unpublished[index] = False

            self.copies[-1].append(deliver)

    def wait_for_copies(self, n_left: int) -> None:
        while len(self.copies) - 1 > n_left:
            for deliver in self.copies.pop(0):
                deliver()

    # Matrices. A register holds 8 rows of 4 words, one word a thread.

    def matrix_rows(
        self, address: np.ndarray, count: int, number: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Index of the bytes of 8 x 16 byte matrices, [warps * count * 8, 16], and the warp of each
        row."""
        self.together(number)
        rows = address.reshape(-1, 4, 8)[:, :count].reshape(-1)
        if (rows % 16).any() or (rows < 0).any() or (rows + 16 > len(self.shared.data)).any():
            raise Fault(f"out of bounds or misaligned: {self.program.instructions[number]}")
        return rows[:, None] + np.arange(16), np.repeat(
            np.arange(self.n_threads // WARP), count * 8
        )

    def load_matrices(
        self, address: np.ndarray, count: int, transposed: bool, number: int
    ) -> np.ndarray:
        """ldmatrix: the words of ``count`` registers, [count, threads]."""
        index, warp = self.matrix_rows(address, count, number)
        tiles = (
            self.shared.read(index, warp, self.report(number)).view(U16).reshape(-1, count, 8, 8)
        )
        if transposed:
            tiles = np.ascontiguousarray(tiles.swapaxes(2, 3))
        return np.ascontiguousarray(
            tiles.view(U32).reshape(-1, count, WARP).swapaxes(0, 1)
        ).reshape(count, -1)

    def store_matrices(
        self, address: np.ndarray, registers: list[np.ndarray], transposed: bool, number: int
    ) -> None:
        count = len(registers)
        words = np.stack([register.view(U32).reshape(-1, WARP) for register in registers], 1)
        tiles = words.view(U16).reshape(-1, 8, 8)
        if transposed:
            tiles = np.ascontiguousarray(tiles.swapaxes(1, 2))
        index, warp = self.matrix_rows(address, count, number)
        self.shared.write(index, warp, tiles.view(U8).reshape(-1, 16), self.report(number))

    def multiply(
        self, sums: list[str], a: list[str], b: list[str], start: list[str], wide: bool, number: int
    ) -> None:
        """mma.sync with a [16, k] and b [k, 8] of bf16 (``wide``: tf32) in registers."""
        self.together(number)
        left = self.fragment(a, wide)
        right = self.fragment(b, wide)
        total = accumulator([self.R[name] for name in start]) + left @ right.swapaxes(1, 2)
        self.R.update(zip(sums, scatter(total)))

    def fragment(self, names: list[str], wide: bool) -> np.ndarray:
        """Operand of products from registers: [warps, 8 or 16 rows, k]; four registers are two rows
        of blocks."""
        words = np.stack([self.R[name].view(U32).reshape(-1, 8, 4) for name in names])
        blocks = numbers(words, wide).reshape(2, len(names) // 2, *words.shape[1:3], -1)
        return blocks.transpose(2, 1, 3, 0, 4).reshape(words.shape[1], 4 * len(names), -1)

    def multiply_groups(
        self,
        sums: list[str],
        a: str,
        b: str,
        add: np.ndarray,
        transposed: tuple[bool, bool],
        wide: bool,
        number: int,
    ) -> None:
        """wgmma: four warps multiply [64, k] and [k, n]; in flight until waited for."""
        self.together(number)
        pinned: list[np.ndarray] = []
        n = len(sums) * 2
        groups = self.n_threads // 128
        right = self.described(b, n, transposed[1], wide, pinned, number)
        if a.startswith("{"):
            left = self.fragment(members(a), wide).reshape(groups, 64, -1)
        else:
            left = self.described(a, 64, transposed[0], wide, pinned, number)
        start = accumulator([self.sums.get(name, self.R[name]) for name in sums]).reshape(
            groups, 64, n
        )
        total = np.where(add.reshape(groups, -1)[:, :1, None], start, 0) + left @ right.swapaxes(
            1, 2
        )
        values = dict(zip(sums, scatter(total.reshape(-1, 16, n))))
        self.sums.update(values)
        self.R.update(dict.fromkeys(sums, np.full(self.n_threads, JUNK[U32], U32)))
        self.products[-1].append((values, pinned))

    def wait_for_products(self, n_left: int) -> None:
        while len(self.products) - 1 > n_left:
            for values, pinned in self.products.pop(0):
                for name, value in values.items():
                    self.R[name] = value
                    if self.sums.get(name) is value:
                        del self.sums[name]
                for index in pinned:
                    self.shared.pinned[index] -= 1

    def described(
        self,
        name: str,
        rows: int,
        transposed: bool,
        wide: bool,
        pinned: list[np.ndarray],
        number: int,
    ) -> np.ndarray:
        """Operand in shared memory, [groups, rows, k], from the descriptor in a register: 32 bytes
        of k."""
        found = []
        for descriptor in self.R[name].view(U64).reshape(-1, 128).tolist():
            if len(set(descriptor)) > 1:
                raise Fault(f"descriptors differ: {self.program.instructions[number]}")
            start, leading, stride = ((descriptor[0] >> bit & 0x3FFF) << 4 for bit in (0, 16, 32))
            line = {1: 128, 2: 64, 3: 32}[descriptor[0] >> 62]  # bytes that are swizzled together
            row, k = np.ogrid[:rows, : 8 if wide else 16]
            if transposed:  # k lines of `line` bytes, each with line / 2 rows
                address = (
                    start
                    + row // (line // 2) * leading
                    + k // 8 * stride
                    + k % 8 * line
                    + row % (line // 2) * 2
                )
            else:
                address = start + row // 8 * stride + row % 8 * line + k * (4 if wide else 2)
            address = address ^ ((address >> 7 & (line // 16 - 1)) << 4)
            index = (address[..., None] + np.arange(4 if wide else 2)).reshape(rows, -1)
            memory = self.shared
            report = self.report(number)
            if (index >= len(memory.data)).any():
                raise Fault(f"out of bounds: {self.program.instructions[number]}")
            if memory.written_by[index].any():
                report("reads what was written since the last barrier")
            if memory.unpublished[index].any():
                report("reads what no fence.proxy.async has published")
            found.append(memory.read(index, np.zeros(rows, int), report))
            memory.readers[index, : self.n_threads // WARP] = 1
            memory.pinned[index] += 1
            pinned.append(index)
        return numbers(np.stack(found).view(U32), wide)

    # Within warps

    def shuffle(
        self, value: np.ndarray, by: np.ndarray, bounds: np.ndarray, mode: str, number: int
    ) -> np.ndarray:
        lane = self.thread % WARP
        by = by.astype(I64) & 31
        bounds = bounds.astype(I64)
        segment = bounds >> 8 & 31
        limit = bounds & 31
        first = lane & segment
        last = (lane & segment) | (limit & ~segment)
        lanes = {
            "bfly": lane ^ by,
            "up": lane - by,
            "down": lane + by,
            "idx": first | (by & ~segment & 31),
        }[mode]
        source = (
            self.thread
            - lane
            + np.where(lanes >= last if mode == "up" else lanes <= last, lanes, lane)
        )
        if not self.active[source][self.active].all():
            self.report(number)("reads a thread that takes no part")
        return value[source]


def numbers(words: np.ndarray, wide: bool) -> np.ndarray:
    """The bf16 (``wide``: tf32) numbers in 32-bit words, along the last axis, as float64."""
    if wide:
        return (words & U32(0xFFFFE000)).view(F32).astype(F64)
    return (np.ascontiguousarray(words).view(U16).astype(U32) << U32(16)).view(F32).astype(F64)


def accumulator(registers: list[np.ndarray]) -> np.ndarray:
    """Sums of products as a matrix, [warps, 16, 8 * len / 4], in float64."""
    words = np.stack([register.view(F32) for register in registers]).reshape(
        -1, 2, 2, len(registers[0]) // WARP, 8, 4
    )
    return words.transpose(3, 1, 4, 0, 5, 2).reshape(words.shape[3], 16, -1).astype(F64)


def scatter(matrix: np.ndarray) -> np.ndarray:
    """The inverse of `accumulator`: [registers, threads]."""
    blocks = matrix.astype(F32).reshape(len(matrix), 2, 8, -1, 4, 2).transpose(3, 1, 5, 0, 2, 4)
    return np.ascontiguousarray(blocks).reshape(-1, len(matrix) * WARP)


# What the translated code calls, by name


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Round to nearest even."""
    bits = x.view(U32).astype(U64)
    return np.where(
        np.isnan(x),
        U16(0x7FFF),
        ((bits + U64(0x7FFF) + (bits >> U64(16) & U64(1))) >> U64(16)).astype(U16),
    )


def one_nan(x: np.ndarray) -> np.ndarray:
    """Results of fp32 arithmetic: PTX has one NaN for them, whichever NaNs are the operands."""
    return np.where(x == x, x, NAN)


def to_tf32(x: np.ndarray) -> np.ndarray:
    """Round to nearest, ties away from zero."""
    return np.where(np.isfinite(x), (x.view(U32) + U32(0x1000)) & U32(0xFFFFE000), x.view(U32))


def shifted(value: np.ndarray, by: np.ndarray, left: bool) -> np.ndarray:
    """Shift, by more than the width too."""
    width = value.dtype.itemsize * 8
    by = np.minimum(by.astype(I64), 63)
    if left:
        return np.where(by >= width, 0, value.astype(U64) << by.astype(U64)).astype(value.dtype)
    wide = I64 if value.dtype.kind == "i" else U64
    return (value.astype(wide) >> by.astype(wide)).astype(value.dtype)


def field(value: np.ndarray, first: np.ndarray, length: np.ndarray) -> np.ndarray:
    """bfe: a bit field, with its sign if the value has one."""
    bits = value.astype(I64) >> (first.astype(I64) & 255) & ((1 << length.astype(I64)) - 1)
    if value.dtype.kind == "i":
        top = 1 << np.maximum(length.astype(I64) - 1, 0)
        bits = (bits ^ top) - top
    return bits.astype(value.dtype)


def permuted(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """prmt: four bytes, each chosen out of eight."""
    choices = np.stack([a, b], 1).view(U8)
    picked = selector[:, None] >> (4 * np.arange(4, dtype=U32))
    data = np.take_along_axis(choices, (picked & 7).astype(I64), 1)
    return (
        np.where(picked & 8, np.where(data & 128, U8(255), U8(0)), data).astype(U8).view(U32)[:, 0]
    )


def quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Divide integers, toward zero."""
    return (np.sign(a) * np.sign(b) * (abs(a) // np.maximum(abs(b), 1))).astype(a.dtype)


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return (a.astype(F64) * b + c).astype(F32)


def packed(parts: Sequence[np.ndarray], kind: type) -> np.ndarray:
    return np.ascontiguousarray(np.stack(parts, 1)).view(kind)[:, 0]


COMPARISONS = {
    "eq": "({1} == {2})",
    "ne": "({1} != {2})",
    "lt": "({1} < {2})",
    "le": "({1} <= {2})",
    "gt": "({1} > {2})",
    "ge": "({1} >= {2})",
    "neu": "~({1} == {2})",
    "ltu": "~({1} >= {2})",
    "leu": "~({1} > {2})",
    "gtu": "~({1} <= {2})",
    "geu": "~({1} < {2})",
    "equ": "~(({1} < {2}) | ({1} > {2}))",
    "num": "~(np.isnan({1}) | np.isnan({2}))",
    "nan": "(np.isnan({1}) | np.isnan({2}))",
}
# {n} is operand n in the type of the instruction, {u n} as a shift or selector (u32), {p n} as a
# predicate
EXPRESSIONS = {
    "add": "({1} + {2})",
    "sub": "({1} - {2})",
    "mul": "({1} * {2})",
    "mad": "({1} * {2} + {3})",
    "fma": "fused({1}, {2}, {3})",
    "and": "({1} & {2})",
    "or": "({1} | {2})",
    "xor": "({1} ^ {2})",
    "not": "(~{1})",
    "neg": "(-{1})",
    "abs": "abs({1})",
    "min": "np.fmin({1}, {2})",
    "max": "np.fmax({1}, {2})",
    "mov": "{1}",
    "ex2": "np.exp2({1})",
    "lg2": "np.log2({1})",
    "rcp": "(F32(1) / {1})",
    "sqrt": "np.sqrt({1})",
    "rsqrt": "(F32(1) / np.sqrt({1}))",
    "selp": "np.where({p3}, {1}, {2})",
    "shl": "shifted({1}, {u2}, True)",
    "shr": "shifted({1}, {u2}, False)",
    "bfe": "field({1}, {u2}, {u3})",
    "prmt": "permuted({1}, {2}, {3})",
    "div": "quotient({1}, {2})",
    "rem": "({1} - {2} * quotient({1}, {2}))",
}


class Block(NamedTuple):
    """A basic block: its code, the registers it writes, and where control goes."""

    execute: Callable[[CTA, Registers], None]
    writes: frozenset[str]
    guard: str
    target: int
    following: int


class Program:
    """A kernel, translated."""

    def __init__(self, ptx: str, n_threads: int) -> None:
        self.n_threads = n_threads
        self.findings: Counter[str] = Counter()
        self.parameters, statements = parse(ptx)
        self.instructions = [
            statement for statement in statements if isinstance(statement, Instruction)
        ]
        self.names: dict[str, object] = {
            **globals(),
            **{kind.__name__: kind for kind in TYPES.values()},
        }
        self.blocks = self._blocks(statements)

    def run(
        self, grid: Sequence[int], arguments: Sequence[int], shared_bytes: int, buffers, order
    ) -> Counter[str]:
        """Execute the programs in ``order`` and return what was found. Arguments are the bits of
        the parameters."""
        self.findings.clear()
        with np.errstate(all="ignore"):
            for place in order:
                cta = CTA(self, shared_bytes, buffers)
                for axis, at, size in zip("xyz", place, grid):
                    cta.R[f"%ctaid.{axis}"] = np.full(self.n_threads, at, U32)
                    cta.R[f"%nctaid.{axis}"] = np.full(self.n_threads, size, U32)
                cta.R["%tid.x"] = cta.thread.astype(U32)
                cta.R["%laneid"] = (cta.thread % WARP).astype(U32)
                for name, bits in zip(self.parameters, [*arguments, 0, 0, 0]):
                    cta.R[name] = np.full(self.n_threads, bits & (1 << 64) - 1, U64)
                self._run_one(cta)
                cta.barrier(0)
        return self.findings

    def _run_one(self, cta: CTA) -> None:
        R = cta.R
        end = len(self.blocks)
        at = np.zeros(self.n_threads, int)
        for _ in range(LONGEST_RUN):
            here = at.min()
            if here == end:
                cta.active[:] = True
                return
            block = self.blocks[here]
            active = cta.active = at == here
            before = None if active.all() else copy.copy(R)
            block.execute(cta, R)
            if before is not None:
                for name in block.writes:
                    kind = register_type(name)
                    R[name] = np.where(active, R[name].view(kind), before[name].view(kind))
            taken = np.ones(self.n_threads, bool)
            if block.guard:
                taken = ~R[block.guard[1:]] if block.guard[0] == "!" else R[block.guard]
            at = np.where(active, np.where(taken, block.target, block.following), at)
        raise Fault("an endless loop")

    def _blocks(self, statements: Sequence[Instruction | str]) -> list[Block]:
        """Basic blocks in reverse postorder, in which threads that went different ways meet
        again."""
        bodies: list[list[tuple[int, Instruction]]] = [[]]
        labels: dict[str, int] = {}
        number = 0
        for statement in statements:
            if isinstance(statement, str):
                if bodies[-1]:
                    bodies.append([])
                labels[statement] = len(bodies) - 1
                continue
            bodies[-1].append((number, statement))
            if statement.op.partition(".")[0] in ("bra", "ret"):
                bodies.append([])
            number += 1

        end = len(bodies)
        edges = []
        for place, body in enumerate(bodies):
            last = body[-1][1] if body else None
            jumps = last is not None and last.op.partition(".")[0] in ("bra", "ret")
            target = (labels[last.operands[0]] if last.operands else end) if jumps else place + 1
            edges.append((last.guard if jumps else "", target, place + 1))

        def successors(place: int) -> Iterator[int]:
            guard, target, following = edges[place]
            return iter((following, target) if guard else (target,))

        order: list[int] = []
        seen = {0, end}
        path = [(0, successors(0))]
        while path:  # a kernel has more blocks than Python allows calls within calls
            place, rest = path[-1]
            new = next((successor for successor in rest if successor not in seen), None)
            if new is None:
                order.append(path.pop()[0])
            else:
                seen.add(new)
                path.append((new, successors(new)))

        rank = {place: n for n, place in enumerate(reversed(order))} | {end: len(order)}
        found = []
        for place in reversed(order):
            guard, target, following = edges[place]
            body = [
                item for item in bodies[place] if item[1].op.partition(".")[0] not in ("bra", "ret")
            ]
            execute, writes = self._translate(place, body)
            found.append(
                Block(execute, writes, guard, rank[target], rank.get(following, len(order)))
            )
        return found

    def _translate(
        self, place: int, body
    ) -> tuple[Callable[[CTA, Registers], None], frozenset[str]]:
        lines = [f"def block_{place}(cta, R):", "    pass"]
        writes = set()
        for number, instruction in body:
            try:
                lines += [f"    {line}" for line in self._statements(number, instruction, writes)]
            except (KeyError, ValueError) as error:
                raise NotImplementedError(f"cannot emulate {instruction}") from error
        exec(_compiled("\n".join(lines)), self.names)
        return self.names[f"block_{place}"], frozenset(writes)  # type: ignore[return-value]

    def _operand(self, text: str, kind: type) -> str:
        """Python for an operand's value in a type."""
        if text.startswith("!"):
            return f"(~{self._operand(text[1:], kind)})"
        if text.startswith("%"):
            low = (
                ""
                if np.dtype(register_type(text)).itemsize == np.dtype(kind).itemsize
                else f".astype({_bits(kind)})"
            )
            return f'R["{text}"]' if kind is bool else f'R["{text}"]{low}.view({kind.__name__})'
        name = f"constant_{kind.__name__}_{text.replace('-', 'minus_')}"
        if name not in self.names:
            value = (
                0
                if text == "global_smem"
                else int(text[2:], 16)
                if text[:2] == "0f"
                else int(text.rstrip("U"), 0)
            )
            bits = {bool: bool, F32: U32, I16: U16, I32: U32, I64: U64}.get(kind, kind)
            value = value != 0 if kind is bool else value & (1 << 8 * np.dtype(kind).itemsize) - 1
            self.names[name] = np.full(self.n_threads, value, bits).view(kind)
        return name

    def _address(self, text: str) -> str:
        base, _, offset = text.strip("[] ").partition("+")
        base = base.strip()
        kind = register_type(base) if base.startswith("%") else U32
        return f"({self._operand(base, kind)}.astype(I64) + {int(offset or '0', 0)})"

    def _statements(self, number: int, instruction: Instruction, writes: set[str]) -> list[str]:
        """Python for one instruction."""
        guard, op, operands, _ = instruction
        parts = op.split(".")
        name = parts[0]
        kind = TYPES.get(parts[-1], U32)
        predicate = self._operand(guard, bool) if guard else ""
        mask = f"cta.active & {predicate}" if guard else "cta.active"

        def assign(register: str, value: str) -> str:
            writes.add(register)
            if not guard:
                return f'R["{register}"] = {value}'
            bits = register_type(register).__name__
            return f'R["{register}"] = np.where({predicate}, ({value}).view({bits}), R["{register}"].view({bits}))'

        if name in ("bar", "barrier"):
            return [] if "warp" in parts else [f"cta.barrier({number})"]
        if name == "fence":
            return ["cta.shared.unpublished[:] = False"] if "proxy" in parts else []
        if name == "ld" and parts[1] == "param":
            register = operands[0]
            wide = register_type(operands[0])
            value = f'R["{operands[1].strip("[] ")}"]'
            if parts[-1] == "s32":
                value += ".astype(U32).view(I32).astype(I64)"
            return [assign(register, f"{value}.astype({wide.__name__})")]
        if name in ("ld", "st"):
            space = parts[1].partition("::")[0]
            registers, address = (
                (operands[0], operands[1]) if name == "ld" else (operands[1], operands[0])
            )
            names = members(registers)
            size = np.dtype(kind).itemsize
            place = f'"{space}", {self._address(address)}'
            if name == "st":
                values = ", ".join(
                    f"{self._operand(r, register_type(r) if r[0] == '%' else kind)}" for r in names
                )
                data = f"packed([v.astype({_bits(kind)}) for v in ({values},)], {_bits(kind)}).view(U8)"
                if len(names) > 1:
                    data = f"np.stack([{values}], 1).view(U8)"
                return [f"cta.store({place}, {data}.reshape(cta.n_threads, -1), {mask}, {number})"]
            lines = [
                f"data = cta.load({place}, {size * len(names)}, {mask}, "
                f"{number}).view({kind.__name__})"
            ]
            for column, register in enumerate(names):
                bits = register_type(register)
                widen = f".astype({bits.__name__})" if np.dtype(bits).itemsize != size else ""
                lines.append(assign(register, f"np.ascontiguousarray(data[:, {column}]){widen}"))
            return lines
        if name == "cp":
            if "commit_group" in op:
                return ["cta.copies.append([])"]
            if "wait" in op:
                return [f"cta.wait_for_copies({operands[0] if operands else 0})"]
            width = int(operands[2], 0)
            size = self._operand(operands[3] if len(operands) > 3 else str(width), U32)
            to = self._address(operands[0])
            source = self._address(operands[1])
            return [f"cta.copy({to}, {source}, {width}, {size}, {mask}, {number})"]
        if name == "ldmatrix":
            names = members(operands[0])
            lines = [
                f"data = cta.load_matrices({self._address(operands[1])}, {len(names)}, "
                f"{'trans' in parts}, {number})"
            ]
            return lines + [
                assign(register, f"data[{place}]") for place, register in enumerate(names)
            ]
        if name == "stmatrix":
            values = ", ".join(self._operand(register, U32) for register in members(operands[1]))
            return [
                f"cta.store_matrices({self._address(operands[0])}, [{values}], {'trans' in parts}, "
                f"{number})"
            ]
        if name == "mma":
            wide = {"m16n8k16": "bf16", "m16n8k8": "tf32"}[parts[3]] == "tf32"
            _require(parts[7] == ("tf32" if wide else "bf16"))
            writes.update(members(operands[0]))
            return [
                f"cta.multiply({', '.join(str(members(operand)) for operand in operands)}, {wide}, "
                f"{number})"
            ]
        if name == "wgmma":
            if parts[1] == "fence":
                return []
            if parts[1] == "commit_group":
                return ["cta.products.append([])"]
            if parts[1] == "wait_group":
                return [f"cta.wait_for_products({operands[0]})"]
            wide = parts[-1] == "tf32"
            _require(wide or parts[-1] == "bf16")
            sums, a, b, add, *signs = operands
            _require(signs[:2] == ["1", "1"])
            transposed = (
                (False, False) if wide else (signs[-2] == "1" and a[0] != "{", signs[-1] == "1")
            )
            writes.update(members(sums))
            addend = self._operand(add, bool)
            return [
                f'cta.multiply_groups({members(sums)}, "{a}", "{b}", {addend}, {transposed}, {wide}, {number})'
            ]
        if name == "shfl":
            value, by, bounds = (self._operand(operand, U32) for operand in operands[-4:-1])
            return [
                assign(operands[0], f'cta.shuffle({value}, {by}, {bounds}, "{parts[2]}", {number})')
            ]
        if name == "mov" and operands[1].startswith("{"):
            whole = ", ".join(
                self._operand(part, register_type(part)) for part in members(operands[1])
            )
            return [assign(operands[0], f"packed([{whole}], {kind.__name__})")]
        if name == "mov" and operands[0].startswith("{"):
            names = members(operands[0])
            bits = {2: U16, 4: U32}[np.dtype(kind).itemsize // len(names)].__name__
            halves = f"{self._operand(operands[1], kind)}.view({bits}).reshape(-1, {len(names)})"
            return [
                assign(register, f"np.ascontiguousarray({halves}[:, {place}])")
                for place, register in enumerate(names)
                if register != "_"
            ]
        return [assign(operands[0], self._expression(name, parts, operands, kind))]

    def _expression(self, name: str, parts: list[str], operands: Sequence[str], kind: type) -> str:
        if name == "cvt":
            return self._conversion(parts, operands)
        if name == "setp":
            _require(len(operands) == 3)
            template = COMPARISONS[parts[1]]
        elif name in ("mul", "mad") and "wide" in parts:
            wide = {I32: I64, U32: U64}[kind]
            a, b = (
                f"{self._operand(operand, kind)}.astype({wide.__name__})"
                for operand in operands[1:3]
            )
            return (
                f"({a} * {b})"
                if name == "mul"
                else f"({a} * {b} + {self._operand(operands[3], wide)})"
            )
        elif name == "div" and kind is F32:
            template = "({1} / {2})"
        else:
            _require("hi" not in parts and "cc" not in parts)
            template = EXPRESSIONS[name]
        names = {str(place): operand for place, operand in enumerate(operands)}

        def fill(match: re.Match[str]) -> str:
            return self._operand(names[match[2]], {"p": bool, "u": U32}.get(match[1], kind))

        value = re.sub(r"\{([pu]?)(\d)\}", fill, template)
        return (
            f"one_nan({value})"
            if kind is F32 and name not in ("setp", "mov", "selp", "neg", "abs")
            else value
        )

    def _conversion(self, parts: list[str], operands: Sequence[str]) -> str:
        to, source = parts[-2:]
        value = self._operand(operands[1], TYPES[source])
        if to == "bf16x2":
            return f"packed([to_bf16({self._operand(operands[2], F32)}), to_bf16({value})], U32)"
        if to in ("bf16", "tf32"):
            _require(source == "f32")
            return f"to_{to}({value})"
        if source == "bf16":
            return f"({value}.astype(U32) << U32(16)).view(F32)"
        return f"{value}.astype({TYPES[to].__name__})"


@functools.lru_cache(None)
def _compiled(source: str) -> types.CodeType:
    return compile(source, "<a basic block>", "exec")


def _bits(kind: type) -> str:
    return f"U{8 * np.dtype(kind).itemsize}"


def _require(holds: bool) -> None:
    if not holds:
        raise ValueError
