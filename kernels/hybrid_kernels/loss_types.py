"""Inputs of every implementation of the distillation loss: teacher, options, and a chunk's tokens.

Shapes: B batch, L length, E teacher width, W teacher vocabulary, K stored tokens of the teacher,
M tokens of a chunk."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

IGNORE = -100
"""The label of a token that cross-entropy leaves out."""

KINDS = ("forward_kl", "reverse_kl", "jsd")


class TeacherHead(NamedTuple):
    """A teacher as its final hidden states and its output head, of any width and vocabulary
    padding."""

    hidden_BLE: Tensor
    head_WE: Tensor


class TeacherTopK(NamedTuple):
    """A teacher as the ids, distinct, and log-probabilities of its K likeliest tokens.

    The log-probabilities are over the real vocabulary and at the temperature of the loss. What they
    leave over is the probability of one more outcome, "any other token", for teacher and student
    alike."""

    ids_BLK: Tensor
    log_probs_BLK: Tensor


class Options(NamedTuple):
    """Divergence and its settings."""

    kind: str
    temperature: float
    beta: float
    hard_weight: float


class Tokens(NamedTuple):
    """Labels, weights and teacher of each token of a chunk."""

    soft_M: Tensor
    """Factor of the divergence."""
    hard_M: Tensor
    """Factor of the cross-entropy: 0 without a label."""
    labels_M: Tensor
    """0 without a label."""
    kept_M: Tensor
    """False where the weight is 0: what such a token holds, be it NaN, reaches neither value nor
    gradient."""
