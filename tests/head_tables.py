"""Head scores made by hand, for tests in more than one folder."""

from typing import Any

import torch
from torch import Tensor

from hybrid_distill.scoring import HeadScores
from hybrid_distill.scoring.uncertainty import bootstrap_interval, split_half

Table = list[list[float]] | Tensor


def some_scores(
    accuracy: Table,
    logprob: Table | None = None,
    control: Table | None = None,
    **fields: Any,
) -> HeadScores:
    """Make scores with these drops; log-probability drops and standard errors are 0 by default."""
    accuracy_LH = torch.as_tensor(accuracy, dtype=torch.float64)
    zeros_LH = torch.zeros_like(accuracy_LH)
    defaults: dict[str, Any] = {
        "n_kv_heads": 1,
        "accuracy_drop_LH": accuracy_LH,
        "logprob_drop_LH": zeros_LH,
        "control_drop_LH": None,
        "accuracy_se_LH": zeros_LH,
        "logprob_se_LH": zeros_LH,
        "control_se_LH": None,
    }
    if logprob is not None:
        defaults["logprob_drop_LH"] = torch.as_tensor(logprob, dtype=torch.float64)
    if control is not None:
        defaults["control_drop_LH"] = torch.as_tensor(control, dtype=torch.float64)
        defaults["control_se_LH"] = zeros_LH
    return HeadScores(**(defaults | fields))


def whole_scores() -> HeadScores:
    """Fill every field, for three layers of four heads of which the second has none."""
    generator = torch.Generator().manual_seed(0)
    difference_HE = torch.randn(12, 30, generator=generator, dtype=torch.float64)
    difference_HE[4:8] = torch.nan
    drop_LH = difference_HE.mean(1).view(3, 4)
    interval_LH2 = bootstrap_interval(difference_HE).view(3, 4, 2)
    return HeadScores(
        n_kv_heads=2,
        accuracy_drop_LH=drop_LH,
        logprob_drop_LH=drop_LH / 3,
        control_drop_LH=drop_LH / 7,
        accuracy_se_LH=drop_LH.abs(),
        logprob_se_LH=drop_LH.abs(),
        control_se_LH=drop_LH.abs(),
        baseline={
            "accuracy": 0.9,
            "chance": 0.25,
            "answer_logprob": -0.1,
            "control_loss": 2.5,
        },
        provenance={
            "model": "m",
            "revision": None,
            "fingerprint": "abc",
            "n_examples": 30,
            "probe": {"seed": 0},
        },
        accuracy_interval_LH2=interval_LH2,
        logprob_interval_LH2=interval_LH2 / 3,
        control_interval_LH2=interval_LH2 / 7,
        n_examples_LH=torch.tensor([[30, 30, 30, 8], [0] * 4, [30] * 4]),
        agreement=split_half(difference_HE, difference_HE, [1, 2, 5]),
    )
