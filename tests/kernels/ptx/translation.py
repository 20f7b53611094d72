"""Python for the instructions of a basic block.

The code of a block is a function of a `CTA` and its registers R. An expression of numpy stands for
an instruction of the arithmetic, a method of the CTA for one that touches memory or other threads.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from . import arithmetic, text
from .control_flow import Numbered
from .cta import CTA, Registers
from .text import (
    F32,
    I16,
    I32,
    I64,
    TYPES,
    U16,
    U32,
    U64,
    Instruction,
    members,
    register_type,
    size_of,
)

COMPARISONS = {
    "eq": "({1} == {2})",
    "ne": "({1} != {2})",
    "lt": "({1} < {2})",
    "le": "({1} <= {2})",
    "gt": "({1} > {2})",
    "ge": "({1} >= {2})",
    # Those with "u", for unordered, hold for a NaN.
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
KEEP_NAN = ("setp", "mov", "selp", "neg", "abs")
"""Instructions that leave a NaN's bits as they are."""
PLACEHOLDER = re.compile(r"\{([pu]?)(\d)\}")
PLACEHOLDER_TYPES = {"p": bool, "u": U32}
MMA_SHAPES = {"m16n8k16": "bf16", "m16n8k8": "tf32"}
"""Shapes of mma.sync that triton asks for, and their operands."""


def _require(holds: bool) -> None:
    """Refuse a form of an instruction that has no translation."""
    if not holds:
        raise ValueError


def _bits(kind: type) -> str:
    """Name the unsigned type of this size."""
    return f"U{8 * size_of(kind)}"


def _literal(operand: str) -> int:
    """Return the bits of an immediate operand."""
    if operand == "global_smem":  # shared memory begins at 0
        return 0
    if operand.startswith("0f"):
        return int(operand[2:], 16)
    return int(operand.rstrip("U"), 0)


@functools.lru_cache(None)
def _compiled(source: str) -> types.CodeType:
    return compile(source, "<a basic block>", "exec")


@dataclass
class _Site:
    """An instruction where it stands; `Translator` writes the Python for it."""

    number: int
    instruction: Instruction
    predicate: str
    """Python for the guard; "" without one."""
    writes: set[str]
    """Registers that its block writes."""

    def __post_init__(self) -> None:
        self.operands = self.instruction.operands
        self.parts = self.instruction.op.split(".")
        self.kind = TYPES.get(self.parts[-1], U32)
        self.mask = f"cta.active & {self.predicate}" if self.predicate else "cta.active"

    def assign(self, register: str, value: str) -> str:
        self.writes.add(register)
        if not self.predicate:
            return f'R["{register}"] = {value}'
        bits = register_type(register).__name__
        new = f"({value}).view({bits})"
        old = f'R["{register}"].view({bits})'
        return f'R["{register}"] = np.where({self.predicate}, {new}, {old})'


