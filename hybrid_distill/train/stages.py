"""Construction of a stage from its config."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from ..model.modeling_hybrid import HybridForCausalLM
from .align import LayerAlignment
from .config import Align, AlignMatrix, Distill, DistillOnPolicy, StageConfig
from .end_to_end import EndToEnd
from .matrix import MatrixAlignment
from .on_policy import OnPolicy
from .stage import Stage

STAGES: dict[type[StageConfig], type[Stage[Any]]] = {
    Align: LayerAlignment,
    AlignMatrix: MatrixAlignment,
    Distill: EndToEnd,
    DistillOnPolicy: OnPolicy,
}


def make_stage(
    config: StageConfig,
    student: HybridForCausalLM,
    teacher: PreTrainedModel | None,
    *,
    vocab_size: int | None = None,
) -> Stage[Any]:
    """Make the stage that a config describes; a stage with cached logits ignores the teacher."""
    if config.cached_logits is not None:
        teacher = None
    stage = STAGES[type(config)](student, teacher, config)  # pyright: ignore[reportArgumentType]
    stage.vocab_size = vocab_size
    return stage
