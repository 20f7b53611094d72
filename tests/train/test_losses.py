"""Distillation losses against torch's own, and the ways they are usually got wrong."""

from typing import Any

import pytest
import torch
from hybrid_kernels.loss_types import KINDS
from messages import naming
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from hybrid_distill.train import losses
from hybrid_distill.train.losses import IGNORE, distillation_loss

# Batch, row length and vocabulary: three sizes that no mistaken transpose could swap.
B = 3
L = 5
V = 11


@pytest.fixture
def logits() -> tuple[Tensor, Tensor]:
    """Student's and teacher's logits, float64: `gradcheck` takes differences of it."""
    student, teacher = 2 * torch.randn(2, B, L, V).double()
    return student, teacher


@pytest.fixture
def mask() -> Tensor:
    """Rows of 5, 3 and 1 tokens: a mean over rows differs from one over tokens."""
    kept = [
        [1, 1, 1, 1, 1],
        [1, 1, 1, 0, 0],
        [1, 0, 0, 0, 0],
    ]
    return torch.tensor(kept).bool()


def torch_kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) of each token, from log-probabilities, by torch's own function."""
    # `kl_div` takes its arguments the other way round.
    return F.kl_div(q, p, log_target=True, reduction="none").sum(-1)


@pytest.mark.parametrize("beta", [0.1, 0.5])
def test_each_divergence_is_made_of_torchs_kl_div(logits, mask, beta):
    student, teacher = logits
    p = teacher.log_softmax(-1)
    q = student.log_softmax(-1)
    mixture = (beta * p.exp() + (1 - beta) * q.exp()).log()

    forward = torch_kl(p, q)
    reverse = torch_kl(q, p)
    jsd = beta * torch_kl(p, mixture) + (1 - beta) * torch_kl(q, mixture)

    for kind, expected in zip(KINDS, (forward, reverse, jsd), strict=True):
        loss = distillation_loss(student, teacher, mask, kind=kind, beta=beta)
        assert_close(loss, expected[mask].mean())


@pytest.mark.parametrize("kind", KINDS)
def test_gradients(logits, mask, kind):
    student, teacher = logits
    labels = torch.randint(V, (B, L))

    def loss(student_logits: Tensor) -> Tensor:
        return distillation_loss(
            student_logits,
            teacher,
            mask,
            kind=kind,
            temperature=2.0,
            beta=0.3,
            hard_weight=0.25,
            labels_BL=labels,
            chunk_size=4,
        )

    student.requires_grad_()
    assert torch.autograd.gradcheck(loss, (student,))


@pytest.mark.parametrize("kind", KINDS)
def test_temperature_divides_both_sides_and_its_square_multiplies(logits, kind):
    student, teacher = logits
    at_one = distillation_loss(student, teacher, kind=kind)
    at_two = distillation_loss(student * 2, teacher * 2, kind=kind, temperature=2.0)
    assert_close(at_two, 4 * at_one)


@pytest.mark.parametrize("kind", KINDS)
def test_longer_rows_and_padding_change_nothing(logits, kind):
    student, teacher = logits
    plain = distillation_loss(student, teacher, kind=kind)

    twice_student = torch.cat([student, student], 1)
    twice_teacher = torch.cat([teacher, teacher], 1)
    twice = distillation_loss(twice_student, twice_teacher, kind=kind)
    assert_close(plain, twice)

    # NaN: a masked token that is multiplied by zero would show.
    padding = torch.full((B, 3, V), float("nan")).double()
    padded_student = torch.cat([student, padding], 1).requires_grad_()
    padded_teacher = torch.cat([teacher, padding], 1)
    is_text = torch.arange(L + 3).expand(B, -1) < L
    padded = distillation_loss(padded_student, padded_teacher, is_text, kind=kind)
    assert_close(plain, padded)

    padded.backward()
    gradient = padded_student.grad
    assert gradient is not None
    assert torch.isfinite(gradient).all()
    assert not gradient[:, L:].any()


def test_vocabularies_padded_differently_are_compared_on_the_real_tokens(logits):
    student, teacher = logits
    wide_student = torch.cat([student, torch.randn(B, L, 5).double()], -1)
    wide_teacher = torch.cat([teacher, torch.randn(B, L, 2).double()], -1)
    expected = distillation_loss(student, teacher)

    both_wide = distillation_loss(wide_student, wide_teacher, vocab_size=V)
    assert_close(both_wide, expected)
    student_wide = distillation_loss(wide_student, teacher)
    assert_close(student_wide, expected)

    # The narrower of the two has 13.
    with pytest.raises(ValueError, match=naming("vocab_size", 14)):
        distillation_loss(wide_student, wide_teacher, vocab_size=14)


