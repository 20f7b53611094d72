"""Plan of the attention heads that a student keeps. No torch."""

from __future__ import annotations

import json
import logging
import random as _random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from operator import index
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, get_args

from .io import refused, write_json
from .validation import COUNT, Limits

FORMAT = "hybrid-distill/head-plan/1"
MOST_NAMED = 8
"""Most heads that a warning names."""
Unit = Literal["head", "kv-group", "layer", "container"]
"""Part of a model that a plan keeps whole (`HeadPlan.top_k`)."""
UnitId = tuple[int, int]
"""Layer of a unit, and its number within the layer."""

log = logging.getLogger(__name__)


class HeadId(NamedTuple):
    """One query head of the teacher: ``L3H5`` is layer 3, head 5, both counted from 0."""

    layer: int
    head: int

    def __str__(self) -> str:
        return f"L{self.layer}H{self.head}"


class Shape(NamedTuple):
    """Head counts of a teacher, the same in each of its layers."""

    n_layers: int
    n_heads: int
    n_kv_heads: int

    def __str__(self) -> str:
        return f"{self.n_layers} layers, {self.n_heads} heads, {self.n_kv_heads} KV heads"

    @classmethod
    def of(cls, source: object) -> Shape:
        """Read the shape of a plan, scores, a config, or a model. Raises ValueError for anything else."""
        config: Any = getattr(source, "config", source)
        # Plans and scores; configs of transformers have other names for them.
        if all(hasattr(config, name) for name in cls._fields):
            return cls(config.n_layers, config.n_heads, config.n_kv_heads)
        try:
            n_layers = getattr(config, "num_hidden_layers", None)
            n_heads = getattr(config, "num_attention_heads", None)
            n_kv_heads = getattr(config, "num_key_value_heads", None)
        # Raised by transformers for a config whose layers differ in shape.
        except RuntimeError as error:
            raise ValueError(
                f"the layers of {type(config).__name__} have different numbers of heads. A plan needs "
                "the same number in every layer; take another teacher."
            ) from error
        if n_layers is None or n_heads is None:
            raise ValueError(
                f"{type(source).__name__} has no head counts; pass a Hugging Face config, a model, a "
                "HeadPlan or HeadScores."
            )
        # Configs without the entry, or with None, have a KV head for every query head.
        return cls(n_layers, n_heads, n_kv_heads or n_heads)

    def unit_size(self, unit: Unit) -> int:
        """Return the number of query heads in a unit."""
        if unit == "head":
            return 1
        if unit == "layer":
            return self.n_heads
        # "container": KV groups in every layer alike, as Falcon-H1 allocates them.
        return self.n_heads // self.n_kv_heads

    def units(self, unit: Unit) -> list[UnitId]:
        """List all units, layer by layer."""
        return list(product(range(self.n_layers), range(self.n_heads // self.unit_size(unit))))


@dataclass(frozen=True)
class Tie:
    """Heads on both sides of a cut that their scores do not tell apart."""

    k: int
    kept: tuple[HeadId, ...]
    left_out: tuple[HeadId, ...]

    def __str__(self) -> str:
        return (
            f"the cut at k = {self.k} falls inside a tie: {_named(self.kept)} kept, {_named(self.left_out)} not, "
            "and the scores do not tell them apart; score on more examples, or cut elsewhere."
        )


def _named(heads: Sequence[HeadId]) -> str:
    """Name the first few heads, with the verb that follows: "L0H1, L0H3 are"."""
    names = ", ".join(map(str, heads[:MOST_NAMED]))
    if len(heads) > MOST_NAMED:
        names += f" and {len(heads) - MOST_NAMED} more"
    verb = "is" if len(heads) == 1 else "are"
    return f"{names} {verb}"


class Scored(Protocol):
    """Scores of all heads (`HeadScores`).

    Tables [layer, head] are tensors, NaN for heads that a layer lacks.
    """

    @property
    def n_layers(self) -> int: ...

    @property
    def n_heads(self) -> int: ...

    @property
    def n_kv_heads(self) -> int: ...

    def ranking(self, by: str = "retrieval") -> list[HeadId]: ...
    def unit_ranking(self, unit_size: int, by: str = "retrieval") -> list[UnitId]: ...
    def tie(self, k: int, by: str = "retrieval") -> Tie | None: ...


@dataclass(frozen=True)
class HeadPlan:
    """Heads that stay attention; every other head becomes recurrent.

    ``teacher`` is the fingerprint of the model that the plan was made for; empty if the plan fits
    any model of this shape. Raises ValueError for a head that does not exist, a repeated head, or
    an impossible shape.
    """

    n_layers: int
    n_heads: int
    n_kv_heads: int
    kept: tuple[HeadId, ...]
    teacher: str = ""

    def __post_init__(self) -> None:
        for name in ("n_layers", "n_heads", "n_kv_heads"):
            COUNT.check(name, getattr(self, name))
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"{self.n_heads} query heads cannot share {self.n_kv_heads} KV heads evenly; "
                "take both numbers from the teacher's config."
            )
        kept = tuple(sorted(HeadId(*pair) for pair in self.kept))
        for head_id in kept:
            self._check_exists(head_id)
        # A repeated head would count twice in k.
        repeated = sorted(head_id for head_id, count in Counter(kept).items() if count > 1)
        if repeated:
            raise ValueError(
                f"heads named twice: {', '.join(map(str, repeated))}; name each head once."
            )
        object.__setattr__(self, "kept", kept)

    def _check_exists(self, head_id: HeadId) -> None:
        # A plan's file may hold anything.
        are_whole = all(isinstance(number, int) for number in head_id)
        in_layers = are_whole and 0 <= head_id.layer < self.n_layers
        if not (in_layers and 0 <= head_id.head < self.n_heads):
            raise ValueError(
                f"head {head_id} does not exist: this teacher has layers 0..{self.n_layers - 1} "
                f"with heads 0..{self.n_heads - 1}."
            )

    @property
    def k(self) -> int:
        """Number of kept heads."""
        return len(self.kept)

    @property
    def keeps_all(self) -> bool:
        """True if every head stays attention: the student equals the teacher."""
        return self.k == self.n_layers * self.n_heads

    def kept_in(self, layer: int) -> tuple[int, ...]:
        """Return the kept query heads of a layer, ascending."""
        return tuple(head_id.head for head_id in self.kept if head_id.layer == layer)

    def replaced_in(self, layer: int) -> tuple[int, ...]:
        """Return the query heads of a layer that become recurrent, ascending."""
        kept = set(self.kept_in(layer))
        return tuple(head for head in range(self.n_heads) if head not in kept)

    def kv_groups_in(self, layer: int) -> tuple[int, ...]:
        """Return the KV heads that a layer's kept heads read, ascending.

        The cache stores each once.
        """
        group_size = self.n_heads // self.n_kv_heads
        return tuple(sorted({head // group_size for head in self.kept_in(layer)}))

    @property
    def n_stored_kv_heads(self) -> int:
        """Number of KV heads in the cache, over all layers."""
        return sum(len(self.kv_groups_in(layer)) for layer in range(self.n_layers))

    def check_fits(self, shape_of: object) -> None:
        """Raise ValueError unless the plan was made for a teacher of this shape."""
        check_same_shape(self, shape_of, "the plan")

    @classmethod
    def top_k(
        cls,
        scores: Scored,
        k: int,
        by: str = "retrieval",
        unit: Unit = "head",
    ) -> HeadPlan:
        """Keep the ``k`` highest-ranked units over all layers.

        ``by`` is a ranking of `HeadScores.value_LH`; "retrieval_minus_control" and "ratio" rank
        heads lower that matter for any text. A unit ranks as its best head does, or by the sum of its heads' shares
        (`HeadScores.unit_ranking`). ``unit`` is

        - "head": single heads;
        - "kv-group": all query heads that read one KV head, which is cached once for all of them;
        - "layer": all heads of a layer;
        - "container": the ``k`` best KV groups of every layer. Falcon-H1 makes all layers as large
          as the largest (`falcon_h1_cache_bytes`), so such a plan uses all that it allocates.

        Logs a warning if the cut splits a tie between heads. Raises ValueError for another unit,
        and if ``k`` exceeds the scored units.
        """
        cls.check_k(scores, k, unit=unit)
        if unit == "head":
            return cls.from_pairs(scores, _first_heads(scores, k, by))
        shape = Shape.of(scores)
        unit_size = shape.unit_size(unit)
        ranked = scores.unit_ranking(unit_size, by)
        if unit == "container":
            _check_scored(k, _n_in_every_layer(ranked, shape.n_layers), unit)
            chosen = _first_in_each_layer(ranked, k)
        else:
            _check_scored(k, len(ranked), unit)
            chosen = ranked[:k]
        return cls.from_pairs(scores, heads_of_units(chosen, unit_size))

    @classmethod
    def spread(cls, shape_of: object, k: int, unit: Unit = "head") -> HeadPlan:
        """Keep ``k`` units spread evenly over the model: as large as a plan whose heads are not ranked yet."""
        cls.check_k(shape_of, k, unit=unit)
        shape = Shape.of(shape_of)
        units = shape.units(unit)
        if unit == "container":
            chosen = _first_in_each_layer(units, k)
        else:
            chosen = [units[number * len(units) // k] for number in range(k)]
        return cls.from_pairs(shape_of, heads_of_units(chosen, shape.unit_size(unit)))

    @classmethod
    def random(cls, shape_of: object, k: int, seed: int, unit: Unit = "head") -> HeadPlan:
        """Keep ``k`` random units, as `top_k` counts them; the same seed draws the same ones."""
        cls.check_k(shape_of, k, unit=unit)
        shape = Shape.of(shape_of)
        units = shape.units(unit)
        # Seeded by text, which draws alike on every Python and machine.
        rng = _random.Random(f"head-plan-{seed}")
        if unit == "container":
            rng.shuffle(units)
            chosen = _first_in_each_layer(units, k)
        else:
            chosen = rng.sample(units, k)
        return cls.from_pairs(shape_of, heads_of_units(chosen, shape.unit_size(unit)))

    @classmethod
    def layers(cls, shape_of: object, layers: Sequence[int]) -> HeadPlan:
        """Keep every head of the given layers."""
        return cls.from_pairs(shape_of, product(layers, range(Shape.of(shape_of).n_heads)))

    @classmethod
    def all(cls, shape_of: object) -> HeadPlan:
        """Keep every head: the student equals the teacher."""
        return cls.layers(shape_of, range(Shape.of(shape_of).n_layers))

    @classmethod
    def none(cls, shape_of: object) -> HeadPlan:
        """Keep no head: the student is fully recurrent."""
        return cls.from_pairs(shape_of, [])

    @classmethod
    def from_pairs(cls, shape_of: object, pairs: Iterable[Sequence[int]]) -> HeadPlan:
        """Keep the given ``(layer, head)`` pairs, such as the top k of a published ranking."""
        kept = [_head_of(pair) for pair in pairs]
        return cls(*Shape.of(shape_of), kept=tuple(kept), teacher=_teacher_of(shape_of))

    @staticmethod
    def check_k(
        shape_of: object,
        k: int,
        name: str = "k",
        unit: str = "head",
    ) -> None:
        """Raise ValueError, naming the option ``name``, unless there are at least ``k`` units."""
        shape = Shape.of(shape_of)
        counts = {
            "head": shape.n_layers * shape.n_heads,
            "kv-group": shape.n_layers * shape.n_kv_heads,
            "layer": shape.n_layers,
            # In each layer.
            "container": shape.n_kv_heads,
        }
        if unit not in counts:
            raise ValueError(f"the unit is {unit!r}; pass one of {', '.join(get_args(Unit))}.")
        Limits(0, counts[unit], whole=True).check(name, k)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, atomically."""
        write_json(Path(path), {"format": FORMAT, **asdict(self)})

    @classmethod
    def load(cls, path: str | Path) -> HeadPlan:
        """Read a plan written by `save`. Raises ValueError for any other file."""
        with refused(f"{path} is not a head plan", "write one with HeadPlan.save"):
            record = json.loads(Path(path).read_text())
            if record["format"] != FORMAT:
                raise ValueError(f"its format is {record['format']!r}, expected {FORMAT!r}")
            return cls(
                record["n_layers"],
                record["n_heads"],
                record["n_kv_heads"],
                record["kept"],
                teacher=record.get("teacher", ""),
            )


def _teacher_of(shape_of: object) -> str:
    """Return the fingerprint of the teacher that a plan or scores are for; empty for a config or a model."""
    if isinstance(shape_of, HeadPlan):
        return shape_of.teacher
    # `HeadScores` have it, by name: this module imports no torch.
    return getattr(shape_of, "fingerprint", "")


def _head_of(pair: Sequence[int]) -> HeadId:
    """Convert a pair to plain integers; those of NumPy and torch (from argsort or topk) count as integers."""
    try:
        return HeadId(*map(index, pair))
    except TypeError:
        # Left as it is: `HeadPlan` refuses it as a head that does not exist.
        return HeadId(*pair)


def _first_heads(scores: Scored, k: int, by: str) -> list[HeadId]:
    """Return the ``k`` heads that rank highest; log a warning if a head left out ranks as high."""
    ranking = scores.ranking(by)
    _check_scored(k, len(ranking), "head")
    tie = scores.tie(k, by)
    if tie is not None:
        _warn_once(tie)
    return ranking[:k]


def _check_scored(k: int, n_scored: int, unit: Unit) -> None:
    """Raise ValueError if ``k`` exceeds the scored units: scores may cover only some of the teacher's heads."""
    if k > n_scored:
        raise ValueError(
            f"k is {k}, but only {n_scored} units of kind {unit!r} are scored; pass at most {n_scored}, or scores of "
            "more heads."
        )


def _n_in_every_layer(units: Sequence[UnitId], n_layers: int) -> int:
    """Return the number of units of the layer that has the fewest."""
    n_in_layer = Counter(layer for layer, _ in units)
    return min(n_in_layer[layer] for layer in range(n_layers))


def heads_of_units(units: Iterable[UnitId], unit_size: int) -> list[HeadId]:
    """List the heads of units."""
    heads: list[HeadId] = []
    for layer, number in units:
        first = number * unit_size
        heads += [HeadId(layer, head) for head in range(first, first + unit_size)]
    return heads


def _first_in_each_layer(ranked: Sequence[UnitId], k: int) -> list[UnitId]:
    """Return the first ``k`` units of every layer."""
    by_layer: dict[int, list[UnitId]] = {}
    for layer, number in ranked:
        by_layer.setdefault(layer, []).append((layer, number))
    chosen: list[UnitId] = []
    for units in by_layer.values():
        chosen += units[:k]
    return chosen


@cache
def _warn_once(tie: Tie) -> None:
    """Log a tie only once: a run makes its plan twice, first to check it, then to use it."""
    log.warning("%s", tie)


def check_same_shape(made_for: object, shape_of: object, name: str) -> None:
    """Raise ValueError unless a plan or scores, called ``name`` in the error, describe a teacher of this shape."""
    expected = Shape.of(made_for)
    actual = Shape.of(shape_of)
    if actual != expected:
        raise ValueError(
            f"{name} was made for another teacher: it describes {expected}, the model has {actual}; "
            "score this teacher and make a new plan."
        )
