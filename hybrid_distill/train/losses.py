"""Losses between a student and its teacher, as pure functions of tensors.

Every loss is a sum divided by a denominator. By default the denominator comes from the inputs, and the loss is a mean
over the tokens that the mask keeps (`frobenius_loss`: over rows), so row length and padding do not change it. With the
denominator of a larger batch, the losses of its parts add up to its loss. Sums are in float32 (float64 for float64
inputs).

Shapes: B batch, L length, S source length, H head, P head dim, D model width, V vocabulary,
M tokens of one chunk, K likeliest tokens of a teacher; X is V, K, or K and one more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from hybrid_kernels.loss_types import IGNORE, TeacherTopK
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
    weighted_teacher_MV = teacher_MV + math.log(beta)
    weighted_student_MV = student_MV + math.log1p(-beta)
    mixture_MV = torch.logaddexp(weighted_teacher_MV, weighted_student_MV)
    from_teacher_M = forward_kl(mixture_MV, teacher_MV)
    from_student_M = forward_kl(mixture_MV, student_MV)
    return beta * from_teacher_M + (1.0 - beta) * from_student_M


DIVERGENCES: dict[str, Callable[..., Tensor]] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
}


def next_token_labels(input_ids_BL: Tensor, seq_idx_BL: Tensor, mask_BL: Tensor) -> Tensor:
    """Return the next token after each unmasked token; `IGNORE` elsewhere, and where the next starts another document.

    Padding counts as another document. The next token may itself be masked: then no prediction is made from it.
    """
    continues = seq_idx_BL[:, 1:] == seq_idx_BL[:, :-1]
    is_predicted = continues & mask_BL[:, :-1]
    next_ids = input_ids_BL[:, 1:].where(is_predicted, IGNORE)  # [B, L - 1]
    return F.pad(next_ids, (0, 1), value=IGNORE)


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
    n_real = _real_vocabulary(student_logits_BLV, teacher, vocab_size)
    shape = student_logits_BLV.shape[:-1]
    if mask_BL is None:
        mask_BL = student_logits_BLV.new_ones(shape, dtype=torch.bool)
    mask_BL = mask_BL.bool()
    if labels_BL is None:
        labels_BL = mask_BL.new_full(shape, IGNORE, dtype=torch.long)
    labels_BL = labels_BL.where(mask_BL, IGNORE)

    # Every chunk is divided by the counts of the whole step: the chunks then just add up.
    dtype = _wide_dtype(student_logits_BLV)
    soft_weight = (1.0 - hard_weight) * temperature**2
    soft_scale = soft_weight / _count(mask_BL, n_tokens, dtype)
    hard_scale = None
    if hard_weight:
        hard_scale = hard_weight / _count(labels_BL != IGNORE, n_labels, dtype)

    if isinstance(teacher, TeacherTopK):
        teacher_parts: tuple[Tensor, ...] = tuple(teacher)
        log_probs_of: Callable[..., tuple[Tensor, Tensor]] = _top_log_probs
    else:
        teacher_parts = (teacher,)
        log_probs_of = _all_log_probs
    divergence = DIVERGENCES[kind]
    if kind == "jsd":
        divergence = partial(jsd, beta=beta)
    chunk_loss = partial(
        _chunk_loss,
        log_probs_of=log_probs_of,
        divergence=divergence,
        temperature=temperature,
        n_real=n_real,
        soft_scale=soft_scale,
        hard_scale=hard_scale,
    )
    rows = [mask_BL.flatten(), labels_BL.flatten(), student_logits_BLV.flatten(0, -2)]
    rows += [part_BLX.flatten(0, -2) for part_BLX in teacher_parts]
    if not chunk_size:
        chunk_size = max(1, CHUNK_LOGITS // n_real)
    return _sum_over_chunks(chunk_loss, rows, chunk_size)


def _chunk_loss(
    mask_M: Tensor,
    labels_M: Tensor,
    student_MV: Tensor,
    *teacher_parts: Tensor,
    log_probs_of: Callable[..., tuple[Tensor, Tensor]],
    divergence: Callable[[Tensor, Tensor], Tensor],
    temperature: float,
    n_real: int,
    soft_scale: Tensor,
    hard_scale: Tensor | None,
) -> Tensor:
    """Compute the share of a chunk; ``teacher_parts`` hold its M rows of the teacher's logits, or of ids and values."""
    student_MV = _comparable(student_MV, mask_M, n_real)
    parts_MX = [_comparable(part_MX, mask_M, n_real) for part_MX in teacher_parts]
    log_q_MX, log_p_MX = log_probs_of(student_MV, *parts_MX, temperature)
    divergence_M = divergence(log_q_MX, log_p_MX)
    loss = soft_scale * divergence_M.where(mask_M, 0.0).sum()
    if hard_scale is not None:
        cross_entropy_M = F.nll_loss(
            student_MV.log_softmax(-1),
            labels_M,
            ignore_index=IGNORE,
            reduction="none",
        )
        loss = loss + hard_scale * cross_entropy_M.sum()
    return loss


