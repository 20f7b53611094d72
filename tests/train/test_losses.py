"""Distillation losses against torch's own, and the ways they are usually got wrong."""

import pytest
import torch
from hybrid_kernels.loss import KINDS
from torch.nn import functional as F

from hybrid_distill.train import losses
from hybrid_distill.train.losses import IGNORE, distillation_loss

B = 3
L = 5
V = 11


@pytest.fixture
def logits() -> tuple[torch.Tensor, torch.Tensor]:
    student, teacher = 2 * torch.randn(2, B, L, V).double()
    return student, teacher


@pytest.fixture
def mask() -> torch.Tensor:
    return torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]]).bool()


def torch_kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """KL(p || q) of each token, from log-probabilities, by torch's own function."""
    return F.kl_div(q, p, log_target=True, reduction="none").sum(-1)


@pytest.mark.parametrize("beta", [0.1, 0.5])
def test_each_divergence_is_made_of_torchs_kl_div(logits, mask, beta):
    student, teacher = logits
    q = student.log_softmax(-1)
    p = teacher.log_softmax(-1)
    m = (beta * p.exp() + (1 - beta) * q.exp()).log()
    jsd = beta * torch_kl(p, m) + (1 - beta) * torch_kl(q, m)
    for kind, expected in zip(KINDS, (torch_kl(p, q), torch_kl(q, p), jsd), strict=True):
        loss = distillation_loss(student, teacher, mask, kind=kind, beta=beta)
        torch.testing.assert_close(loss, expected[mask].mean())


@pytest.mark.parametrize("kind", KINDS)
def test_gradients(logits, mask, kind):
    student, teacher = logits
    labels = torch.randint(V, (B, L))

    def loss(x: torch.Tensor) -> torch.Tensor:
        return distillation_loss(
            x,
            teacher,
            mask,
            kind=kind,
            temperature=2.0,
            beta=0.3,
            hard_weight=0.25,
            labels_BL=labels,
            chunk_size=4,
        )

    assert torch.autograd.gradcheck(loss, (student.requires_grad_(),))


@pytest.mark.parametrize("kind", KINDS)
def test_temperature_divides_both_sides_and_its_square_multiplies(logits, kind):
    student, teacher = logits
    at_two = distillation_loss(student * 2, teacher * 2, kind=kind, temperature=2.0)
    torch.testing.assert_close(at_two, 4 * distillation_loss(student, teacher, kind=kind))


@pytest.mark.parametrize("kind", KINDS)
def test_longer_rows_and_padding_change_nothing(logits, kind):
    student, teacher = logits
    plain = distillation_loss(student, teacher, kind=kind)
    twice = distillation_loss(torch.cat([student] * 2, 1), torch.cat([teacher] * 2, 1), kind=kind)
    torch.testing.assert_close(plain, twice)
    padding = torch.full((B, 3, V), float("nan")).double()
    padded_student = torch.cat([student, padding], 1).requires_grad_()
    mask = torch.arange(L + 3).expand(B, -1) < L
    padded = distillation_loss(padded_student, torch.cat([teacher, padding], 1), mask, kind=kind)
    torch.testing.assert_close(plain, padded)
    padded.backward()
    assert padded_student.grad is not None
    assert torch.isfinite(padded_student.grad).all()
    assert not padded_student.grad[:, L:].any()


def test_vocabularies_padded_differently_are_compared_on_the_real_tokens(logits):
    student, teacher = logits
    wide_student = torch.cat([student, torch.randn(B, L, 5).double()], -1)
    wide_teacher = torch.cat([teacher, torch.randn(B, L, 2).double()], -1)
    expected = distillation_loss(student, teacher)
    both_wide = distillation_loss(wide_student, wide_teacher, vocab_size=V)
    torch.testing.assert_close(both_wide, expected)
    student_wide = distillation_loss(wide_student, teacher)
    torch.testing.assert_close(student_wide, expected)
    with pytest.raises(ValueError, match="vocab_size is 14"):
        distillation_loss(wide_student, wide_teacher, vocab_size=14)


