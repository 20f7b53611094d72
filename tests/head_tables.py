"""Head scores made by hand, for tests in more than one folder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybrid_distill.scoring import HeadScores
from hybrid_distill.scoring.uncertainty import bootstrap_interval, split_half

Table = list[list[float]] | Tensor


def some_scores(accuracy: Table, logprob: Table | None = None, control: Table | None = None, **more: Any) -> HeadScores:
    """Scores with these drops, log-probability drops of 0 by default, and standard errors of 0 or as in ``more``."""

    def table(rows: Table | None) -> Tensor | None:
        return None if rows is None else torch.as_tensor(rows, dtype=torch.float64)

    accuracy_LH, control_LH = torch.as_tensor(accuracy, dtype=torch.float64), table(control)
    nothing = torch.zeros_like(accuracy_LH)
    fields = {
        "n_kv_heads": 1,
        "accuracy_drop_LH": accuracy_LH,
        "logprob_drop_LH": nothing if logprob is None else table(logprob),
        "control_drop_LH": control_LH,
        "accuracy_se_LH": nothing,
        "logprob_se_LH": nothing,
        "control_se_LH": None if control_LH is None else nothing,
    }
    return HeadScores(**{**fields, **more})


def whole_scores() -> HeadScores:
    """Every field filled, from three layers of four heads of which the second has none."""
    generator = torch.Generator().manual_seed(0)
    difference_HE = torch.randn(12, 30, generator=generator, dtype=torch.float64)
    difference_HE[4:8] = torch.nan
    drop_LH, interval_LH2 = difference_HE.mean(1).view(3, 4), bootstrap_interval(difference_HE).view(3, 4, 2)
    return HeadScores(
        2,
        *[drop_LH, drop_LH / 3, drop_LH / 7],
        *[drop_LH.abs()] * 3,
        baseline={"accuracy": 0.9, "chance": 0.25, "answer_logprob": -0.1, "control_loss": 2.5},
        provenance={"model": "m", "revision": None, "fingerprint": "abc", "n_examples": 30, "probe": {"seed": 0}},
        accuracy_interval_LH2=interval_LH2,
        logprob_interval_LH2=interval_LH2 / 3,
        control_interval_LH2=interval_LH2 / 7,
        n_examples_LH=torch.tensor([[30, 30, 30, 8], [0] * 4, [30] * 4]),
        agreement=split_half(difference_HE, difference_HE, [1, 2, 5]),
    )
