"""Depthwise causal convolution of width 2 to 4: one kernel forward, one backward, one more through
a SiLU.

    pre_t = sum_k weight[:, k] x_{t - (K - 1) + k}        y_t = pre_t, or silu(pre_t)

Every program works on one tile of tokens and channels and reads each input K times, K - 1 of them
from cache. The gradient of the weight is summed from one partial per tile, in a fixed order.

Shapes: B batch, L length, C channels, K width (K - 1 in a state).
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

from .common import (
    Compilation,
    check_device,
    check_dtype,
    check_not_empty,
    check_seq_idx,
    check_shape,
    dot_mode,
    narrow,
    no_second_derivative,
    rows,
)

WIDTHS = (2, 3, 4)
ACTIVATIONS = (None, "silu")


class Tile(NamedTuple):
    """Tokens and channels of one program, and its warps."""

    tokens: int
    channels: int
    num_warps: int


FORWARD = Tile(tokens=32, channels=64, num_warps=4)
BACKWARD = Tile(tokens=64, channels=32, num_warps=8)


def causal_conv(
    x_BLC: Tensor,
    weight_CK: Tensor,
    *,
    activation: str | None = None,
    state_BCK: Tensor | None = None,
    seq_idx_BL: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """y_BLC in the dtype of x, and the state after the last token: the last K - 1 inputs, [B, C, K
    - 1].

    The last tap sees the current token. ``state_BCK`` is the state before the first token (zeros if
    absent). With ``seq_idx_BL`` no tap reaches into another document; the given state belongs to
    the first one. Sums run in fp32. The returned state may share memory with x.

    Raises ValueError for shapes that do not fit, dtypes other than bfloat16 and float32, an empty
    x, or a width or activation that no kernel exists for."""
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"activation is {activation!r}; it must be None or 'silu': apply another one to the "
            "result."
        )
    y_BLC = _forward_op(x_BLC, weight_CK, state_BCK, seq_idx_BL, activation == "silu")
    return y_BLC, _last_inputs(x_BLC, state_BCK, weight_CK.shape[1] - 1)


def compilations(capability: int) -> list[Compilation]:
    """Every configuration, for compiling ahead of time; the same ones for every ``capability``."""
    common = {
        "weight": "*bf16",
        "state": "*bf16",
        "seq_idx": "*i64",
        "L": "i32",
        "C": "i32",
        "x_row": "i32",
    }
    pointers = dict.fromkeys(("x", "y", "dy", "dpre", "dx", "dstate"), "*bf16") | {
        "dweight": "*fp32"
    }
    kernels = {
        "forward": (_forward, FORWARD, {"SILU": False}),
        "forward silu": (_forward, FORWARD, {"SILU": True}),
        "through silu": (_through_silu, FORWARD, {}),
        "backward": (_backward, BACKWARD, {}),
    }
    found = []
    for (name, (kernel, tile, more)), width in itertools.product(kernels.items(), WIDTHS):
        constants = {
            "BLOCK_L": tile.tokens,
            "BLOCK_C": tile.channels,
            "WIDTH": width,
            "HAS_STATE": True,
            "PACKED": True,
            "MODE": "gpu",
            **more,
        }
        arguments = {**pointers, **common, **constants}
        found.append(
            Compilation(
                name=f"conv {name} K={width}",
                kernel=kernel,
                arguments={argument: arguments[argument] for argument in kernel.arg_names},
                constants=frozenset(constants),
                divisible=frozenset(kernel.arg_names) - frozenset(constants) - {"L"},
                num_warps=tile.num_warps,
                num_stages=2,
                tensor_cores=False,
            )
        )
    return found


def _check(
    x_BLC: Tensor, weight_CK: Tensor, state_BCK: Tensor | None, seq_idx_BL: Tensor | None
) -> None:
    check_shape("x_BLC", x_BLC, (None, None, None), "BLC")
    check_not_empty("x_BLC", x_BLC)
    batch, length, channels = x_BLC.shape
    check_shape("weight_CK", weight_CK, (channels, None), "CK")
    if weight_CK.shape[1] not in WIDTHS:
        raise ValueError(
            f"weight_CK has width {weight_CK.shape[1]}; the kernel has widths 2, 3 and 4: pad it "
            "with zeros."
        )
    floats = {"x_BLC": x_BLC, "weight_CK": weight_CK}
    if state_BCK is not None:
        check_shape("state_BCK", state_BCK, (batch, channels, weight_CK.shape[1] - 1), "BCK")
        floats["state_BCK"] = state_BCK
    for name, tensor in floats.items():
        check_dtype(name, tensor)
        check_device(name, tensor, x_BLC)
    if seq_idx_BL is not None:
        check_device("seq_idx_BL", seq_idx_BL, x_BLC)
        check_seq_idx(seq_idx_BL, batch, length)


def _last_inputs(x_BLC: Tensor, state_BCK: Tensor | None, n_past: int) -> Tensor:
    """The state after the row; a view of x where the row is long enough."""
    tail_BCK = x_BLC[:, -n_past:].mT
    missing = n_past - tail_BCK.shape[2]
    if missing == 0:
        return tail_BCK
    if state_BCK is None:
        return F.pad(tail_BCK, (missing, 0))
    return torch.cat([state_BCK[:, :, -missing:].to(x_BLC.dtype), tail_BCK], dim=2)


_ARGUMENTS = "Tensor x, Tensor weight, Tensor? state, Tensor? seq_idx, bool silu"


@custom_op("hybrid_kernels::causal_conv", mutates_args=(), schema=f"({_ARGUMENTS}) -> Tensor")
def _forward_op(x, weight, state, seq_idx, silu) -> Tensor:
    _check(x, weight, state, seq_idx)
    x, x_row = rows(x)
    weight, state, seq_idx = (
        None if t is None else t.contiguous() for t in (weight, state, seq_idx)
    )
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    batch, length, channels = x.shape
    with torch.cuda.device_of(x):
        _forward[_grid(FORWARD, batch, length, channels)](
            x,
            weight,
            state,
            seq_idx,
            y,
            length,
            channels,
            x_row,
            SILU=silu,
            **_constants(FORWARD, weight, state, seq_idx, x.dtype),
        )
    return y


@_forward_op.register_fake
def _(x, weight, state, seq_idx, silu) -> Tensor:
    return x.new_empty(x.shape)


@custom_op(
    "hybrid_kernels::causal_conv_gradients",
    mutates_args=(),
    schema=f"(Tensor dy, {_ARGUMENTS}) -> Tensor[]",
)
def _backward_op(dy, x, weight, state, seq_idx, silu) -> list[Tensor]:
    """Return the gradients of x, the weight, and the state if there is one."""
    dy = dy.contiguous()
    x, x_row = rows(x)
    weight, state, seq_idx = (
        None if t is None else t.contiguous() for t in (weight, state, seq_idx)
    )
    dx = torch.empty_like(dy)
    dstate = None if state is None else torch.empty_like(state)
    batch, length, channels = x.shape
    width = weight.shape[1]
    # The state's gradient comes as rows before the first
    n_rows = length if state is None else length + width - 1
    grid = _grid(BACKWARD, batch, n_rows, channels)
    n_tiles = triton.cdiv(n_rows, BACKWARD.tokens)
    dweight_TKC = torch.empty(
        batch * n_tiles, width, channels, dtype=torch.float32, device=x.device
    )
    with torch.cuda.device_of(x):
        # Without an activation, what reaches the sum is dy itself.
        dpre = dy
        if silu:
            dpre = torch.empty_like(dy)
            _through_silu[_grid(FORWARD, batch, length, channels)](
                dy,
                x,
                weight,
                state,
                seq_idx,
                dpre,
                length,
                channels,
                x_row,
                **_constants(FORWARD, weight, state, seq_idx, x.dtype),
            )
        _backward[grid](
            dpre,
            x,
            weight,
            state,
            seq_idx,
            dx,
            dstate,
            dweight_TKC,
            length,
            channels,
            x_row,
            **_constants(BACKWARD, weight, state, seq_idx, x.dtype),
        )
    # [tiles, K, C] with channels last: the kernel's stores are contiguous, and this sum is ordered.
    dweight = dweight_TKC.sum(0).mT.to(weight.dtype).contiguous()
    return [dx, dweight] if dstate is None else [dx, dweight, dstate]


@_backward_op.register_fake
def _(dy, x, weight, state, seq_idx, silu) -> list[Tensor]:
    return [t.new_empty(t.shape) for t in (x, weight, state) if t is not None]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.silu = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    dx, dweight, *dstate = _backward_op(dy, *ctx.saved_tensors, ctx.silu)
    return dx, dweight, *(dstate or [None]), None, None


_forward_op.register_autograd(_gradients, setup_context=_save)
_backward_op.register_autograd(no_second_derivative)


def _grid(tile: Tile, batch: int, length: int, channels: int) -> tuple[int]:
    """Channels vary fastest; one dimension, for the others hold 65,535 programs at most."""
    return (batch * triton.cdiv(length, tile.tokens) * triton.cdiv(channels, tile.channels),)


def _constants(
    tile: Tile, weight: Tensor, state: Tensor | None, seq_idx: Tensor | None, dtype: torch.dtype
) -> dict[str, Any]:
    return {
        "BLOCK_L": tile.tokens,
        "BLOCK_C": tile.channels,
        "WIDTH": weight.shape[1],
        "HAS_STATE": state is not None,
        "PACKED": seq_idx is not None,
        "MODE": dot_mode(dtype),
        "num_warps": tile.num_warps,
    }


@triton.jit
def _tile(n_rows, C, BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr):
    """Row of the batch, index of the tile of tokens, and channels of this program."""
    # Neighboring programs share a row's cache lines if channels change fastest.
    n_channel_tiles = tl.cdiv(C, BLOCK_C)
    n_token_tiles = tl.cdiv(n_rows, BLOCK_L)
    pid = tl.program_id(0)
    channel = pid % n_channel_tiles * BLOCK_C + tl.arange(0, BLOCK_C)
    token_tile = pid // n_channel_tiles % n_token_tiles
    return (pid // n_channel_tiles // n_token_tiles).to(tl.int64), token_tile, channel


@triton.jit
def _weight(weight, channel, back, C, WIDTH: tl.constexpr):
    """The weights of the tap that looks ``back`` tokens back, one per channel."""
    return tl.load(weight + channel * WIDTH + (WIDTH - 1 - back), mask=channel < C, other=0.0).to(
        tl.float32
    )


@triton.jit
def _same_document(seq_idx, earlier, later, L):
    """Treat the tokens before the row as part of its first document."""
    before = tl.load(seq_idx + tl.maximum(earlier, 0), mask=earlier < L, other=0)
    after = tl.load(seq_idx + tl.maximum(later, 0), mask=later < L, other=0)
    return (before == after)[:, None]


@triton.jit
def _tap(
    x,
    state,
    seq_idx,
    first,
    t,
    channel,
    back: tl.constexpr,
    L,
    C,
    x_row,
    WIDTH: tl.constexpr,
    HAS_STATE: tl.constexpr,
    PACKED: tl.constexpr,
):
    """[tokens, channels]: the input ``back`` tokens before each t; 0 before the row and in another
    document.

    x points to the ``first`` token of the tile, so that offsets are small.
    """
    source = t - back
    real = (channel < C)[None, :]
    inside = (source >= 0) & (source < L)
    offset = (source - first)[:, None] * x_row + channel[None, :]
    tap = tl.load(x + offset, mask=inside[:, None] & real, other=0.0).to(tl.float32)
    # Tap 0 is the token itself, never a part of the state or of another document.
    if HAS_STATE and back > 0:
        held = (source < 0) & (source > -WIDTH)
        place = channel[None, :] * (WIDTH - 1) + (source + WIDTH - 1)[:, None]
        tap += tl.load(state + place, mask=held[:, None] & real, other=0.0).to(tl.float32)
    if PACKED and back > 0:
        tap = tl.where(_same_document(seq_idx, source, t, L), tap, 0.0)
    return tap


@triton.jit
def _before_activation(
    x,
    weight,
    state,
    seq_idx,
    first,
    t,
    channel,
    L,
    C,
    x_row,
    WIDTH: tl.constexpr,
    HAS_STATE: tl.constexpr,
    PACKED: tl.constexpr,
):
    pre = _tap(x, state, seq_idx, first, t, channel, 0, L, C, x_row, WIDTH, HAS_STATE, PACKED)
    pre *= _weight(weight, channel, 0, C, WIDTH)[None, :]
    for back in tl.static_range(1, WIDTH):
        tap = _tap(
            x, state, seq_idx, first, t, channel, back, L, C, x_row, WIDTH, HAS_STATE, PACKED
        )
        # Fused here: else the compiler chooses which product of a sum it rounds, with a state
        # another one than without, and two halves of a row do not have the whole's bits.
        pre = tl.fma(tap, _weight(weight, channel, back, C, WIDTH)[None, :], pre)
    return pre


@triton.jit(do_not_specialize=["L"])
def _forward(
    x,
    weight,
    state,
    seq_idx,
    y,
    L,
    C,
    x_row,
    BLOCK_L: tl.constexpr,
    BLOCK_C: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_STATE: tl.constexpr,
    PACKED: tl.constexpr,
    SILU: tl.constexpr,
    MODE: tl.constexpr,
):
    row, token_tile, channel = _tile(L, C, BLOCK_L, BLOCK_C)
    first = token_tile * BLOCK_L
    t = first + tl.arange(0, BLOCK_L)
    x += (row * L + first) * x_row
    y += (row * L + first) * C
    if HAS_STATE:
        state += row * C * (WIDTH - 1)
    if PACKED:
        seq_idx += row * L

    out = _before_activation(
        x, weight, state, seq_idx, first, t, channel, L, C, x_row, WIDTH, HAS_STATE, PACKED
    )
    if SILU:
        out *= tl.sigmoid(out)
    offset = (t - first)[:, None] * C + channel[None, :]
    tl.store(
        y + offset,
        narrow(out, y.dtype.element_ty, MODE),
        mask=(t < L)[:, None] & (channel < C)[None, :],
    )


@triton.jit(do_not_specialize=["L"])
def _through_silu(
    dy,
    x,
    weight,
    state,
    seq_idx,
    dpre,
    L,
    C,
    x_row,
    BLOCK_L: tl.constexpr,
    BLOCK_C: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_STATE: tl.constexpr,
    PACKED: tl.constexpr,
    MODE: tl.constexpr,
):
    """dy silu'(pre), in a separate pass: a tile of the backward would need K x K taps."""
    row, token_tile, channel = _tile(L, C, BLOCK_L, BLOCK_C)
    first = token_tile * BLOCK_L
    t = first + tl.arange(0, BLOCK_L)
    x += (row * L + first) * x_row
    if HAS_STATE:
        state += row * C * (WIDTH - 1)
    if PACKED:
        seq_idx += row * L

    pre = _before_activation(
        x, weight, state, seq_idx, first, t, channel, L, C, x_row, WIDTH, HAS_STATE, PACKED
    )
    gate = tl.sigmoid(pre)
    offset = (t - first)[:, None] * C + channel[None, :]
    inside = (t < L)[:, None] & (channel < C)[None, :]
    start = (row * L + first) * C
    # silu'(p) = s (1 + p (1 - s)) with s = sigmoid(p).
    slope = gate * (1.0 + pre * (1.0 - gate))
    gradient = tl.load(dy + start + offset, mask=inside, other=0.0).to(tl.float32) * slope
    tl.store(dpre + start + offset, narrow(gradient, dpre.dtype.element_ty, MODE), mask=inside)


