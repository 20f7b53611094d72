"""Which students a sweep makes. Pure data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, Literal

from ...limits import numbers, words
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
        """Of its folder: ``top4-n16-s0``, ``none-n16-s0``, ``all-s0``."""
        how = self.selection if self.selection in ("none", ALL) else f"{self.selection}{self.heads}"
        return "-".join([how, *([] if self.d_state is None else [f"n{self.d_state}"]), f"s{self.seed}"])


@dataclass(frozen=True)
class Grid:
    """The values that are combined with one another. Raises ValueError for an axis that is empty or not understood."""

    heads: tuple[int | Literal["all"], ...]
    d_state: tuple[int, ...]
    selection: tuple[str, ...]
    seeds: tuple[int, ...]

    def __post_init__(self) -> None:
        for name, values in self.axes().items():
            if not values:
                raise ValueError(f"--{_flag(name)} is empty; a sweep needs at least one value of it.")
        for name in ("heads", "d_state"):
            least = 0 if name == "heads" else 1
            for value in getattr(self, name):
                if value != ALL and value < least:
                    raise ValueError(f"--{_flag(name)} names {value}; it must be a whole number of at least {least}.")
        for value in self.selection:
            if value not in SELECTIONS:
                raise ValueError(f"--selection names {value!r}; choose from {', '.join(SELECTIONS)}.")

    @classmethod
    def parse(cls, *, heads: str, d_state: str, selection: str, seeds: int, first_seed: int = 0) -> Grid:
        """From the flags of the command: ``0,2,4,all``, ``4,16``, ``top,random``, a number of seeds."""
        if seeds < 1:
            raise ValueError(f"--seeds is {seeds}; a sweep needs at least 1.")
        return cls(
            heads=_each_once(numbers("heads", heads, least=0, named={ALL: ALL})),
            d_state=_each_once(numbers("d-state", d_state, least=1)),
            selection=_each_once(words(selection)),
            seeds=tuple(range(first_seed, first_seed + seeds)),
        )

    def axes(self) -> dict[str, tuple[Any, ...]]:
        """The values by axis."""
        return asdict(self)

    def cells(self, shape: HeadPlan) -> list[Cell]:
        """The students for a teacher of this shape, each once, one seed after the other.

        Raises ValueError for more heads than the teacher has, and when no cell is left.
        """
        for heads in self.heads:
            HeadPlan.check_k(shape, shape.n_layers * shape.n_heads if heads == ALL else heads)
        combined = product(self.seeds, self.d_state, self.selection, self.heads)
        cells = [self._cell(shape, *values) for values in combined]
        found = list(dict.fromkeys(cell for cell in cells if cell is not None))
        if not found:
            raise ValueError(f"the grid has no cell: {self.left_out(shape)}")
        return found

    def left_out(self, shape: HeadPlan) -> str:
        """Which numbers of heads make no whole layers, in one line; empty when all do or nobody asked for layers."""
        if "layers" not in self.selection:
            return ""
        odd = [str(heads) for heads in self.heads if self._cell(shape, 0, 1, "layers", heads) is None]
        rule = f"whole layers have {shape.n_heads} heads each"
        return f"{rule}, so layers are not placed for {', '.join(odd)} heads; add multiples of it." if odd else ""

    @staticmethod
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


def _each_once(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(values))


def _flag(name: str) -> str:
    return name.replace("_", "-")
