"""What scoring finds: a number for every head, and all that it depends on, in one file.

Shapes: L layer, H query head.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..io import write_json
from ..plan import HeadId
from ..provenance import now, versions
from ..teacher import fingerprint
from .uncertainty import tie_warning

FORMAT = "hybrid-distill/head-scores/2"
READABLE = ("hybrid-distill/head-scores/1", FORMAT)
DROPS = ("accuracy_drop_LH", "logprob_drop_LH", "control_drop_LH")
ERRORS = ("accuracy_se_LH", "logprob_se_LH", "control_se_LH")
INTERVALS = ("accuracy_interval_LH2", "logprob_interval_LH2", "control_interval_LH2")
WAYS = ("retrieval", "retrieval_minus_control", "ratio")
COMBINED = "combined by "
"""How the method of scores by several probes begins (`combine`)."""
CONTROL_FLOOR = 0.01  # nats per token: one percent of perplexity, about what a small control set can resolve


@dataclass(frozen=True)
class Reading:
    """How to show an accuracy drop x: as ``offset + scale * x``, called ``name``, in ``unit``, over ``probes``.

    Of ranks (``is_rank``), unlike of drops, the lowest is the best.
    """

    name: str = "accuracy lost"
    unit: str = "points of accuracy"
    scale: float = 100.0
    offset: float = 0.0
    is_rank: bool = False
    probes: tuple[str, ...] = ()

    def __call__(self, drop: float) -> float:
        return self.offset + self.scale * drop

    @property
    def label(self) -> str:
        """Name and probes, as in "mean rank over kv_retrieval, copying"."""
        return f"{self.name} over {', '.join(self.probes)}" if self.probes else self.name


@dataclass(frozen=True, eq=False)
class HeadScores:
    """What each head is worth, as float64 tensors [layer, head]; a higher drop means more is lost without it.

    ``accuracy_drop_LH`` is in shares of examples (-1 to 1), ``logprob_drop_LH`` in nats of the answer's
    log-probability, ``control_drop_LH`` in nats of next-token loss per token on plain text (None without
    texts). Standard errors are of paired differences: the same examples with and without the head.

    Optional, None where not measured: intervals (low, high) of the three drops, ``n_examples_LH``, the examples
    each head was tried on (int64), and ``agreement`` of disjoint halves of the examples (`split_half`). A NaN
    accuracy drop says that the layer has no such head (hybrid teachers).
    """

    n_kv_heads: int
    accuracy_drop_LH: Tensor
    logprob_drop_LH: Tensor
    control_drop_LH: Tensor | None
    accuracy_se_LH: Tensor
    logprob_se_LH: Tensor
    control_se_LH: Tensor | None
    baseline: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    accuracy_interval_LH2: Tensor | None = None
    logprob_interval_LH2: Tensor | None = None
    control_interval_LH2: Tensor | None = None
    n_examples_LH: Tensor | None = None
    agreement: dict[str, Any] | None = None

    @property
    def n_layers(self) -> int:
        return self.accuracy_drop_LH.shape[0]

    @property
    def n_heads(self) -> int:
        return self.accuracy_drop_LH.shape[1]

    @property
    def fingerprint(self) -> str:
        """Of the teacher that was scored."""
        return self.provenance.get("fingerprint", "")

    @property
    def reading(self) -> Reading:
        """What ``accuracy_drop_LH`` holds: points of accuracy, or what `combine_scores` made of several probes."""
        method = str(self.provenance.get("method", ""))
        if not method.startswith(COMBINED):
            return Reading()
        parts = self.provenance.get("parts", [])
        probes = tuple(part.get("probe", {}).get("name", "an unnamed probe") for part in parts)
        how = method.removeprefix(COMBINED)
        if how != "mean_rank":
            names = {"max_drop": "largest accuracy loss", "weighted": "weighted mean accuracy loss"}
            return Reading(names.get(how, how), probes=probes)
        n_places = self.provenance.get("n_places", max(2, len(self.ranking())))
        unit = f"mean rank, 1 to {n_places}"
        return Reading("mean rank", unit, 1.0 - n_places, float(n_places), is_rank=True, probes=probes)

    def value_LH(self, by: str = "retrieval") -> Tensor:
        """What a head counts for, higher is better, NaN where there is no head.

        "retrieval": the accuracy drop. "retrieval_minus_control": the answer's log-probability drop less the
        control drop, both in nats (of one answer, of one token). "ratio": the one over the other, a control
        drop below 0.01 nats counting as 0.01. The latter two put back heads that matter for everything.
        Raises ValueError for another way, or without a control drop where one is needed.
        """
        if by not in WAYS:
            raise ValueError(f"by is {by!r}; heads are ranked by {', '.join(map(repr, WAYS))}.")
        if by == "retrieval":
            return self.accuracy_drop_LH
        if self.control_drop_LH is None:
            raise ValueError(
                f"by is {by!r}, but these scores have no control drop; score again with control texts, "
                "or rank by 'retrieval'."
            )
        if by == "retrieval_minus_control":
            return self.logprob_drop_LH - self.control_drop_LH
        return self.logprob_drop_LH / self.control_drop_LH.clamp(min=CONTROL_FLOOR)

    def ranking(self, by: str = "retrieval") -> list[HeadId]:
        """All heads that exist, best first: by `value_LH`, equal ones by log-probability drop, then (layer, head)."""
        value, logprob = self.value_LH(by).tolist(), self.logprob_drop_LH.tolist()
        heads = [HeadId(layer, head) for layer in range(self.n_layers) for head in range(self.n_heads)]
        exist = [h for h in heads if not math.isnan(value[h.layer][h.head] + logprob[h.layer][h.head])]
        return sorted(exist, key=lambda h: (-value[h.layer][h.head], -logprob[h.layer][h.head], h))

    def tie_warning(self, k: int, by: str = "retrieval") -> str | None:
        """What to say where the first ``k`` heads end inside a tie, otherwise None (`uncertainty.tie_warning`)."""
        return tie_warning(self, k, by)

    def save(self, path: str | Path) -> None:
        """Write the scores as JSON, NaN as null; an interrupted write leaves an earlier file as it was."""
        tables = {name: _rows(getattr(self, name)) for name in (*DROPS, *ERRORS, *INTERVALS, "n_examples_LH")}
        shape = {"n_layers": self.n_layers, "n_heads": self.n_heads, "n_kv_heads": self.n_kv_heads}
        record = {
            "format": FORMAT,
            **shape,
            "baseline": self.baseline,
            "provenance": self.provenance,
            "agreement": self.agreement,
            **tables,
        }
        write_json(Path(path), record)

    @classmethod
    def load(cls, path: str | Path) -> HeadScores:
        """Read scores written by `save`, now or by an earlier version. Raises ValueError for a file that holds none."""
        try:
            record = json.loads(Path(path).read_text())
            if record["format"] not in READABLE:
                raise ValueError(f"its format is {record['format']!r}, expected {' or '.join(map(repr, READABLE))}")
            tables: dict[str, Any] = {name: tensor_or_none(record[name]) for name in (*DROPS, *ERRORS)}
            tables |= {name: tensor_or_none(record.get(name)) for name in (*INTERVALS, "n_examples_LH")}
            shape = (record["n_layers"], record["n_heads"])
            for name, table in tables.items():
                expected = (*shape, 2) if name in INTERVALS else shape
                if table is not None and tuple(table.shape) != expected:
                    raise ValueError(f"{name} is {tuple(table.shape)}, expected {expected} (layers, heads)")
            if tables["n_examples_LH"] is not None:
                tables["n_examples_LH"] = tables["n_examples_LH"].long()
            return cls(
                record["n_kv_heads"],
                **tables,
                baseline=record["baseline"],
                provenance=record["provenance"],
                agreement=record.get("agreement"),
            )
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} holds no head scores ({error}); write them with hybrid-distill score.") from error


def _rows(table: Tensor | None) -> list[Any] | None:
    return None if table is None else _swap(table.tolist(), lambda x: None if x != x else x)


def tensor_or_none(rows: list[Any] | None) -> Tensor | None:
    """A table of a JSON file as float64, null in it as NaN; None without a table."""
    if rows is None:
        return None
    return torch.tensor(_swap(rows, lambda x: math.nan if x is None else x), dtype=torch.float64)


def _swap(entry: Any, change: Callable[[Any], Any]) -> Any:
    """Nested lists with every entry changed."""
    return [_swap(inner, change) for inner in entry] if isinstance(entry, list) else change(entry)


def describe_run(model: PreTrainedModel) -> dict[str, Any]:
    """Which model was measured, and on what: for the provenance of a result."""
    on_gpu = model.device.type == "cuda"
    return {
        "model": model.name_or_path,
        "revision": getattr(model.config, "_commit_hash", None),
        "fingerprint": fingerprint(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(model.device) if on_gpu else model.device.type,
        "versions": versions(),
        "date": now(),
    }
