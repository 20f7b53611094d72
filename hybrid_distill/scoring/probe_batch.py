"""Batches of probe rows of one kind and length: no padding and, for prompts without a tree, no mask.

Shapes: as in `probe_rows`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..distributed import own_share
from ..probes.answering import accepts
from .probe_rows import ProbeRow, PromptRow, TextRow


class ProbeBatch:
    """Rows of one kind and length that run together."""

    def __init__(self, rows: Sequence[ProbeRow]) -> None:
        self.rows = list(rows)
        self.kind = type(rows[0])
        self.n_positions = max(row.n_positions for row in rows)
        self.length = max(len(row.tokens) for row in rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def is_text(self) -> bool:
        """True for plain texts, False for prompts."""
        return self.kind is TextRow

    @cached_property
    def ids_BL(self) -> Tensor:
        """Token ids."""
        return torch.stack([row.ids_L for row in self.rows])

    def parts(self, n_rows: int) -> Iterator[tuple[slice, ProbeBatch]]:
        """Split into batches of up to ``n_rows`` rows; yield each with its slice of this batch."""
        for start in range(0, len(self), n_rows):
            rows = slice(start, start + n_rows)
            yield rows, ProbeBatch(self.rows[rows])

    def logits(self, model: PreTrainedModel, groups: int = 1) -> Tensor:
        """Compute logits_GBSV of ``groups`` consecutive copies of the rows."""
        arguments = self._tree_arguments(model, groups)
        if accepts(model, "logits_to_keep"):
            arguments["logits_to_keep"] = self.n_positions
        output = model(input_ids=self.ids_BL.repeat(groups, 1), use_cache=False, **arguments)
        return output.logits[:, -self.n_positions :].unflatten(0, (groups, len(self)))

    def _tree_arguments(self, model: PreTrainedModel, groups: int) -> dict[str, object]:
        """Return the mask and positions of rows with a tree; plain rows need neither."""
        prompts = [row for row in self.rows if isinstance(row, PromptRow)]
        # Without a mask, attention takes its fast causal path.
        if not any(row.node_of for row in prompts):
            return {}
        mask_B1LL = torch.stack([row.sees_LL for row in prompts])[:, None]
        # Only sdpa accepts a Boolean mask; other attentions add the mask to their scores.
        if model.config._attn_implementation != "sdpa":
            lowest = torch.finfo(model.dtype).min
            zeros_B1LL = torch.zeros_like(mask_B1LL, dtype=model.dtype)
            mask_B1LL = zeros_B1LL.masked_fill(~mask_B1LL, lowest)
        position_BL = torch.stack([row.position_L for row in prompts])
        return {
            "attention_mask": mask_B1LL.repeat(groups, 1, 1, 1),
            "position_ids": position_BL.repeat(groups, 1),
        }

    def values(self, logits_GBSV: Tensor) -> Tensor:
        """Return value_GQ, from which each row's outcome is computed, in float64 on the CPU."""
        # From here on in float64: drops are small differences of sums.
        return self.kind.values(self.rows, logits_GBSV).double().cpu()

    def values_by_plain_forwards(self, model: PreTrainedModel) -> Tensor:
        """Return value_1Q by ordinary forwards: the fallback and the reference for `values`."""
        return self.kind.values_by_plain_forwards(self.rows, model)

    def outcome(self, value_GQ: Tensor) -> Tensor:
        """Return outcome_XGBE; all rows must have the same number of questions."""
        sizes = [row.n_values for row in self.rows]
        outcomes = []
        for row, own_GQ in zip(self.rows, value_GQ.split(sizes, dim=1)):
            outcomes.append(row.outcome(own_GQ))
        return torch.stack(outcomes, dim=2)


def batches_of(rows: Iterable[ProbeRow]) -> list[ProbeBatch]:
    """Group rows of one kind into one batch per length."""
    by_length: dict[int, list[ProbeRow]] = {}
    for row in rows:
        by_length.setdefault(len(row.tokens), []).append(row)
    return [ProbeBatch(group) for group in by_length.values()]


def own_batches(rows: Iterable[ProbeRow]) -> list[ProbeBatch]:
    """Batch this process's share of rows of one kind, longest first."""
    # The longest batch meets the memory limit first, before much has been measured. Rows are dealt
    # out in turns, so every process gets rows of all lengths.
    longest_first = sorted(rows, key=lambda row: (-len(row.tokens), row.number))
    return batches_of(own_share(longest_first))
