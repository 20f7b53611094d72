"""Run a model in another mode for a while, and generate with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
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
    own = settings.use_cache
    settings.use_cache = False
    try:
        yield
    finally:
        settings.use_cache = own


def may_cache(model: PreTrainedModel) -> bool:
    """Return False where a model's settings for `generate`, or `without_cache`, rule a cache out."""
    return getattr(model.generation_config, "use_cache", None) is not False


@contextmanager
def eager_attention(model: PreTrainedModel) -> Iterator[None]:
    """Switch to eager attention, the only one that returns attention maps; restore afterwards."""
    own = model.config._attn_implementation or "eager"
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(own)


def generated(model: PreTrainedModel, **options: object) -> Tensor:
    """Return the tokens of ``model.generate``, typed."""
    # By name: transformers' decorators hide the method's return type from type checkers.
    generate: Callable[..., Tensor] = getattr(model, "generate")  # noqa: B009
    return generate(**options)
