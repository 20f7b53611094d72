"""From a config to its stage."""

from __future__ import annotations

from transformers import PreTrainedModel

from ..model.modeling_hybrid import HybridForCausalLM
from .align import LayerAlignment
from .config import AlignConfig, DistillConfig, MatrixConfig, OnPolicyConfig, StageConfig
from .end_to_end import EndToEnd
from .matrix import MatrixAlignment
from .on_policy import OnPolicy
from .stage import Stage

__all__ = ["EndToEnd", "LayerAlignment", "MatrixAlignment", "OnPolicy", "Stage", "make_stage"]


def make_stage(
    config: StageConfig,
    student: HybridForCausalLM,
    teacher: PreTrainedModel | None,
    *,
    vocab_size: int | None = None,
) -> Stage:
    """Make the stage that a config describes; one with cached logits leaves the teacher alone.

    Raises ValueError where there is no teacher and the stage needs one.
    """
    if isinstance(config, DistillConfig) and config.cached_logits is not None:
        return EndToEnd(student, None, config, vocab_size=vocab_size)
    if teacher is None:
        raise ValueError(f"{config.name} needs the teacher; only end-to-end distillation has teacher_logits on disk.")
    if isinstance(config, OnPolicyConfig):
        return OnPolicy(student, teacher, config, vocab_size=vocab_size)
    if isinstance(config, DistillConfig):
        return EndToEnd(student, teacher, config, vocab_size=vocab_size)
    if isinstance(config, AlignConfig):
        return LayerAlignment(student, teacher, config)
    if isinstance(config, MatrixConfig):
        return MatrixAlignment(student, teacher, config)
    raise ValueError(f"{type(config).__name__} is not a stage; use AlignConfig, MatrixConfig or DistillConfig.")
