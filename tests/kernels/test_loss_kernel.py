"""The chunked distillation loss equals that of `hybrid_distill.train.losses`: value and gradients,
all options."""

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hybrid_kernels.loss import distillation_loss, loss_and_gradients
from hybrid_kernels.loss_chunks import narrow_adder
from hybrid_kernels.loss_types import IGNORE, KINDS, TeacherHead, TeacherTopK
from messages import naming
from torch import Tensor

from hybrid_distill.train import losses

# (implementation, dtype) -> error relative to the largest value; the reference multiplies the same
# numbers in fp64. In bf16 the logits are rounded, as in any model, and then their gradient.
TOLERANCE = {
    ("torch", torch.float64): 1e-12,
    ("torch", torch.float32): 1e-5,
    ("torch", torch.bfloat16): 3e-2,
    ("triton", torch.float32): 1e-5,
    ("triton", torch.bfloat16): 3e-2,
}
KERNELS = Path(__file__).parents[2] / "kernels"
# Rows, tokens, widths of student and teacher, rows of their heads.
B = 2
L = 5
D = 8
E = 6
V = 37
W = 41
REAL = 35
"""Words of the vocabulary, fewer than either head has rows."""


@pytest.fixture
def interpreter() -> None:
    """For tests that run kernels."""
    pytest.importorskip("triton", reason="the kernels are written in triton")
    from hybrid_kernels.common import RUNS_HERE

    if not RUNS_HERE:
        pytest.skip("needs TRITON_INTERPRET=1, or a GPU")


@pytest.fixture(params=["torch", "triton"])
def impl(request: pytest.FixtureRequest) -> str:
    """Both implementations of a chunk; the kernels run in the interpreter."""
    if request.param == "triton":
        request.getfixturevalue("interpreter")
    return request.param


class Case:
    """A student, a teacher of another width and vocabulary padding, labels and weights of different
    size."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.hidden = torch.randn(B, L, D).to(dtype)
        self.head = torch.randn(V, D).to(dtype)
        self.teacher = TeacherHead(torch.randn(B, L, E).to(dtype), torch.randn(W, E).to(dtype))
        self.labels = torch.randint(REAL, (B, L)).masked_fill(torch.rand(B, L) < 0.3, IGNORE)
        self.mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 1, 0]]).bool()

    def run(self, loss, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Return value and gradients, by hidden states and head, of ``loss(hidden, head, teacher)``."""
        dtype = dtype or self.hidden.dtype
        hidden = self.hidden.detach().to(dtype).requires_grad_()
        head = self.head.detach().to(dtype).requires_grad_()
        teacher = TeacherHead(self.teacher.hidden_BLE.to(dtype), self.teacher.head_WE.to(dtype))
        value = loss(hidden, head, teacher)
        value.backward()
        assert hidden.grad is not None
        assert head.grad is not None
        return [value.detach(), hidden.grad, head.grad]

    def ours(self, teacher: TeacherHead | TeacherTopK | None = None, **options) -> list[Tensor]:
        """Return value and gradients of the chunked loss."""
        options = {"weight_BL": self.mask, "labels_BL": self.labels, "vocab_size": REAL, **options}

        def loss(hidden: Tensor, head: Tensor, own: TeacherHead) -> Tensor:
            return distillation_loss(hidden, head, teacher or own, **options)

        return self.run(loss)

    def expected(self, **options) -> list[Tensor]:
        """Return the reference on whole logits, in fp64."""

        def loss(hidden: Tensor, head: Tensor, teacher: TeacherHead) -> Tensor:
            return losses.distillation_loss(
                hidden @ head.mT,
                teacher.hidden_BLE @ teacher.head_WE.mT,
                self.mask,
                labels_BL=self.labels,
                vocab_size=REAL,
                **options,
            )

        return self.run(loss, torch.float64)


def close(actual: list[Tensor], expected: list[Tensor], tolerance: float) -> float:
    """Return the largest error, after asserting that it is small."""
    errors = []
    for ours, theirs in zip(actual, expected, strict=True):
        largest = theirs.abs().max().clamp_min(1e-30)
        difference = (ours.double() - theirs).abs().max()
        errors.append((difference / largest).item())
    assert all(error <= tolerance for error in errors), errors
    return max(errors)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("temperature", "hard_weight"), [(1.0, 0.0), (2.0, 0.25), (0.5, 1.0)])
def test_value_and_gradients_are_the_references(
    kind, temperature, hard_weight, dtype, impl, poison
):
    if (impl, dtype) not in TOLERANCE:
        pytest.skip("the kernels have no fp64")
    case = Case(dtype)
    options = {"kind": kind, "temperature": temperature, "hard_weight": hard_weight, "beta": 0.3}
    ours = case.ours(chunk_size=4, impl=impl, **options)
    assert ours[1].dtype == ours[2].dtype == dtype
    close(ours, case.expected(**options), TOLERANCE[impl, dtype])


