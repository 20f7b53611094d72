"""How sure a ranking of heads is: intervals by resampling, agreement of halves, ties at the cut.

Shapes: H head (any number of them, in any order), E example, R resample.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..plan import HeadId

if TYPE_CHECKING:
    from .head_scores import HeadScores

HEADS_AT_ONCE, RESAMPLES_AT_ONCE = 512, 256
NORMAL_95 = 1.96  # half the width of a 95 % interval, in standard errors


def bootstrap_interval(
    difference_HE: Tensor, *, confidence: float = 0.95, n_resamples: int = 1000, seed: int = 0
) -> Tensor:
    """[H, 2]: (low, high) of each head's mean over the examples, by the percentile bootstrap (Efron, 1979).

    Every head sees the same resamples of the examples, so that heads can be compared. NaN marks an example on
    which a head was not tried; a head that was tried on none gets NaN. Raises ValueError for no heads, no examples,
    or a confidence outside 0 to 1.
    """
    if difference_HE.ndim != 2 or not difference_HE.numel():
        raise ValueError(f"differences are {tuple(difference_HE.shape)}; pass [heads, examples], at least 1 of each.")
    if not 0 < confidence < 1 or n_resamples < 1:
        raise ValueError(
            f"confidence is {confidence}, n_resamples {n_resamples}; pass a share between 0 and 1, and at least 1."
        )
    tail = (1 - confidence) / 2
    levels = torch.tensor([tail, 1 - tail], dtype=torch.float64)
    intervals = [
        _resampled_means(block_HE, n_resamples, seed).nanquantile(levels, dim=1).T
        for block_HE in difference_HE.detach().cpu().double().split(HEADS_AT_ONCE)
    ]
    return torch.cat(intervals)


def _resampled_means(difference_HE: Tensor, n_resamples: int, seed: int) -> Tensor:
    """[H, R]: the mean of each resample, drawn from the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    n_examples = difference_HE.shape[1]
    tried_HE = (~difference_HE.isnan()).double()
    known_HE = difference_HE.nan_to_num()
    means = []
    for start in range(0, n_resamples, RESAMPLES_AT_ONCE):
        shape = (min(RESAMPLES_AT_ONCE, n_resamples - start), n_examples)
        drawn_RE = torch.randint(n_examples, shape, generator=generator)
        times_RE = torch.zeros(shape, dtype=torch.float64).scatter_add_(1, drawn_RE, torch.ones_like(drawn_RE).double())
        means.append((known_HE @ times_RE.T) / (tried_HE @ times_RE.T))
    return torch.cat(means, dim=1)


def split_half(
    accuracy_HE: Tensor, logprob_HE: Tensor, ks: Sequence[int], *, n_splits: int = 20, seed: int = 0
) -> dict[str, Any]:
    """How well the rankings by two disjoint random halves of the examples agree, averaged over ``n_splits`` splits.

    Both tensors hold differences, with the head minus without, NaN where a head was not tried. Gives
    ``overlap[str(k)]``, the share of common heads among the two first k (for each k of ``ks`` below the number
    of heads), and ``spearman``, of all ranks. Half the examples rank worse than all of them: the figures are a
    lower bound for the whole. Raises ValueError for fewer than two examples.
    """
    if accuracy_HE.shape != logprob_HE.shape or accuracy_HE.shape[-1] < 2:
        raise ValueError(
            f"differences are {tuple(accuracy_HE.shape)} and {tuple(logprob_HE.shape)}; "
            "halves need the same [heads, examples] twice, with at least 2 examples."
        )
    tried_H = ~accuracy_HE.isnan().all(dim=1)
    accuracy_HE, logprob_HE = (table.detach().cpu().double()[tried_H.cpu()] for table in (accuracy_HE, logprob_HE))
    n_heads, n_examples = accuracy_HE.shape
    half = n_examples // 2
    ks = sorted({k for k in ks if 0 < k < n_heads})
    generator = torch.Generator().manual_seed(seed)
    overlaps: dict[int, list[float]] = {k: [] for k in ks}
    correlations = []
    for _ in range(n_splits):
        shuffled = torch.randperm(n_examples, generator=generator)
        (order_a, ranks_a), (order_b, ranks_b) = (
            _order_and_ranks(accuracy_HE[:, part].nanmean(1), logprob_HE[:, part].nanmean(1))
            for part in (shuffled[:half], shuffled[half : 2 * half])
        )
        correlations.append(_correlation(ranks_a, ranks_b))
        for k in ks:
            common = set(order_a[:k].tolist()) & set(order_b[:k].tolist())
            overlaps[k].append(len(common) / k)
    return {
        "n_splits": n_splits,
        "examples_per_half": half,
        "seed": seed,
        "overlap": {str(k): sum(shares) / n_splits for k, shares in overlaps.items()},
        "spearman": sum(correlations) / n_splits,
    }


