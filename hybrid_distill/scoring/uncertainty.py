"""How sure a ranking of heads is: bootstrap intervals, and the agreement of halves of the examples.

Shapes: H head (any number of them, in any order), E example.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

NUMBERS_AT_ONCE = 2**24


def bootstrap_interval(difference_HE: Tensor, *, seed: int = 0) -> Tensor:
    """Return [H, 2]: the 95 % interval of each head's mean over the examples, by the percentile bootstrap.

    NaN marks an example on which a head was not tried. Heads that were tried on equally many see the same resamples.
    """
    from scipy.stats import bootstrap  # slow to import

    difference_HE = difference_HE.detach().cpu().double()
    tried_HE = ~difference_HE.isnan()
    n_tried_H = tried_HE.sum(1)
    interval_H2 = torch.full((len(difference_HE), 2), torch.nan, dtype=torch.float64)
    for n in set(n_tried_H.tolist()) - {0}:
        alike_H = n_tried_H == n
        sample_HE = difference_HE[alike_H][tried_HE[alike_H]].view(-1, n)
        if n == 1:  # which scipy refuses
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
    """Measure how well the rankings by two disjoint random halves of the examples agree, on average over splits.

    Both tensors hold differences on two examples or more, NaN where a head was not tried. Returns
    ``overlap[str(k)]``, the share of common heads among the two first k (for each k of ``ks`` below the number of
    heads), the same for rankings by log-probability alone (``overlap_by_logprob``), and ``spearman``, the correlation
    of all ranks: lower bounds for all examples, which rank better.
    """
    from scipy.stats import spearmanr  # slow to import

    tried_H = ~accuracy_HE.isnan().all(dim=1)
    tables_KHE = torch.stack([accuracy_HE.double(), logprob_HE.double()])[:, tried_H].cpu()
    _, n_heads, n_examples = tables_KHE.shape
    half, ks = n_examples // 2, sorted({k for k in ks if 0 < k < n_heads})
    generator = torch.Generator().manual_seed(seed)
    overlaps_SK, spearman_S = ([], []), []

    def order(mean_HK: Tensor) -> np.ndarray:
        """Number heads from worst up: by the first column, equal ones by the next; NaN, not tried, is worst."""
        return mean_HK.nan_to_num(nan=-torch.inf).unique(dim=0, return_inverse=True)[1].numpy()

    for _ in range(n_splits):
        shuffled = torch.randperm(n_examples, generator=generator)
        means = [tables_KHE[:, :, part].nanmean(2).T for part in (shuffled[:half], shuffled[half : 2 * half])]
        by_accuracy, by_logprob = ([order(mean_HK[:, column:]) for mean_HK in means] for column in (0, 1))
        for ranks, overlap_SK in zip((by_accuracy, by_logprob), overlaps_SK):
            first = [np.argsort(-rank_H, kind="stable").tolist() for rank_H in ranks]
            overlap_SK.append([len({*first[0][:k]} & {*first[1][:k]}) / k for k in ks])
        a, b = by_accuracy
        # 1 if all heads are equal in both halves, 0 if only one half tells heads apart.
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
    """Return the figure of a scipy test, whose type its annotations do not tell."""
    return float(np.asarray(result)[0])
