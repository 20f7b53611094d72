"""Which attention heads a student keeps. Pure data: no torch, no files but JSON."""

from __future__ import annotations

import json
import logging
import random as _random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from .io import write_json

FORMAT = "hybrid-distill/head-plan/1"

log = logging.getLogger(__name__)


class HeadId(NamedTuple):
    """One query head of the teacher: ``L3H5`` is layer 3, head 5, both counted from 0."""

    layer: int
    head: int

    def __str__(self) -> str:
        return f"L{self.layer}H{self.head}"


class Ranked(Protocol):
    """Anything that ranks heads, most important first, and knows where its order is a guess (``HeadScores`` does)."""

    n_layers: int
    n_heads: int
    n_kv_heads: int

    def ranking(self, by: str = "retrieval") -> list[HeadId]: ...
    def tie_warning(self, k: int, by: str = "retrieval") -> str | None: ...


class Valued(Protocol):
    """Anything that has a number for every head; tables [layer, head] with NaN for heads that are not there."""

    n_layers: int
    n_heads: int
    n_kv_heads: int
    logprob_drop_LH: Any

    def value_LH(self, by: str = "retrieval") -> Any: ...


@dataclass(frozen=True)
class HeadPlan:
    """The heads that stay attention; every other head becomes recurrent.

    ``teacher`` is the fingerprint of the model the plan was made for, or empty when it fits any model of this shape.
    Raises ValueError for a head that does not exist, a head named twice, or an impossible shape.
    """

    n_layers: int
    n_heads: int
    n_kv_heads: int
    kept: tuple[HeadId, ...]
    teacher: str = ""

    def __post_init__(self) -> None:
        for name in ("n_layers", "n_heads", "n_kv_heads"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; a plan needs a whole number of at least 1.")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"{self.n_heads} query heads cannot share {self.n_kv_heads} KV heads evenly; "
                "take both numbers from the teacher's config."
            )
        kept = tuple(sorted(HeadId(*pair) for pair in self.kept))
        for head_id in kept:
            self._check_exists(head_id)
        repeated = sorted({h for h in kept if kept.count(h) > 1})
        if repeated:
            raise ValueError(f"heads named twice: {', '.join(map(str, repeated))}; name each head once.")
        object.__setattr__(self, "kept", kept)

    def _check_exists(self, head_id: HeadId) -> None:
        layer, head = head_id
        whole = isinstance(layer, int) and isinstance(head, int)
        if not (whole and 0 <= layer < self.n_layers and 0 <= head < self.n_heads):
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
        """Whether every head stays: the student then is the teacher."""
        return self.k == self.n_layers * self.n_heads

    def kept_in(self, layer: int) -> tuple[int, ...]:
        """Kept query heads of a layer, ascending."""
        return tuple(h.head for h in self.kept if h.layer == layer)

    def recurrent_in(self, layer: int) -> tuple[int, ...]:
        """Query heads of a layer that become recurrent, ascending."""
        kept = set(self.kept_in(layer))
        return tuple(h for h in range(self.n_heads) if h not in kept)

    def kv_groups_in(self, layer: int) -> tuple[int, ...]:
        """KV heads that the kept heads of a layer read, ascending; each is stored once."""
        group_size = self.n_heads // self.n_kv_heads
        return tuple(sorted({head // group_size for head in self.kept_in(layer)}))

    @property
    def n_stored_kv_heads(self) -> int:
        """Keys and values that a cache holds, over all layers: one for all kept heads of a group."""
        return sum(len(self.kv_groups_in(layer)) for layer in range(self.n_layers))

    def check_fits(self, shape_of: Any) -> None:
        """Raise ValueError unless the plan was made for a teacher of this shape."""
        theirs, ours = _shape(shape_of), (self.n_layers, self.n_heads, self.n_kv_heads)
        if theirs != ours:
            raise ValueError(
                "the plan was made for another teacher: it expects {} layers, {} heads, {} KV heads, "
                "the model has {}, {}, {}; score this teacher and make a new plan.".format(*ours, *theirs)
            )

    @classmethod
    def top_k(cls, scores: Ranked, k: int, by: str = "retrieval") -> HeadPlan:
        """The ``k`` best heads over all layers, by the scores' own ranking.

        ``by`` is "retrieval", "retrieval_minus_control" or "ratio" (`HeadScores.value_LH`); the latter two put
        back heads that matter for everything. A cut inside a tie is logged as a warning. Raises ValueError for
        more heads than there are.
        """
        cls.check_k(scores, k)
        ranking = scores.ranking(by)
        if k > len(ranking):
            raise ValueError(f"k is {k}, but only {len(ranking)} heads of this teacher are scored; take a smaller k.")
        if tie := scores.tie_warning(k, by):
            log.warning(tie)
        return cls(*_shape(scores), kept=tuple(ranking[:k]), teacher=_fingerprint(scores))

    @classmethod
    def under_budget(
        cls,
        scores: Valued,
        *,
        heads: int | None = None,
        kv_heads: int | None = None,
        cache_bytes: int | None = None,
        context: int | None = None,
        head_dim: int | None = None,
        d_state: int | None = None,
        bytes_per_element: int = 2,
        windows: Sequence[int | None] | None = None,
        per_layer: Literal["uniform", "power_of_two"] | None = None,
        by: str = "retrieval",
    ) -> HeadPlan:
        """The plan of greatest total score that costs no more than one budget; the optimum, not an approximation.

        The budget is one of: ``heads``, kept query heads; ``kv_heads``, stored KV heads, where heads of one group
        cost one; ``cache_bytes``, of one sequence of ``context`` tokens as `budget.cache_bytes` counts them, the
        states of recurrent heads included (needs ``head_dim`` and ``d_state``, and the layers' ``windows`` where they
        have some, `model.layer_windows`). ``per_layer`` asks for the same
        number of KV heads in every layer that has heads, or for 0, 1, 2, 4, ... of them: a server's cache wants
        pages of one size, or of sizes that divide one another.

        Scores are `HeadScores.value_LH` of ``by``, log-probability deciding between equal ones. A head that
        lowers the total is left out even where there is room. Raises ValueError for a budget that no plan meets.
        """
        from .budget import best_plan

        return best_plan(
            scores,
            heads=heads,
            kv_heads=kv_heads,
            cache=cache_bytes,
            context=context,
            head_dim=head_dim,
            d_state=d_state,
            bytes_per_element=bytes_per_element,
            windows=windows,
            per_layer=per_layer,
            by=by,
        )

    @classmethod
    def random(cls, shape_of: Any, k: int, seed: int) -> HeadPlan:
        """``k`` heads drawn without replacement; the same seed draws the same heads."""
        cls.check_k(shape_of, k)
        n_layers, n_heads, _ = _shape(shape_of)
        every = [HeadId(layer, head) for layer in range(n_layers) for head in range(n_heads)]
        kept = _random.Random(f"head-plan-{seed}").sample(every, k)
        return cls(*_shape(shape_of), kept=tuple(kept), teacher=_fingerprint(shape_of))

    @classmethod
    def layers(cls, shape_of: Any, layers: Sequence[int]) -> HeadPlan:
        """Every head of the named layers."""
        n_heads = _shape(shape_of)[1]
        kept = tuple(HeadId(layer, head) for layer in layers for head in range(n_heads))
        return cls(*_shape(shape_of), kept=kept, teacher=_fingerprint(shape_of))

    @classmethod
    def all(cls, shape_of: Any) -> HeadPlan:
        """Every head: the student is the teacher."""
        return cls.layers(shape_of, range(_shape(shape_of)[0]))

    @classmethod
    def none(cls, shape_of: Any) -> HeadPlan:
        """No head: a fully recurrent student."""
        return cls(*_shape(shape_of), kept=(), teacher=_fingerprint(shape_of))

    @classmethod
    def from_pairs(cls, shape_of: Any, pairs: Iterable[Sequence[int]]) -> HeadPlan:
        """Explicit ``(layer, head)`` pairs, for example a published ranking cut at k."""
        kept = tuple(HeadId(*pair) for pair in pairs)
        return cls(*_shape(shape_of), kept=kept, teacher=_fingerprint(shape_of))

    @staticmethod
    def check_k(shape_of: Any, k: int) -> None:
        """Raise ValueError unless a teacher of this shape has ``k`` heads to keep."""
        n_layers, n_heads, _ = _shape(shape_of)
        if not isinstance(k, int) or not 0 <= k <= n_layers * n_heads:
            raise ValueError(
                f"k is {k!r}; the teacher has {n_layers} x {n_heads} = {n_layers * n_heads} heads, "
                f"so k must be a whole number from 0 to {n_layers * n_heads}."
            )

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, whole or not at all."""
        record = {
            "format": FORMAT,
            "n_layers": self.n_layers,
            "n_heads": self.n_heads,
            "n_kv_heads": self.n_kv_heads,
            "kept": [list(head_id) for head_id in self.kept],
            "teacher": self.teacher,
        }
        write_json(Path(path), record)

    @classmethod
    def load(cls, path: str | Path) -> HeadPlan:
        """Read a plan written by `save`. Raises ValueError for a file that is not one."""
        try:
            record = json.loads(Path(path).read_text())
            if record["format"] != FORMAT:
                raise ValueError(f"its format is {record['format']!r}, expected {FORMAT!r}")
            shape = (record["n_layers"], record["n_heads"], record["n_kv_heads"])
            kept = tuple(HeadId(*pair) for pair in record["kept"])
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a head plan ({error}); write one with HeadPlan.save.") from error
        return cls(*shape, kept=kept, teacher=record.get("teacher", ""))


def _shape(source: Any) -> tuple[int, int, int]:
    """(layers, query heads, KV heads) of a plan, of scores, of a Hugging Face config, or of a model."""
    config = getattr(source, "config", source)
    if all(hasattr(config, name) for name in ("n_layers", "n_heads", "n_kv_heads")):
        return config.n_layers, config.n_heads, config.n_kv_heads
    try:
        if hasattr(config, "num_hidden_layers") and hasattr(config, "num_attention_heads"):
            n_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
            return config.num_hidden_layers, config.num_attention_heads, n_kv_heads
    except RuntimeError as error:  # of transformers, for a config whose layers are of several shapes
        raise ValueError(
            f"the layers of {type(config).__name__} have different numbers of heads; a plan needs the same in every "
            "layer: take another teacher."
        ) from error
    raise ValueError(
        f"{type(source).__name__} has no head counts; pass a Hugging Face config, a model, a HeadPlan or HeadScores."
    )


def _fingerprint(source: Any) -> str:
    return getattr(source, "teacher", "") or getattr(source, "fingerprint", "") or ""
