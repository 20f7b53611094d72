"""Distillation loss from hidden states and output heads: the logits of all tokens never exist at the same time.

    loss = (1 - h) T^2 mean_w divergence(teacher / T, student / T) + h mean_w cross-entropy(labels)

The tokens go through in chunks: logits of a chunk, loss and gradient of those logits in place,
gradients of hidden states and head from them. The gradient is therefore ready when the forward
ends, and the backward only scales it. Nothing waits for the device. What is done to a chunk's
logits is written in `loss_torch`, and once more as Triton kernels in `loss_triton`, the only one of
the three that imports triton; `loss_choice` chooses. All of it is one operator of torch: a graph of
torch.compile goes through it whole.

Shapes: B batch, L length, D student width, E teacher width, V student vocabulary, W teacher
vocabulary, K stored tokens of the teacher, M tokens of a chunk or of all chunks.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from . import loss_choice
from .loss_checks import (
    check_numbers,
    check_options,
    check_tensors,
    product_dtype,
    real_vocabulary,
)
from .loss_chunks import Problem, default_chunk, loss_in_chunks, wide
from .loss_types import IGNORE, Options, TeacherHead, TeacherTopK, Tokens


def distillation_loss(
    student_hidden_BLD: Tensor,
    student_head_VD: Tensor,
    teacher: TeacherHead | TeacherTopK,
    weight_BL: Tensor | None = None,
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
    impl: str = "auto",
) -> Tensor:
    """Compute ``(1 - hard_weight) * T^2 * divergence + hard_weight * cross-entropy``, a scalar in nats per token.

    ``kind`` is "forward_kl", KL(teacher || student), "reverse_kl", the other way round, or "jsd",
    ``beta * KL(teacher || m) + (1 - beta) * KL(student || m)`` with ``m = beta * teacher + (1 -
    beta) * student``. Both parts are means weighted by ``weight_BL`` (a mask, or numbers from 0),
    the hard one over the tokens that have a label, at temperature 1. ``n_tokens`` and ``n_labels``,
    scalars, are the sums of weights of a larger batch of which this is a part; the losses of its
    parts then add up to its loss. ``vocab_size`` is the number of real tokens; logits beyond it are
    padding. By default it is the smaller of the two vocabularies. Any dimensions may stand in place
    of B and L.

    Gradients go to student_hidden and student_head, the latter summed in fp32. Under autocast both
    are multiplied in its dtype; float16 is multiplied in float32. ``chunk_size`` is in tokens.
    ``impl`` "auto" is "triton" for bfloat16 and float32 on a CUDA device, else "torch".

    Raises ValueError for shapes, dtypes or devices that do not fit, no tokens, and options out of
    range; RuntimeError for "triton" where it is not installed.
    """
    options = Options(kind, temperature, beta, hard_weight)
    check_options(options, labels_BL, chunk_size, impl)
    check_tensors(student_hidden_BLD, student_head_VD, teacher, weight_BL, labels_BL)
    n_real = real_vocabulary(student_head_VD, teacher, vocab_size)
    student_names = ("student_hidden_BLD", "student_head_VD")
    dtype = product_dtype(student_hidden_BLD, student_head_VD, *student_names)
    from_head = isinstance(teacher, TeacherHead)
    teacher_dtype = dtype
    if from_head:
        teacher_dtype = product_dtype(*teacher, "the teacher's hidden_BLE", "head_WE")
    totals = (n_tokens, n_labels)
    tokens = _tokens(student_hidden_BLD, weight_BL, labels_BL, totals, options, wide(dtype))
    has_grad = torch.is_grad_enabled()
    loss, _, _ = loss_and_gradients(
        student_hidden_BLD.flatten(0, -2),
        student_head_VD,
        *_flat(teacher),
        from_head,
        *tokens,
        *options,
        n_real,
        teacher_dtype,
        chunk_size,
        impl,
        dtype,
        has_grad and student_hidden_BLD.requires_grad,
        has_grad and student_head_VD.requires_grad,
    )
    return loss


@custom_op(
    "hybrid_kernels::distillation_loss",
    mutates_args=(),
    schema="(Tensor hidden, Tensor head, Tensor teacher_a, Tensor teacher_b, bool from_head, "
    "Tensor soft, Tensor hard, "
    "Tensor labels, Tensor kept, str kind, float temperature, float beta, float hard_weight, "
    "SymInt n_real, "
    "ScalarType teacher_dtype, SymInt? chunk_size, str impl, ScalarType dtype, bool for_hidden, "
    "bool for_head) "
    "-> (Tensor, Tensor, Tensor)",
)
def loss_and_gradients(
    hidden,
    head,
    teacher_a,
    teacher_b,
    from_head,
    soft,
    hard,
    labels,
    kept,
    kind,
    temperature,
    beta,
    hard_weight,
    n_real,
    teacher_dtype,
    chunk_size,
    impl,
    dtype,
    for_hidden,
    for_head,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss and its gradients by hidden states and head, empty where they are not wanted.

    ``teacher_a`` and ``teacher_b`` are the tensors of a `TeacherHead` or, unless ``from_head``, of a
    `TeacherTopK`.
    """
    options = Options(kind, temperature, beta, hard_weight)
    impl = loss_choice.choose_implementation(impl, hidden.device, dtype, kind, from_head)
    if from_head:
        teacher = TeacherHead(teacher_a, teacher_b)
    else:
        teacher = TeacherTopK(teacher_a, teacher_b)
    if chunk_size is None:
        chunk_size = default_chunk(n_real, impl, hidden.device)
    problem = Problem(
        teacher=teacher,
        tokens=Tokens(soft, hard, labels, kept),
        options=options,
        n_real=n_real,
        dtype=dtype,
        teacher_dtype=teacher_dtype,
        chunk_size=chunk_size,
        in_logits=importlib.import_module(f".loss_{impl}", __package__),
    )
    check_numbers(teacher, problem.tokens, n_real)
    # Dtypes are chosen already; autocast would cast operands a second time.
    with torch.autocast(hidden.device.type, enabled=False):
        loss, d_hidden, d_head = loss_in_chunks(hidden, head, problem, for_hidden, for_head)
    if d_hidden is None:
        d_hidden = hidden.new_empty(0)
    if d_head is None:
        d_head = head.new_empty(0)
    return loss, d_hidden, d_head


