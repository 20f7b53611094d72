"""Construction of a stage from its config."""

from __future__ import annotations

import importlib

from transformers import PreTrainedModel

from ..model.modeling_hybrid import HybridForCausalLM
from .config import StageConfig
from .stage import Stage


def make_stage(
    config: StageConfig,
    student: HybridForCausalLM,
    teacher: PreTrainedModel | None,
    *,
    vocab_size: int | None = None,
) -> Stage:
    """Make the stage that a config describes; a stage with cached logits ignores the teacher."""
    if config.cached_logits is not None:
        teacher = None
    file, _, name = config.stage.partition(".")
    stage: Stage = getattr(importlib.import_module(f".{file}", __package__), name)(student, teacher, config)
    stage.vocab_size = vocab_size
    return stage
