"""Uncertainty of a head ranking: bootstrap intervals, and split-half agreement.

Shapes: H head (any number of them, in any order), E example.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

NUMBERS_AT_ONCE = 2**24


def bootstrap_interval(difference_HE: Tensor, *, seed: int = 0) -> Tensor:
    """Return [H, 2]: the 95 % percentile-bootstrap interval of each head's mean over the examples.

    NaN marks an example that a head was not tried on. Heads tried on equally many examples share resamples.
    """
    from scipy.stats import bootstrap  # slow to import

    difference_HE = difference_HE.detach().cpu().double()
    tried_HE = ~difference_HE.isnan()
    n_tried_H = tried_HE.sum(1)
    interval_H2 = torch.full((len(difference_HE), 2), torch.nan, dtype=torch.float64)
    for n in set(n_tried_H.tolist()) - {0}:
        alike_H = n_tried_H == n
        sample_HE = difference_HE[alike_H][tried_HE[alike_H]].view(-1, n)
        if n == 1:  # scipy rejects a single observation
            interval_H2[alike_H] = sample_HE.expand(-1, 2)
            continue
        found = bootstrap(
            (sample_HE.numpy(),),
            np.mean,
            axis=1,
            method="percentile",
            confidence_level=0.95,
            n_resamples=1000,
            batch=max(1, NUMBERS_AT_ONCE // sample_HE.numel()),
            rng=np.random.default_rng(seed),
        )
        interval_H2[alike_H] = torch.tensor(np.stack(found.confidence_interval, axis=1))
    return interval_H2


def split_half(
    accuracy_HE: Tensor, logprob_HE: Tensor, ks: Sequence[int], *, n_splits: int = 20, seed: int = 0
) -> dict[str, object]:
    """Measure how well rankings from two disjoint random halves of the examples agree, averaged over splits.

    Both tensors hold differences on at least two examples, NaN where a head was not tried. Returns
    ``overlap[str(k)]``, the share of heads common to both top-k lists (for each k of ``ks`` below the number of heads);
    ``overlap_by_logprob``, the same for rankings by log-probability alone; ``spearman``, the correlation of all ranks.
    All are lower bounds for the full set of examples, which ranks heads better than a half.
    """
    from scipy.stats import spearmanr  # slow to import

    tried_H = ~accuracy_HE.isnan().all(dim=1)
    tables_KHE = torch.stack([accuracy_HE.double(), logprob_HE.double()])[:, tried_H].cpu()
    _, n_heads, n_examples = tables_KHE.shape
    half, ks = n_examples // 2, sorted({k for k in ks if 0 < k < n_heads})
    generator = torch.Generator().manual_seed(seed)
    overlaps_SK, spearman_S = ([], []), []

    def order(mean_HK: Tensor) -> np.ndarray:
        """Rank heads from the worst up by the first column, ties by the next; NaN (not tried) ranks worst."""
        return mean_HK.nan_to_num(nan=-torch.inf).unique(dim=0, return_inverse=True)[1].numpy()

    for _ in range(n_splits):
        shuffled = torch.randperm(n_examples, generator=generator)
        means = [tables_KHE[:, :, part].nanmean(2).T for part in (shuffled[:half], shuffled[half : 2 * half])]
        by_accuracy, by_logprob = ([order(mean_HK[:, column:]) for mean_HK in means] for column in (0, 1))
        for ranks, overlap_SK in zip((by_accuracy, by_logprob), overlaps_SK):
            first = [np.argsort(-rank_H, kind="stable").tolist() for rank_H in ranks]
            overlap_SK.append([len({*first[0][:k]} & {*first[1][:k]}) / k for k in ks])
        a, b = by_accuracy
        # 1 if all heads tie in both halves, 0 if they tie in only one.
        spearman_S.append(statistic(spearmanr(a, b)) if a.max() and b.max() else float(a.max() == b.max()))
    return {
        "n_splits": n_splits,
        "examples_per_half": half,
        "seed": seed,
        **{
            name: {str(k): sum(shares) / n_splits for k, shares in zip(ks, zip(*overlap_SK))}
            for name, overlap_SK in zip(("overlap", "overlap_by_logprob"), overlaps_SK)
        },
        "spearman": sum(spearman_S) / n_splits,
    }


def statistic(result: object) -> float:
    """Return the statistic of a scipy test as a float; scipy's annotations do not give its type."""
    return float(np.asarray(result)[0])
