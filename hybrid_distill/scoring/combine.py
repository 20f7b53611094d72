"""One ranking from the scores of several probes: one format misses heads that another needs.

Shapes: K part, L layer, H query head.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from .head_scores import COMBINED, HeadScores

How = Literal["mean_rank", "max_drop", "weighted"]

TEACHER = ("model", "revision", "fingerprint")
"""Entries of a provenance that are about the teacher, not about the measurement."""


def combine_scores(
    scores: Sequence[HeadScores], how: How = "mean_rank", weights: Sequence[float] | None = None
) -> HeadScores:
    """Scores of the same teacher on several probes as one, whose ``ranking()`` is the combined one.

    ``max_drop``: a head counts by the probe that misses it most. Both tables hold the largest drop of any part, and
    the standard error of the part it comes from. A maximum over noisy drops errs upwards.

    ``weighted``: both tables hold the mean of the parts' drops with these ``weights`` (divided by their sum), errors
    taken as independent.

    ``mean_rank``: a head counts by the mean of its places in the parts' rankings, so that no probe outweighs another by
    the size of its drops. ``accuracy_drop_LH`` is then no share of examples: it is 1 for a head that comes first in
    every part, 0 for one that comes last in every part, linear in the mean place between. Its standard error is that
    of the mean over parts; ``HeadScores.reading`` turns both into ranks, 1 being the first. ``logprob_drop_LH`` is the
    mean drop in nats and orders heads of equal mean place.

    In all three, the control drop is the mean over the different control texts of the parts, None where no part has
    one. Raises ValueError for no scores, another teacher among them, an unknown ``how``, and weights that are missing,
    unasked for, negative or all zero.
    """
    scores = list(scores)
    _check_same_teacher(scores)
    shares_K = shares(how, weights, len(scores))
    combined = {"max_drop": _largest, "weighted": _mean, "mean_rank": _mean}[how]
    accuracy = _mean_place(scores) if how == "mean_rank" else combined(*_stacked(scores, "accuracy"), shares_K)
    logprob = combined(*_stacked(scores, "logprob"), shares_K)
    control = _control(scores)
    return HeadScores(
        scores[0].n_kv_heads,
        accuracy_drop_LH=accuracy[0],
        logprob_drop_LH=logprob[0],
        control_drop_LH=control[0],
        accuracy_se_LH=accuracy[1],
        logprob_se_LH=logprob[1],
        control_se_LH=control[1],
        baseline={"parts": [part.baseline for part in scores]},
        provenance={
            "method": f"{COMBINED}{how}",
            "weights": None if weights is None else list(weights),
            **({"n_places": _n_places(scores)} if how == "mean_rank" else {}),
            "parts": [part.provenance for part in scores],
            **{name: scores[0].provenance.get(name) for name in TEACHER},
        },
    )


def _check_same_teacher(scores: Sequence[HeadScores]) -> None:
    if not scores:
        raise ValueError("there are no scores to combine; give at least one HeadScores.")
    first = scores[0]
    for number, part in enumerate(scores, start=1):
        shapes = [(each.n_layers, each.n_heads, each.n_kv_heads) for each in (first, part)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"scores 1 and {number} have {shapes[0]} and {shapes[1]} layers, heads and KV heads; "
                "combine scores of one teacher only."
            )
        if not part.fingerprint or part.fingerprint != first.fingerprint:
            raise ValueError(
                f"scores 1 and {number} are of the teachers {first.fingerprint or 'unknown'} and "
                f"{part.fingerprint or 'unknown'}; combine scores of one known teacher, or score it again."
            )


def shares(how: str, weights: Sequence[float] | None, n_parts: int) -> Tensor:
    """shares_K, summing to 1. Raises ValueError for an unknown ``how``, and for weights that do not go with it."""
    if how not in get_args(How):
        raise ValueError(f"how is {how!r}; scores are combined by {', '.join(get_args(How))}.")
    if (weights is not None) != (how == "weighted"):
        raise ValueError(f"how is {how!r} and weights are {weights}; give weights with 'weighted', and only there.")
    parts = [1.0] * n_parts if weights is None else [float(weight) for weight in weights]
    usable = all(math.isfinite(part) and part >= 0 for part in parts) and sum(parts) > 0
    if len(parts) != n_parts or not usable:
        raise ValueError(
            f"weights are {weights} for {n_parts} scores; give each a number of at least 0, and one of them more."
        )
    return torch.tensor(parts, dtype=torch.float64) / sum(parts)


def _stacked(scores: Sequence[HeadScores], name: str) -> tuple[Tensor, Tensor]:
    """(drop_KLH, se_KLH) of the parts."""
    tables = [torch.stack([getattr(part, f"{name}_{kind}_LH") for part in scores]) for kind in ("drop", "se")]
    return tables[0], tables[1]


def _mean(drop_KLH: Tensor, se_KLH: Tensor, shares_K: Tensor) -> tuple[Tensor, Tensor]:
    shares_K11 = shares_K[:, None, None]
    return (shares_K11 * drop_KLH).sum(0), (shares_K11 * se_KLH).square().sum(0).sqrt()


def _largest(drop_KLH: Tensor, se_KLH: Tensor, shares_K: Tensor) -> tuple[Tensor, Tensor]:
    largest_LH, part_LH = drop_KLH.max(0)
    return largest_LH, se_KLH.gather(0, part_LH[None])[0]


def _mean_place(scores: Sequence[HeadScores]) -> tuple[Tensor, Tensor]:
    """(height_LH, se_LH): 1 for the first place in every part, 0 for the last, NaN for a head that a part lacks."""
    rankings = [part.ranking() for part in scores]
    place_KLH = torch.full((len(scores), *scores[0].accuracy_drop_LH.shape), torch.nan, dtype=torch.float64)
    for place_LH, ranking in zip(place_KLH, rankings, strict=True):
        for place, (layer, head) in enumerate(ranking):
            place_LH[layer, head] = place
    n_parts, last = len(scores), _n_places(scores) - 1
    # Summed before they are divided: heads of the same mean place get the very same number.
    height_LH = 1 - place_KLH.sum(0) / (n_parts * last)
    return height_LH, place_KLH.std(0, correction=min(1, n_parts - 1)) / (last * math.sqrt(n_parts))


def _n_places(scores: Sequence[HeadScores]) -> int:
    """Places of the longest of the rankings, at least 2."""
    return max(2, *(len(part.ranking()) for part in scores))


def _control(scores: Sequence[HeadScores]) -> tuple[Tensor | None, Tensor | None]:
    """Mean control drop over the different control texts, and its error: parts with the same texts count once."""
    measured = {
        json.dumps(part.provenance.get("control") or number): part
        for number, part in reversed(list(enumerate(scores)))
        if part.control_drop_LH is not None and part.control_se_LH is not None
    }
    if not measured:
        return None, None
    parts = list(measured.values())
    return _mean(*_stacked(parts, "control"), shares("mean_rank", None, len(parts)))
