"""Racing: heads that cannot be among the first k any more are not tried on further examples.

The race is for the accuracy drop over all N examples. These are a finite population, and the first n of them, in an
order drawn at random, are a sample of it. So the number of right answers that become wrong without a head, and of wrong
ones that become right, follow hypergeometric distributions. Their exact confidence bounds hold for any model and any
examples: the only randomness is that of the order. A head leaves when its upper bound is below the k-th largest lower
bound. All bounds, of all heads after all rounds, hold together with the stated confidence (a union bound), and then the
first k heads, and their order, are those of exhaustive scoring: heads that might still tie in accuracy stay. Racing
saves much where k heads stand out, and little where the k-th and the next lose about the same.

Shapes: H head, E example.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from ..probes import check_counts

SHARES = (1 / 8, 1 / 4, 1 / 2, 1)


@dataclass(frozen=True)
class Race:
    """A race for the first ``k`` of ``n_heads`` heads on ``n_examples`` examples, right with ``confidence``.

    Raises ValueError for a ``k`` below 1.
    """

    k: int
    n_heads: int
    n_examples: int
    confidence: float = 0.99
    seed: int = 0

    def __post_init__(self) -> None:
        check_counts(race_k=self.k)

    @property
    def rounds(self) -> list[int]:
        """Number of examples that the heads in the race have seen after each round; all of them after the last."""
        return sorted({math.ceil(share * self.n_examples) for share in SHARES})

    def order(self) -> list[int]:
        """Return the examples in the order in which they are tried."""
        return torch.randperm(self.n_examples, generator=torch.Generator().manual_seed(self.seed)).tolist()

    def bounds(self, right_E: Tensor, right_HE: Tensor) -> tuple[Tensor, Tensor]:
        """Return (low_H, high_H), which bound the number of answers lost on all examples.

        ``right_E`` is the baseline on all examples in order, ``right_HE`` each head's result on the first of them.
        """
        # Lost and gained answers are bounded from both sides; after the last round everything is known.
        alpha = (1 - self.confidence) / (4 * self.n_heads * max(1, len(self.rounds) - 1))
        before_E = right_E[: right_HE.shape[1]]
        n_right, n_seen_right = int(right_E.sum()), int(before_E.sum())
        n_wrong, n_seen_wrong = len(right_E) - n_right, len(before_E) - n_seen_right
        lost_H, gained_H = ((before_E > right_HE).sum(1), (before_E < right_HE).sum(1))
        lost = [_count_bounds(n_right, n_seen_right, x, alpha) for x in lost_H.tolist()]
        gained = [_count_bounds(n_wrong, n_seen_wrong, x, alpha) for x in gained_H.tolist()]
        low = [a_low - b_high for (a_low, _), (_, b_high) in zip(lost, gained)]
        high = [a_high - b_low for (_, a_high), (b_low, _) in zip(lost, gained)]
        return torch.tensor(low), torch.tensor(high)

    def stay(self, right_E: Tensor, right_HE: Tensor) -> list[bool]:
        """Return which heads may still be among the first k; at least k do."""
        low_H, high_H = self.bounds(right_E, right_HE)
        to_reach = low_H.sort(descending=True).values[: self.k][-1]  # of all heads, if there are fewer than k
        return (high_H >= to_reach).tolist()


def _count_bounds(population: int, n_drawn: int, found: int, alpha: float) -> tuple[int, int]:
    """Bound the count in the population, given ``found`` among ``n_drawn``; each bound fails with chance alpha."""
    return population - _upper(population, n_drawn, n_drawn - found, alpha), _upper(population, n_drawn, found, alpha)


@cache
def _upper(population: int, n_drawn: int, found: int, alpha: float) -> int:
    """Return the largest count under which drawing ``found`` or fewer is likelier than alpha."""
    from scipy.stats import hypergeom  # slow to import

    if n_drawn == population:
        return found
    counts = np.arange(found, population - (n_drawn - found) + 1)
    return int(counts[hypergeom.cdf(found, population, counts, n_drawn) > alpha][-1])
