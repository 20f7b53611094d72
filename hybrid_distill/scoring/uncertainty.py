"""Measure the uncertainty of a head ranking: bootstrap intervals, and split-half agreement.

Shapes: H head (any number of them, in any order), N sample (a prompt, a question or a text).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

AGREEMENT_AT = (1, 2, 5, 10, 20, 50, 100)
"""Sizes of the top-k lists whose agreement between halves of the samples is measured."""
NUMBERS_AT_ONCE = 2**24  # resampled values in memory: 128 MiB


def bootstrap_interval(difference_HN: Tensor, *, seed: int = 0) -> Tensor:
    """Return [H, 2]: the 95 % percentile-bootstrap interval of each head's mean over the samples.

    NaN marks a sample that a head was not measured on. Heads measured on equally many samples share
    resamples.
    """
    from scipy.stats import bootstrap  # slow to import

    difference_HN = difference_HN.detach().cpu().double()
    is_measured_HN = ~difference_HN.isnan()
    n_samples_H = is_measured_HN.sum(1)
    interval_H2 = torch.full((len(difference_HN), 2), torch.nan, dtype=torch.float64)
    for n_samples in set(n_samples_H.tolist()) - {0}:
        # scipy resamples whole tables, so heads with as many samples go together.
        in_table_H = n_samples_H == n_samples
        measured = difference_HN[in_table_H][is_measured_HN[in_table_H]]
        sample_HN = measured.view(-1, n_samples)
        if n_samples == 1:  # scipy rejects a single observation
            interval_H2[in_table_H] = sample_HN.expand(-1, 2)
            continue
        result = bootstrap(
            (sample_HN.numpy(),),
            np.mean,
            axis=1,
            method="percentile",
            confidence_level=0.95,
            n_resamples=1000,
            batch=max(1, NUMBERS_AT_ONCE // sample_HN.numel()),
            rng=np.random.default_rng(seed),
        )
        bounds_H2 = np.stack(result.confidence_interval, axis=1)
        interval_H2[in_table_H] = torch.tensor(bounds_H2)
    return interval_H2


def split_half(
    accuracy_HN: Tensor,
    logprob_HN: Tensor,
    ks: Sequence[int],
    *,
    n_splits: int = 20,
    seed: int = 0,
) -> dict[str, object]:
    """Measure the agreement of rankings by two disjoint random halves of the samples, averaged over splits.

    Both tensors hold differences on at least two samples, NaN where a head was not measured.
    Returns, with the settings:

    - ``overlap[str(k)]``: the share of heads common to both top-k lists, for each k of ``ks`` below
      the number of heads;
    - ``overlap_by_logprob``: the same for rankings by log-probability alone;
    - ``spearman``: the correlation of all ranks.

    All are lower bounds for the full set of samples, which ranks heads better than a half.
    """
    is_measured_H = ~accuracy_HN.isnan().all(dim=1)
    accuracy_HN = accuracy_HN.double()[is_measured_H].cpu()
    logprob_HN = logprob_HN.double()[is_measured_H].cpu()
    n_heads, n_samples = accuracy_HN.shape
    ks = sorted({k for k in ks if 0 < k < n_heads})
    half = n_samples // 2
    generator = torch.Generator().manual_seed(seed)
    overlaps = dict.fromkeys(ks, 0.0)
    overlaps_by_logprob = dict.fromkeys(ks, 0.0)
    spearman = 0.0
    for _ in range(n_splits):
        # Both halves rank the same heads on samples that they do not share.
        shuffled = torch.randperm(n_samples, generator=generator, device="cpu")
        by_accuracy = []
        by_logprob = []
        for part in (shuffled[:half], shuffled[half : 2 * half]):
            accuracy_H = accuracy_HN[:, part].nanmean(1)
            logprob_H = logprob_HN[:, part].nanmean(1)
            by_accuracy.append(_ranks(accuracy_H, logprob_H))
            by_logprob.append(_ranks(logprob_H))
        for k in ks:
            overlaps[k] += _overlap(by_accuracy, k)
            overlaps_by_logprob[k] += _overlap(by_logprob, k)
        spearman += _spearman(by_accuracy)
    return {
        "n_splits": n_splits,
        "examples_per_half": half,
        "seed": seed,
        "overlap": {str(k): total / n_splits for k, total in overlaps.items()},
        "overlap_by_logprob": {
            str(k): total / n_splits for k, total in overlaps_by_logprob.items()
        },
        "spearman": spearman / n_splits,
    }


def _ranks(*keys_H: Tensor) -> np.ndarray:
    """Rank heads from the worst up by the first key, ties by the next; NaN (not measured) is worst."""
    keys_HK = torch.stack(keys_H, dim=1).nan_to_num(nan=-torch.inf)
    # unique sorts rows by their first column, then the next, so indices of unique rows are ranks.
    _, rank_H = keys_HK.unique(dim=0, return_inverse=True)
    return rank_H.numpy()


def _overlap(halves: Sequence[np.ndarray], k: int) -> float:
    """Return the share of heads common to the top k of two halves, given their ranks."""
    top_heads = []
    for rank_H in halves:
        # Stable: heads that tie stay in the order of their positions, as in `HeadScores.ranking`.
        best_first_H = np.argsort(-rank_H, kind="stable")
        top_heads.append(set(best_first_H[:k].tolist()))
    common = set.intersection(*top_heads)
    return len(common) / k


def _spearman(halves: Sequence[np.ndarray]) -> float:
    """Correlate ranks: 1 if all heads tie in both halves, 0 if they tie in only one."""
    from scipy.stats import spearmanr  # slow to import

    a, b = halves
    a_has_order = bool(a.max())
    b_has_order = bool(b.max())
    if a_has_order and b_has_order:
        return statistic(spearmanr(a, b))
    return float(a_has_order == b_has_order)


def statistic(result: object) -> float:
    """Return the statistic of a scipy test as a float; scipy's annotations do not give its type."""
    return float(np.asarray(result)[0])
