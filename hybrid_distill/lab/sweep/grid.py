"""Students of a sweep. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Literal

from ...config import Selection
from ...plan import HeadPlan
from ...validation import COUNT, numbers, words

ALL: Literal["all"] = "all"
NONE: Literal["none"] = "none"
SELECTIONS: tuple[Selection, ...] = ("top", "random", "layers", "restoration")


@dataclass(frozen=True)
class Cell:
    """One student. ``selection`` is "none" if it keeps no heads and "all" if it keeps all, however they were requested;
    with all heads there is no state, and ``d_state`` is None."""

    selection: Selection
    heads: int
    d_state: int | None
    seed: int

    @property
    def name(self) -> str:
        """Name of the cell's folder: ``top4-n16-s0``, ``none-n16-s0``, ``all-s0``."""
        how = self.selection if self.selection in (NONE, ALL) else f"{self.selection}{self.heads}"
        return "-".join([how, *([] if self.d_state is None else [f"n{self.d_state}"]), f"s{self.seed}"])


@dataclass(frozen=True)
class Grid:
    """Values of each axis; their combinations are the cells."""

    heads: tuple[int | Literal["all"], ...]
    d_state: tuple[int, ...]
    selection: tuple[Selection, ...]
    seeds: tuple[int, ...]

    @classmethod
    def parse(cls, *, heads: str, d_state: str, selection: str, seeds: int, first_seed: int = 0) -> Grid:
        """Parse the command's flags: ``0,2,4,all``, ``4,16``, ``top,random``, a number of seeds.

        Raises ValueError for an empty or invalid axis.
        """
        COUNT.check("--seeds", seeds)
        asked = words(selection)
        chosen: dict[Selection, None] = dict.fromkeys(name for word in asked for name in SELECTIONS if name == word)
        if not chosen or not chosen.keys() >= set(asked):
            raise ValueError(f"--selection is {selection!r}; choose from {', '.join(SELECTIONS)}, with commas between.")
        return cls(
            heads=tuple(dict.fromkeys(numbers("heads", heads, least=0, named={ALL: ALL}))),
            d_state=tuple(dict.fromkeys(numbers("d-state", d_state, least=1))),
            selection=tuple(chosen),
            seeds=tuple(range(first_seed, first_seed + seeds)),
        )

    def cells(self, shape: HeadPlan) -> list[Cell]:
        """Return the students for a teacher of this shape, each once, seed by seed.

        ``layers`` applies only to numbers of heads that fill whole layers. Raises ValueError for more heads than the
        teacher has, and if no cell is left.
        """
        every = shape.n_layers * shape.n_heads
        counts = [every if heads == ALL else heads for heads in self.heads]
        found: dict[Cell, None] = {}
        for k in counts:
            HeadPlan.check_k(shape, k)
        for seed, d_state, selection, k in product(self.seeds, self.d_state, self.selection, counts):
            if k in (0, every):
                found[Cell(NONE, 0, d_state, seed) if k == 0 else Cell(ALL, k, None, seed)] = None
            elif selection != "layers" or k % shape.n_heads == 0:
                found[Cell(selection, k, d_state, seed)] = None
        if not found:
            raise ValueError(f"the grid has no cell: whole layers have {shape.n_heads} heads; pass multiples of it.")
        return list(found)