@loss_and_gradients.register_fake
def _(hidden, head, *others) -> tuple[Tensor, Tensor, Tensor]:
    # What decides the results comes last, here and in `_save`.
    *_, dtype, for_hidden, for_head = others
    d_hidden = hidden.new_empty(0)
    if for_hidden:
        d_hidden = torch.empty_like(hidden)
    d_head = head.new_empty(0)
    if for_head:
        d_head = head.new_empty(head.shape, dtype=wide(dtype))
    return hidden.new_empty((), dtype=wide(dtype)), d_hidden, d_head


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, head, *_, for_hidden, for_head = inputs
    _, d_hidden, d_head = output
    ctx.n_inputs = len(inputs)
    ctx.head_dtype = head.dtype
    ctx.for_hidden = for_hidden
    ctx.for_head = for_head
    ctx.save_for_backward(d_hidden, d_head)
    # Else torch fills gradients of the outputs that are gradients with zeros, as large as the head.
    ctx.set_materialize_grads(False)


def _scale_gradients(
    ctx: Any, d_loss: Tensor | None, *of_gradients: Tensor | None
) -> tuple[Tensor | None, ...]:
    if d_loss is None or any(gradient is not None for gradient in of_gradients):
        raise RuntimeError(
            "the fused distillation loss has no second derivative (create_graph=True): compute it "
            "from logits to differentiate twice."
        )
    d_hidden, d_head = ctx.saved_tensors
    by_hidden = None
    if ctx.for_hidden:
        by_hidden = _scaled(d_hidden, d_loss, d_hidden.dtype)
    by_head = None
    if ctx.for_head:
        by_head = _scaled(d_head, d_loss, ctx.head_dtype)
    no_others = [None] * (ctx.n_inputs - 2)
    return by_hidden, by_head, *no_others


loss_and_gradients.register_autograd(_scale_gradients, setup_context=_save)


def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return gradient * factor without a copy in another dtype, and in place unless the graph is kept for more."""
    # In place would corrupt the graph of a second derivative, which must be refused, not wrong.
    if torch.is_grad_enabled():  # create_graph=True
        return (gradient * factor).to(dtype)
    gradient = gradient.detach()
    engine: Any = torch._C
    # With retain_graph=True the saved gradient is read again, so that it must not be overwritten.
    # PyTorch tells by a private function alone.
    is_read_again = engine._autograd._get_current_graph_task_keep_graph()
    if gradient.dtype == dtype and not is_read_again:
        return torch.mul(gradient, factor, out=gradient)
    return torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=dtype))


def _tokens(
    hidden_BLD: Tensor,
    weight_BL: Tensor | None,
    labels_BL: Tensor | None,
    totals: tuple[Tensor | None, Tensor | None],
    options: Options,
    dtype: torch.dtype,
) -> Tokens:
    """Return the factors of each token's divergence and cross-entropy, in ``dtype``, and its label."""
    shape = hidden_BLD.shape[:-1]
    device = hidden_BLD.device
    if weight_BL is None:
        weight_BL = torch.ones(shape, device=device)
    if labels_BL is None:
        labels_BL = torch.full(shape, IGNORE, device=device)
    weight_M = weight_BL.detach().flatten().to(dtype)
    labels_M = labels_BL.flatten()
    kept_M = weight_M != 0
    is_labelled_M = kept_M & (labels_M != IGNORE)
    hard_M = weight_M.where(is_labelled_M, 0.0)
    n_tokens, n_labels = totals
    soft_scale = (1.0 - options.hard_weight) * options.temperature**2
    return Tokens(
        soft_M=weight_M * (soft_scale / _total(weight_M, n_tokens)),
        hard_M=hard_M * (options.hard_weight / _total(hard_M, n_labels)),
        labels_M=labels_M.where(is_labelled_M, 0),
        kept_M=kept_M,
    )


def _total(weight_M: Tensor, total: Tensor | None) -> Tensor:
    """Return the sum of the weights, or the ``total`` of a larger batch; 1 for 0, where all weights are."""
    if total is None:
        total = weight_M.sum()
    else:
        total = total.to(weight_M)
    # Without a branch: a look at the sum would wait for the device.
    return total.where(total != 0, 1.0)


def _flat(teacher: TeacherHead | TeacherTopK) -> TeacherHead | TeacherTopK:
    """Return the teacher without gradients, its tokens in one dimension."""
    if isinstance(teacher, TeacherHead):
        return TeacherHead(teacher.hidden_BLE.detach().flatten(0, -2), teacher.head_WE.detach())
    return TeacherTopK(
        teacher.ids_BLK.flatten(0, -2), teacher.log_probs_BLK.detach().flatten(0, -2)
    )