@triton.jit
def _load_gradient(dpre, first, t, channel, L, C):
    """dpre at tokens t, 0 outside the row."""
    inside = ((t >= 0) & (t < L))[:, None] & (channel < C)[None, :]
    return tl.load(dpre + ((t - first)[:, None] * C + channel[None, :]), mask=inside, other=0.0).to(
        tl.float32
    )


@triton.jit(do_not_specialize=["L"])
def _backward(
    dpre,
    x,
    weight,
    state,
    seq_idx,
    dx,
    dstate,
    dweight,
    L,
    C,
    x_row,
    BLOCK_L: tl.constexpr,
    BLOCK_C: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_STATE: tl.constexpr,
    PACKED: tl.constexpr,
    MODE: tl.constexpr,
):
    # Inputs of the state: tokens before the row
    # The state's K - 1 inputs are rows -(K - 1) ... -1, so that dx and dstate are one computation.
    n_before: tl.constexpr = WIDTH - 1 if HAS_STATE else 0
    row, token_tile, channel = _tile(L + n_before, C, BLOCK_L, BLOCK_C)
    first = token_tile * BLOCK_L - n_before
    t = first + tl.arange(0, BLOCK_L)
    real = (channel < C)[None, :]
    x += (row * L + first) * x_row
    dpre += (row * L + first) * C
    dx += (row * L + first) * C
    if HAS_STATE:
        state += row * C * (WIDTH - 1)
        dstate += row * C * (WIDTH - 1)
    if PACKED:
        seq_idx += row * L
    dweight += (row * tl.cdiv(L + n_before, BLOCK_L) + token_tile) * WIDTH * C

    # dx_t gathers from the K - 1 tokens after t: a gather and no atomics, so that the bits do not
    # depend on the order of programs.
    here = _load_gradient(dpre, first, t, channel, L, C)
    gradient = here * _weight(weight, channel, 0, C, WIDTH)[None, :]
    # What the token ``back`` places later took from this one
    for back in tl.static_range(1, WIDTH):
        later = _load_gradient(dpre, first, t + back, channel, L, C)
        if PACKED:
            later = tl.where(_same_document(seq_idx, t, t + back, L), later, 0.0)
        gradient += later * _weight(weight, channel, back, C, WIDTH)[None, :]
    # One partial sum per tile and tap, summed by torch in a fixed order afterwards.
    for back in tl.static_range(WIDTH):
        tap = _tap(
            x, state, seq_idx, first, t, channel, back, L, C, x_row, WIDTH, HAS_STATE, PACKED
        )
        tl.store(
            dweight + (WIDTH - 1 - back) * C + channel, tl.sum(here * tap, 0), mask=channel < C
        )

    inside = ((t >= 0) & (t < L))[:, None] & real
    tl.store(
        dx + ((t - first)[:, None] * C + channel[None, :]),
        narrow(gradient, dx.dtype.element_ty, MODE),
        inside,
    )
    if HAS_STATE:
        place = channel[None, :] * (WIDTH - 1) + (t + WIDTH - 1)[:, None]
        tl.store(
            dstate + place,
            narrow(gradient, dstate.dtype.element_ty, MODE),
            mask=(t < 0)[:, None] & real,
        )
