"""PTX as text: types, statements, operands."""

from __future__ import annotations

import re
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
LOCATION = re.compile(r"\s*\.loc\s.*// (\S+)")
LABEL = re.compile(r"([$\w]+):$")
STATEMENT = re.compile(r"(?:@(!?%\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.S)
# Neither a comma within {a, b} nor one within [a, b] ends an operand.
OPERAND = re.compile(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,\s{[])+")


class Instruction(NamedTuple):
    """One PTX statement and the line of the kernel that it comes from."""

    guard: str  # "%p3", "!%p3" or ""
    op: str
    operands: tuple[str, ...]
    line: str

    def __str__(self) -> str:
        return f"{self.line}: {self.op} {', '.join(self.operands)}"[:100]

    @property
    def name(self) -> str:
        """The op without its modifiers."""
        return self.op.partition(".")[0]


def parse(ptx: str) -> tuple[list[str], list[Instruction | str]]:
    """Return the names of the kernel's parameters, and its instructions and labels in order."""
    head, body = ptx.split("\n{\n", 1)
    parameters = re.findall(r"\.param [^,)]*?(\w+_param_\d+)", head)
    statements: list[Instruction | str] = []
    line = ""
    for text in body[: body.rindex("\n}")].split("\n"):
        if location := LOCATION.match(text):
            line = location[1]
        text = text.split("//")[0].strip()
        if label := LABEL.match(text):
            statements.append(label[1])
            continue
        for part in text.split(";"):
            statement = STATEMENT.match(part.strip())
            if statement is None:
                continue
            guard, op, rest = statement.groups()
            # shfl writes "value|predicate", two operands.
            operands = OPERAND.findall(rest.replace("|", ","))
            statements.append(Instruction(guard or "", op, tuple(operands), line))
    return parameters, statements


def members(operand: str) -> list[str]:
    """Return the registers of "{%r1, %r2}", or of a single one."""
    return [part.strip() for part in operand.strip("{} ").split(",")]


def register_type(name: str) -> type:
    """Return the unsigned type that holds a register's bits."""
    return REGISTER_TYPES.get(name.rstrip("0123456789"), U32)


def size_of(kind: type) -> int:
    """Return the bytes of a value."""
    return np.dtype(kind).itemsize
