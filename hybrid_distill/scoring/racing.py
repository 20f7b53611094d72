"""Racing: stop measuring heads that can no longer be among the top k.

Heads race by accuracy drop over all N prompts, measured in random order. After each round, the k
heads whose ablation has cost most so far lead. A head that does not lead belongs to the top k only
if it overtakes a leader in the remaining prompts. Both are measured on the same prompts, so the
difference of each pair is one sample per prompt, and Student's t bounds its sum over all N
(corrected for the share that is measured already). A prompt counts once, however many questions
it has: questions about one text are not independent.

The probability of overtaking is a head's risk. Heads drop out in ascending order of risk, as long
as the sum of their risks stays within 1 - confidence, shared evenly by the rounds. So all of the
top k stay with about the stated confidence; heads that may still tie stay too. Bounds that hold for
any data (hypergeometric, for every head and round at once) drop hardly any head of a real model,
whose k-th head costs only a few answers more than the next.

Shapes: H head, K leader, M prompt.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..validation import check_counts

# Close together at the end, where most heads are decided, and just before the control texts.
SHARES = (1 / 8, 1 / 4, 1 / 2, 3 / 4, 7 / 8, 1)
"""Shares of the prompts after which heads drop out."""


@dataclass(frozen=True)
class Race:
    """Race for the top ``k`` heads on ``n_prompts``, correct with probability ``confidence``.

    Raises ValueError for a ``k`` below 1.
    """

    k: int
    n_prompts: int
    confidence: float = 0.99
    seed: int = 0
    n_questions: int = 1
    """Number of questions per prompt."""

    def __post_init__(self) -> None:
        check_counts(race_k=self.k)

    @property
    def rounds(self) -> list[int]:
        """Cumulative number of prompts after each round; all prompts after the last."""
        return sorted({math.ceil(share * self.n_prompts) for share in SHARES})

    def order(self) -> list[int]:
        """Return the indices of the prompts in the order of measurement."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randperm(self.n_prompts, generator=generator, device="cpu").tolist()

    def stay(self, accuracy_HM: Tensor) -> list[bool]:
        """Return for each head whether it may still be among the top k; at least k heads stay.

        ``accuracy_HM`` is the share of correct answers on the prompts measured so far, in order, with
        each head ablated.
        """
        leaders_K = accuracy_HM.sum(1).argsort(stable=True)[: self.k]
        # A head of the top k that is not a leader overtakes at least one of them.
        risk_H = self.overtaking(accuracy_HM, leaders_K).sum(0)
        ascending = risk_H.sort(stable=True)
        # Heads drop out after every round but the last.
        n_decisions = max(1, len(self.rounds) - 1)
        allowed_risk = (1 - self.confidence) / n_decisions
        n_dropped = int((ascending.values.cumsum(0) <= allowed_risk).sum())
        stays_H = torch.ones(len(accuracy_HM), dtype=torch.bool)
        stays_H[ascending.indices[:n_dropped]] = False
        return stays_H.tolist()

    def overtaking(self, accuracy_HM: Tensor, leaders_K: Tensor) -> Tensor:
        """Return the probability, [K, H], that a head's drop over all prompts reaches a leader's."""
        from scipy.stats import t  # slow to import

        n_measured = accuracy_HM.shape[1]
        # One more, made-up prompt, in which the head gains one answer on the leader: where all
        # measured prompts agree, the variance would be 0 otherwise, and nothing in doubt.
        n = n_measured + 1
        one_answer = 1 / self.n_questions
        lead_KHM = accuracy_HM - accuracy_HM[leaders_K][:, None]
        mean_KH = (lead_KHM.sum(-1) - one_answer) / n
        squares_KH = lead_KHM.square().sum(-1) + one_answer**2
        variance_KH = (squares_KH / n - mean_KH.square()) * n / n_measured
        # Finite population: once all prompts are measured, the sum has no error.
        share_left = 1 - n_measured / self.n_prompts
        error_KH = (variance_KH * share_left / n).sqrt()
        return torch.from_numpy(t.sf((mean_KH / error_KH).numpy(), df=n_measured))
