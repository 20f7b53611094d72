"""Racing: stop measuring heads that can no longer be among the top k.

Heads race by accuracy drop over all N examples. The examples are a finite population, and the first n in random order
are a sample of it. The number of correct answers that become wrong when a head is ablated, and of wrong answers that
become correct, are therefore hypergeometric. If examples have several questions, so are the numbers of examples with at
least one, two, ... such changes. The exact confidence bounds hold for any model and any examples: only the order is
random. A head drops out when its upper bound is below the k-th largest lower bound. By a union bound, all bounds, for
all heads and rounds, hold together with the stated confidence; then the top k and their order are the same as in
exhaustive scoring, because heads that might still tie in accuracy stay. Racing saves much if k heads stand out, and
little if the k-th and the next have similar drops.

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
    """Race for the top ``k`` of ``n_heads`` heads on ``n_examples`` examples, correct with probability ``confidence``.

    Raises ValueError for a ``k`` below 1.
    """

    k: int
    n_heads: int
    n_examples: int
    confidence: float = 0.99
    seed: int = 0
    n_queries: int = 1
    """Number of questions per example."""

    def __post_init__(self) -> None:
        check_counts(race_k=self.k)

    @property
    def rounds(self) -> list[int]:
        """Cumulative number of examples after each round; all examples after the last."""
        return sorted({math.ceil(share * self.n_examples) for share in SHARES})

    def order(self) -> list[int]:
        """Return the indices of the examples in the order of measurement."""
        return torch.randperm(self.n_examples, generator=torch.Generator().manual_seed(self.seed)).tolist()

    def bounds(self, right_E: Tensor, right_HE: Tensor) -> tuple[Tensor, Tensor]:
        """Return (low_H, high_H), bounds on the net number of correct answers that ablation loses on all examples.

        ``right_E`` is the baseline's share of correct answers on all examples, in order; ``right_HE`` is the share on
        the examples measured so far, with each head ablated.
        """
        # Lost and gained answers have two bounds each (the 4); after the last round, counts are exact (the -1).
        alpha = (1 - self.confidence) / (4 * self.n_heads * max(1, len(self.rounds) - 1) * self.n_queries)
        n_right_E, n_right_HE = ((self.n_queries * share).round().long() for share in (right_E, right_HE))
        n_before_E = n_right_E[: right_HE.shape[1]]
        low_H, high_H = torch.zeros(2, len(right_HE), dtype=torch.long)
        for n in range(1, self.n_queries + 1):
            # Answers that can be lost, then answers that can be gained: possible, measured, and changed.
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
        """Return one bool per head: whether it may still be among the top k. At least k heads stay."""
        low_H, high_H = self.bounds(right_E, right_HE)
        to_reach = low_H.sort(descending=True).values[: self.k][-1]  # the minimum, if there are fewer than k heads
        return (high_H >= to_reach).tolist()


def _count_bounds(population: int, n_drawn: int, found: int, alpha: float) -> tuple[int, int]:
    """Bound the count in the population, given ``found`` in ``n_drawn``; each bound fails with probability <= alpha."""
    return population - _upper(population, n_drawn, n_drawn - found, alpha), _upper(population, n_drawn, found, alpha)


@cache
def _upper(population: int, n_drawn: int, found: int, alpha: float) -> int:
    """Return the largest population count for which P(drawing ``found`` or fewer) exceeds alpha."""
    from scipy.stats import hypergeom  # slow to import

    if n_drawn == population:
        return found
    counts = np.arange(found, population - (n_drawn - found) + 1)
    return int(counts[hypergeom.cdf(found, population, counts, n_drawn) > alpha][-1])
