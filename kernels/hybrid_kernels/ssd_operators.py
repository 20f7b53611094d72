"""Operators of torch around the kernels of the recurrence: the scan and the gate, with gradients.

Operators, so that torch.compile breaks no graph at them. Shapes as in `ssd`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.library import custom_op

from . import ssd_launch
from .common import dot_mode, no_second_derivative
from .ssd_launch import ScanArguments
from .ssd_triton import _gate, _gate_gradients

GATE_BLOCK = 1024
"""Elements of a program of the gate."""
_ARGUMENTS = (
    "Tensor x, Tensor a, Tensor b, Tensor c, Tensor? D, Tensor? state, Tensor? seq_idx, "
    "bool softplus, SymInt? n_segments"
)


def scan(arguments: ScanArguments) -> tuple[Tensor, Tensor]:
    """Run `ssd` without its gate, on a state that fits one program; return y and the last state."""
    differentiable = arguments[:6]
    needs_gradient = any(tensor is not None and tensor.requires_grad for tensor in differentiable)
    save = torch.is_grad_enabled() and needs_gradient
    y, final, _ = scan_forward(*arguments, save)
    return y, final


@custom_op(
    "hybrid_kernels::ssd",
    mutates_args=(),
    schema=f"({_ARGUMENTS}, bool save) -> (Tensor, Tensor, Tensor)",
)
def scan_forward(
    x, a, b, c, D, state, seq_idx, softplus, n_segments, save
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, the last state, and the states before each chunk: empty unless ``save``."""
    arguments = ScanArguments(x, a, b, c, D, state, seq_idx, softplus, n_segments)
    y, final, chunk_states = ssd_launch.ssd_forward(arguments, save_chunk_states=save)
    if chunk_states is None:
        chunk_states = y.new_empty(0)
    return y, final, chunk_states


