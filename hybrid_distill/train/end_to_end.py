"""Distillation of the whole student from the teacher's predictions."""

from __future__ import annotations

from typing import Any, cast

import torch
from hybrid_kernels.loss import distillation_loss as fused_distillation_loss
from hybrid_kernels.loss_types import IGNORE, TeacherHead, TeacherTopK
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..data import Batch, TaughtBatch, cu_seqlens
from ..model.layout import decoder_of
from ..model.logits import finishes_logits, logits_of
from ..model.modeling_hybrid import HybridForCausalLM
from ..student.sharing import unshare_weights
from ..teacher import decoder_blocks
from .config import Distill
from .losses import distillation_loss, next_token_labels
from .optimizer import learning_rate_scales
from .stage import Stage, StageLoss, Totals, mixer_parameters, teacher_hidden

# transformers renames gradient to activation checkpointing: version 6 drops the old name, 5.2 lacks the new one.
_CHECKPOINTING = "gradient_checkpointing"
if hasattr(PreTrainedModel, "activation_checkpointing_enable"):
    _CHECKPOINTING = "activation_checkpointing"

LOSS = {
    "auto": "auto",
    "triton": "triton",
    # mamba-ssm has no loss.
    "mamba_ssm": "auto",
    "torch": "torch",
    "reference": "torch",
}
"""Implementation of the distillation loss for a student on each of `kernel_choice.IMPLEMENTATIONS`."""


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Recompute each decoder layer's activations in the backward pass instead of keeping them."""
    enable = getattr(model, f"{_CHECKPOINTING}_enable")
    enable(**{f"{_CHECKPOINTING}_kwargs": {"use_reentrant": False}})


def keep_activations(model: PreTrainedModel) -> None:
    """Undo `checkpoint_activations`."""
    disable = getattr(model, f"{_CHECKPOINTING}_disable")
    disable()


def _checkpoints_activations(model: HybridForCausalLM) -> bool:
    layers = model.model.layers
    return any(getattr(layer, "gradient_checkpointing", False) for layer in layers)


