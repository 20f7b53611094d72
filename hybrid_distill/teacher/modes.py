"""Run a model in another mode for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Disable dropout and gradients; restore the model's mode afterwards."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


@contextmanager
def without_cache(model: PreTrainedModel) -> Iterator[None]:
    """Let probes and `generate` read a model without a cache; restore its settings afterwards."""
    settings = model.generation_config
    assert settings is not None
    previous = settings.use_cache
    settings.use_cache = False
    try:
        yield
    finally:
        settings.use_cache = previous


def may_cache(model: PreTrainedModel) -> bool:
    """Return False where a model's settings for `generate`, or `without_cache`, rule a cache out."""
    return getattr(model.generation_config, "use_cache", None) is not False


@contextmanager
def eager_attention(model: PreTrainedModel) -> Iterator[None]:
    """Switch to eager attention, the only one that returns attention maps; restore afterwards."""
    previous = model.config._attn_implementation or "eager"
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(previous)
