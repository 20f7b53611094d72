"""Distillation loss chunk by chunk: logits, their loss and gradient in place, and the products of that gradient.

Shapes as in `loss`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from .loss_types import Options, TeacherHead, TeacherTopK, Tokens

CHUNK_LOGITS = {"triton": 2**29, "torch": 2**25}
"""Logits of a chunk: 4,096 tokens of 128k words on a GPU."""
LARGE_DEVICE = 60 * 10**9
"""Memory, in bytes, below which a GPU's chunks are half as long."""
ALIGNED = 16
"""Elements a row of logits starts at a multiple of: for others triton does not compile wide loads."""

Comparison = Callable[[Tensor, slice, Tokens], tuple[Tensor, Tensor]]
"""Computes loss_M and gradient_MV from a chunk's logits, its place among the tokens, and its tokens."""


class Problem(NamedTuple):
    """Everything that the loss depends on besides the student; tensors with their tokens in one dimension."""

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


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def default_chunk(n_real: int, impl: str, device: torch.device) -> int:
    """Return as many tokens as `CHUNK_LOGITS` and the device allow, in whole tiles of a matrix product."""
    size = CHUNK_LOGITS[impl] // n_real
    if impl == "triton" and device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        if memory < LARGE_DEVICE:
            size //= 2
    if size >= 128:
        return size // 128 * 128
    return max(1, size)


def loss_in_chunks(
    hidden_MD: Tensor, head_VD: Tensor, problem: Problem, for_hidden: bool, for_head: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the loss, its gradient by the hidden states, in their dtype, and by the head, in float32 at least.

    A gradient that is not wanted is None.
    """
    compare = _comparison(problem)
    # Once for all chunks; padding of the vocabulary never enters a softmax.
    head = head_VD[: problem.n_real].to(problem.dtype)
    d_hidden = None
    if for_hidden:
        d_hidden = torch.empty_like(hidden_MD)
    d_head = None
    if for_head:
        # fp32 for the sum over chunks: in bf16 the later chunks' small terms would be rounded away.
        d_head = head_VD.new_zeros(head_VD.shape, dtype=wide(problem.dtype))

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


def _comparison(problem: Problem) -> Comparison:
    """Return how a chunk's logits are compared with the problem's teacher."""
    teacher = problem.teacher
    options = problem.options
    in_logits = problem.in_logits
    if isinstance(teacher, TeacherTopK):
        ids_MK, log_probs_MK = teacher

        def with_top_k(logits_MV: Tensor, rows: slice, tokens: Tokens) -> tuple[Tensor, Tensor]:
            ids = _kept(ids_MK[rows], tokens)
            log_probs = _kept(log_probs_MK[rows], tokens).to(wide(problem.dtype))
            return in_logits.of_top_k(logits_MV, ids, log_probs, tokens, options)

        return with_top_k

    hidden_ME, head_WE = teacher
    dtype = problem.teacher_dtype
    head = head_WE[: problem.n_real].to(dtype)

    def with_head(logits_MV: Tensor, rows: slice, tokens: Tokens) -> tuple[Tensor, Tensor]:
        hidden = _kept(hidden_ME[rows], tokens).to(dtype)
        return in_logits.of_head(logits_MV, _logits(hidden, head), tokens, options)

    return with_head


def _kept(x: Tensor, tokens: Tokens) -> Tensor:
    return x.masked_fill(~tokens.kept_M.unsqueeze(-1), 0)


def _logits(hidden_MD: Tensor, head_VD: Tensor) -> Tensor:
    """Compute logits; on a GPU, every row starts at a multiple of 16 bytes, whatever the vocabulary."""
    if hidden_MD.device.type == "cpu":
        return hidden_MD @ head_VD.mT
    n_real = len(head_VD)
    # Triton specializes on strides that are multiples of 16; others load element by element.
    padded = hidden_MD.new_empty(len(hidden_MD), -(-n_real // ALIGNED) * ALIGNED)
    return torch.mm(hidden_MD, head_VD.mT, out=padded[:, :n_real])


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to a total in float32 at least; a CPU rounds a bf16 product before it is added."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.device.type == "cpu":
        total += a @ b
    else:
        add = narrow_adder(a.dtype, a.device)
        add(total, a, b)


@functools.cache
def narrow_adder(
    dtype: torch.dtype, device: torch.device
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return this torch's best way to add a bf16 product to an fp32 sum, always on bf16 tensor cores."""

    def in_one(total: Tensor, a: Tensor, b: Tensor) -> Tensor:  # from torch 2.10 on
        return torch.addmm(total, a, b, out_dtype=total.dtype, out=total)

    def wide_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:  # from torch 2.8 on
        return total.add_(torch.mm(a, b, out_dtype=total.dtype))

    def narrow_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return total.add_(a @ b)

    a = torch.zeros(16, 16, dtype=dtype, device=device)
    total = torch.zeros(16, 16, dtype=torch.float32, device=device)
    for add in (in_one, wide_product):
        try:
            add(total, a, a)
        except (RuntimeError, TypeError):
            continue
        return add
    return narrow_product
