"""Students of a sweep. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Literal, cast

from ...config import Selection
from ...model.field_rules import OWN_RULES, check_field
from ...plan import HeadPlan
from ...validation import COUNT, numbers, words

ALL: Literal["all"] = "all"
NONE: Literal["none"] = "none"
SELECTIONS: tuple[Selection, ...] = ("top", "random", "layers", "restoration")


@dataclass(frozen=True)
class Cell:
    """One student.

    ``selection`` is "none" if it keeps no heads and "all" if it keeps all, however they were
    requested; with all heads there is no state, and ``d_state`` is None.
    """

    selection: Selection
    heads: int
    d_state: int | None
    seed: int
    window: int = 0

    @property
    def name(self) -> str:
        """Name of the cell's folder: ``top4-n16-s0``, ``top4-n8-w32-s0``, ``none-n16-s0``, ``all-s0``."""
        first = self.selection
        if self.selection not in (NONE, ALL):
            first = f"{self.selection}{self.heads}"
        parts = [first]
        if self.d_state is not None:
            parts.append(f"n{self.d_state}")
        if self.window:
            parts.append(f"w{self.window}")
        parts.append(f"s{self.seed}")
        return "-".join(parts)


@dataclass(frozen=True)
class Grid:
    """Values of each axis; their combinations are the cells."""

    heads: tuple[int | Literal["all"], ...]
    d_state: tuple[int, ...]
    window: tuple[int, ...]
    selection: tuple[Selection, ...]
    seeds: tuple[int, ...]

    @classmethod
    def parse(
        cls,
        *,
        heads: str,
        d_state: str,
        selection: str,
        seeds: int,
        window: str = "0",
    ) -> Grid:
        """Parse the command's flags: ``0,2,4,all``, ``4,16``, ``top,random``, a number of seeds.

        Raises ValueError for an empty or invalid axis, and for a state of 0 where no window takes
        its place.
        """
        COUNT.check("--seeds", seeds)
        states = tuple(dict.fromkeys(numbers("d-state", d_state, least=0)))
        windows = tuple(dict.fromkeys(numbers("window", window, least=0)))
        for state in states:
            check_field("--d-state", state, OWN_RULES["d_state"])
        if 0 in states and not any(windows):
            raise ValueError(
                f"--d-state is {d_state!r}, and a state of 0 leaves a window alone; "
                "pass a --window of at least 1, or states of at least 4."
            )
        return cls(
            heads=tuple(dict.fromkeys(numbers("heads", heads, least=0, named={ALL: ALL}))),
            d_state=states,
            window=windows,
            selection=_selections(selection),
            seeds=tuple(range(seeds)),
        )

    def cells(self, shape: HeadPlan) -> list[Cell]:
        """Return the students for a teacher of this shape, each once, seed by seed.

        Leaves out cells with neither state nor window, whose heads would have no replacement, cells of
        ``restoration`` without a state, which nothing aligns, and cells of ``layers`` whose heads do
        not fill whole layers. Raises ValueError for more heads
        than the teacher has, and if no cell is left.
        """
        n_all_heads = shape.n_layers * shape.n_heads
        counts = [n_all_heads if heads == ALL else heads for heads in self.heads]
        for k in counts:
            HeadPlan.check_k(shape, k, "--heads")
        # Keys of a dict, which keeps their order: without heads, all selections are the same student.
        cells: dict[Cell, None] = {}
        axes = (self.seeds, self.d_state, self.window, self.selection, counts)
        for seed, d_state, window, selection, k in product(*axes):
            cell = _cell(shape, selection, k, d_state, seed, window)
            if cell is not None:
                cells[cell] = None
        if not cells:
            raise ValueError(
                f"the grid has no cell: layers have {shape.n_heads} heads, and restoration needs a state; pass --heads "
                "multiples of that, or --d-state of at least 4."
            )
        return list(cells)


def _cell(
    shape: HeadPlan, selection: Selection, k: int, d_state: int, seed: int, window: int
) -> Cell | None:
    """Return the cell of one place of the grid; None where there is no such student."""
    if k == shape.n_layers * shape.n_heads:
        return Cell(ALL, k, None, seed)
    if not d_state and not window:
        return None
    if k == 0:
        return Cell(NONE, 0, d_state, seed, window)
    if selection == "restoration" and not d_state:
        return None
    if selection == "layers" and k % shape.n_heads:
        return None
    return Cell(selection, k, d_state, seed, window)


def _selections(flag: str) -> tuple[Selection, ...]:
    """Return the selections that a flag names, each once. Raises ValueError for any other word, or none."""
    names = list(dict.fromkeys(words(flag)))
    unknown = set(names).difference(SELECTIONS)
    if unknown or not names:
        raise ValueError(
            f"--selection is {flag!r}; choose from {', '.join(SELECTIONS)}, with commas between."
        )
    return tuple(cast(Selection, name) for name in names)