def _sum_over_chunks(
    chunk_loss: Callable[..., Tensor], rows: Sequence[Tensor], chunk_size: int
) -> Tensor:
    """Add up the loss of all tokens, ``chunk_size`` at a time; each of ``rows`` has one row per token."""
    splits = [tensor.split(chunk_size) for tensor in rows]
    chunks = list(zip(*splits))
    if len(chunks) == 1:
        return chunk_loss(*chunks[0])
    # Without checkpoints, autograd would keep the float32 copies of all chunks.
    losses = [checkpoint(chunk_loss, *chunk, use_reentrant=False) for chunk in chunks]
    return torch.stack(losses).sum()


def l2_norm_loss(
    pred_BLD: Tensor,
    target_BLD: Tensor,
    mask_BL: Tensor | None = None,
    denominator: Tensor | None = None,
) -> Tensor:
    """Compute the mean over tokens of ``||pred - target||_2`` (arXiv 2408.10189, layer-to-layer stage).

    Inputs may have more dimensions (BLHP); all but the last count as tokens. ``denominator`` is the number of tokens
    in a larger batch.
    """
    error_BLD = _wide(pred_BLD) - _wide(target_BLD)
    norm = _root(error_BLD.square().sum(-1))
    norm_BL = _mean_per_token(norm)
    mask_BL = _mask_like(norm_BL, mask_BL)
    return norm_BL.where(mask_BL, 0.0).sum() / _count(mask_BL, denominator, norm_BL.dtype)


def normalized_mse(
    pred_BLD: Tensor,
    target_BLD: Tensor,
    mask_BL: Tensor | None = None,
    denominator: Tensor | None = None,
) -> Tensor:
    """Divide the squared error by the squared target: 1 for a prediction of zero, at any scale.

    ``denominator`` is the `power` of a larger batch's target.
    """
    error = power(_wide(pred_BLD) - _wide(target_BLD), mask_BL)
    if denominator is None:
        denominator = power(target_BLD, mask_BL)
    denominator = denominator.to(error.dtype)
    # A target of zeros, such as a fully masked batch, must not make the loss NaN.
    return error / denominator.clamp_min(torch.finfo(error.dtype).tiny)


def power(x_BLD: Tensor, mask_BL: Tensor | None = None) -> Tensor:
    """Sum the mean square over tokens; this is the denominator of `normalized_mse`."""
    square_BL = _mean_per_token(_wide(x_BLD).square())
    mask_BL = _mask_like(square_BL, mask_BL)
    return square_BL.where(mask_BL, 0.0).sum()


def frobenius_loss(
    pred_BHLS: Tensor,
    target_BHLS: Tensor,
    mask_BL: Tensor | None = None,
    denominator: Tensor | None = None,
) -> Tensor:
    """Compute the mean over rows and heads of ``||pred - target||_F``; masked query rows count as equal.

    ``denominator`` is the number of rows, B, in a larger batch.
    """
    error_BHLS = _wide(pred_BHLS) - _wide(target_BHLS)
    if mask_BL is not None:
        masked_B1L1 = ~mask_BL.bool()[:, None, :, None]
        error_BHLS = error_BHLS.masked_fill(masked_B1L1, 0.0)
    norm_BH = _root(error_BHLS.square().sum((-2, -1)))
    norm_B = norm_BH.mean(1)
    if denominator is None:
        return norm_B.mean()
    return norm_B.sum() / denominator.to(norm_B.dtype)


