"""Head scores made by hand, for tests in more than one folder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybrid_distill.scoring import HeadScores

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
