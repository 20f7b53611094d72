"""Measure next-token loss on plain text.

Shapes: B batch, L length, T predicted tokens (L - 1), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..teacher import longest_context, text_config
from .answering import forward, left_pad
from .encoding import Tokens, tokenize

LOGITS_AT_ONCE = 2**27
"""Maximum number of logits in memory: half a gigabyte in float32."""


class TextBatch:
    """Left-padded texts. ``counts_BT`` marks the predicted tokens: all except each text's first."""

    def __init__(self, rows: Sequence[Tokens], device: torch.device) -> None:
        self.input_ids_BL, self.mask_BL = left_pad(rows, device)
        # Where both the token and the one before it are real: a text's first token follows a pad.
        self.counts_BT = (self.mask_BL[:, 1:] * self.mask_BL[:, :-1]).bool()

    def logits(self, model: PreTrainedModel) -> Tensor:
        """Return logits_BTV that predict each token except the first, in float32."""
        return forward(model, self.input_ids_BL, self.mask_BL).logits[:, :-1].float()

    def token_losses(self, logits_BTV: Tensor) -> Tensor:
        """Return loss_BT in nats; 0 at pads."""
        targets_BT = self.input_ids_BL[:, 1:]
        target_logits_BT = logits_BTV.gather(-1, targets_BT[..., None])[..., 0]
        return (logits_BTV.logsumexp(-1) - target_logits_BT) * self.counts_BT

    def text_losses(self, model: PreTrainedModel) -> Tensor:
        """Return loss_B: each text's mean next-token loss in nats."""
        loss_BT = self.token_losses(self.logits(model))
        return loss_BT.double().sum(1) / self.counts_BT.sum(1)


def text_batches(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    max_tokens: int,
    batch_size: int,
) -> Iterator[TextBatch]:
    """Yield the rows of `text_rows`, within the model's context, in batches whose logits fit in memory."""
    max_tokens = min(max_tokens, longest_context(model.config) or max_tokens)
    rows = text_rows(tokenizer, texts, max_tokens=max_tokens)
    logits_per_row = max_tokens * text_config(model).vocab_size
    n_rows = max(1, min(batch_size, LOGITS_AT_ONCE // logits_per_row))
    for start in range(0, len(rows), n_rows):
        yield TextBatch(rows[start : start + n_rows], model.device)


def text_rows(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, max_tokens: int
) -> list[Tokens]:
    """Return the first ``max_tokens`` tokens of each text.

    Skips texts of one token, which predict nothing. Raises ValueError if that skips every text.
    """
    rows = []
    for tokens in tokenize(tokenizer, texts):
        row = tokens[:max_tokens]
        if len(row) > 1:
            rows.append(row)
    _check_any(rows, texts)
    return rows


def predictable(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[str]:
    """Return the texts of two tokens or more: others have no next token. Raises ValueError as `text_rows` does."""
    kept = []
    for text, tokens in zip(texts, tokenize(tokenizer, texts), strict=True):
        if len(tokens) > 1:
            kept.append(text)
    _check_any(kept, texts)
    return kept


def _check_any(kept: Sequence[object], texts: Sequence[str]) -> None:
    if texts and not kept:
        raise ValueError(
            f"none of the {len(texts)} texts has two tokens or more; there is no next token to predict."
        )
