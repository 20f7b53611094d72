"""Distillation loss of a chunk's logits in plain torch: loss and gradient of every token.

With q the student's probabilities at temperature T and r_v = d divergence / d q_v, the gradient by
the student's logits is (q_v r_v - q_v sum_u q_u r_u) / T: every divergence is written as its
``pull`` q_v r_v.

Shapes: M tokens, V vocabulary, K stored tokens of the teacher, O outcomes that are compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .loss_types import Options, Tokens

CACHED_LOGITS = 2**18
"""Logits whose passes a CPU does one after the other; a few buffers of 1 MiB stay in its cache."""
SMALLEST_TAIL = torch.finfo(torch.float32).eps
"""Smallest probability mass outside the teacher's top K; anything less is rounding of their sum."""


def of_head(
    student_MV: Tensor, teacher_MV: Tensor, tokens: Tokens, options: Options
) -> tuple[Tensor, Tensor]:
    """Return loss_M, in float32 at least, and gradient_MV by the student's logits, in their place."""
    return _part_by_part(_of_head, student_MV, (teacher_MV,), tokens, options)


def of_top_k(
    student_MV: Tensor, ids_MK: Tensor, log_probs_MK: Tensor, tokens: Tokens, options: Options
) -> tuple[Tensor, Tensor]:
    """Compute `of_head` for a teacher that is stored at K tokens; all others are one outcome."""
    return _part_by_part(_of_top_k, student_MV, (ids_MK, log_probs_MK), tokens, options)


def _part_by_part(
    compare: Callable[..., tuple[Tensor, Tensor]],
    student_MV: Tensor,
    teacher: tuple[Tensor, ...],
    tokens: Tokens,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """Compare some tokens at a time, so that what each pass leaves is still in the cache for the
    next."""
    size = len(student_MV)
    if student_MV.device.type == "cpu":
        size = max(1, CACHED_LOGITS // student_MV.shape[1])
    losses = []
    for start in range(0, len(student_MV), size):
        rows = slice(start, start + size)
        tokens_of_part = Tokens(*(tensor[rows] for tensor in tokens))
        teacher_of_part = [tensor[rows] for tensor in teacher]
        loss_M, gradient_MV = compare(student_MV[rows], *teacher_of_part, tokens_of_part, options)
        # In place: a chunk's logits and its gradient never exist at the same time.
        student_MV[rows] = gradient_MV
        losses.append(loss_M)
    return torch.cat(losses), student_MV


def _of_head(
    student_MV: Tensor, teacher_MV: Tensor, tokens: Tokens, options: Options
) -> tuple[Tensor, Tensor]:
    student_MV = _wide(student_MV)
    teacher_MV = _wide(teacher_MV)
    log_q_MV = (student_MV / options.temperature).log_softmax(-1)
    log_p_MV = (teacher_MV / options.temperature).log_softmax(-1)
    divergence_M, gradient_MV = divergence(log_q_MV, log_p_MV, options)
    gradient_MV *= (tokens.soft_M / options.temperature).unsqueeze(-1)
    return _with_cross_entropy(
        tokens.soft_M * divergence_M, gradient_MV, student_MV, tokens, options
    )


def _of_top_k(
    student_MV: Tensor, ids_MK: Tensor, log_probs_MK: Tensor, tokens: Tokens, options: Options
) -> tuple[Tensor, Tensor]:
    student_MV = _wide(student_MV)
    log_q_MV = (student_MV / options.temperature).log_softmax(-1)
    # -inf, so that the stored tokens take no part in the sum of the others.
    rest_MV = log_q_MV.scatter(1, ids_MK, -math.inf)
    log_q_rest = rest_MV.logsumexp(-1, keepdim=True)
    log_q_MO = torch.cat([log_q_MV.gather(1, ids_MK), log_q_rest], -1)
    divergence_M, gradient_MO = compare_outcomes(
        log_q_MO, log_probs_MK, student_MV.shape[1], options
    )
    gradient_MO *= (tokens.soft_M / options.temperature).unsqueeze(-1)
    # An outcome's gradient is shared out among its tokens by their probabilities.
    gradient_MV = (rest_MV - log_q_rest).exp() * gradient_MO[:, -1:]
    gradient_MV.scatter_(1, ids_MK, gradient_MO[:, :-1])
    return _with_cross_entropy(
        tokens.soft_M * divergence_M, gradient_MV, student_MV, tokens, options
    )


def compare_outcomes(
    log_q_MO: Tensor, log_probs_MK: Tensor, n_vocabulary: int, options: Options
) -> tuple[Tensor, Tensor]:
    """Return divergence and gradient over K tokens and "any other", which is left out if K is the
    whole vocabulary."""
    n_stored = log_probs_MK.shape[1]
    if n_stored == n_vocabulary:
        divergence_M, gradient_MK = divergence(log_q_MO[:, :n_stored], log_probs_MK, options)
        return divergence_M, torch.nn.functional.pad(gradient_MK, (0, 1))
    # The clamp keeps log finite where the stored tokens hold all of the mass; with the whole
    # vocabulary stored there is no rest, and its log would be -inf.
    stored_M1 = log_probs_MK.exp().sum(-1, keepdim=True)
    log_rest_M1 = (1.0 - stored_M1).clamp_min(SMALLEST_TAIL).log()
    log_p_MO = torch.cat([log_probs_MK, log_rest_M1], -1)
    return divergence(log_q_MO, log_p_MO, options)


def divergence(log_q_MO: Tensor, log_p_MO: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Return the divergence between teacher p and student q, and its gradient by the student's
    logits at temperature T."""
    q = log_q_MO.exp()
    p = log_p_MO.exp()
    if options.kind == "forward_kl":
        value = (p * (log_p_MO - log_q_MO)).sum(-1)
        # q times the sum of p, not q: rounded log-probabilities need not sum to 1.
        return value, q * p.sum(-1, keepdim=True) - p
    if options.kind == "reverse_kl":
        pull = q * (log_q_MO - log_p_MO)
        return pull.sum(-1), pull - q * pull.sum(-1, keepdim=True)
    beta = options.beta
    # The mixture in logs: m underflows where both p and q do, and log m must not.
    log_m = torch.logaddexp(log_p_MO + math.log(beta), log_q_MO + math.log1p(-beta))
    pull = (1.0 - beta) * q * (log_q_MO - log_m)
    value = beta * (p * (log_p_MO - log_m)).sum(-1) + pull.sum(-1)
    return value, pull - q * pull.sum(-1, keepdim=True)


def _with_cross_entropy(
    loss_M: Tensor, gradient_MV: Tensor, student_MV: Tensor, tokens: Tokens, options: Options
) -> tuple[Tensor, Tensor]:
    """Add the cross-entropy of the labels, at temperature 1, to the loss and its gradient."""
    if not options.hard_weight:
        return loss_M, gradient_MV
    log_q_MV = student_MV.log_softmax(-1)
    label_M1 = tokens.labels_M.unsqueeze(-1)
    hard_M1 = tokens.hard_M.unsqueeze(-1)
    log_q_of_label_M = log_q_MV.gather(1, label_M1).squeeze(-1)
    loss_M = loss_M - tokens.hard_M * log_q_of_label_M
    gradient_MV += hard_M1 * log_q_MV.exp()
    # Added, not set: the divergence has a gradient there already.
    gradient_MV.scatter_add_(1, label_M1, -hard_M1)
    return loss_M, gradient_MV


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
