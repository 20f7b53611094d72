"""Losses between a student and its teacher, as pure functions of tensors.

Every loss is a sum divided by a denominator. By default the denominator comes from the inputs, and the loss is a mean
over the tokens that the mask keeps (`frobenius_loss`: over rows), so row length and padding do not change it. With the
denominator of a larger batch, the losses of its parts add up to its loss. Sums are in float32 (float64 for float64
inputs).

Shapes: B batch, L length, S source length, H head, P head dim, D model width, V vocabulary,
M tokens of one chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from hybrid_kernels.loss import IGNORE, TeacherTopK
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

CHUNK_LOGITS = 2**26
"""Logits converted to float32 at the same time (256 MiB). A chunk holds as many tokens as fit; if there are several
chunks, each is recomputed in the backward pass."""
SMALLEST_TAIL = torch.finfo(torch.float32).eps
"""Minimum probability outside a teacher's top K; anything smaller is rounding error of their sum."""


def forward_kl(student_MV: Tensor, teacher_MV: Tensor) -> Tensor:
    """Compute KL(teacher || student) of each token, from log-probabilities.

    Its gradient equals that of cross-entropy with the teacher's softmax: the two differ by the teacher's entropy.
    """
    return (teacher_MV.exp() * (teacher_MV - student_MV)).sum(-1)


def reverse_kl(student_MV: Tensor, teacher_MV: Tensor) -> Tensor:
    """Compute KL(student || teacher) of each token, from log-probabilities (arXiv 2306.08543)."""
    return forward_kl(teacher_MV, student_MV)


def jsd(student_MV: Tensor, teacher_MV: Tensor, beta: float = 0.5) -> Tensor:
    """Compute the generalized Jensen-Shannon divergence of each token, from log-probabilities (arXiv 2306.13649).

    ``beta * KL(teacher || m) + (1 - beta) * KL(student || m)`` with ``m = beta * teacher + (1 - beta) * student``,
    0 < beta < 1.
    """
    mixture_MV = torch.logaddexp(teacher_MV + math.log(beta), student_MV + math.log1p(-beta))
    return beta * forward_kl(mixture_MV, teacher_MV) + (1.0 - beta) * forward_kl(mixture_MV, student_MV)


def next_token_labels(input_ids_BL: Tensor, seq_idx_BL: Tensor, mask_BL: Tensor) -> Tensor:
    """Return the next token after each unmasked token; `IGNORE` elsewhere, and where the next starts another document.

    Padding counts as another document. The next token may itself be masked: then no prediction is made from it.
    """
    same_document = (seq_idx_BL[:, 1:] == seq_idx_BL[:, :-1]) & mask_BL[:, :-1]
    return F.pad(input_ids_BL[:, 1:].where(same_document, IGNORE), (0, 1), value=IGNORE)


