"""Distillation loss from hidden states and output heads: the logits of all tokens never exist at
the same time.

    loss = (1 - h) T^2 mean_w divergence(teacher / T, student / T) + h mean_w cross-entropy(labels)

The tokens go through in chunks: logits of a chunk, loss and gradient of those logits in place,
gradients of hidden states and head from them. The gradient is therefore ready when the forward
ends, and the backward only scales it. Nothing waits for the device. What is done to a chunk's
logits is written in `loss_torch`, and once more as Triton kernels in `loss_triton`, the only one of
the three that imports triton. All of it is one operator of torch: a graph of torch.compile goes
through it whole.

Shapes: B batch, L length, D student width, E teacher width, V student vocabulary, W teacher
vocabulary, K stored tokens of the teacher, M tokens of a chunk or of all chunks."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import custom_op

from . import unusable
from .loss_types import IGNORE, KINDS, Options, TeacherHead, TeacherTopK, Tokens

log = logging.getLogger(__name__)

IMPLEMENTATIONS = ("auto", "triton", "torch")
KERNEL_DTYPES = (torch.bfloat16, torch.float32)
CHUNK_LOGITS = {"triton": 2**29, "torch": 2**25}  # 4,096 tokens of 128k words on a GPU
LARGE_DEVICE = 60 * 10**9  # bytes; chunks are half as long on a smaller GPU
# Elements a row of logits starts at a multiple of: for others triton does not compile wide loads
ALIGNED = 16


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
    """``(1 - hard_weight) * T^2 * divergence + hard_weight * cross-entropy``, a scalar in nats per
    token.

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
    range; RuntimeError for "triton" where it is not installed."""
    options = Options(kind, temperature, beta, hard_weight)
    _check_options(options, labels_BL, chunk_size, impl)
    _check_tensors(student_hidden_BLD, student_head_VD, teacher, weight_BL, labels_BL)
    n_real = _real_vocabulary(student_head_VD, teacher, vocab_size)
    dtype = _product_dtype(
        student_hidden_BLD, student_head_VD, "student_hidden_BLD", "student_head_VD"
    )
    from_head = isinstance(teacher, TeacherHead)
    teacher_dtype = (
        _product_dtype(*teacher, "the teacher's hidden_BLE", "head_WE") if from_head else dtype
    )
    tokens = _tokens(
        student_hidden_BLD, weight_BL, labels_BL, (n_tokens, n_labels), options, _wide(dtype)
    )
    student = student_hidden_BLD.flatten(0, -2), student_head_VD
    wanted = (torch.is_grad_enabled() and tensor.requires_grad for tensor in student)
    return _loss_op(
        *student,
        *_flat(teacher),
        from_head,
        *tokens,
        *options,
        n_real,
        dtype,
        teacher_dtype,
        chunk_size,
        impl,
        *wanted,
    )[0]


class _Problem(NamedTuple):
    """All that the loss depends on besides the student; tensors with their tokens in one
    dimension."""

    teacher: TeacherHead | TeacherTopK
    tokens: Tokens
    options: Options
    n_real: int
    dtype: torch.dtype
    """Dtype of the student's products."""
    teacher_dtype: torch.dtype
    chunk_size: int
    in_logits: ModuleType
    """`loss_torch` or `loss_triton`."""


