"""Racing: stop measuring heads that can no longer be among the top k.

Heads race by accuracy drop over all N examples. The examples are a finite population, and the first
n in random order are a sample of it. The number of correct answers that become wrong when a head is
ablated, and of wrong answers that become correct, are therefore hypergeometric. If examples have
several questions, so are the numbers of examples with at least one, two, ... such changes. The
exact confidence bounds hold for any model and any examples: only the order is random. A head drops
out when its upper bound is below the k-th largest lower bound. By a union bound, all bounds, for
all heads and rounds, hold together with the stated confidence; then the top k and their order are
the same as in exhaustive scoring, because heads that might still tie in accuracy stay. Racing saves
much if k heads stand out, and little if the k-th and the next have similar drops.

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
    """Race for the top ``k`` of ``n_heads`` heads on ``n_examples`` examples, correct with
    probability ``confidence``.

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
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randperm(self.n_examples, generator=generator).tolist()

    def bounds(self, right_E: Tensor, right_HE: Tensor) -> tuple[Tensor, Tensor]:
        """Return (low_H, high_H), bounds on the net number of correct answers that ablation loses
        on all examples.

        ``right_E`` is the baseline's share of correct answers on all examples, in order;
        ``right_HE`` is the share on the examples measured so far, with each head ablated.
        """
        # Rounded: thirds, say, do not multiply back to whole numbers.
        n_right_E = (self.n_queries * right_E).round().long()
        n_right_HE = (self.n_queries * right_HE).round().long()
        n_wrong_E = self.n_queries - n_right_E
        n_wrong_HE = self.n_queries - n_right_HE
        low_H = torch.zeros(len(right_HE), dtype=torch.long)
        high_H = torch.zeros(len(right_HE), dtype=torch.long)
        # Answers lost = examples that lose at least 1, plus those that lose at least 2, ...
        for n in range(1, self.n_queries + 1):
            fewest_lost_H, most_lost_H = self._bound_losers(n_right_E, n_right_HE, n)
            fewest_gained_H, most_gained_H = self._bound_losers(n_wrong_E, n_wrong_HE, n)
            low_H += fewest_lost_H - most_gained_H
            high_H += most_lost_H - fewest_gained_H
        return low_H, high_H

    def _bound_losers(
        self,
        count_E: Tensor,
        count_HE: Tensor,
        n: int,
    ) -> Tensor:
        """Return bounds_2H on the number of examples whose count falls by ``n`` without a head."""
        # Lost and gained answers have two bounds each (the 4); after the last round, counts are
        # exact (the -1).
        n_bounds = 4 * self.n_heads * max(1, len(self.rounds) - 1) * self.n_queries
        alpha = (1 - self.confidence) / n_bounds
        measured_E = count_E[: count_HE.shape[1]]
        # Only these can lose n: the others are no part of the population.
        population = int((count_E >= n).sum())
        n_drawn = int((measured_E >= n).sum())
        losers_H = (measured_E - count_HE >= n).sum(1).tolist()
        return torch.tensor(
            [_count_bounds(population, n_drawn, losers, alpha) for losers in losers_H]
        ).T

    def stay(self, right_E: Tensor, right_HE: Tensor) -> list[bool]:
        """Return for each head whether it may still be among the top k. At least k heads stay."""
        low_H, high_H = self.bounds(right_E, right_HE)
        first_k = low_H.sort(descending=True).values[: self.k]
        # The last one, not the k-th: there may be fewer than k heads.
        return (high_H >= first_k[-1]).tolist()


def _count_bounds(
    population: int,
    n_drawn: int,
    found: int,
    alpha: float,
) -> tuple[int, int]:
    """Bound the count in the population, given ``found`` in ``n_drawn``.

    Each bound fails with probability <= alpha.
    """
    most_others = _upper_bound(population, n_drawn, n_drawn - found, alpha)
    return population - most_others, _upper_bound(population, n_drawn, found, alpha)


@cache
def _upper_bound(
    population: int,
    n_drawn: int,
    found: int,
    alpha: float,
) -> int:
    """Return the largest population count for which P(drawing ``found`` or fewer) exceeds alpha."""
    from scipy.stats import hypergeom  # slow to import

    if n_drawn == population:
        return found
    # All counts that what was drawn leaves possible.
    counts = np.arange(found, population - (n_drawn - found) + 1)
    plausible = hypergeom.cdf(found, population, counts, n_drawn) > alpha
    return int(counts[plausible][-1])