def distillation_loss(
    student_logits_BLV: Tensor,
    teacher: Tensor | TeacherTopK,
    mask_BL: Tensor | None = None,
    *,
    kind: str = "forward_kl",
    temperature: float = 1.0,
    beta: float = 0.5,
    hard_weight: float = 0.0,
    labels_BL: Tensor | None = None,
    n_tokens: Tensor | None = None,
    n_labels: Tensor | None = None,
    vocab_size: int | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """Compute ``(1 - hard_weight) * T^2 * divergence + hard_weight * cross-entropy``, a scalar in nats per token.

    `hybrid_kernels.loss.distillation_loss` does the same from hidden states, without the logits of all tokens.

    ``teacher`` is its logits, [B, L, V], or its likeliest tokens. The temperature T divides the logits of both models;
    T^2 preserves the size of the gradient (arXiv 1503.02531). The hard part has temperature 1 and is a mean over the
    tokens with a label. ``n_tokens`` and ``n_labels`` are counts of the larger batch that this is a part of
    (`Stage.totals`). ``vocab_size`` is the number of real tokens; entries beyond it are padding, which may differ
    between teacher and student. By default it is the smaller of the two widths.
    """
    known = teacher if isinstance(teacher, TeacherTopK) else (teacher,)
    compared: Callable[..., tuple[Tensor, Tensor]] = _outcomes if isinstance(teacher, TeacherTopK) else _tokens
    width = min(x.shape[-1] for x in (student_logits_BLV, teacher) if isinstance(x, Tensor))
    n_real = width if vocab_size is None else vocab_size
    if not 0 < n_real <= width:
        raise ValueError(f"vocab_size is {n_real}; it must be from 1 to {width}, the number of logits.")
    divergence = {"forward_kl": forward_kl, "reverse_kl": reverse_kl, "jsd": partial(jsd, beta=beta)}[kind]
    shape = student_logits_BLV.shape[:-1]
    mask_BL = student_logits_BLV.new_ones(shape, dtype=torch.bool) if mask_BL is None else mask_BL.bool()
    labels_BL = mask_BL.new_full(shape, IGNORE, dtype=torch.long) if labels_BL is None else labels_BL
    labels_BL = labels_BL.where(mask_BL, IGNORE)
    dtype = _wide(student_logits_BLV).dtype
    soft_scale = (1.0 - hard_weight) * temperature**2 / _count(mask_BL, n_tokens, dtype)
    hard_scale = hard_weight / _count(labels_BL != IGNORE, n_labels, dtype)

    def chunk_loss(mask_M: Tensor, labels_M: Tensor, student_MV: Tensor, *known_MX: Tensor) -> Tensor:
        student_MV, *theirs = (_real(x, mask_M, n_real) for x in (student_MV, *known_MX))
        loss = soft_scale * divergence(*compared(student_MV, *theirs, temperature)).where(mask_M, 0.0).sum()
        if hard_weight:
            log_q_MV = student_MV.log_softmax(-1)
            loss = loss + hard_scale * F.nll_loss(log_q_MV, labels_M, ignore_index=IGNORE, reduction="none").sum()
        return loss

    of_tokens = (mask_BL.flatten(), labels_BL.flatten(), *(x.flatten(0, -2) for x in (student_logits_BLV, *known)))
    size = chunk_size or max(1, CHUNK_LOGITS // n_real)
    chunks = list(zip(*(x.split(size) for x in of_tokens)))
    if len(chunks) == 1:
        return chunk_loss(*chunks[0])
    return torch.stack([checkpoint(chunk_loss, *chunk, use_reentrant=False) for chunk in chunks]).sum()


def l2_norm_loss(
    pred_BLD: Tensor, target_BLD: Tensor, mask_BL: Tensor | None = None, total: Tensor | None = None
) -> Tensor:
    """Compute the mean over tokens of ``||pred - target||_2`` (arXiv 2408.10189, layer-to-layer stage).

    Inputs may have more dimensions (BLHP); all but the last count as tokens. ``total`` is the number of tokens in a
    larger batch.
    """
    error_BL, mask_BL = _per_token(_root((_wide(pred_BLD) - _wide(target_BLD)).square().sum(-1)), mask_BL)
    return error_BL.where(mask_BL, 0.0).sum() / _count(mask_BL, total, error_BL.dtype)


def normalized_mse(
    pred_BLD: Tensor, target_BLD: Tensor, mask_BL: Tensor | None = None, total: Tensor | None = None
) -> Tensor:
    """Divide the squared error by the squared target: 1 for a prediction of zero, at any scale.

    ``total`` is the `power` of a larger batch's target.
    """
    error = power(_wide(pred_BLD) - _wide(target_BLD), mask_BL)
    total = power(target_BLD, mask_BL) if total is None else total.to(error.dtype)
    return error / total.clamp_min(torch.finfo(error.dtype).tiny)


def power(x_BLD: Tensor, mask_BL: Tensor | None = None) -> Tensor:
    """Sum the mean square over tokens; this is the denominator of `normalized_mse`."""
    square_BL, mask_BL = _per_token(_wide(x_BLD).square(), mask_BL)
    return square_BL.where(mask_BL, 0.0).sum()


def frobenius_loss(
    pred_BHLS: Tensor, target_BHLS: Tensor, mask_BL: Tensor | None = None, total: Tensor | None = None
) -> Tensor:
    """Compute the mean over rows and heads of ``||pred - target||_F``; masked query rows count as equal.

    ``total`` is the number of rows, B, in a larger batch.
    """
    error_BHLS = _wide(pred_BHLS) - _wide(target_BHLS)
    if mask_BL is not None:
        error_BHLS = error_BHLS.masked_fill(~mask_BL.bool()[:, None, :, None], 0.0)
    norm_B = _root(error_BHLS.square().sum((-2, -1))).mean(1)
    return norm_B.mean() if total is None else norm_B.sum() / total.to(norm_B.dtype)


def _per_token(x: Tensor, mask_BL: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the mean of ``x`` [B, L, ...] over the dimensions after L, and the mask of the tokens that count."""
    x_BL = x.reshape(*x.shape[:2], -1).mean(-1)
    return x_BL, x_BL.new_ones(x_BL.shape, dtype=torch.bool) if mask_BL is None else mask_BL.bool()


def _tokens(student_MV: Tensor, teacher_MV: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of all tokens, first the student's, then the teacher's."""
    return (student_MV / temperature).log_softmax(-1), (teacher_MV / temperature).log_softmax(-1)


def _outcomes(student_MV: Tensor, ids_MK: Tensor, log_probs_MK: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Do as `_tokens` for the teacher's K tokens and "any other", which is left out if K is the whole vocabulary."""
    log_q_MV = (student_MV / temperature).log_softmax(-1)
    log_q_MK = log_q_MV.gather(1, ids_MK)
    if ids_MK.shape[1] == student_MV.shape[1]:
        return log_q_MK, log_probs_MK
    rest_M1 = log_q_MV.scatter(1, ids_MK, -math.inf).logsumexp(-1, keepdim=True)
    tail_M1 = (1.0 - log_probs_MK.exp().sum(-1, keepdim=True)).clamp_min(SMALLEST_TAIL).log()
    return torch.cat([log_q_MK, rest_M1], -1), torch.cat([log_probs_MK, tail_M1], -1)


def _real(x_MV: Tensor, mask_M: Tensor, n_real: int) -> Tensor:
    """Drop vocabulary padding, in float32; zero masked tokens, so that NaN there affects neither value nor gradient."""
    x_MV = x_MV[:, :n_real]
    return (_wide(x_MV) if x_MV.is_floating_point() else x_MV).masked_fill(~mask_M[:, None], 0)


def _root(square: Tensor) -> Tensor:
    """Take the square root, with a gradient of 0 at 0, where the gradient of a norm is 0/0."""
    zero = square == 0
    return square.masked_fill(zero, 1.0).sqrt().masked_fill(zero, 0.0)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _count(mask_BL: Tensor, total: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Count the unmasked tokens, or take ``total``; return 1 instead of 0, as the sum over no tokens is 0."""
    return (mask_BL.sum() if total is None else total).to(dtype).clamp_min(1)