@custom_op(
    "hybrid_kernels::distillation_loss",
    mutates_args=(),
    schema="(Tensor hidden, Tensor head, Tensor known, Tensor of_known, bool from_head, "
    "Tensor soft, Tensor hard, "
    "Tensor labels, Tensor kept, str kind, float temperature, float beta, float hard_weight, "
    "SymInt n_real, "
    "ScalarType dtype, ScalarType teacher_dtype, SymInt? chunk_size, str impl, bool for_hidden, "
    "bool for_head) "
    "-> (Tensor, Tensor, Tensor)",
)
def _loss_op(
    hidden,
    head,
    known,
    of_known,
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
    dtype,
    teacher_dtype,
    chunk_size,
    impl,
    for_hidden,
    for_head,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss and its gradients by hidden states and head, empty where they are not
    wanted."""
    options = Options(kind, temperature, beta, hard_weight)
    impl = _pick(impl, hidden.device, dtype, options, from_head)
    problem = _Problem(
        teacher=TeacherHead(known, of_known) if from_head else TeacherTopK(known, of_known),
        tokens=Tokens(soft, hard, labels, kept),
        options=options,
        n_real=n_real,
        dtype=dtype,
        teacher_dtype=teacher_dtype,
        chunk_size=chunk_size or _default_chunk(n_real, impl, hidden.device),
        in_logits=importlib.import_module(f".loss_{impl}", __package__),
    )
    _check_numbers(problem)
    # Dtypes are chosen already; autocast would cast operands a second time.
    with torch.autocast(hidden.device.type, enabled=False):
        loss, d_hidden, d_head = _chunked(hidden, head, problem, (for_hidden, for_head))
    return (
        loss,
        hidden.new_empty(0) if d_hidden is None else d_hidden,
        head.new_empty(0) if d_head is None else d_head,
    )


@_loss_op.register_fake
def _(hidden, head, *others) -> tuple[Tensor, Tensor, Tensor]:
    *_, dtype, _, _, _, for_hidden, for_head = others
    d_hidden = torch.empty_like(hidden) if for_hidden else hidden.new_empty(0)
    d_head = head.new_empty(head.shape, dtype=_wide(dtype)) if for_head else head.new_empty(0)
    return hidden.new_empty((), dtype=_wide(dtype)), d_hidden, d_head


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.head_dtype = inputs[1].dtype
    ctx.wanted = inputs[-2:]
    ctx.save_for_backward(*output[1:])
    # Else torch fills gradients of the outputs that are gradients with zeros, as large as the head.
    ctx.set_materialize_grads(False)


def _scale_gradients(
    ctx: Any, d_loss: Tensor | None, *of_gradients: Tensor | None
) -> tuple[Tensor | None, ...]:
    if d_loss is None or any(gradient is not None for gradient in of_gradients):
        raise RuntimeError(
            "the fused distillation loss has no second derivative (create_graph=True): compute it "
            "from logits to "
            "differentiate twice."
        )
    d_hidden, d_head = ctx.saved_tensors
    found = [
        _scaled(gradient, d_loss, dtype) if wanted else None
        for gradient, dtype, wanted in zip(
            (d_hidden, d_head), (d_hidden.dtype, ctx.head_dtype), ctx.wanted
        )
    ]
    return (*found, *[None] * 18)


_loss_op.register_autograd(_scale_gradients, setup_context=_save)


def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return gradient * factor without a copy in another dtype, and in place unless the graph is
    kept for more."""
    # In place would corrupt the graph of a second derivative, which must be refused, not wrong.
    if torch.is_grad_enabled():  # create_graph=True
        return (gradient * factor).to(dtype)
    gradient = gradient.detach()
    engine: Any = torch._C
    # With retain_graph=True the saved gradient is read again, so that it must not be overwritten.
    # PyTorch tells by a private function alone.
    in_place = gradient.dtype == dtype and not engine._autograd._get_current_graph_task_keep_graph()
    return torch.mul(
        gradient, factor, out=gradient if in_place else torch.empty_like(gradient, dtype=dtype)
    )


def _chunked(
    hidden_MD: Tensor, head_VD: Tensor, problem: _Problem, wanted: tuple[bool, ...]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The loss, its gradient by the hidden states, in their dtype, and by the head, in float32 at
    least."""
    compare = _comparison(problem)
    # Once for all chunks; padding of the vocabulary never enters a softmax.
    head = head_VD[: problem.n_real].to(problem.dtype)
    d_hidden = torch.empty_like(hidden_MD) if wanted[0] else None
    # fp32 for the sum over chunks: in bf16 the later chunks' small terms would be rounded away.
    d_head = head_VD.new_zeros(head_VD.shape, dtype=_wide(problem.dtype)) if wanted[1] else None

    losses = []
    for start in range(0, len(hidden_MD), problem.chunk_size):
        rows = slice(start, start + problem.chunk_size)
        tokens = Tokens(*(t[rows] for t in problem.tokens))
        # Masked before the product: 0 times NaN would be NaN in the head's gradient.
        student_MD = _kept(hidden_MD[rows], tokens).to(problem.dtype)
        loss_M, gradient_MV = compare(_logits(student_MD, head), rows, tokens)
        losses.append(loss_M)
        # In bf16, so that both products below run on tensor cores.
        gradient_MV = gradient_MV.to(problem.dtype)
        if d_hidden is not None:
            d_hidden[rows] = gradient_MV @ head
        if d_head is not None:
            _add_product(d_head[: problem.n_real], gradient_MV.mT, student_MD)
    return torch.cat(losses).sum(), d_hidden, d_head


def _comparison(problem: _Problem) -> Callable[[Tensor, slice, Tokens], tuple[Tensor, Tensor]]:
    """From a chunk's logits, its place among the tokens, and its tokens: loss_M and gradient_MV."""
    teacher = problem.teacher
    options = problem.options
    if isinstance(teacher, TeacherTopK):
        ids_MK, log_probs_MK = teacher

        def with_top_k(logits_MV: Tensor, rows: slice, tokens: Tokens) -> tuple[Tensor, Tensor]:
            ids, log_probs = (_kept(t[rows], tokens) for t in (ids_MK, log_probs_MK))
            return problem.in_logits.of_top_k(
                logits_MV, ids, log_probs.to(_wide(problem.dtype)), tokens, options
            )

        return with_top_k

    hidden_ME, head_WE = teacher
    dtype = problem.teacher_dtype
    head = head_WE[: problem.n_real].to(dtype)

    def with_head(logits_MV: Tensor, rows: slice, tokens: Tokens) -> tuple[Tensor, Tensor]:
        return problem.in_logits.of_head(
            logits_MV, _logits(_kept(hidden_ME[rows], tokens).to(dtype), head), tokens, options
        )

    return with_head


def _kept(x: Tensor, tokens: Tokens) -> Tensor:
    return x.masked_fill(~tokens.kept_M.unsqueeze(-1), 0)


def _logits(hidden_MD: Tensor, head_VD: Tensor) -> Tensor:
    """On a GPU, every row starts at a multiple of 16 bytes, whatever the vocabulary."""
    if hidden_MD.device.type == "cpu":
        return hidden_MD @ head_VD.mT
    n_real = len(head_VD)
    # Triton specializes on strides that are multiples of 16; others load element by element.
    padded = hidden_MD.new_empty(len(hidden_MD), -(-n_real // ALIGNED) * ALIGNED)
    return torch.mm(hidden_MD, head_VD.mT, out=padded[:, :n_real])


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, where total is in float32 at least; a CPU rounds a bf16 product before it is
    added."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.device.type == "cpu":
        total += a @ b
    else:
        _narrow_adder(a.dtype, a.device)(total, a, b)


@functools.cache
def _narrow_adder(
    dtype: torch.dtype, device: torch.device
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return this torch's best way to add a bf16 product to an fp32 sum, always on bf16 tensor
    cores."""

    def in_one(total: Tensor, a: Tensor, b: Tensor) -> Tensor:  # from torch 2.10 on
        return torch.addmm(total, a, b, out_dtype=total.dtype, out=total)

    def wide_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:  # from torch 2.8 on
        return total.add_(torch.mm(a, b, out_dtype=total.dtype))

    a, total = (
        torch.zeros(16, 16, dtype=dtype_, device=device) for dtype_ in (dtype, torch.float32)
    )
    for way in (in_one, wide_product):
        try:
            way(total, a, a)
        except (RuntimeError, TypeError):
            continue
        return way
    return lambda total, a, b: total.add_(a @ b)


def _tokens(
    hidden_BLD: Tensor,
    weight_BL: Tensor | None,
    labels_BL: Tensor | None,
    totals: tuple[Tensor | None, Tensor | None],
    options: Options,
    dtype: torch.dtype,
) -> Tokens:
    shape = hidden_BLD.shape[:-1]
    device = hidden_BLD.device
    weight_BL = torch.ones(shape, device=device) if weight_BL is None else weight_BL
    labels_BL = torch.full(shape, IGNORE, device=device) if labels_BL is None else labels_BL
    weight_M = weight_BL.detach().flatten().to(dtype)
    labels_M = labels_BL.flatten()
    kept_M = weight_M != 0
    labelled_M = kept_M & (labels_M != IGNORE)
    hard_M = weight_M.where(labelled_M, 0.0)
    soft_scale = (1.0 - options.hard_weight) * options.temperature**2
    return Tokens(
        soft_M=weight_M * (soft_scale / _total(weight_M, totals[0])),
        hard_M=hard_M * (options.hard_weight / _total(hard_M, totals[1])),
        labels_M=labels_M.where(labelled_M, 0),
        kept_M=kept_M,
    )


def _total(weight_M: Tensor, given: Tensor | None) -> Tensor:
    """Sum of the weights, or the given one; 1 for 0, where all weights are."""
    total = weight_M.sum() if given is None else given.to(weight_M)
    # Without a branch: a look at the sum would wait for the device.
    return total.where(total != 0, 1.0)


def _flat(teacher: TeacherHead | TeacherTopK) -> TeacherHead | TeacherTopK:
    if isinstance(teacher, TeacherHead):
        return TeacherHead(teacher.hidden_BLE.detach().flatten(0, -2), teacher.head_WE.detach())
    return TeacherTopK(
        teacher.ids_BLK.flatten(0, -2), teacher.log_probs_BLK.detach().flatten(0, -2)
    )


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _product_dtype(hidden: Tensor, head: Tensor, hidden_name: str, head_name: str) -> torch.dtype:
    """Return the dtype a linear layer multiplies in, never float16: its range is too small for
    logits' gradients."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and torch.float64 not in (hidden.dtype, head.dtype):
        dtype = torch.get_autocast_dtype(device)
    elif hidden.dtype != head.dtype:
        raise ValueError(
            f"{hidden_name} is {hidden.dtype} and {head_name} {head.dtype}; cast one, or use "
            "autocast."
        )
    else:
        dtype = hidden.dtype
    # fp16 ends at 65,504, and gradients of single logits begin below 6e-8.
    return torch.float32 if dtype == torch.float16 else dtype


def _default_chunk(n_real: int, impl: str, device: torch.device) -> int:
    """As many tokens as `CHUNK_LOGITS` and the device allow, in whole tiles of a matrix product."""
    size = CHUNK_LOGITS[impl] // n_real
    if impl == "triton" and device.type == "cuda":
        size //= 1 + (torch.cuda.get_device_properties(device).total_memory < LARGE_DEVICE)
    return size // 128 * 128 if size >= 128 else max(1, size)


def _pick(
    impl: str, device: torch.device, dtype: torch.dtype, options: Options, from_head: bool
) -> str:
    """The implementation that "auto" stands for; a named one if it can compute in this dtype."""
    has_kernels = dtype in KERNEL_DTYPES
    if impl == "triton" and not has_kernels:
        raise ValueError(
            f"impl is 'triton' for {dtype}; the kernels are for bfloat16 and float32: use "
            "impl='torch'."
        )
    if impl == "triton" and (reason := unusable()):
        raise RuntimeError(f"impl 'triton' cannot run: {reason}; or pass impl='torch'.")
    if impl == "auto":
        right = (
            device.type == "cuda"
            and has_kernels
            and _is_right(device, dtype, options.kind, from_head)
        )
        return "triton" if right else "torch"
    return impl


def implementation_of(
    impl: str, device: torch.device, dtype: torch.dtype, kind: str, from_head: bool
) -> str:
    """Describe what runs: "triton", or "torch" and, on a GPU, why."""
    if impl != "auto" or device.type != "cuda":
        return "torch" if impl == "auto" else impl
    reason = _reason_against(device, dtype, kind, from_head)
    return "triton" if reason is None else f"torch ({reason})"


@functools.cache
def _is_right(device: torch.device, dtype: torch.dtype, kind: str, from_head: bool) -> bool:
    """Return True if the kernels run here and give what torch gives; else log why not."""
    reason = _reason_against(device, dtype, kind, from_head)
    if reason is not None:
        log.warning("the distillation loss runs on torch, not on its kernel: %s", reason)
    return reason is None


@functools.cache
def _reason_against(
    device: torch.device, dtype: torch.dtype, kind: str, from_head: bool
) -> str | None:
    """Return in one line why the kernels must not run: they cannot, are known to fail, or failed
    when tried."""
    reason = unusable()
    if reason is None and dtype not in KERNEL_DTYPES:
        reason = f"the kernels are for bfloat16 and float32, not {dtype}"
    if reason is None:
        from .known_bad import known_bad

        reason = known_bad("distillation loss", device)
    if reason is None:
        from .selftest import check_kernel

        reason = check_kernel("distillation loss", device, dtype, kind=kind, from_head=from_head)
    return reason


def _real_vocabulary(
    head_VD: Tensor, teacher: TeacherHead | TeacherTopK, vocab_size: int | None
) -> int:
    widths = [len(head_VD)] + ([len(teacher.head_WE)] if isinstance(teacher, TeacherHead) else [])
    n_real = min(widths) if vocab_size is None else vocab_size
    if not 0 < n_real <= min(widths):
        raise ValueError(
            f"vocab_size is {n_real}; the heads have {' and '.join(map(str, widths))} rows, so it "
            "must be from 1 to "
            f"{min(widths)}."
        )
    if isinstance(teacher, TeacherTopK) and not 0 < teacher.ids_BLK.shape[-1] <= n_real:
        raise ValueError(
            f"the teacher has {teacher.ids_BLK.shape[-1]} ids a token; it must be from 1 to "
            f"vocab_size, {n_real}."
        )
    return n_real


def _check_numbers(problem: _Problem) -> None:
    """Check on a CPU only: a GPU would have to be waited for, and shows NaN or a device-side
    assertion."""
    tokens = problem.tokens
    if tokens.kept_M.device.type != "cpu":
        return
    named = {"labels_BL": tokens.labels_M}
    if isinstance(problem.teacher, TeacherTopK):
        named["the teacher's ids_BLK"] = problem.teacher.ids_BLK[tokens.kept_M]
    for name, ids in named.items():
        wrong = ids[(ids < 0) | (ids >= problem.n_real)]
        if len(wrong):
            raise ValueError(
                f"{name} has {wrong[0].item()}; it must be from 0 to vocab_size - 1, "
                f"{problem.n_real - 1}."
            )


def _check_options(
    options: Options, labels: Tensor | None, chunk_size: int | None, impl: str
) -> None:
    kind, temperature, beta, hard_weight = options
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; choose one of {', '.join(KINDS)}.")
    if kind == "jsd" and not 0.0 < beta < 1.0:
        raise ValueError(
            f"beta is {beta}; jsd needs 0 < beta < 1 (its ends are the kinds forward_kl and "
            "reverse_kl)."
        )
    if not temperature > 0:
        raise ValueError(
            f"temperature is {temperature}; it divides the logits and must be above 0."
        )
    if not 0.0 <= hard_weight <= 1.0:
        raise ValueError(f"hard_weight is {hard_weight}; a mixture weight lies between 0 and 1.")
    if hard_weight and labels is None:
        raise ValueError(
            f"hard_weight is {hard_weight} without labels_BL; pass the labels or use hard_weight=0."
        )
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}; it counts tokens: pass at least 1, or None.")
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl is {impl!r}; choose one of {', '.join(IMPLEMENTATIONS)}.")


def _check_tensors(
    hidden: Tensor,
    head: Tensor,
    teacher: TeacherHead | TeacherTopK,
    weight: Tensor | None,
    labels: Tensor | None,
) -> None:
    if hidden.dim() < 2 or hidden.numel() == 0:
        raise ValueError(
            f"student_hidden_BLD has shape {tuple(hidden.shape)}; it must be [B, L, D], none of "
            "them 0."
        )
    _check_head("student_head_VD", head, hidden.shape[-1])
    tokens = hidden.shape[:-1]
    if isinstance(teacher, TeacherHead):
        named = {"the teacher's hidden_BLE": teacher.hidden_BLE}
        _check_head("the teacher's head_WE", teacher.head_WE, teacher.hidden_BLE.shape[-1])
    else:
        named = {
            "the teacher's ids_BLK": teacher.ids_BLK,
            "the teacher's log_probs_BLK": teacher.log_probs_BLK,
        }
        if (
            teacher.ids_BLK.shape != teacher.log_probs_BLK.shape
            or teacher.ids_BLK.dtype != torch.int64
        ):
            raise ValueError(
                f"the teacher's ids_BLK are {teacher.ids_BLK.dtype} of shape "
                f"{tuple(teacher.ids_BLK.shape)}, its "
                f"log_probs_BLK of shape {tuple(teacher.log_probs_BLK.shape)}; pass one int64 id "
                "for each."
            )
    for name, tensor in named.items():
        if tensor.dim() != hidden.dim() or tensor.shape[:-1] != tokens:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; its tokens must be the student's, "
                f"{tuple(tokens)}."
            )
    for name, tensor in {"weight_BL": weight, "labels_BL": labels}.items():
        if tensor is not None and tensor.shape != tokens:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; it must have one entry a token: "
                f"{tuple(tokens)}."
            )
    # A data-dependent branch would break the graph of torch.compile.
    traced = torch.compiler.is_compiling()
    if not traced and weight is not None and weight.device.type == "cpu" and (weight < 0).any():
        raise ValueError("weight_BL has a negative entry; weights start at 0: clamp them.")
    for name, tensor in {
        "student_head_VD": head,
        **named,
        "weight_BL": weight,
        "labels_BL": labels,
    }.items():
        if tensor is not None and tensor.device != hidden.device:
            raise ValueError(
                f"{name} is on {tensor.device}, student_hidden_BLD on {hidden.device}; move it "
                "there."
            )


def _check_head(name: str, head: Tensor, width: int) -> None:
    if head.dim() != 2 or head.shape[1] != width:
        raise ValueError(
            f"{name} has shape {tuple(head.shape)}; it must be [vocabulary, {width}], as its "
            "hidden states."
        )