def _real_vocabulary(
    student_logits_BLV: Tensor,
    teacher: Tensor | TeacherTopK,
    vocab_size: int | None,
) -> int:
    """Return the number of tokens to compare. Raises ValueError if a model has fewer logits."""
    width = student_logits_BLV.shape[-1]
    # A top K's last dimension is K, which limits nothing.
    if isinstance(teacher, Tensor):
        width = min(width, teacher.shape[-1])
    n_real = vocab_size
    if n_real is None:
        n_real = width
    if not 0 < n_real <= width:
        raise ValueError(
            f"vocab_size is {n_real}; it must be from 1 to {width}, the number of logits."
        )
    return n_real


def _mean_per_token(x: Tensor) -> Tensor:
    """Average ``x`` [B, L, ...] over all dimensions after L."""
    return x.reshape(*x.shape[:2], -1).mean(-1)


def _mask_like(x_BL: Tensor, mask_BL: Tensor | None) -> Tensor:
    """Return the mask of the tokens that count; without one, all of them."""
    if mask_BL is None:
        return x_BL.new_ones(x_BL.shape, dtype=torch.bool)
    return mask_BL.bool()


def _all_log_probs(
    student_MV: Tensor,
    teacher_MV: Tensor,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of all tokens, first the student's, then the teacher's."""
    log_q_MV = (student_MV / temperature).log_softmax(-1)
    log_p_MV = (teacher_MV / temperature).log_softmax(-1)
    return log_q_MV, log_p_MV


def _top_log_probs(
    student_MV: Tensor,
    ids_MK: Tensor,
    log_p_MK: Tensor,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """Do as `_all_log_probs` for the teacher's K tokens and "any other".

    The latter is left out if K is the whole vocabulary.
    """
    log_q_MV = (student_MV / temperature).log_softmax(-1)
    log_q_MK = log_q_MV.gather(1, ids_MK)
    if ids_MK.shape[1] == student_MV.shape[1]:
        return log_q_MK, log_p_MK
    # The student's rest is summed token by token, for 1 minus the top's sum would cancel. Of the
    # teacher, only the top is known.
    log_q_rest_M1 = log_q_MV.scatter(1, ids_MK, -math.inf).logsumexp(-1, keepdim=True)
    p_top_M1 = log_p_MK.exp().sum(-1, keepdim=True)
    log_p_rest_M1 = (1.0 - p_top_M1).clamp_min(SMALLEST_TAIL).log()
    log_q_MX = torch.cat([log_q_MK, log_q_rest_M1], -1)
    log_p_MX = torch.cat([log_p_MK, log_p_rest_M1], -1)
    return log_q_MX, log_p_MX


def _comparable(x_MX: Tensor, mask_M: Tensor, n_real: int) -> Tensor:
    """Drop vocabulary padding, in float32; zero masked tokens, so that NaN there affects neither value nor gradient."""
    x_MX = x_MX[:, :n_real]
    # A top K's token ids stay integers: they index.
    if x_MX.is_floating_point():
        x_MX = _wide(x_MX)
    return x_MX.masked_fill(~mask_M[:, None], 0)


def _root(square: Tensor) -> Tensor:
    """Take the square root, with a gradient of 0 at 0, where the gradient of a norm is 0/0."""
    is_zero = square == 0
    # The inner fill is for the gradient, which would be 0 * (1 / 0); the outer restores the value.
    return square.masked_fill(is_zero, 1.0).sqrt().masked_fill(is_zero, 0.0)


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _wide(x: Tensor) -> Tensor:
    return x.to(_wide_dtype(x))


def _count(mask_BL: Tensor, denominator: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Count the unmasked tokens, or take ``denominator``; return 1 instead of 0, as the sum over no tokens is 0."""
    if denominator is None:
        denominator = mask_BL.sum()
    return denominator.to(dtype).clamp_min(1)
