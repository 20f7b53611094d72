"""Basic blocks of a kernel, in an order in which threads that went different ways meet again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .text import Instruction

Numbered = tuple[int, Instruction]
"""An instruction and its place in the program."""


class BasicBlock(NamedTuple):
    """Instructions without a jump, and where control goes; blocks are named by their rank."""

    body: list[Numbered]
    guard: str
    target: int  # where the guard holds
    following: int


class _Edge(NamedTuple):
    guard: str
    target: int
    following: int

    def successors(self) -> tuple[int, ...]:
        return (self.following, self.target) if self.guard else (self.target,)


def _jumps(instruction: Instruction) -> bool:
    return instruction.name in ("bra", "ret")


def basic_blocks(statements: Sequence[Instruction | str]) -> list[BasicBlock]:
    """Cut a program at labels and jumps; blocks are in reverse postorder.

    The block that runs next is the first at which a thread waits, so in this order a thread waits
    where branches meet until the others have come."""
    bodies, labels = _bodies(statements)
    edges = [_edge(place, body, labels, len(bodies)) for place, body in enumerate(bodies)]
    order = _reverse_postorder(edges)
    ranks = {place: rank for rank, place in enumerate(order)}
    end = len(order)
    ranks[len(bodies)] = end
    blocks = []
    for place in order:
        guard, target, following = edges[place]
        body = [numbered for numbered in bodies[place] if not _jumps(numbered[1])]
        # No thread comes to what only follows a jump without a guard: it may have no rank.
        blocks.append(BasicBlock(body, guard, ranks[target], ranks.get(following, end)))
    return blocks


def _bodies(
    statements: Sequence[Instruction | str],
) -> tuple[list[list[Numbered]], dict[str, int]]:
    """Return the instructions of each block in the order of the text, and each label's block."""
    bodies: list[list[Numbered]] = [[]]
    labels: dict[str, int] = {}
    number = 0
    for statement in statements:
        if isinstance(statement, str):
            if bodies[-1]:
                bodies.append([])
            labels[statement] = len(bodies) - 1
            continue
        bodies[-1].append((number, statement))
        if _jumps(statement):
            bodies.append([])
        number += 1
    return bodies, labels


def _edge(place: int, body: list[Numbered], labels: dict[str, int], end: int) -> _Edge:
    following = place + 1
    if not body:
        return _Edge("", following, following)
    _, last = body[-1]
    if not _jumps(last):
        return _Edge("", following, following)
    if not last.operands:  # ret
        return _Edge(last.guard, end, following)
    return _Edge(last.guard, labels[last.operands[0]], following)


def _reverse_postorder(edges: Sequence[_Edge]) -> list[int]:
    """Order the blocks that can be reached from the first one."""
    postorder: list[int] = []
    end = len(edges)
    seen = {0, end}
    # A kernel has more blocks than Python allows calls within calls, so the path is a list.
    path: list[tuple[int, Iterator[int]]] = [(0, iter(edges[0].successors()))]
    while path:
        place, rest = path[-1]
        new = next((successor for successor in rest if successor not in seen), None)
        if new is None:
            postorder.append(place)
            path.pop()
        else:
            seen.add(new)
            path.append((new, iter(edges[new].successors())))
    return postorder[::-1]
