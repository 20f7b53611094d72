"""Ids of a tokenizer: how many a model must have rows for, and whether a model has them.

Every loss, every folder of logits and every check uses this count. ``len(tokenizer)`` is smaller for a tokenizer whose
ids have gaps, and the highest ids (often end-of-text) would then be outside the loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the highest token id plus one; ``len(tokenizer)`` is less if ids have gaps."""
    return max(tokenizer.get_vocab().values()) + 1


def check_embedding(tokenizer: PreTrainedTokenizerBase, config: Any, name: str) -> None:
    """Raise ValueError, naming tokenizer and model, if the tokenizer has ids that the model's embedding lacks.

    ``config`` is the model's, ``name`` the model as the user named it.
    """
    n_rows = config.get_text_config(decoder=True).vocab_size
    n_ids = vocabulary_size(tokenizer)
    if n_ids <= n_rows:
        return
    vocabulary = tokenizer.get_vocab()
    beyond = sorted((number, token) for token, number in vocabulary.items() if number >= n_rows)
    number, token = beyond[0]
    raise ValueError(
        f"the tokenizer {tokenizer.name_or_path or 'of this model'} has ids up to {n_ids - 1}, but the "
        f"embedding of {name} has {n_rows} rows: {len(beyond)} tokens have none, the first is {token!r} ({number}); "
        f"pass a model saved after `model.resize_token_embeddings({n_ids})`, or its tokenizer without the added tokens."
    )
