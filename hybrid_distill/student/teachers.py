"""Check whether a model can be a teacher, from its config and tokenizer.

Every command does so first. The model is built on the meta device: no weights are read, nothing is computed.
"""

from __future__ import annotations

import torch
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..model import HybridConfig
from ..plan import HeadPlan
from ..teacher import attention_sites
from ..validation import first_line
from ..vocabulary import check_embedding
from .build import checked_sites
from .init import DEFAULT_INIT


def check_teacher(
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    name: str,
    heads: bool = False,
) -> None:
    """Raise ValueError if a model cannot be a teacher; ``name`` is the model as the user named it.

    A teacher is a decoder of text alone whose embedding has a row for every id of its ``tokenizer``. With ``heads``,
    its heads must also be ones that a student can replace. Without, a model whose heads are only ranked, or whose
    logits alone are used, may have other mixers, and may itself be a student.
    """
    if config.model_type != HybridConfig.model_type or heads:
        model = empty_teacher(config, name)
        if heads:
            # Before a plan, whose error would miss a count of heads: this one names the layer.
            attention_sites(model)
            checked_sites(model, HeadPlan.none(model), DEFAULT_INIT)
    if tokenizer is not None:
        check_embedding(tokenizer, config, name)


def empty_teacher(
    config: PretrainedConfig,
    name: str,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str | None = None,
) -> PreTrainedModel:
    """Build a teacher on the meta device, without weights.

    Raises ValueError if transformers cannot, and for a model that wraps its language model with other parts.
    """
    attention = {"attn_implementation": attn_implementation} if attn_implementation else {}
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=dtype, **attention
            )
    # Each version of transformers raises other errors.
    except Exception as error:
        raise ValueError(
            f"cannot build the teacher {name!r} ({first_line(error)}); pass another model."
        ) from error
    # The model's config, not the one passed in: Llama 4's wraps a text model, which transformers builds alone.
    _check_text_only(model, name)
    return model


def _check_text_only(model: PreTrainedModel, name: str) -> None:
    """Raise ValueError for a model that wraps its language model, as those for images and sound do."""
    text = model.config.get_text_config(decoder=True)
    if text is not model.config:
        raise ValueError(
            f"{name} is a {type(model).__name__}, which wraps a language model ({text.model_type}) with other parts; "
            "a teacher is a language model alone. Pass a text-only checkpoint, or save its language model as one "
            "(docs/heads.md)."
        )
