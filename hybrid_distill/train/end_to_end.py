"""Distillation of the whole student from the teacher's predictions."""

from __future__ import annotations

from typing import Any, cast

import torch
from hybrid_kernels.loss import IGNORE, TeacherHead, TeacherTopK
from hybrid_kernels.loss import distillation_loss as fused_distillation_loss
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..data import Batch, TaughtBatch, cu_seqlens
from ..kernels import loss_implementation
from ..model.layout import decoder_of
from ..model.modeling_hybrid import HybridForCausalLM, finishes_logits, logits_of
from ..student.build import unshare_weights
from .config import Distill
from .losses import distillation_loss, next_token_labels
from .stage import Stage, StageLoss, Totals, mixer_parameters, teacher_hidden

# transformers renames gradient to activation checkpointing: version 6 drops the old name, 5.2 lacks the new one.
_CHECKPOINTING = "gradient_checkpointing"
if hasattr(PreTrainedModel, "activation_checkpointing_enable"):
    _CHECKPOINTING = "activation_checkpointing"


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Recompute each decoder layer's activations in the backward pass instead of keeping them."""
    enable = getattr(model, f"{_CHECKPOINTING}_enable")
    enable(**{f"{_CHECKPOINTING}_kwargs": {"use_reentrant": False}})


def keep_activations(model: PreTrainedModel) -> None:
    """Undo `checkpoint_activations`."""
    getattr(model, f"{_CHECKPOINTING}_disable")()


class EndToEnd(Stage[Distill]):
    """End-to-end distillation: the student learns to predict what the teacher predicts; see `losses.distillation_loss`.

    With ``config.fused``, the logits of all tokens are never in memory together, provided that the output embeddings
    are plain products and whole in this process (not under ZeRO-3).

    Without a teacher, each batch must be a `TaughtBatch`: the loss then covers the teacher's likeliest tokens and "any
    other". Stored logits are valid only for the ``temperature`` and ``vocab_size`` that they were computed with.
    """

    def __init__(self, student: HybridForCausalLM, teacher: PreTrainedModel | None, config: Distill) -> None:
        super().__init__(student, teacher, config)
        unshare_weights(student)
        student.set_segment_len(config.segment_len)
        self.model = student
        every = config.train == "all"
        self.train_only(dict(student.named_parameters()) if every else mixer_parameters(student, config.train))
        if config.gradient_checkpointing:
            checkpoint_activations(student)
        elif any(getattr(part, "gradient_checkpointing", False) for part in self.parts()):  # set by an earlier stage
            keep_activations(student)

    @property
    def is_fused(self) -> bool:
        """True if the loss is computed from hidden states: both models' logits are then plain products."""
        return self.config.fused and all(_is_product(model) for model in (self.model, *self.teachers))

    def parts(self) -> list[nn.Module]:
        return list(self.model.model.layers)

    def n_tokens(self, batch: Batch) -> Tensor:
        """Count as `Stage.n_tokens` does; for a loss on the text alone, only tokens whose next one has a label."""
        if self.config.hard_weight < 1:
            return super().n_tokens(batch)
        return (next_token_labels(batch["input_ids"], batch["seq_idx"], batch["mask"]) != IGNORE).sum()

    def totals(self, batch: Batch) -> dict[str, Tensor]:
        """Extend `Stage.totals` by the number of tokens that have a hard label."""
        labels_BL = next_token_labels(batch["input_ids"], batch["seq_idx"], batch["mask"])
        return super().totals(batch) | {"labels": (labels_BL != IGNORE).sum()}

    def loss(self, batch: Batch, totals: Totals) -> StageLoss:
        input_ids, seq_idx, config = batch["input_ids"], batch["seq_idx"], self.config
        options: dict[str, Any] = {
            "kind": config.kind, "temperature": config.temperature, "beta": config.beta, "vocab_size": self.vocab_size,
            "n_tokens": totals.get("tokens"), "n_labels": totals.get("labels"),
        }  # fmt: skip
        if config.hard_weight:
            labels_BL = next_token_labels(input_ids, seq_idx, batch["mask"])
            options |= {"hard_weight": config.hard_weight, "labels_BL": labels_BL}
        if self.teachers:
            theirs = teacher_hidden(self.teacher, batch)
        else:
            taught = cast(TaughtBatch, batch)
            theirs = TeacherTopK(taught["teacher_ids_BLK"], taught["teacher_log_probs_BLK"])
        packed = {"seq_idx": seq_idx, "cu_seq_lens_q": cu_seqlens(batch)}
        ours_BLD = self.model.model(input_ids=input_ids, use_cache=False, **packed)[0]
        return StageLoss(self._compare(ours_BLD, theirs, batch["mask"], options), {})

    def _compare(
        self, ours_BLD: Tensor, theirs: Tensor | TeacherTopK, mask_BL: Tensor, options: dict[str, Any]
    ) -> Tensor:
        """Compute the loss; ``theirs`` is the teacher's hidden states, [B, L, E], or its likeliest tokens."""
        if self.is_fused:
            options |= {"impl": loss_implementation(self.model)}
            known = theirs
            if isinstance(theirs, Tensor):
                known = TeacherHead(theirs, _head(self.teacher).weight)
            assert not isinstance(known, Tensor)
            return fused_distillation_loss(ours_BLD, _head(self.model).weight, known, mask_BL, **options)
        if isinstance(theirs, Tensor):
            with torch.no_grad():
                theirs = logits_of(self.teacher, theirs)
        return distillation_loss(logits_of(self.model, ours_BLD), theirs, mask_BL, **options)


def _head(model: PreTrainedModel) -> nn.Linear:
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear)
    return head


def _is_product(model: PreTrainedModel) -> bool:
    """Check whether logits are a plain product with the head's weight, and this process holds the whole weight."""
    head = _head(model)
    whole = type(head) is nn.Linear and head.bias is None and type(head.weight.data) is Tensor
    return (
        whole
        and head.weight.numel() == head.in_features * head.out_features
        and not finishes_logits(decoder_of(model).config)
    )