class Translator:
    """Makes functions of basic blocks; they share the constants of the program."""

    def __init__(self, n_threads: int) -> None:
        self.n_threads = n_threads
        # Code names types both as this package does and as numpy does.
        self.names: dict[str, object] = {**vars(text), **vars(arithmetic)}
        for kind in TYPES.values():
            self.names[kind.__name__] = kind
        self.by_name: dict[str, Callable[[_Site], list[str]]] = {
            "bar": self._barrier,
            "barrier": self._barrier,
            "fence": self._fence,
            "ld": self._load,
            "st": self._store,
            "cp": self._copy,
            "ldmatrix": self._load_matrices,
            "stmatrix": self._store_matrices,
            "mma": self._multiply,
            "wgmma": self._multiply_groups,
            "shfl": self._shuffle,
            "mov": self._move,
        }

    def function(
        self, body: Iterable[Numbered]
    ) -> tuple[Callable[[CTA, Registers], None], frozenset[str]]:
        """Return the function of a block, and the registers that it writes."""
        lines = ["def block(cta, R):", "    pass"]
        writes: set[str] = set()
        for number, instruction in body:
            try:
                statements = self._statements(number, instruction, writes)
            except (KeyError, ValueError) as error:
                raise NotImplementedError(f"cannot emulate {instruction}") from error
            lines += [f"    {statement}" for statement in statements]
        exec(_compiled("\n".join(lines)), self.names)
        return self.names["block"], frozenset(writes)  # type: ignore[return-value]

    def _statements(self, number: int, instruction: Instruction, writes: set[str]) -> list[str]:
        guard = instruction.guard
        predicate = self._operand(guard, bool) if guard else ""
        site = _Site(number, instruction, predicate, writes)
        return self.by_name.get(instruction.name, self._compute)(site)

    # Operands

    def _operand(self, operand: str, kind: type) -> str:
        """Python for an operand's value in a type."""
        if operand.startswith("!"):
            return f"(~{self._operand(operand[1:], kind)})"
        if not operand.startswith("%"):
            return self._constant(operand, kind)
        value = f'R["{operand}"]'
        if kind is bool:
            return value
        if size_of(register_type(operand)) != size_of(kind):
            value += f".astype({_bits(kind)})"
        return f"{value}.view({kind.__name__})"

    def _constant(self, operand: str, kind: type) -> str:
        """Name an immediate operand, which all threads share."""
        name = f"constant_{kind.__name__}_{operand.replace('-', 'minus_')}"
        if name not in self.names:
            value = _literal(operand)
            if kind is bool:
                constant = np.full(self.n_threads, value != 0)
            else:
                bits = {F32: U32, I16: U16, I32: U32, I64: U64}.get(kind, kind)
                mask = (1 << 8 * size_of(kind)) - 1
                constant = np.full(self.n_threads, value & mask, bits).view(kind)
            self.names[name] = constant
        return name

    def _of_register(self, operand: str, otherwise: type = U32) -> str:
        """Python for an operand in its register's own type; a constant's is ``otherwise``."""
        return self._operand(
            operand, register_type(operand) if operand.startswith("%") else otherwise
        )

    def _address(self, operand: str) -> str:
        base, _, offset = operand.strip("[] ").partition("+")
        return f"({self._of_register(base.strip())}.astype(I64) + {int(offset or '0', 0)})"

    # Order

    def _barrier(self, site: _Site) -> list[str]:
        # Lanes of a warp count as ordered.
        if "warp" in site.parts:
            return []
        return [f"cta.barrier({site.number})"]

    def _fence(self, site: _Site) -> list[str]:
        if "proxy" not in site.parts:
            return []
        return ["cta.shared.unpublished[:] = False"]

    # Memory

    def _place(self, site: _Site, address: str) -> str:
        space = site.parts[1].partition("::")[0]
        return f'"{space}", {self._address(address)}'

    def _load(self, site: _Site) -> list[str]:
        if site.parts[1] == "param":
            return [self._load_parameter(site)]
        registers = members(site.operands[0])
        size = size_of(site.kind)
        place = self._place(site, site.operands[1])
        load = f"cta.load({place}, {size * len(registers)}, {site.mask}, {site.number})"
        lines = [f"data = {load}.view({site.kind.__name__})"]
        for column, register in enumerate(registers):
            value = f"np.ascontiguousarray(data[:, {column}])"
            own = register_type(register)
            if size_of(own) != size:
                value += f".astype({own.__name__})"
            lines.append(site.assign(register, value))
        return lines

    def _load_parameter(self, site: _Site) -> str:
        register, parameter = site.operands
        value = f'R["{parameter.strip("[] ")}"]'
        if site.parts[-1] == "s32":  # extended by its sign
            value += ".astype(U32).view(I32).astype(I64)"
        return site.assign(register, f"{value}.astype({register_type(register).__name__})")

    def _store(self, site: _Site) -> list[str]:
        address, registers = site.operands
        values = [self._of_register(name, site.kind) for name in members(registers)]
        if len(values) > 1:
            data = f"np.stack([{', '.join(values)}], 1)"
        else:
            bits = _bits(site.kind)
            data = f"packed([{values[0]}.astype({bits})], {bits})"
        in_rows = f"{data}.view(U8).reshape(cta.n_threads, -1)"
        place = self._place(site, address)
        return [f"cta.store({place}, {in_rows}, {site.mask}, {site.number})"]

    def _copy(self, site: _Site) -> list[str]:
        operands = site.operands
        if "commit_group" in site.instruction.op:
            return ["cta.copies.append([])"]
        if "wait" in site.instruction.op:
            n_left = operands[0] if operands else 0
            return [f"cta.wait_for_copies({n_left})"]
        to = self._address(operands[0])
        source = self._address(operands[1])
        width = int(operands[2], 0)
        size = self._operand(operands[3] if len(operands) > 3 else str(width), U32)
        return [f"cta.copy({to}, {source}, {width}, {size}, {site.mask}, {site.number})"]

    # Matrices

    def _load_matrices(self, site: _Site) -> list[str]:
        registers = members(site.operands[0])
        address = self._address(site.operands[1])
        transposed = "trans" in site.parts
        load = f"cta.load_matrices({address}, {len(registers)}, {transposed}, {site.number})"
        lines = [f"data = {load}"]
        for place, register in enumerate(registers):
            lines.append(site.assign(register, f"data[{place}]"))
        return lines

    def _store_matrices(self, site: _Site) -> list[str]:
        address = self._address(site.operands[0])
        values = [self._operand(register, U32) for register in members(site.operands[1])]
        transposed = "trans" in site.parts
        return [
            f"cta.store_matrices({address}, [{', '.join(values)}], {transposed}, {site.number})"
        ]

    def _multiply(self, site: _Site) -> list[str]:
        shape = site.parts[3]
        operand_type = site.parts[7]
        _require(operand_type == MMA_SHAPES[shape])
        sums, a, b, start = (members(operand) for operand in site.operands)
        site.writes.update(sums)
        wide = operand_type == "tf32"
        return [f"cta.multiply({sums}, {a}, {b}, {start}, {wide}, {site.number})"]

    def _multiply_groups(self, site: _Site) -> list[str]:
        step = site.parts[1]
        if step == "fence":
            return []
        if step == "commit_group":
            return ["cta.products.append([])"]
        if step == "wait_group":
            return [f"cta.wait_for_products({site.operands[0]})"]

        operand_type = site.parts[-1]
        _require(operand_type in ("tf32", "bf16"))
        wide = operand_type == "tf32"
        sums, a, b, add, scale_a, scale_b, *major = site.operands
        _require(scale_a == scale_b == "1")
        # Only operands in shared memory can be transposed, and of those only bf16.
        transposes_a = not wide and not a.startswith("{") and major[-2] == "1"
        transposes_b = not wide and major[-1] == "1"
        transposed = (transposes_a, transposes_b)
        site.writes.update(members(sums))
        registers = f'{members(sums)}, "{a}", "{b}", {self._operand(add, bool)}'
        return [f"cta.multiply_groups({registers}, {transposed}, {wide}, {site.number})"]

    # Registers

    def _shuffle(self, site: _Site) -> list[str]:
        target = site.operands[0]
        # A predicate may come second; the mask of threads comes last.
        *_, value, by, bounds, _ = site.operands
        values = ", ".join(self._operand(operand, U32) for operand in (value, by, bounds))
        mode = site.parts[2]
        return [site.assign(target, f'cta.shuffle({values}, "{mode}", {site.number})')]

    def _move(self, site: _Site) -> list[str]:
        target, source = site.operands
        if source.startswith("{"):
            values = ", ".join(self._of_register(part) for part in members(source))
            return [site.assign(target, f"packed([{values}], {site.kind.__name__})")]
        if target.startswith("{"):
            return self._unpack(site)
        return self._compute(site)

    def _unpack(self, site: _Site) -> list[str]:
        target, source = site.operands
        registers = members(target)
        bits = {2: U16, 4: U32}[size_of(site.kind) // len(registers)].__name__
        value = self._operand(source, site.kind)
        columns = f"{value}.view({bits}).reshape(-1, {len(registers)})"
        lines = []
        for place, register in enumerate(registers):
            if register != "_":
                lines.append(site.assign(register, f"np.ascontiguousarray({columns}[:, {place}])"))
        return lines

    def _compute(self, site: _Site) -> list[str]:
        return [site.assign(site.operands[0], self._expression(site))]

    def _expression(self, site: _Site) -> str:
        name = site.instruction.name
        parts = site.parts
        operands = site.operands
        if name == "cvt":
            return self._conversion(parts, operands)
        if name in ("mul", "mad") and "wide" in parts:
            return self._wide_product(site)
        if name == "setp":
            _require(len(operands) == 3)
            template = COMPARISONS[parts[1]]
        elif name == "div" and site.kind is F32:
            template = "({1} / {2})"
        else:
            _require("hi" not in parts and "cc" not in parts)
            template = EXPRESSIONS[name]

        def fill(match: re.Match[str]) -> str:
            kind = PLACEHOLDER_TYPES.get(match[1], site.kind)
            return self._operand(operands[int(match[2])], kind)

        value = PLACEHOLDER.sub(fill, template)
        if site.kind is F32 and name not in KEEP_NAN:
            return f"one_nan({value})"
        return value

    def _wide_product(self, site: _Site) -> str:
        wide = {I32: I64, U32: U64}[site.kind]
        factors = []
        for operand in site.operands[1:3]:
            factors.append(f"{self._operand(operand, site.kind)}.astype({wide.__name__})")
        product = " * ".join(factors)
        if site.instruction.name == "mul":
            return f"({product})"
        return f"({product} + {self._operand(site.operands[3], wide)})"

    def _conversion(self, parts: Sequence[str], operands: Sequence[str]) -> str:
        to, source = parts[-2:]
        value = self._operand(operands[1], TYPES[source])
        if to == "bf16x2":
            low = self._operand(operands[2], F32)
            return f"packed([to_bf16({low}), to_bf16({value})], U32)"
        if to in ("bf16", "tf32"):
            _require(source == "f32")
            return f"to_{to}({value})"
        if source == "bf16":
            return f"({value}.astype(U32) << U32(16)).view(F32)"
        return f"{value}.astype({TYPES[to].__name__})"
