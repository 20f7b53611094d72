"""Racing: heads that cannot be among the first k any more are not tried on further examples.

The race is for the accuracy drop over all N examples. These are a finite population, and the first n of them, in an
order drawn at random, are a sample of it. So the number of right answers that become wrong without a head, and of wrong
ones that become right, follow hypergeometric distributions; where an example asks several questions, the numbers of
examples in which at least one, two, ... do. Their exact confidence bounds hold for any model and any examples: the only
randomness is that of the order. A head leaves when its upper bound is below the k-th largest lower
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
    n_queries: int = 1
    """Questions in each example."""

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

        ``right_E`` is the baseline's share of right answers on all examples in order, ``right_HE`` each head's on the
        first of them.
        """
        # Lost and gained answers are bounded from both sides; after the last round everything is known.
        alpha = (1 - self.confidence) / (4 * self.n_heads * max(1, len(self.rounds) - 1) * self.n_queries)
        n_right_E, n_right_HE = ((self.n_queries * share).round().long() for share in (right_E, right_HE))
        n_before_E = n_right_E[: right_HE.shape[1]]
        low_H, high_H = torch.zeros(2, len(right_HE), dtype=torch.long)
        for n in range(1, self.n_queries + 1):
            # Questions that can be lost, and that can be gained, and how many were.
            for sign, can, seen, found_HE in (
                (1, n_right_E, n_before_E, n_before_E - n_right_HE),
                (-1, self.n_queries - n_right_E, self.n_queries - n_before_E, n_right_HE - n_before_E),
            ):
                n_can, n_seen = int((can >= n).sum()), int((seen >= n).sum())
                counts_H = (found_HE >= n).sum(1).tolist()
                bounds_H2 = torch.tensor([_count_bounds(n_can, n_seen, count, alpha) for count in counts_H])
                few_H, many_H = bounds_H2.T if sign > 0 else -bounds_H2.T.flip(0)
                low_H, high_H = low_H + few_H, high_H + many_H
        return low_H, high_H

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