class EndToEnd(Stage[Distill]):
    """End-to-end distillation: the student learns to predict what the teacher predicts; see `losses.distillation_loss`.

    With ``config.fused``, the logits of all tokens are never in memory together, provided that the output embeddings
    are plain products and whole in this process (not under ZeRO-3).

    Without a teacher, each batch must be a `TaughtBatch`: the loss then covers the teacher's likeliest tokens and "any
    other". Stored logits are valid only for the ``temperature`` and ``vocab_size`` that they were computed with.
    """

    def __init__(
        self,
        student: HybridForCausalLM,
        teacher: PreTrainedModel | None,
        config: Distill,
    ) -> None:
        super().__init__(student, teacher, config)
        # Alignment leaves weights that the teacher owns too: training them would train the teacher.
        unshare_weights(student)
        student.set_segment_len(config.segment_len)
        # The whole student runs here, so all of it is registered, also what stays frozen.
        self.model = student
        if config.train == "all":
            chosen = dict(student.named_parameters())
        else:
            chosen = mixer_parameters(student, config.train)
        if config.lr_scale is not None:
            scales = learning_rate_scales(student, *config.lr_scale)
            # Frozen, else the gradients of weights that do not move would count when gradients are clipped.
            chosen = {name: weight for name, weight in chosen.items() if scales[weight]}
        self.train_only(chosen)
        if config.gradient_checkpointing:
            checkpoint_activations(student)
        elif _checkpoints_activations(student):
            # An earlier stage of the same student has set it.
            keep_activations(student)

    @property
    def is_fused(self) -> bool:
        """True if the loss is computed from hidden states: both models' logits are then plain products."""
        if not self.config.fused:
            return False
        return all(_is_product(model) for model in (self.model, *self.teachers))

    def parts(self) -> list[nn.Module]:
        return list(self.model.model.layers)

    def whole_layers(self) -> list[nn.Module]:
        layers: list[nn.Module] = []
        for model in (self.model, *self.teachers):
            layers += [layer for _, layer in decoder_blocks(model)]
        return layers

    def n_tokens(self, batch: Batch) -> Tensor:
        """Count as `Stage.n_tokens` does; for a loss on the text alone, only tokens whose next one has a label."""
        if self.config.hard_weight < 1:
            return super().n_tokens(batch)
        return _n_labels(batch)

    def totals(self, batch: Batch) -> dict[str, Tensor]:
        """Extend `Stage.totals` by the number of tokens that have a hard label, if labels are used."""
        totals = super().totals(batch)
        if self.config.hard_weight:
            totals["labels"] = _n_labels(batch)
        return totals

    def loss(self, batch: Batch, totals: Totals) -> StageLoss:
        config = self.config
        options: dict[str, Any] = {
            "kind": config.kind,
            "temperature": config.temperature,
            "beta": config.beta,
            "vocab_size": self.vocab_size,
            "n_tokens": totals.get("tokens"),
            "n_labels": totals.get("labels"),
        }
        if config.hard_weight:
            options["hard_weight"] = config.hard_weight
            options["labels_BL"] = _labels(batch)
        teacher_output = self._teacher_output(batch)
        # The decoder alone: the model's own forward would make the logits of all tokens.
        decoder = self.model.model
        student_BLD = decoder(
            input_ids=batch["input_ids"],
            use_cache=False,
            seq_idx=batch["seq_idx"],
            cu_seq_lens_q=cu_seqlens(batch),
        )[0]
        if self.is_fused:
            total = self._fused_loss(student_BLD, teacher_output, batch["mask"], options)
        else:
            total = self._loss_of_logits(student_BLD, teacher_output, batch["mask"], options)
        return StageLoss(total, {})

    def _teacher_output(self, batch: Batch) -> Tensor | TeacherTopK:
        """Return the teacher's hidden states, [B, L, E], or its stored likeliest tokens."""
        if self.teachers:
            return teacher_hidden(self.teacher, batch)
        taught = cast(TaughtBatch, batch)
        return TeacherTopK(taught["teacher_ids_BLK"], taught["teacher_log_probs_BLK"])

    def _fused_loss(
        self,
        student_BLD: Tensor,
        teacher_output: Tensor | TeacherTopK,
        mask_BL: Tensor,
        options: dict[str, Any],
    ) -> Tensor:
        """Compute the loss chunk by chunk from hidden states."""
        if isinstance(teacher_output, Tensor):
            head_WE = _head(self.teacher).weight
            teacher: TeacherHead | TeacherTopK = TeacherHead(teacher_output, head_WE)
        else:
            teacher = teacher_output
        return fused_distillation_loss(
            student_BLD,
            _head(self.model).weight,
            teacher,
            mask_BL,
            impl=loss_implementation(self.model),
            **options,
        )

    def _loss_of_logits(
        self,
        student_BLD: Tensor,
        teacher_output: Tensor | TeacherTopK,
        mask_BL: Tensor,
        options: dict[str, Any],
    ) -> Tensor:
        """Compute the loss from the logits of all tokens, [B, L, V]."""
        if isinstance(teacher_output, Tensor):
            with torch.no_grad():
                teacher_output = logits_of(self.teacher, teacher_output)
        student_logits_BLV = logits_of(self.model, student_BLD)
        return distillation_loss(student_logits_BLV, teacher_output, mask_BL, **options)


def loss_implementation(student: HybridForCausalLM) -> str:
    """Return the implementation of the distillation loss that goes with the student's."""
    return LOSS[student.ssm_implementation]


def _labels(batch: Batch) -> Tensor:
    return next_token_labels(batch["input_ids"], batch["seq_idx"], batch["mask"])


def _n_labels(batch: Batch) -> Tensor:
    return (_labels(batch) != IGNORE).sum()


def _head(model: PreTrainedModel) -> nn.Linear:
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear)
    return head


def _is_product(model: PreTrainedModel) -> bool:
    """Check whether logits are a plain product with the head's weight, and this process holds the whole weight."""
    head = _head(model)
    # A subclass may compute something else. FSDP2's DTensor is a shard; others are quantized.
    if type(head) is not nn.Linear or type(head.weight.data) is not Tensor:
        return False
    if head.bias is not None:
        return False
    # ZeRO-3 leaves an empty weight between calls of its module.
    if head.weight.numel() != head.in_features * head.out_features:
        return False
    # Some families scale or cap the product.
    return not finishes_logits(decoder_of(model).config)
