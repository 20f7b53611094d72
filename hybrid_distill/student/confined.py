"""Confine a teacher to windows: the student that it is without its view of distant tokens."""

from __future__ import annotations

from transformers import PreTrainedModel

from ..model import HybridForCausalLM
from ..plan import HeadPlan
from .build import build_student
from .sharing import share_frozen_weights


def confined(teacher: PreTrainedModel, window: int, sinks: int) -> HybridForCausalLM:
    """Confine every head of the teacher to its last ``window`` tokens and the first ``sinks``.

    Shares the teacher's weights outside its attention: not for training.
    """
    none = HeadPlan.none(teacher)
    student, _ = build_student(teacher, none, d_state=0, window=window, sinks=sinks)
    share_frozen_weights(student, teacher)
    return student
