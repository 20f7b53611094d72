"""A translated kernel, and its execution on a grid."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from .control_flow import basic_blocks
from .cta import CTA, Registers
from .matrices import WARP
from .memory import Fault, Memory
from .text import U32, U64, Instruction, parse, register_type
from .translation import Translator

LONGEST_RUN = 100_000
"""Basic blocks that one program may run."""


class Block(NamedTuple):
    """A basic block: its code, the registers it writes, and where control goes."""

    execute: Callable[[CTA, Registers], None]
    writes: frozenset[str]
    guard: str
    target: int  # where the guard holds
    following: int

    def next_of(self, R: Registers) -> np.ndarray | int:
        """Return the block that each thread goes to."""
        if not self.guard:
            return self.target
        if self.guard.startswith("!"):
            taken = ~R[self.guard[1:]]
        else:
            taken = R[self.guard]
        return np.where(taken, self.target, self.following)


class Program:
    """A kernel, translated."""

    def __init__(self, ptx: str, n_threads: int) -> None:
        self.n_threads = n_threads
        self.findings: Counter[str] = Counter()
        self.parameters, statements = parse(ptx)
        self.instructions = [
            statement for statement in statements if isinstance(statement, Instruction)
        ]
        translator = Translator(n_threads)
        self.blocks = []
        for block in basic_blocks(statements):
            execute, writes = translator.function(block.body)
            self.blocks.append(Block(execute, writes, block.guard, block.target, block.following))

    def run(
        self,
        grid: Sequence[int],
        arguments: Sequence[int],
        shared_bytes: int,
        buffers: Sequence[tuple[int, Memory]],
        order: Iterable[Sequence[int]],
    ) -> Counter[str]:
        """Execute the programs in ``order`` and return what was found. Arguments are the bits of
        the parameters."""
        self.findings.clear()
        with np.errstate(all="ignore"):
            for place in order:
                cta = CTA(self, shared_bytes, buffers)
                self._set_registers(cta.R, place, grid, arguments)
                self._run_one(cta)
                # Programs are checked one by one: what one leaves in memory is ordered for the next.
                cta.barrier(0)
        return self.findings

    def _set_registers(
        self, R: Registers, place: Sequence[int], grid: Sequence[int], arguments: Sequence[int]
    ) -> None:
        for axis, at, size in zip("xyz", place, grid):
            R[f"%ctaid.{axis}"] = np.full(self.n_threads, at, U32)
            R[f"%nctaid.{axis}"] = np.full(self.n_threads, size, U32)
        thread = np.arange(self.n_threads)
        R["%tid.x"] = thread.astype(U32)
        R["%laneid"] = (thread % WARP).astype(U32)
        # Triton adds pointers to scratch memory, which these kernels do not use.
        scratch = [0, 0, 0]
        for name, bits in zip(self.parameters, [*arguments, *scratch]):
            R[name] = np.full(self.n_threads, bits & (1 << 64) - 1, U64)

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
                _restore(R, before, block.writes, active)
            at = np.where(active, block.next_of(R), at)
        raise Fault("an endless loop")


def _restore(R: Registers, before: Registers, written: Iterable[str], active: np.ndarray) -> None:
    """Undo what a block wrote to registers of threads that do not take part."""
    for name in written:
        kind = register_type(name)
        R[name] = np.where(active, R[name].view(kind), before[name].view(kind))