@pytest.mark.parametrize("words", [REAL, 32])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_longer_than_a_block(kind, words, monkeypatch, interpreter):
    from hybrid_kernels import loss_triton

    monkeypatch.setattr(loss_triton, "BLOCK", 16)
    monkeypatch.setitem(globals(), "REAL", words)
    case = Case()
    options = {"kind": kind, "hard_weight": 0.5}
    ours = case.ours(impl="triton", **options)
    close(ours, case.expected(**options), TOLERANCE["triton", torch.float32])


@pytest.mark.parametrize("chunk_size", [1, 3, 10])
def test_chunks_change_nothing(chunk_size):
    case = Case(torch.float64)
    close(case.ours(chunk_size=chunk_size), case.ours(), 1e-12)


def test_weights_are_the_weights_of_a_mean(impl):
    case = Case()
    weight = torch.rand(B, L) + 0.1
    ours = case.ours(weight_BL=weight, hard_weight=0.5, impl=impl)

    def each_alone(hidden: Tensor, head: Tensor, teacher: TeacherHead) -> Tensor:
        soft = []
        hard = []
        for row, place in itertools.product(range(B), range(L)):
            token = (slice(row, row + 1), slice(place, place + 1))
            logits = hidden[token] @ head.mT
            target = teacher.hidden_BLE[token] @ teacher.head_WE.mT
            labels = {"labels_BL": case.labels[token], "hard_weight": 1.0}
            soft.append(losses.distillation_loss(logits, target, vocab_size=REAL))
            hard.append(losses.distillation_loss(logits, target, vocab_size=REAL, **labels))
        has_label = case.labels != IGNORE
        soft_mean = weighted_mean(torch.stack(soft), weight.flatten())
        hard_mean = weighted_mean(torch.stack(hard), (weight * has_label).flatten())
        return 0.5 * soft_mean + 0.5 * hard_mean

    close(ours, case.run(each_alone, torch.float64), 1e-5)


def weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    return (values * weights).sum() / weights.sum()


def test_parts_of_a_batch_add_up_to_its_loss(impl):
    case = Case()
    case.mask[1] = False  # a part without a token
    options = {"hard_weight": 0.5, "vocab_size": REAL, "impl": impl}
    totals = {
        "n_tokens": case.mask.sum(),
        "n_labels": (case.mask & (case.labels != IGNORE)).sum().double(),
    }

    def in_parts(hidden: Tensor, head: Tensor, teacher: TeacherHead) -> Tensor:
        loss = torch.zeros(())
        for row in (slice(0, 1), slice(1, 2)):
            of_row = TeacherHead(teacher.hidden_BLE[row], teacher.head_WE)
            tokens = {"weight_BL": case.mask[row], "labels_BL": case.labels[row]}
            part = distillation_loss(hidden[row], head, of_row, **tokens, **totals, **options)
            loss = loss + part
        return loss

    whole = [tensor.double() for tensor in case.ours(**options)]
    close(case.run(in_parts), whole, 1e-6)


def test_what_masked_tokens_hold_is_never_seen(impl):
    case = Case()
    clean = case.ours(kind="jsd", impl=impl)
    case.hidden[~case.mask] = float("nan")
    case.teacher.hidden_BLE[~case.mask] = float("inf")
    dirty = case.ours(kind="jsd", impl=impl)
    for one, other in zip(clean, dirty):
        assert torch.equal(one, other)
    assert not dirty[1][~case.mask].any()


def test_no_token_at_all_costs_nothing():
    case = Case()
    value, *gradients = case.ours(weight_BL=torch.zeros(B, L))
    assert value == 0
    assert not any(gradient.any() for gradient in gradients)


def stored(case: Case, k: int, temperature: float) -> TeacherTopK:
    logits = (case.teacher.hidden_BLE.double() @ case.teacher.head_WE.double().mT)[..., :REAL]
    log_probs, ids = (logits / temperature).log_softmax(-1).topk(k, dim=-1)
    return TeacherTopK(ids, log_probs)