def test_chunks_change_neither_value_nor_gradient(logits, mask):
    student, teacher = logits
    student.requires_grad_()
    is_unlabeled = torch.rand(B, L) < 0.3
    labels = torch.randint(V, (B, L)).masked_fill(is_unlabeled, IGNORE)

    def value_and_gradient(chunk_size: int) -> tuple[Tensor, Tensor]:
        loss = distillation_loss(
            student,
            teacher,
            mask,
            hard_weight=0.5,
            labels_BL=labels,
            chunk_size=chunk_size,
        )
        (gradient,) = torch.autograd.grad(loss, student)
        return loss, gradient

    in_one_chunk = value_and_gradient(1000)
    for chunk_size in (4, 1):
        assert_close(value_and_gradient(chunk_size), in_one_chunk)


def test_hard_labels_alone_are_cross_entropy_over_the_labelled_tokens(logits, mask):
    student, teacher = logits
    labels = torch.randint(V, (B, L))
    labels[0, 2] = IGNORE
    options: dict[str, Any] = {"hard_weight": 1.0, "temperature": 3.0, "labels_BL": labels}

    loss = distillation_loss(student, teacher, mask, **options)

    is_labelled = mask & (labels != IGNORE)
    cross_entropy = F.cross_entropy(student[is_labelled], labels[is_labelled])
    assert_close(loss, cross_entropy)


def test_labels_stop_at_the_end_of_a_document():
    ids = torch.tensor([[5, 6, 7, 8, 9, 0]])
    seq_idx = torch.tensor([[0, 0, 1, 1, 1, 2]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 0]]).bool()

    labels = losses.next_token_labels(ids, seq_idx, mask)

    assert labels.tolist() == [[6, IGNORE, 8, 9, IGNORE, IGNORE]]


def test_bf16_logits_are_summed_in_float32(logits):
    student, teacher = logits
    student = student.bfloat16()
    teacher = teacher.bfloat16()

    loss = distillation_loss(student, teacher)

    in_float32 = distillation_loss(student.float(), teacher.float())
    assert loss.dtype == torch.float32
    assert torch.equal(loss, in_float32)


def test_l2_norm_is_the_mean_norm_over_kept_tokens(logits, mask):
    pred, target = logits
    error_norms = (pred - target).norm(dim=-1)
    assert_close(losses.l2_norm_loss(pred, target, mask), error_norms[mask].mean())

    def loss(prediction: Tensor) -> Tensor:
        return losses.l2_norm_loss(prediction, target, mask)

    pred.requires_grad_()
    assert torch.autograd.gradcheck(loss, (pred,))

    # The derivative of a norm at zero is 0/0.
    exact = torch.ones(1, 2, 4, requires_grad=True)
    losses.l2_norm_loss(exact, torch.ones(1, 2, 4)).backward()
    assert exact.grad is not None
    assert not exact.grad.any()


@pytest.mark.parametrize(
    "loss", [losses.l2_norm_loss, losses.normalized_mse, losses.frobenius_loss]
)
def test_a_nan_is_not_hidden(loss):
    pred = torch.zeros(1, 2, 4, 4)
    pred[0, 1, 2, 3] = float("nan")
    target = torch.ones(1, 2, 4, 4)
    assert loss(pred, target).isnan()


def test_normalized_mse_is_one_for_zero_and_free_of_scale(logits, mask):
    pred, target = logits

    of_zero = losses.normalized_mse(torch.zeros_like(target), target, mask)
    assert_close(of_zero.item(), 1.0)

    plain = losses.normalized_mse(pred, target, mask)
    scaled = losses.normalized_mse(pred * 9, target * 9, mask)
    assert_close(scaled, plain)


def test_frobenius_is_the_mean_matrix_norm(mask):
    pred = torch.randn(B, 2, L, L).double()
    target = torch.randn(B, 2, L, L).double()

    matrix_norms = torch.linalg.matrix_norm(pred - target)
    assert_close(losses.frobenius_loss(pred, target), matrix_norms.mean())

    # The mask leaves out rows of each matrix, the queries that are padding.
    is_kept_row = mask[:, None, :, None]
    masked = losses.frobenius_loss(pred, target, mask)
    zeroed = losses.frobenius_loss(pred * is_kept_row, target * is_kept_row)
    assert_close(masked, zeroed)
