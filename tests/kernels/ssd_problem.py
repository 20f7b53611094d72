"""Inputs of the recurrence's kernels, and what the recurrence itself gives for them; needs no
pytest."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from hybrid_kernels.ssd import ssd
from torch import Tensor

from hybrid_distill.model.decays import log_decay
from hybrid_distill.model.ssd import ssd_scan

FP32 = torch.float32
BF16 = torch.bfloat16


class Problem(NamedTuple):
    """Arguments of `ssd` as fp64 leaves that hold what ``dtype`` can represent."""

    x: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    D: Tensor | None
    z: Tensor | None
    state: Tensor | None

    def leaves(self) -> list[Tensor]:
        return [tensor for tensor in self if tensor is not None]


def problem(
    batch: int,
    length: int,
    heads: int,
    head_dim: int,
    d_state: int,
    *,
    dtype=FP32,
    gated=True,
    state=True,
) -> Problem:
    def draw(*size: int) -> Tensor:
        return torch.randn(size).to(dtype).double().requires_grad_()

    tokens = (batch, length, heads)
    return Problem(
        x=draw(*tokens, head_dim),
        a=(2 * draw(*tokens)).detach().requires_grad_(),
        b=draw(*tokens, d_state),
        c=draw(*tokens, d_state),
        D=draw(heads) if gated else None,
        z=draw(*tokens, head_dim) if gated else None,
        state=draw(batch, heads, head_dim, d_state) if state else None,
    )


def documents(batch: int, length: int) -> Tensor:
    """Return documents of 20 tokens on average."""
    return (torch.rand(batch, length) < 0.05).long().cumsum(-1)


def reference(
    given: Problem, seq_idx: Tensor | None, softplus: bool = True
) -> tuple[Tensor, Tensor]:
    """Return outputs and final state of the recurrence."""
    log_a = log_decay(given.a) if softplus else given.a
    y, state = ssd_scan(
        given.x,
        log_a,
        given.b,
        given.c,
        state_BHPN=given.state,
        seq_idx_BL=seq_idx,
        impl="reference",
    )
    if given.D is not None:
        y = y + given.D.unsqueeze(-1) * given.x
    if given.z is not None:
        y = y * F.silu(given.z)
    return y, state


def in_dtype(given: Problem, dtype: torch.dtype) -> Problem:
    """Return the kernel's arguments: the decay stays in fp32, as the model computes it."""
    leaves = {}
    for name, tensor in given._asdict().items():
        if tensor is not None:
            own_dtype = torch.float32 if name == "a" else dtype
            tensor = tensor.detach().to(own_dtype).requires_grad_()
        leaves[name] = tensor
    return Problem(**leaves)


def in_one_row(given: Problem) -> Problem:
    """Return the problem with x, B and C as slices of one tensor, as a student's projection has them."""
    parts = [tensor.detach().flatten(2) for tensor in (given.x, given.b, given.c)]
    row = torch.cat(parts, -1)
    heads = given.x.shape[2]
    slices = []
    for part in row.split([part.shape[-1] for part in parts], -1):
        slices.append(part.unflatten(-1, (heads, -1)).detach().requires_grad_())
    x, b, c = slices
    return given._replace(x=x, b=b, c=c)


def run_kernels(given: Problem, **options: Any) -> tuple[Tensor, Tensor]:
    """Return outputs and final state of `ssd`."""
    return ssd(
        given.x,
        given.a,
        given.b,
        given.c,
        D_H=given.D,
        z_BLHP=given.z,
        state_BHPN=given.state,
        **options,
    )


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest element; infinity for NaN."""
    assert actual.shape == expected.shape
    scale = expected.abs().max().clamp_min(1e-12)
    largest = (actual.double() - expected.double()).abs().max()
    return (largest / scale).nan_to_num(float("inf")).item()


def compare(
    given: Problem,
    *,
    dtype: torch.dtype = FP32,
    seq_idx: Tensor | None = None,
    softplus=True,
    n_segments=None,
    in_row=False,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return outputs, final state and every gradient, of the kernels and of the recurrence."""
    y, state = reference(given, seq_idx, softplus)
    # Signs of x: with random ones, the terms of dD may cancel out.
    to_y = (torch.randn(y.shape).abs() * given.x.sign()).detach().to(dtype).double()
    to_state = torch.randn(state.shape).float().double()
    loss = (y * to_y).sum() + (state * to_state).sum()
    gradients = torch.autograd.grad(loss, given.leaves())

    narrow = in_dtype(given, dtype)
    if in_row:
        narrow = in_one_row(narrow)
    kernel_y, kernel_state = run_kernels(
        narrow, seq_idx_BL=seq_idx, softplus=softplus, n_segments=n_segments
    )
    kernel_loss = (kernel_y * to_y.to(dtype)).sum() + (kernel_state * to_state.float()).sum()
    kernel_gradients = torch.autograd.grad(kernel_loss, narrow.leaves())
    assert kernel_y.dtype == dtype
    assert kernel_state.dtype == FP32
    for gradient, leaf in zip(kernel_gradients, narrow.leaves(), strict=True):
        assert gradient.dtype == leaf.dtype

    names = ["y", "final"]
    for name, tensor in given._asdict().items():
        if tensor is not None:
            names.append(f"d{name}")
    by_kernels = dict(zip(names, [kernel_y, kernel_state, *kernel_gradients]))
    by_recurrence = dict(zip(names, [y, state, *gradients]))
    return by_kernels, by_recurrence
