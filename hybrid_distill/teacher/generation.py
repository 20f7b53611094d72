"""Generate with a model as it is: without the settings that it brings, and without choosing from NaN."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
)

from ..model.self_check import check_not_nan


def generate_ids(
    model: PreTrainedModel,
    *,
    processors: Sequence[LogitsProcessor] = (),
    refuses_nan: bool = True,
    **options: object,
) -> Tensor:
    """Generate token ids by ``options`` alone, without the penalties and sampling settings that the model brings.

    Raises ValueError if the first token's logits are NaN, or in greedy decoding any token's, if ``refuses_nan``.
    """
    # By name: transformers' decorators hide the method's return type from type checkers.
    generate: Callable[..., Tensor] = getattr(model, "generate")  # noqa: B009
    guard = _NaNGuard(model) if refuses_nan else None
    all_processors = LogitsProcessorList(processors)
    if guard is not None:
        # First: a processor may hide a NaN.
        all_processors.insert(0, guard)
    with _without_generation_settings(model):
        tokens = generate(**options, logits_processor=all_processors)
    if guard is not None:
        guard.check()
    return tokens


@contextmanager
def _without_generation_settings(model: Any) -> Iterator[None]:
    """Leave out a model's settings for `generate`, which transformers puts where a call has none; restore afterwards.

    Instruct models bring penalties and limits of sampling. Probes and texts for training want the model itself.
    """
    holders: list[Any] = [model]
    if hasattr(model, "get_base_model"):
        # PEFT's wrapper gives its settings to the model in it at every call.
        holders.append(model.get_base_model())
    settings = [holder.generation_config for holder in holders]
    own: GenerationConfig = settings[0]
    model.generation_config = GenerationConfig(
        bos_token_id=own.bos_token_id,
        eos_token_id=own.eos_token_id,
        pad_token_id=own.pad_token_id,
        use_cache=own.use_cache,
    )
    try:
        yield
    finally:
        for holder, settings_of_holder in zip(holders, settings, strict=True):
            holder.generation_config = settings_of_holder


class _NaNGuard(LogitsProcessor):
    """Refuse NaN, for which `generate` would choose token 0, or fail on the device.

    Checks the first token's logits at once, so that it fails early, and those of all tokens in `check`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.largest: Tensor | None = None
        """Largest logit so far, on the device. NaN once any logit is."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.largest is None:
            self.largest = scores.max()
            self.check()
        # Not checked here: on a GPU each check waits for the device.
        self.largest = torch.maximum(self.largest, scores.max())
        return scores

    def check(self) -> None:
        """Raise ValueError if a logit was NaN."""
        if self.largest is not None:
            check_not_nan(self.largest, self.model)