@scan_forward.register_fake
def _(x, a, b, c, D, state, seq_idx, softplus, n_segments, save) -> tuple[Tensor, Tensor, Tensor]:
    batch, length, n_heads, head_dim = x.shape
    d_state = b.shape[-1]
    # The shape of the saved states depends on the tile, which a fake tensor's device decides too.
    chunk = ssd_launch.tile_on(x.device, x.dtype, d_state, head_dim).chunk
    saved_shape = (0,)
    if save:
        n_chunks = -(-length // chunk)
        saved_shape = (batch, n_chunks, n_heads, d_state, head_dim)
    final = x.new_empty((batch, n_heads, head_dim, d_state), dtype=torch.float32)
    return x.new_empty(x.shape), final, x.new_empty(saved_shape)


@custom_op(
    "hybrid_kernels::ssd_gradients",
    mutates_args=(),
    schema=f"(Tensor dy, Tensor? dstate, Tensor chunk_states, {_ARGUMENTS}, int width) -> Tensor[]",
)
def scan_backward(
    dy, dstate, chunk_states, x, a, b, c, D, state, seq_idx, softplus, n_segments, width
) -> list[Tensor]:
    """Return the gradients of x, B and C, in one row if it has a ``width``, then those of a, D and state, if given."""
    # x, B and C come from one convolution. With their gradients in one row, autograd has nothing
    # to concatenate: a copy of all activations less.
    row_BLC = None
    if width:
        row_BLC = _gradient_row(x, b, c, width)
    arguments = ScanArguments(x, a, b, c, D, state, seq_idx, softplus, n_segments)
    gradients = ssd_launch.ssd_backward(dy, dstate, chunk_states, arguments, row_BLC=row_BLC)
    if row_BLC is None:
        outputs = [gradients.x_BLHP, gradients.b_BLHN, gradients.c_BLHN]
    else:
        outputs = [row_BLC]
    for gradient in (gradients.a_BLH, gradients.D_H, gradients.state_BHPN):
        if gradient is not None:
            outputs.append(gradient)
    return outputs


@scan_backward.register_fake
def _(
    dy, dstate, chunk_states, x, a, b, c, D, state, seq_idx, softplus, n_segments, width
) -> list[Tensor]:
    if width:
        outputs = [x.new_empty((*x.shape[:2], width))]
    else:
        outputs = [tensor.new_empty(tensor.shape) for tensor in (x, b, c)]
    for tensor in (a, D, state):
        if tensor is not None:
            outputs.append(tensor.new_empty(tensor.shape))
    return outputs


def _width_of_row(x: Tensor, b: Tensor, c: Tensor) -> int:
    """Return the width of a token's row of which x, B and C are slices, and nothing else is; 0 without such a row."""
    batch, length = x.shape[:2]
    width = x.stride(1)
    end = 0
    for part in (x, b, c):
        # torch.compile traces parts that are no plain tensors; others have memory of their own.
        if type(part) is not Tensor:
            return 0
        if part.untyped_storage().data_ptr() != x.untyped_storage().data_ptr():
            return 0
        token = part[0, 0]
        follows = part.storage_offset() >= end
        strides_fit = part.stride()[:2] == (length * width, width)
        if not (follows and strides_fit and token.is_contiguous()):
            return 0
        end = part.storage_offset() + token.numel()
    n_bytes = batch * length * width * x.itemsize
    if end > width or x.untyped_storage().nbytes() != n_bytes:
        return 0
    return width


def _gradient_row(x: Tensor, b: Tensor, c: Tensor, width: int) -> Tensor:
    """Make a row for the gradients of x, B and C, 0 where it has none of them."""
    # Uninitialized, then zeroed only in the gaps: the kernels write all the rest.
    row_BLC = x.new_empty((*x.shape[:2], width))
    end = 0
    for part in (x, b, c):
        row_BLC[..., end : part.storage_offset()].zero_()
        end = part.storage_offset() + part[0, 0].numel()
    row_BLC[..., end:].zero_()
    return row_BLC


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, ctx.softplus, ctx.n_segments, _ = inputs
    _, _, chunk_states = output
    ctx.save_for_backward(*tensors, chunk_states)
    # Else an unused final state would cost a tensor of zeros, and the backward a pass over it.
    ctx.set_materialize_grads(False)


def _gradients(
    ctx: Any, dy: Tensor | None, dstate: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, ...]:
    x, a, b, c, D, state, seq_idx, chunk_states = ctx.saved_tensors
    if dy is None:
        dy = torch.zeros_like(x)
    width = _width_of_row(x, b, c)
    arguments = (x, a, b, c, D, state, seq_idx, ctx.softplus, ctx.n_segments)
    gradients = scan_backward(dy, dstate, chunk_states, *arguments, width)
    if width:
        row_BLC = gradients.pop(0)
        dx = ssd_launch.slice_like(x, row_BLC)
        db = ssd_launch.slice_like(b, row_BLC)
        dc = ssd_launch.slice_like(c, row_BLC)
    else:
        dx = gradients.pop(0)
        db = gradients.pop(0)
        dc = gradients.pop(0)
    da = gradients.pop(0)
    dD = None
    if D is not None:
        dD = gradients.pop(0)
    dstate_before = None
    if state is not None:
        dstate_before = gradients.pop(0)
    # seq_idx, softplus, n_segments and save have none.
    return dx, da, db, dc, dD, dstate_before, None, None, None, None


scan_forward.register_autograd(_gradients, setup_context=_save)
scan_backward.register_autograd(no_second_derivative)


@custom_op("hybrid_kernels::gate", mutates_args=())
def gate(y: Tensor, z: Tensor) -> Tensor:
    """Return y silu(z), for tensors of one shape and dtype."""
    y = y.contiguous()
    z = z.contiguous()
    out = torch.empty_like(y)
    n = y.numel()
    grid = (triton.cdiv(n, GATE_BLOCK),)
    with torch.cuda.device_of(y):
        _gate[grid](y=y, z=z, out=out, n=n, BLOCK=GATE_BLOCK, MODE=dot_mode(y.dtype))
    return out


@custom_op("hybrid_kernels::gate_gradients", mutates_args=())
def gate_gradients(dout: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of y and z."""
    dout = dout.contiguous()
    y = y.contiguous()
    z = z.contiguous()
    dy = torch.empty_like(y)
    dz = torch.empty_like(z)
    n = y.numel()
    grid = (triton.cdiv(n, GATE_BLOCK),)
    with torch.cuda.device_of(y):
        _gate_gradients[grid](
            y=y, z=z, dout=dout, dy=dy, dz=dz, n=n, BLOCK=GATE_BLOCK, MODE=dot_mode(y.dtype)
        )
    return dy, dz


@gate.register_fake
def _(y: Tensor, z: Tensor) -> Tensor:
    return y.new_empty(y.shape)


@gate_gradients.register_fake
def _(dout: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    return y.new_empty(y.shape), z.new_empty(z.shape)


gate.register_autograd(
    lambda ctx, dout: gate_gradients(dout, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
gate_gradients.register_autograd(no_second_derivative)