def _order_and_ranks(accuracy_H: Tensor, logprob_H: Tensor) -> tuple[Tensor, Tensor]:
    """Heads from best to worst, and each head's rank; equal heads share the mean of their ranks.

    By accuracy, equal ones by log-probability; a head that this half has not tried (NaN) comes last.
    """
    scores_H2 = torch.stack([accuracy_H, logprob_H], dim=1).nan_to_num(nan=-torch.inf)
    order = scores_H2[:, 1].argsort(descending=True, stable=True)
    order = order[scores_H2[order, 0].argsort(descending=True, stable=True)]
    _, group, size = scores_H2[order].unique_consecutive(dim=0, return_inverse=True, return_counts=True)
    last = size.cumsum(0).double()
    ranks = torch.empty(len(order), dtype=torch.float64)
    ranks[order] = (last - (size - 1) / 2)[group]
    return order, ranks


def _correlation(a: Tensor, b: Tensor) -> float:
    """Pearson's; 1 for ranks that are all equal in both, 0 where only one side tells heads apart."""
    a, b = a - a.mean(), b - b.mean()
    norms = a.norm() * b.norm()
    if norms == 0:
        return float(bool(torch.equal(a, b)))
    return (a @ b / norms).item()


def tie_warning(scores: HeadScores, k: int, by: str = "retrieval") -> str | None:
    """What to say where the cut after the ``k``-th head falls among heads that the scores do not tell apart.

    Two heads are tied when their scores are equal exactly and, by retrieval, where accuracy is equal, when the
    intervals of their log-probability drops overlap (without intervals: 1.96 standard errors to each side).
    """
    ranking = scores.ranking(by)
    if not 0 < k < len(ranking):
        return None
    last, first_out = ranking[k - 1], ranking[k]
    if not _tied(scores, last, first_out, by):
        return None
    kept = [head for head in ranking[:k] if _tied(scores, head, first_out, by)]
    left_out = [head for head in ranking[k:] if _tied(scores, last, head, by)]
    return (
        f"the cut at k = {k} falls inside a tie: {_named(kept)} {_is(kept)} kept, {_named(left_out)} {_is(left_out)} "
        "not, and the scores do not tell them apart; score on more examples, or cut elsewhere."
    )


def _tied(scores: HeadScores, a: HeadId, b: HeadId, by: str) -> bool:
    value_LH, logprob_LH = scores.value_LH(by), scores.logprob_drop_LH
    if value_LH[a] != value_LH[b]:
        return False
    if by != "retrieval" or logprob_LH[a] == logprob_LH[b]:
        return True
    (low_a, high_a), (low_b, high_b) = _logprob_interval(scores, a), _logprob_interval(scores, b)
    return low_a <= high_b and low_b <= high_a


def _logprob_interval(scores: HeadScores, head: HeadId) -> tuple[float, float]:
    if scores.logprob_interval_LH2 is not None:
        low, high = scores.logprob_interval_LH2[head].tolist()
        return low, high
    drop, error = scores.logprob_drop_LH[head].item(), scores.logprob_se_LH[head].item()
    return drop - NORMAL_95 * error, drop + NORMAL_95 * error


def _named(heads: Sequence[HeadId], most: int = 8) -> str:
    shown = ", ".join(map(str, heads[:most]))
    return f"{shown} and {len(heads) - most} more" if len(heads) > most else shown


def _is(heads: Sequence[HeadId]) -> str:
    return "is" if len(heads) == 1 else "are"