def coarse_loss(
    case: Case, top: TeacherTopK, kind: str, temperature: float, hard_weight: float
) -> list[Tensor]:
    """Through autograd: probabilities of K tokens and of all others together, then the reference's
    divergences."""

    def loss(hidden: Tensor, head: Tensor, _: TeacherHead) -> Tensor:
        logits = (hidden @ head.mT)[..., :REAL]
        q = (logits / temperature).softmax(-1)
        q_top = q.gather(-1, top.ids_BLK)
        is_other = torch.ones_like(q).scatter(-1, top.ids_BLK, 0.0)
        q_others = (q * is_other).sum(-1, keepdim=True)
        log_q = torch.cat([q_top, q_others], -1).log()

        p_top = top.log_probs_BLK.exp()
        p_others = 1 - p_top.sum(-1, keepdim=True)
        log_p = torch.cat([p_top, p_others], -1).log()

        options = {"beta": 0.3} if kind == "jsd" else {}
        divergence_BL = getattr(losses, kind)(log_q, log_p, **options)
        soft = temperature**2 * divergence_BL[case.mask].mean()
        labels = case.labels.where(case.mask, IGNORE)
        hard = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
        return (1 - hard_weight) * soft + hard_weight * hard

    return case.run(loss, torch.float64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("temperature", "hard_weight"), [(1.0, 0.0), (2.0, 0.5)])
def test_a_teacher_of_top_k_and_a_tail(kind, temperature, hard_weight, dtype, impl, poison):
    if (impl, dtype) not in TOLERANCE:
        pytest.skip("the kernels have no fp64")
    case = Case(dtype)
    top = stored(case, 5, temperature)
    options = {"kind": kind, "beta": 0.3, "temperature": temperature, "hard_weight": hard_weight}
    ours = case.ours(top, chunk_size=4, impl=impl, **options)
    expected = coarse_loss(case, top, kind, temperature, hard_weight)
    close(ours, expected, TOLERANCE[impl, dtype])


@pytest.mark.parametrize("kind", KINDS)
def test_the_top_of_everything_is_the_whole_teacher(kind, impl):
    case = Case()
    options = {"kind": kind, "hard_weight": 0.5}
    ours = case.ours(stored(case, REAL, 1.0), impl=impl, **options)
    close(ours, case.expected(**options), TOLERANCE[impl, torch.float32])


def test_the_backward_scales_and_frozen_parts_get_nothing():
    case = Case(torch.float64)
    hidden = case.hidden.requires_grad_()
    head = case.head.requires_grad_()
    loss = distillation_loss(hidden, head, case.teacher)
    once = torch.autograd.grad(loss, (hidden, head), retain_graph=True)
    thrice = torch.autograd.grad(3 * loss, (hidden, head), retain_graph=True)
    for one, three in zip(once, thrice):
        assert torch.allclose(3 * one, three)

    with_frozen_head = distillation_loss(hidden, head.detach(), case.teacher)
    (of_hidden,) = torch.autograd.grad(with_frozen_head, hidden)
    assert torch.equal(of_hidden, once[0])
    frozen = distillation_loss(hidden.detach(), head.detach(), case.teacher)
    assert not frozen.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_backward_overwrites_what_nobody_needs(dtype):
    case = Case(dtype)
    hidden = case.hidden.requires_grad_()
    head = case.head.requires_grad_()
    loss = distillation_loss(hidden, head, case.teacher)
    backward: Any = loss.grad_fn
    address_of_hidden, address_of_head = [t.data_ptr() for t in backward.saved_tensors]
    loss.backward()
    assert hidden.grad is not None
    assert head.grad is not None
    assert hidden.grad.data_ptr() == address_of_hidden
    # In bf16 it is a copy: the saved one is a sum in fp32.
    is_in_place = head.grad.data_ptr() == address_of_head
    assert is_in_place == (dtype == torch.float32)
    assert head.grad.dtype == dtype


@pytest.mark.parametrize("version", ["2.10", "2.9", "neither"])
def test_every_torch_adds_bf16_products_to_an_fp32_sum(version, monkeypatch):
    """Stand-ins for torch's CUDA build of that version, on a CPU; all of them multiply bf16
    numbers."""
    addmm = torch.addmm
    mm = torch.mm
    multiplied = []

    def wide_mm(a: Tensor, b: Tensor, *, out_dtype: torch.dtype) -> Tensor:
        multiplied.append(a.dtype)
        return mm(a.to(out_dtype), b.to(out_dtype))

    def wide_addmm(
        total: Tensor, a: Tensor, b: Tensor, *, out_dtype: torch.dtype, out: Tensor
    ) -> Tensor:
        multiplied.append(a.dtype)
        return addmm(total, a.to(out_dtype), b.to(out_dtype), out=out)

    def absent(*args: Any, **kwargs: Any) -> Tensor:
        raise TypeError("no out_dtype")

    has_none = version == "neither"
    monkeypatch.setattr(torch, "addmm", wide_addmm if version == "2.10" else absent)
    monkeypatch.setattr(torch, "mm", absent if has_none else wide_mm)
    add = narrow_adder.__wrapped__(torch.bfloat16, torch.device("cpu"))
    total = torch.randn(5, 6)
    a = torch.randn(5, 7).bfloat16()
    b = torch.randn(7, 6).bfloat16()
    expected = total.double() + a.double() @ b.double()

    add(total, a, b)
    # Without either, a product is rounded to bf16 before it is added.
    close([total], [expected], 1e-2 if has_none else 1e-6)
    assert set(multiplied) == (set() if has_none else {torch.bfloat16})


