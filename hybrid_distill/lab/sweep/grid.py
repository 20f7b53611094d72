"""Students of a sweep. Pure data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import product
from typing import Literal

from ...limits import COUNT, numbers, words
from ...plan import HeadPlan

ALL: Literal["all"] = "all"
SELECTIONS = ("top", "random", "layers", "restoration")


@dataclass(frozen=True)
class Cell:
    """One student. ``selection`` is "none" without kept heads and "all" with all of them, however they were asked for;
    with all of them there is no state, and ``d_state`` is None."""

    selection: str
    heads: int
    d_state: int | None
    seed: int

    @property
    def name(self) -> str:
        """Name of the cell's folder: ``top4-n16-s0``, ``none-n16-s0``, ``all-s0``."""
        how = self.selection if self.selection in ("none", ALL) else f"{self.selection}{self.heads}"
        return "-".join([how, *([] if self.d_state is None else [f"n{self.d_state}"]), f"s{self.seed}"])


@dataclass(frozen=True)
class Grid:
    """Values that are combined with one another."""

    heads: tuple[int | Literal["all"], ...]
    d_state: tuple[int, ...]
    selection: tuple[str, ...]
    seeds: tuple[int, ...]

    @classmethod
    def parse(cls, *, heads: str, d_state: str, selection: str, seeds: int, first_seed: int = 0) -> Grid:
        """Read the command's flags: ``0,2,4,all``, ``4,16``, ``top,random``, a number of seeds.

        Raises ValueError for an axis that is empty or not understood.
        """
        COUNT.check("--seeds", seeds)
        chosen = dict.fromkeys(words(selection))
        if not chosen or not chosen.keys() <= set(SELECTIONS):
            raise ValueError(f"--selection is {selection!r}; choose from {', '.join(SELECTIONS)}, with commas between.")
        return cls(
            heads=tuple(dict.fromkeys(numbers("heads", heads, least=0, named={ALL: ALL}))),
            d_state=tuple(dict.fromkeys(numbers("d-state", d_state, least=1))),
            selection=tuple(chosen),
            seeds=tuple(range(first_seed, first_seed + seeds)),
        )

    def axes(self) -> dict[str, list[int | str]]:
        """Return the values by axis."""
        return {name: list(values) for name, values in asdict(self).items()}

    def cells(self, shape: HeadPlan) -> list[Cell]:
        """Return the students for a teacher of this shape, each once, one seed after the other.

        Raises ValueError for more heads than the teacher has, and when no cell is left.
        """
        for heads in self.heads:
            HeadPlan.check_k(shape, shape.n_layers * shape.n_heads if heads == ALL else heads)
        combined = product(self.seeds, self.d_state, self.selection, self.heads)
        found = dict.fromkeys(_cell(shape, *values) for values in combined)
        found.pop(None, None)
        if not found:
            raise ValueError(f"the grid has no cell: {self.left_out(shape)}")
        return [cell for cell in found if cell is not None]

    def left_out(self, shape: HeadPlan) -> str:
        """Name the numbers of heads that do not fill whole layers, in one line; empty where that matters to none."""
        if "layers" not in self.selection:
            return ""
        odd = [str(heads) for heads in self.heads if _cell(shape, 0, 1, "layers", heads) is None]
        rule = f"whole layers have {shape.n_heads} heads each"
        return f"{rule}, so layers are not placed for {', '.join(odd)} heads; add multiples of it." if odd else ""


def _cell(shape: HeadPlan, seed: int, d_state: int, selection: str, heads: int | str) -> Cell | None:
    every = shape.n_layers * shape.n_heads
    k = every if heads == ALL else int(heads)
    if k == every:
        return Cell(ALL, k, None, seed)
    if k == 0:
        return Cell("none", 0, d_state, seed)
    if selection == "layers" and k % shape.n_heads:
        return None
    return Cell(selection, k, d_state, seed)
