"""Result of scoring: the numbers of every head and their provenance, in one file.

Shapes: L layer, H query head (in tables [H, N], scored heads only), N sample (a prompt, a question or a
text), U unit of neighboring heads.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..io import Record, refused, write_json
from ..plan import HeadId, Tie
from ..provenance import now, versions
from ..teacher import HeadSite, decoder_blocks, fingerprint, imported_from

FORMAT = "hybrid-distill/head-scores/2"
DROPS = ("accuracy_drop_LH", "logprob_drop_LH", "control_drop_LH")
ERRORS = ("accuracy_se_LH", "logprob_se_LH", "control_se_LH")
INTERVALS = ("accuracy_interval_LH2", "logprob_interval_LH2", "control_interval_LH2")
TABLES = (*DROPS, *ERRORS, *INTERVALS, "n_examples_LH")
CRITERIA = ("retrieval", "logprob", "retrieval_minus_control", "ratio")
# Nats per token: 1 % of perplexity, about the resolution of a small control set.
CONTROL_FLOOR = 0.01
# Half-width of a 95 % interval, in standard errors.
NORMAL_95 = 1.96


@dataclass(frozen=True, eq=False)
class HeadScores:
    """Scores of every head, as float64 tensors [layer, head]; a higher drop means that ablating the
    head costs more.

    ``accuracy_drop_LH`` is a share of questions (-1 to 1), ``logprob_drop_LH`` the drop in the
    answer's log-probability in nats, ``control_drop_LH`` the rise in next-token loss on plain text
    in nats per token (None without texts). Standard errors are for paired differences: the same
    prompts with and without the head. Scores by attribution (`is_additive`) have no accuracy.

    Optional, None if not measured: intervals (low, high) of the three drops; ``n_examples_LH``, the
    number of prompts each head was measured on (int64); ``agreement`` between disjoint halves of
    the prompts (`split_half`). A NaN drop marks a head that was not scored or that its layer does
    not have (hybrid teachers).
    """

    n_kv_heads: int
    accuracy_drop_LH: Tensor | None
    logprob_drop_LH: Tensor
    control_drop_LH: Tensor | None
    accuracy_se_LH: Tensor | None
    logprob_se_LH: Tensor
    control_se_LH: Tensor | None
    baseline: Record = field(default_factory=dict)
    provenance: Record = field(default_factory=dict)
    accuracy_interval_LH2: Tensor | None = None
    logprob_interval_LH2: Tensor | None = None
    control_interval_LH2: Tensor | None = None
    n_examples_LH: Tensor | None = None
    agreement: Record | None = None

    @property
    def n_layers(self) -> int:
        return self.logprob_drop_LH.shape[0]

    @property
    def n_heads(self) -> int:
        return self.logprob_drop_LH.shape[1]

    @property
    def is_additive(self) -> bool:
        """True for shares of one gain (`attribute_heads`): those of several heads add up."""
        return self.accuracy_drop_LH is None

    def of_teacher(self, fingerprint: str) -> HeadScores:
        """Return the scores as those of another copy of the model, such as one that is not quantized.

        Their provenance keeps the fingerprint of the weights that were measured.
        """
        if self.fingerprint == fingerprint:
            return self
        provenance = {
            **self.provenance,
            "fingerprint": fingerprint,
            "measured_on": self.fingerprint,
        }
        return replace(self, provenance=provenance)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the scored teacher."""
        return self.provenance.get("fingerprint", "")

    def value_LH(self, by: str = "retrieval") -> Tensor:
        """Return each head's value by one criterion: higher is better, NaN means no score.

        - "retrieval": the accuracy drop or, if accuracy was not measured, the log-probability drop.
        - "logprob": the drop in the answer's log-probability.
        - "retrieval_minus_control": the log-probability drop (nats per answer) minus the control
          drop (nats per token).
        - "ratio": the log-probability drop divided by the control drop, which counts as at least
          0.01 nats.

        The last two lower the rank of heads that matter for all text. Raises ValueError for any
        other criterion, and for a criterion whose control drop was not measured.
        """
        if by not in CRITERIA:
            raise ValueError(f"by is {by!r}; heads are ranked by {', '.join(map(repr, CRITERIA))}.")
        if by == "retrieval" and self.accuracy_drop_LH is not None:
            return self.accuracy_drop_LH
        if by in ("retrieval", "logprob"):
            return self.logprob_drop_LH
        if self.control_drop_LH is None:
            raise ValueError(
                f"by is {by!r}, but these scores have no control drop; score again with control "
                "texts, or rank by 'retrieval'."
            )
        if by == "retrieval_minus_control":
            return self.logprob_drop_LH - self.control_drop_LH
        return self.logprob_drop_LH / self.control_drop_LH.clamp(min=CONTROL_FLOOR)

    def ranking(self, by: str = "retrieval") -> list[HeadId]:
        """List all scored heads, best first: by `value_LH`, log-probability drop and position."""
        # Two keys: accuracy moves in steps of one question, so many heads tie.
        keys_LH2 = torch.stack([self.value_LH(by), self.logprob_drop_LH], dim=-1)
        is_scored_LH = ~keys_LH2.isnan().any(-1)
        # Negated: sorted() is ascending.
        keys_of = {}
        for layer, head in is_scored_LH.nonzero().tolist():
            keys_of[HeadId(layer, head)] = (-keys_LH2[layer, head]).tolist()
        return sorted(keys_of, key=lambda head: (keys_of[head], head))

    def unit_ranking(self, unit_size: int, by: str = "retrieval") -> list[tuple[int, int]]:
        """List units of ``unit_size`` neighboring heads as (layer, number), best first.

        A unit ranks by the sum of its heads' shares of one gain (`is_additive`). Drops of heads that were ablated one
        by one do not add up: by these, a unit ranks as its best head does.
        """
        ranking = self.ranking(by)
        # A dict keeps the order of the ranking: each unit takes the place of its best head.
        units = list(dict.fromkeys((head.layer, head.head // unit_size) for head in ranking))
        if not self.is_additive:
            return units
        # A layer with fewer heads has NaN for the others.
        share_LUH = self.value_LH(by).nan_to_num().unflatten(1, (-1, unit_size))
        share_LU = share_LUH.sum(2)
        return sorted(units, key=lambda unit: -share_LU[unit].item())

    def tie(self, k: int, by: str = "retrieval") -> Tie | None:
        """Return the heads that tie with the ``k``-th and the next, None if the scores separate these two.

        Two heads tie if their values are equal and, for "retrieval", the intervals of their
        log-probability drops overlap too (without intervals: 1.96 standard errors on each side).
        """
        ranking = self.ranking(by)
        if not 0 < k < len(ranking):
            return None
        last_kept = ranking[k - 1]
        first_left_out = ranking[k]
        if not self._are_tied(last_kept, first_left_out, by):
            return None
        kept = [head for head in ranking[:k] if self._are_tied(head, first_left_out, by)]
        left_out = [head for head in ranking[k:] if self._are_tied(last_kept, head, by)]
        return Tie(k, tuple(kept), tuple(left_out))

    def _are_tied(self, a: HeadId, b: HeadId, by: str) -> bool:
        value_LH = self.value_LH(by)
        if value_LH[a] != value_LH[b]:
            return False
        # Accuracy alone cannot separate these; log-probability, the tie-breaker, may.
        if by != "retrieval" or self.logprob_drop_LH[a] == self.logprob_drop_LH[b]:
            return True
        low_a, high_a = self._logprob_interval(a)
        low_b, high_b = self._logprob_interval(b)
        return low_a <= high_b and low_b <= high_a

    def _logprob_interval(self, head: HeadId) -> tuple[float, float]:
        if self.logprob_interval_LH2 is not None:
            low, high = self.logprob_interval_LH2[head].tolist()
            return low, high
        center = self.logprob_drop_LH[head].item()
        half_width = NORMAL_95 * self.logprob_se_LH[head].item()
        return center - half_width, center + half_width

    @classmethod
    def from_differences(
        cls,
        model: PreTrainedModel,
        sites: Sequence[HeadSite],
        heads: Sequence[HeadId],
        differences: Mapping[str, Tensor],
        *,
        baseline: Record,
        provenance: Record,
    ) -> HeadScores:
        """Average the differences of each head over the samples, with the standard error of the mean.

        ``differences`` maps logprob and, if measured, accuracy and control to a table [H, N], one
        row for each of ``heads``; NaN marks a sample that a head was not measured on. All other
        heads get NaN.
        """
        drops: dict[str, Tensor] = {}
        errors: dict[str, Tensor] = {}
        for name, difference_HN in differences.items():
            mean_H, error_H = _mean_and_error(difference_HN)
            drops[name] = head_table(model, sites, heads, mean_H)
            errors[name] = head_table(model, sites, heads, error_H)
        return cls(
            n_kv_heads=sites[0].n_kv_heads,
            accuracy_drop_LH=drops.get("accuracy"),
            logprob_drop_LH=drops["logprob"],
            control_drop_LH=drops.get("control"),
            accuracy_se_LH=errors.get("accuracy"),
            logprob_se_LH=errors["logprob"],
            control_se_LH=errors.get("control"),
            baseline=baseline,
            provenance=provenance,
        )

    def save(self, path: str | Path) -> None:
        """Write the scores as JSON, NaN as null.

        An interrupted write leaves an existing file intact.
        """
        record: Record = {"format": FORMAT}
        for name in ("n_layers", "n_heads", "n_kv_heads", "baseline", "provenance", "agreement"):
            record[name] = getattr(self, name)
        for name in TABLES:
            record[name] = _to_rows(getattr(self, name))
        write_json(Path(path), record)

    @classmethod
    def load(cls, path: str | Path) -> HeadScores:
        """Read scores written by `save`. Raises ValueError for any other file."""
        with refused(f"{path} does not hold head scores", "write them with hybrid-distill score"):
            record = json.loads(Path(path).read_text())
            if record["format"] != FORMAT:
                raise ValueError(f"its format is {record['format']!r}, expected {FORMAT!r}")
            if not isinstance(record["provenance"], dict):
                raise ValueError("its provenance is not an object")
            shape = (record["n_layers"], record["n_heads"])
            tables: Record = {}
            for name in TABLES:
                rows = record[name] if name in (*DROPS, *ERRORS) else record.get(name)
                tables[name] = _to_table(name, rows, shape)
            return cls(
                n_kv_heads=record["n_kv_heads"],
                baseline=record["baseline"],
                provenance=record["provenance"],
                agreement=record.get("agreement"),
                **tables,
            )


def _mean_and_error(difference_HN: Tensor) -> tuple[Tensor, Tensor]:
    """Return each head's mean over its samples and the standard error of that mean."""
    mean_H1 = difference_HN.nanmean(1, keepdim=True)
    n_H = (~difference_HN.isnan()).sum(1)
    squares_H = (difference_HN - mean_H1).nan_to_num().square().sum(1)
    # From one sample no error can be estimated; it is 0, not NaN.
    variance_H = squares_H / (n_H - 1).clamp(min=1)
    return mean_H1[:, 0], (variance_H / n_H).sqrt()


def head_table(
    model: PreTrainedModel,
    sites: Sequence[HeadSite],
    heads: Sequence[HeadId],
    entry_H: Tensor,
) -> Tensor:
    """Scatter one entry per head into a float64 table [L, H, ...]; other heads get NaN."""
    n_layers = len(decoder_blocks(model))
    # Layers without attention, or with fewer heads, keep NaN (hybrid teachers).
    n_heads = max(site.n_heads for site in sites)
    shape = (n_layers, n_heads, *entry_H.shape[1:])
    table_LH = torch.full(shape, math.nan, dtype=torch.float64)
    rows = [head.layer for head in heads]
    columns = [head.head for head in heads]
    table_LH[rows, columns] = entry_H.double()
    return table_LH


def heads_of(sites: Sequence[HeadSite]) -> list[HeadId]:
    """List all heads, bottom to top."""
    heads: list[HeadId] = []
    for site in sites:
        heads += [HeadId(site.layer, head) for head in range(site.n_heads)]
    return heads


def _to_rows(table: Tensor | None) -> list[object] | None:
    """Return a table as nested lists for JSON, with None for NaN, which JSON does not have."""
    if table is None:
        return None
    # As objects: an array of numbers cannot hold None.
    rows = table.numpy().astype(object)
    rows[table.isnan().numpy()] = None
    return rows.tolist()


def _to_table(name: str, rows: list[object] | None, shape: tuple[int, int]) -> Tensor | None:
    """Make a table from its rows in a file. Raises ValueError for another shape."""
    if rows is None:
        return None
    # Through NumPy, which reads None as NaN; torch does not.
    table = torch.tensor(np.array(rows, dtype=np.float64))
    expected = (*shape, 2) if name in INTERVALS else shape
    if tuple(table.shape) != expected:
        raise ValueError(f"{name} is {tuple(table.shape)}, expected {expected} (layers, heads)")
    return table.long() if name == "n_examples_LH" else table


def describe_run(model: PreTrainedModel) -> Record:
    """Describe the measured model and the software versions, for the provenance of a result."""
    device = model.device.type
    if device == "cuda":
        device = torch.cuda.get_device_name(model.device)
    return {
        "model": model.name_or_path,
        "imported_from": imported_from(str(model.name_or_path)),
        "revision": getattr(model.config, "_commit_hash", None),
        "fingerprint": fingerprint(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": device,
        "versions": versions(),
        "date": now(),
    }