@pytest.mark.parametrize("kind", ["forward_kl", "jsd"])
def test_torch_compiles_it_in_one_graph_to_the_same_bits(kind, impl, monkeypatch):
    case = Case()
    options = {"kind": kind, "hard_weight": 0.25, "chunk_size": 4, "impl": impl}
    # The whole head, and its top 5.
    teachers = (None, stored(case, 5, 1.0))
    eager = [case.ours(teacher, **options) for teacher in teachers]
    compiled = torch.compile(distillation_loss, fullgraph=True, backend="aot_eager")
    monkeypatch.setitem(globals(), "distillation_loss", compiled)
    for teacher, expected in zip(teachers, eager):
        for one, other in zip(case.ours(teacher, **options), expected):
            assert torch.equal(one, other)


@pytest.mark.parametrize("frozen", [False, True])
def test_the_operator_keeps_what_torch_asks_of_it(frozen, monkeypatch):
    """Schema, fake kernel and autograd. The traced program is tested above: this one asks for
    second derivatives."""
    calls = []
    op = loss_and_gradients

    def note_call(*arguments: Any) -> Any:
        calls.append(arguments)
        return op(*arguments)

    monkeypatch.setattr("hybrid_kernels.loss.loss_and_gradients", note_call)
    case = Case()
    hidden = case.hidden.requires_grad_()
    head = case.head.requires_grad_(not frozen)
    distillation_loss(hidden, head, case.teacher, case.mask, chunk_size=4, vocab_size=REAL)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(op, calls[0], test_utils=checks)


def test_a_second_derivative_is_refused_in_words():
    case = Case()
    hidden = case.hidden.requires_grad_()
    loss = distillation_loss(hidden, case.head, case.teacher)
    (first,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match=naming("create_graph")):
        first.sum().backward()


def test_autocast_multiplies_in_bf16_and_sums_the_head_in_fp32():
    case = Case()
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        ours = case.ours()
    assert [t.dtype for t in ours] == [torch.float32] * 3
    close(ours, case.expected(), TOLERANCE["torch", torch.bfloat16])


def test_the_torch_version_needs_no_triton():
    # In a process of its own: a second import here would register torch's operators anew, for all
    # later tests.
    without_triton = "import sys; sys.modules['triton'] = None"
    code = f"{without_triton}; import hybrid_kernels.loss, hybrid_kernels.loss_torch"
    variables = {**os.environ, "PYTHONPATH": str(KERNELS)}
    subprocess.run([sys.executable, "-c", code], check=True, env=variables)


NEGATIVE = TeacherTopK(torch.full((2, 5, 1), -1), torch.zeros(2, 5, 1))


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"kind": "kl"}, ("kind", "'kl'")),
        ({"temperature": 0.0}, ("temperature", 0.0)),
        ({"hard_weight": 0.5}, ("hard_weight", 0.5, "labels_BL")),
        ({"chunk_size": 0}, ("chunk_size", 0)),
        ({"vocab_size": 38}, ("vocab_size", 38)),
        ({"student_hidden_BLD": torch.zeros(2, 0, 8)}, ("student_hidden_BLD", "(2, 0, 8)")),
        (
            {"student_hidden_BLD": torch.zeros(2, 5, 8).half()},
            ("student_hidden_BLD", "torch.float16"),
        ),
        ({"student_head_VD": torch.zeros(37, 9)}, ("student_head_VD", "(37, 9)")),
        ({"weight_BL": -torch.ones(2, 5)}, ("weight_BL",)),
        ({"hard_weight": 1.0, "labels_BL": torch.full((2, 5), 37)}, ("labels_BL", 37)),
        (
            {"teacher": TeacherHead(torch.zeros(2, 4, 6), torch.zeros(41, 6))},
            ("hidden_BLE", "(2, 4, 6)"),
        ),
        ({"teacher": NEGATIVE}, ("ids_BLK", -1)),
        (
            {"teacher": TeacherTopK(torch.zeros(2, 5, 3).long(), torch.zeros(2, 5, 1))},
            ("log_probs_BLK", "(2, 5, 1)"),
        ),
    ],
)
def test_bad_input_is_named(change, facts):
    case = Case()
    good = {
        "student_hidden_BLD": case.hidden,
        "student_head_VD": case.head,
        "teacher": case.teacher,
    }
    with pytest.raises(ValueError, match=naming(*facts)):
        distillation_loss(**{**good, **change})