def test_chunks_change_neither_value_nor_gradient(logits, mask):
    student, teacher = logits
    student.requires_grad_()
    is_unlabeled = torch.rand(B, L) < 0.3
    labels = torch.randint(V, (B, L)).masked_fill(is_unlabeled, IGNORE)
    options = {"hard_weight": 0.5, "labels_BL": labels}

    def value_and_gradient(chunk_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        loss = distillation_loss(student, teacher, mask, chunk_size=chunk_size, **options)
        (gradient,) = torch.autograd.grad(loss, student)
        return loss, gradient

    whole = value_and_gradient(1000)
    for chunk_size in (4, 1):
        torch.testing.assert_close(value_and_gradient(chunk_size), whole)


def test_hard_labels_alone_are_cross_entropy_over_the_labelled_tokens(logits, mask):
    student, teacher = logits
    labels = torch.randint(V, (B, L))
    labels[0, 2] = IGNORE
    options = {"hard_weight": 1.0, "temperature": 3.0, "labels_BL": labels}
    loss = distillation_loss(student, teacher, mask, **options)
    kept = mask & (labels != IGNORE)
    torch.testing.assert_close(loss, F.cross_entropy(student[kept], labels[kept]))


def test_labels_stop_at_the_end_of_a_document():
    ids = torch.tensor([[5, 6, 7, 8, 9, 0]])
    seq_idx = torch.tensor([[0, 0, 1, 1, 1, 2]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 0]]).bool()
    labels = losses.next_token_labels(ids, seq_idx, mask)
    assert labels.tolist() == [[6, IGNORE, 8, 9, IGNORE, IGNORE]]


def test_bf16_logits_are_summed_in_float32(logits):
    student, teacher = (x.bfloat16() for x in logits)
    loss = distillation_loss(student, teacher)
    assert loss.dtype == torch.float32
    in_float32 = distillation_loss(student.float(), teacher.float())
    assert torch.equal(loss, in_float32)


def test_l2_norm_is_the_mean_norm_over_kept_tokens(logits, mask):
    pred, target = logits
    expected = (pred - target)[mask].norm(dim=-1).mean()
    torch.testing.assert_close(losses.l2_norm_loss(pred, target, mask), expected)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return losses.l2_norm_loss(x, target, mask)

    assert torch.autograd.gradcheck(loss, (pred.requires_grad_(),))
    equal = torch.ones(1, 2, 4, requires_grad=True)
    losses.l2_norm_loss(equal, torch.ones(1, 2, 4)).backward()
    assert equal.grad is not None, "not 0/0 where the error is zero"
    assert not equal.grad.any(), "not 0/0 where the error is zero"


@pytest.mark.parametrize(
    "loss", [losses.l2_norm_loss, losses.normalized_mse, losses.frobenius_loss]
)
def test_a_nan_is_not_hidden(loss):
    pred = torch.zeros(1, 2, 4, 4)
    pred[0, 1, 2, 3] = float("nan")
    assert loss(pred, torch.ones(1, 2, 4, 4)).isnan()


def test_normalized_mse_is_one_for_zero_and_free_of_scale(logits, mask):
    pred, target = logits
    of_zero = losses.normalized_mse(torch.zeros_like(target), target, mask)
    torch.testing.assert_close(of_zero.item(), 1.0)
    scaled = losses.normalized_mse(pred * 9, target * 9, mask)
    torch.testing.assert_close(scaled, losses.normalized_mse(pred, target, mask))


def test_frobenius_is_the_mean_matrix_norm(mask):
    pred = torch.randn(B, 2, L, L).double()
    target = torch.randn(B, 2, L, L).double()
    expected = torch.linalg.matrix_norm(pred - target).mean()
    torch.testing.assert_close(losses.frobenius_loss(pred, target), expected)
    rows = mask[:, None, :, None]
    masked = losses.frobenius_loss(pred, target, mask)
    zeroed = losses.frobenius_loss(pred * rows, target * rows)
    torch.testing.assert_close(masked, zeroed)
