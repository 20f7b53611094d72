"""The state of one program, and the instructions that are more than an expression."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from .matrices import WARP, accumulator, described_bytes, fragment, numbers, scatter
from .memory import Fault, Memory, Report
from .text import I64, U8, U16, U32, U64, members, register_type

if TYPE_CHECKING:
    from .program import Program

# A NaN where it can be one
JUNK = {bool: False, U16: 0x7FC1, U32: 0x7FC0BAD1, U64: 0xDEADBEEFDEADBEEF}
JUNK_BYTE = 0xCD
WARPS_OF_A_GROUP = 4
"""Warps that execute a wgmma together."""
GROUP = WARPS_OF_A_GROUP * WARP

Access = tuple[Memory, np.ndarray, np.ndarray]
"""A memory, the threads that access it, and the index of their bytes, [threads, width]."""


class Registers(dict):
    """Values by register name; those never written hold junk."""

    def __init__(self, n_threads: int) -> None:
        super().__init__()
        self.n_threads = n_threads

    def __missing__(self, name: str) -> np.ndarray:
        kind = register_type(name)
        return np.full(self.n_threads, JUNK[kind], kind)


class CTA:
    """The state of one program. R maps names to registers.

    ``number`` is an instruction's place in its program: findings name it."""

    def __init__(
        self, program: Program, shared_bytes: int, buffers: Sequence[tuple[int, Memory]]
    ) -> None:
        self.program = program
        self.n_threads = program.n_threads
        self.buffers = buffers
        self.R = Registers(self.n_threads)
        self.shared = Memory(np.full(max(shared_bytes, 16), JUNK_BYTE, U8), "shared")
        self.thread = np.arange(self.n_threads)
        self.warp = self.thread // WARP
        self.active = np.ones(self.n_threads, bool)
        # Groups of cp.async that were committed; the last group is still open.
        self.copies: list[list[Callable[[], None]]] = [[]]
        # Groups of wgmma, as `copies`: its sums by register, and what it reads until its wait.
        self.products: list[list[tuple[dict[str, np.ndarray], list[np.ndarray]]]] = [[]]
        self.sums: dict[str, np.ndarray] = {}  # of wgmma in flight, by register

    def report(self, number: int) -> Report:
        """Return a function that notes what is wrong with an instruction."""
        instruction = self.program.instructions[number]
        return lambda what: self.program.findings.update([f"{instruction} {what}"])

    def fault(self, what: str, number: int) -> Fault:
        return Fault(f"{what}: {self.program.instructions[number]}")

    def together(self, number: int) -> None:
        """Raise unless every thread takes part."""
        if not self.active.all():
            raise self.fault("not every thread reaches it", number)

    def barrier(self, number: int) -> None:
        self.together(number)
        self.shared.forget()
        for _, memory in self.buffers:
            memory.forget()

    # Loads and stores

    def places(
        self, space: str, address: np.ndarray, width: int, mask: np.ndarray, number: int
    ) -> list[Access]:
        """Find the memories that the threads of ``mask`` access, and where."""
        if (address[mask] % width).any():
            raise self.fault("misaligned", number)
        memories = [(0, self.shared)] if space == "shared" else self.buffers
        accesses: list[Access] = []
        left = mask
        for base, memory in memories:
            end = base + len(memory.data)
            inside = left & (address >= base) & (address + width <= end)
            if inside.any():
                threads = np.flatnonzero(inside)
                first_byte = address[threads] - base
                index = first_byte[:, None] + np.arange(width)
                accesses.append((memory, threads, index))
                left = left & ~inside
        if left.any():
            raise self.fault(f"thread {np.flatnonzero(left)[0]} is out of bounds", number)
        return accesses

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
        width = data.shape[1]
        for memory, threads, index in self.places(space, address, width, mask, number):
            memory.write(index, self.warp[threads], data[threads], self.report(number))

    def copy(
        self,
        to: np.ndarray,
        source: np.ndarray,
        width: int,
        size: np.ndarray,
        mask: np.ndarray,
        number: int,
    ) -> None:
        """cp.async: ``size`` bytes of each thread, zeros up to ``width``."""
        data = self.load("global", source, width, mask & (size > 0), number)
        is_beyond = np.arange(width) >= size.astype(I64)[:, None]
        data[is_beyond] = 0
        for memory, threads, index in self.places("shared", to, width, mask, number):
            any_value = np.ones(index.shape, bool)
            memory.claim(index, self.warp[threads], any_value, self.report(number))
            memory.landing[index] += 1

            # Defaults bind this iteration's values: a closure would see the last one's.
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

    # Matrices of 8 rows of 16 bytes in shared memory; a register holds one

    def matrix_rows(
        self, address: np.ndarray, count: int, number: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Index of the bytes of matrices, [warps * count * 8, 16], and the warp of each row."""
        self.together(number)
        # Eight threads of a warp name the rows of a matrix; of fewer than four, the rest is unused.
        rows = address.reshape(-1, 4, 8)[:, :count].reshape(-1)
        is_outside = (rows < 0) | (rows + 16 > len(self.shared.data))
        if (rows % 16).any() or is_outside.any():
            raise self.fault("out of bounds or misaligned", number)
        warp = np.repeat(np.arange(self.n_threads // WARP), count * 8)
        return rows[:, None] + np.arange(16), warp

    def load_matrices(
        self, address: np.ndarray, count: int, transposed: bool, number: int
    ) -> np.ndarray:
        """ldmatrix: the words of ``count`` registers, [count, threads]."""
        index, warp = self.matrix_rows(address, count, number)
        data = self.shared.read(index, warp, self.report(number))
        tiles = data.view(U16).reshape(-1, count, 8, 8)
        if transposed:
            tiles = np.ascontiguousarray(tiles.swapaxes(2, 3))
        words = tiles.view(U32).reshape(-1, count, WARP)
        return np.ascontiguousarray(words.swapaxes(0, 1)).reshape(count, -1)

    def store_matrices(
        self, address: np.ndarray, registers: list[np.ndarray], transposed: bool, number: int
    ) -> None:
        words = np.stack([register.view(U32).reshape(-1, WARP) for register in registers], 1)
        tiles = words.view(U16).reshape(-1, 8, 8)
        if transposed:
            tiles = np.ascontiguousarray(tiles.swapaxes(1, 2))
        index, warp = self.matrix_rows(address, len(registers), number)
        self.shared.write(index, warp, tiles.view(U8).reshape(-1, 16), self.report(number))

    # Products of matrices

    def multiply(
        self, sums: list[str], a: list[str], b: list[str], start: list[str], wide: bool, number: int
    ) -> None:
        """mma.sync with a [16, k] and b [k, 8] of bf16 (``wide``: tf32) in registers."""
        self.together(number)
        left = self.fragment(a, wide)
        right = self.fragment(b, wide)
        addend = accumulator([self.R[name] for name in start])
        total = addend + left @ right.swapaxes(1, 2)
        self.R.update(zip(sums, scatter(total)))

    def fragment(self, names: list[str], wide: bool) -> np.ndarray:
        return fragment([self.R[name] for name in names], wide)

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
        groups = self.n_threads // GROUP
        right = self.described(b, n, transposed[1], wide, pinned, number)
        if a.startswith("{"):
            left = self.fragment(members(a), wide).reshape(groups, 64, -1)
        else:
            left = self.described(a, 64, transposed[0], wide, pinned, number)

        in_flight = [self.sums.get(name, self.R[name]) for name in sums]
        start = accumulator(in_flight).reshape(groups, 64, n)
        adds = add.reshape(groups, -1)[:, :1, None]
        total = np.where(adds, start, 0) + left @ right.swapaxes(1, 2)

        values = dict(zip(sums, scatter(total.reshape(-1, 16, n))))
        self.sums.update(values)
        junk = np.full(self.n_threads, JUNK[U32], U32)
        self.R.update(dict.fromkeys(sums, junk))
        self.products[-1].append((values, pinned))

    def wait_for_products(self, n_left: int) -> None:
        while len(self.products) - 1 > n_left:
            for values, pinned in self.products.pop(0):
                for name, value in values.items():
                    self.R[name] = value
                    # A later product may have replaced it in flight.
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
        """Operand in shared memory, [groups, rows, k], from the descriptor in a register; append
        the index of its bytes to ``pinned``."""
        memory = self.shared
        report = self.report(number)
        operands = []
        for descriptor in self.R[name].view(U64).reshape(-1, GROUP).tolist():
            if len(set(descriptor)) > 1:
                raise self.fault("descriptors differ", number)
            index = described_bytes(descriptor[0], rows, transposed, wide)
            if (index >= len(memory.data)).any():
                raise self.fault("out of bounds", number)
            # By any warp: the tensor core is none of them.
            if memory.written_by[index].any():
                report("reads what was written since the last barrier")
            if memory.unpublished[index].any():
                report("reads what no fence.proxy.async has published")
            operands.append(memory.read(index, np.zeros(rows, int), report))
            memory.readers[index, : self.n_threads // WARP] = 1
            memory.pinned[index] += 1
            pinned.append(index)
        return numbers(np.stack(operands).view(U32), wide)

    # Within warps

    def shuffle(
        self, value: np.ndarray, by: np.ndarray, bounds: np.ndarray, mode: str, number: int
    ) -> np.ndarray:
        """shfl.sync: the value of another lane, or one's own where that lies out of bounds.

        The PTX manual names ``bounds`` "c": a limit, and a mask that cuts warps into segments."""
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
        in_bounds = lanes >= last if mode == "up" else lanes <= last
        first_thread = self.thread - lane
        source = first_thread + np.where(in_bounds, lanes, lane)
        if not self.active[source][self.active].all():
            self.report(number)("reads a thread that takes no part")
        return value[source]
