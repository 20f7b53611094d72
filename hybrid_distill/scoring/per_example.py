"""Head scores from one number per head and example.

Shapes: E example, K layer that has heads, L layer, H head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..probes import Probe
from ..teacher import HeadSite, decoder_blocks
from .head_scores import HeadScores, describe_run


def mean_scores(
    model: PreTrainedModel,
    probe: Probe,
    sites: Sequence[HeadSite],
    value_EKH: Tensor,
    *,
    table: Literal["accuracy", "logprob"],
    method: str,
    baseline: dict[str, Any],
) -> HeadScores:
    """The mean over examples and its standard error, as one table of `HeadScores`; the other is 0 for every head.

    ``sites`` are the K layers' heads; heads of other layers get NaN. There is no control drop.
    """
    value_EKH = value_EKH.double().cpu()
    n = len(value_EKH)
    n_layers, layers = len(decoder_blocks(model)), [site.layer for site in sites]

    def spread(value_KH: Tensor) -> Tensor:
        value_LH = torch.full((n_layers, value_KH.shape[1]), math.nan, dtype=torch.float64)
        value_LH[layers] = value_KH
        return value_LH

    mean_LH = spread(value_EKH.mean(0))
    error_LH = spread(value_EKH.std(0, correction=min(1, n - 1)) / math.sqrt(n))
    nothing_LH = spread(torch.zeros_like(value_EKH[0]))
    of_accuracy = table == "accuracy"
    return HeadScores(
        sites[0].n_kv_heads,
        accuracy_drop_LH=mean_LH if of_accuracy else nothing_LH,
        logprob_drop_LH=nothing_LH if of_accuracy else mean_LH,
        control_drop_LH=None,
        accuracy_se_LH=error_LH if of_accuracy else nothing_LH,
        logprob_se_LH=nothing_LH if of_accuracy else error_LH,
        control_se_LH=None,
        baseline={"chance": probe.chance, **baseline},
        provenance={"method": method, "probe": probe.describe(), "n_examples": n, **describe_run(model)},
    )
