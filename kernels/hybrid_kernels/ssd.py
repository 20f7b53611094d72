"""The recurrence of SSM heads, one forward and one backward pass with the state in registers.

Per head, with one decay per token, a skip D and a gate z (the last two optional):

    S_t = a_t S_{t-1} + x_t B_t^T        y_t = (S_t C_t + D x_t) silu(z_t)
    log a = -softplus(raw)

A program owns one head of one row and walks over its chunks of Q tokens. With cum_i = sum_{s <= i}
log a_s inside the chunk and S the state before it, kept as [N, P] so that no product ever needs it
transposed:

    scores_ij = (C_i . B_j) exp(cum_i - cum_j) for j <= i        y = scores x + exp(cum) C S
    S <- exp(cum_Q) S + B^T (exp(cum_Q - cum) x)

The backward walks in reverse with dS, the gradient of the state after the chunk, and the state
before each chunk, which the forward has stored. With dscores_ij = (dy_i . x_j) exp(cum_i - cum_j)
for j <= i:

    dC = dscores B + exp(cum) dy S^T
    dB^T = C^T dscores + (dS x^T) exp(cum_Q - cum)
    dx = scores^T dy + exp(cum_Q - cum) B dS + D dy
    dS <- exp(cum_Q) dS + C^T (exp(cum) dy)
    dlog a_t = sum_{i >= t > j} scores_ij (dy_i . x_j)        token before t -> token after t
             + sum_{i >= t} exp(cum_i) dy_i . (S^T C_i)       state before -> token after t
             + sum_{j < t} exp(cum_Q - cum_j) x_j . (dS^T B_j)   token before t -> state after
             + exp(cum_Q) <dS, S>                             state before -> state after

scores^T is computed as B C^T, never by transposing what a product has left in registers: triton
before 3.7.1 compiles that wrongly for Hopper. Nothing is shared between programs, so results do not
depend on the order they run in.

Two small kernels stand around these: one sums the log decays of all chunks beforehand, one adds up
dlog a afterwards from what the backward wrote of each token. The gate is a pass of its own: inside,
its divisions and exponentials would take registers and time where both are scarce.

Where rows and heads are too few for the device, a row is cut into segments: one kernel finds what
each adds to the state, a small one carries the states over, and the main kernels then run on every
segment at once.

Shapes: B batch, L length, H head, P head dim, N state size, Q tokens in a chunk, M chunks, S
segments."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.library import custom_op

from .common import (
    DTYPES,
    check_device,
    check_dtype,
    check_not_empty,
    check_seq_idx,
    check_shape,
    dot_mode,
    no_second_derivative,
    rows,
)
from .ssd_tiles import (
    BACKWARD_KERNELS,
    DECAY_HEADS,
    DECAYS,
    LARGEST_FP32_BLOCK,
    LARGEST_HEAD_DIM,
    LARGEST_STATE,
    Tile,
    block_of,
    segments,
    tile_for,
)
from .ssd_triton import (
    _backward,
    _carry_over,
    _decay_gradients,
    _decays,
    _forward,
    _gate,
    _gate_gradients,
    _segment_states,
    wanted,
)

CARRY_BLOCK = GATE_BLOCK = 1024


def ssd(
    x_BLHP: Tensor,
    a_BLH: Tensor,
    b_BLHN: Tensor,
    c_BLHN: Tensor,
    *,
    D_H: Tensor | None = None,
    z_BLHP: Tensor | None = None,
    state_BHPN: Tensor | None = None,
    seq_idx_BL: Tensor | None = None,
    softplus: bool = True,
    n_segments: int | None = None,
) -> tuple[Tensor, Tensor]:
    """y_BLHP in the dtype of x, and the state after the last token in fp32; differentiable in every
    float argument.

    ``a_BLH`` is the raw decay, log a = -softplus(raw), and -inf means "no decay"; with
    ``softplus=False`` it is log a. Below -30 log a counts as -30 and gets no gradient.
    ``state_BHPN`` is the state before the first token (zero if absent). ``seq_idx_BL`` numbers the
    documents packed in a row, ascending: the state restarts where the number changes, and a given
    state belongs to the first document. ``n_segments`` overrides how many parts of a row run at
    once, which otherwise follows from the shape and the device.

    bfloat16 inputs are multiplied as bf16 with fp32 sums, float32 ones nearly as fp32, a large N or
    P in blocks; states stay in fp32.

    Raises ValueError for shapes that do not fit, other dtypes, an empty x, N or P above 128, a
    falling seq_idx (looked at on a CPU, or with HYBRID_KERNELS_DEBUG=1)."""
    given = (x_BLHP, a_BLH, b_BLHN, c_BLHN, D_H, state_BHPN, seq_idx_BL)
    if z_BLHP is not None:
        check_shape("z_BLHP", z_BLHP, x_BLHP.shape, "BLHP")
        check_dtype("z_BLHP", z_BLHP, (x_BLHP.dtype,))
        check_device("z_BLHP", z_BLHP, x_BLHP)
    # Blocks of the state are independent: P is split freely, and y is a sum over blocks of N.
    largest = max(x_BLHP.shape[-1], b_BLHN.shape[-1])
    if x_BLHP.dtype == torch.float32 and largest > LARGEST_FP32_BLOCK:
        _check(*given, n_segments)
        y, final = _in_blocks(*given, softplus, n_segments)
    else:
        y, final = _scan(*given, softplus, n_segments)
    return (y if z_BLHP is None else gate(y, z_BLHP)), final


def _in_blocks(
    x, a, b, c, D, state, seq_idx, softplus: bool, n_segments: int | None
) -> tuple[Tensor, Tensor]:
    """`ssd` block by block of the state, none of which enters another; y sums over N, so the skip
    comes last."""

    def run(p: slice, n: slice) -> tuple[Tensor, Tensor]:
        before = None if state is None else state[:, :, p, n]
        return _scan(
            x[..., p], a, b[..., n], c[..., n], None, before, seq_idx, softplus, n_segments
        )

    runs = [[run(p, n) for n in _fp32_blocks(b.shape[-1])] for p in _fp32_blocks(x.shape[-1])]
    # A stack and a sum, not a running total: the order of the sum is the order of the blocks.
    y = torch.cat([torch.stack([y for y, _ in same_p]).sum(0) for same_p in runs], dim=-1)
    final = torch.cat(
        [torch.cat([final for _, final in same_p], dim=-1) for same_p in runs], dim=-2
    )
    return y if D is None else y + D.unsqueeze(-1) * x, final


def _fp32_blocks(size: int) -> list[slice]:
    """Cut N or P: each fp32 product is three on tensor cores and takes twice the registers, so that
    a large state does not fit one program."""
    starts = range(0, size, LARGEST_FP32_BLOCK)
    return [slice(start, min(start + LARGEST_FP32_BLOCK, size)) for start in starts]


def block_sizes(dtype: torch.dtype, head_dim: int, d_state: int) -> list[tuple[int, int]]:
    """List the different P and N of the blocks that `ssd` runs a state in."""
    if dtype != torch.float32:
        return [(head_dim, d_state)]
    sizes = itertools.product(_fp32_blocks(head_dim), _fp32_blocks(d_state))
    return list(dict.fromkeys((p.stop - p.start, n.stop - n.start) for p, n in sizes))


def _scan(
    x, a, b, c, D, state, seq_idx, softplus: bool, n_segments: int | None
) -> tuple[Tensor, Tensor]:
    given = (x, a, b, c, D, state)
    save = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in given
    )
    y, final, _ = _forward_op(*given, seq_idx, softplus, n_segments, save)
    return y, final


_ARGUMENTS = (
    "Tensor x, Tensor a, Tensor b, Tensor c, Tensor? D, Tensor? state, Tensor? seq_idx, "
    "bool softplus, SymInt? n_segments"
)


@custom_op(
    "hybrid_kernels::ssd",
    mutates_args=(),
    schema=f"({_ARGUMENTS}, bool save) -> (Tensor, Tensor, Tensor)",
)
def _forward_op(
    x, a, b, c, D, state, seq_idx, softplus, n_segments, save
) -> tuple[Tensor, Tensor, Tensor]:
    options = dict(
        D_H=D, state_BHPN=state, seq_idx_BL=seq_idx, softplus=softplus, n_segments=n_segments
    )
    y, final, chunk_states = ssd_forward(x, a, b, c, **options, save_chunk_states=save)
    return y, final, y.new_empty(0) if chunk_states is None else chunk_states


@_forward_op.register_fake
def _(x, a, b, c, D, state, seq_idx, softplus, n_segments, save) -> tuple[Tensor, Tensor, Tensor]:
    (batch, length, n_heads, head_dim) = x.shape
    d_state = b.shape[-1]
    # The shape of the saved states depends on the tile, which a fake tensor's device decides too.
    chunk = tile_for(_capability(x.device), x.dtype, d_state, head_dim).chunk
    saved = (batch, -(-length // chunk), n_heads, d_state, head_dim) if save else (0,)
    final = x.new_empty((batch, n_heads, head_dim, d_state), dtype=torch.float32)
    return x.new_empty(x.shape), final, x.new_empty(saved)


@custom_op(
    "hybrid_kernels::ssd_gradients",
    mutates_args=(),
    schema=f"(Tensor dy, Tensor? dstate, Tensor chunk_states, {_ARGUMENTS}, int width) -> Tensor[]",
)
def _backward_op(
    dy, dstate, chunk_states, x, a, b, c, D, state, seq_idx, softplus, n_segments, width
) -> list[Tensor]:
    """Return the gradients of a, D and state, if given, behind those of x, B and C: in one row if
    it has a width."""
    options = dict(
        D_H=D, state_BHPN=state, seq_idx_BL=seq_idx, softplus=softplus, n_segments=n_segments
    )
    # x, B and C come from one convolution. With their gradients in one row, autograd has nothing
    # to concatenate: a copy of all activations less.
    row_BLC = _gradient_row(x, b, c, width) if width else None
    found = ssd_backward(dy, dstate, chunk_states, x, a, b, c, **options, row_BLC=row_BLC)
    of_row = [found.x_BLHP, found.b_BLHN, found.c_BLHN] if row_BLC is None else [row_BLC]
    return of_row + [
        gradient for gradient in (found.a_BLH, found.D_H, found.state_BHPN) if gradient is not None
    ]


@_backward_op.register_fake
def _(
    dy, dstate, chunk_states, x, a, b, c, D, state, seq_idx, softplus, n_segments, width
) -> list[Tensor]:
    of_row = (
        [x.new_empty((*x.shape[:2], width))]
        if width
        else [tensor.new_empty(tensor.shape) for tensor in (x, b, c)]
    )
    return of_row + [
        tensor.new_empty(tensor.shape) for tensor in (a, D, state) if tensor is not None
    ]


def _width_of_row(x: Tensor, b: Tensor, c: Tensor) -> int:
    """Return the width of a token's row of which x, B and C are slices, and nothing else is; 0 if
    there is none."""
    (batch, length) = x.shape[:2]
    width = x.stride(1)
    end = 0
    for part in (x, b, c):
        if (
            type(part) is not Tensor
            or part.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        ):
            return 0  # torch.compile traces it, or it has a place of its own
        token = part[0, 0]
        if (
            part.storage_offset() < end
            or part.stride()[:2] != (length * width, width)
            or not token.is_contiguous()
        ):
            return 0
        end = part.storage_offset() + token.numel()
    return (
        width
        if end <= width and x.untyped_storage().nbytes() == batch * length * width * x.itemsize
        else 0
    )


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
    ctx.save_for_backward(*tensors, output[2])
    # Else an unused final state would cost a tensor of zeros, and the backward a pass over it.
    ctx.set_materialize_grads(False)


def _gradients(
    ctx: Any, dy: Tensor | None, dstate: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, ...]:
    x, a, b, c, D, state, seq_idx, chunk_states = ctx.saved_tensors
    given = (x, a, b, c, D, state, seq_idx, ctx.softplus, ctx.n_segments)
    width = _width_of_row(x, b, c)
    found = _backward_op(
        torch.zeros_like(x) if dy is None else dy, dstate, chunk_states, *given, width
    )
    if width:
        dx, db, dc = (
            found[0].as_strided(t.shape, t.stride(), t.storage_offset()) for t in (x, b, c)
        )
    else:
        dx, db, dc = found[:3]
    da, *rest = found[1 if width else 3 :]
    dD = None if D is None else rest.pop(0)
    return dx, da, db, dc, dD, None if state is None else rest.pop(0), None, None, None, None


_forward_op.register_autograd(_gradients, setup_context=_save)
_backward_op.register_autograd(no_second_derivative)


@custom_op("hybrid_kernels::gate", mutates_args=())
def gate(y: Tensor, z: Tensor) -> Tensor:
    """y silu(z), for tensors of one shape and dtype."""
    y = y.contiguous()
    z = z.contiguous()
    out = torch.empty_like(y)
    n = y.numel()
    with torch.cuda.device_of(y):
        _gate[(triton.cdiv(n, GATE_BLOCK),)](
            y=y, z=z, out=out, n=n, BLOCK=GATE_BLOCK, MODE=dot_mode(y.dtype)
        )
    return out


@custom_op("hybrid_kernels::gate_gradients", mutates_args=())
def _gate_gradients_op(dout: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    dout = dout.contiguous()
    y = y.contiguous()
    z = z.contiguous()
    dy = torch.empty_like(y)
    dz = torch.empty_like(z)
    n = y.numel()
    with torch.cuda.device_of(y):
        _gate_gradients[(triton.cdiv(n, GATE_BLOCK),)](
            y=y, z=z, dout=dout, dy=dy, dz=dz, n=n, BLOCK=GATE_BLOCK, MODE=dot_mode(y.dtype)
        )
    return dy, dz


@gate.register_fake
def _(y: Tensor, z: Tensor) -> Tensor:
    return y.new_empty(y.shape)


@_gate_gradients_op.register_fake
def _(dout: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    return y.new_empty(y.shape), z.new_empty(z.shape)


gate.register_autograd(
    lambda ctx, dout: _gate_gradients_op(dout, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
_gate_gradients_op.register_autograd(no_second_derivative)


class Gradients(NamedTuple):
    """Each in the dtype of what it is the gradient of; None for what was absent."""

    x_BLHP: Tensor
    a_BLH: Tensor
    b_BLHN: Tensor
    c_BLHN: Tensor
    D_H: Tensor | None
    state_BHPN: Tensor | None


def ssd_forward(
    x_BLHP: Tensor,
    a_BLH: Tensor,
    b_BLHN: Tensor,
    c_BLHN: Tensor,
    *,
    D_H: Tensor | None = None,
    state_BHPN: Tensor | None = None,
    seq_idx_BL: Tensor | None = None,
    softplus: bool = True,
    n_segments: int | None = None,
    save_chunk_states: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`ssd` without autograd and gate: y_BLHP, the final state_BHPN, and the states before each
    chunk, [B, M, H, N, P].

    The last are what `ssd_backward` needs, in the dtype of x; None without ``save_chunk_states``.
    """
    call = _Call.of(
        x_BLHP,
        a_BLH,
        b_BLHN,
        c_BLHN,
        D_H,
        state_BHPN,
        seq_idx_BL,
        softplus,
        n_segments,
        backward=False,
    )
    before = call.states_before_segments()
    y = torch.empty(call.shape, dtype=call.x.dtype, device=call.x.device)
    final = torch.empty(call.state_shape, dtype=torch.float32, device=call.x.device)
    chunk_states = None
    if save_chunk_states:
        chunk_states = torch.empty(
            call.chunk_states_shape, dtype=call.x.dtype, device=call.x.device
        )
    with torch.cuda.device_of(call.x):
        _forward[call.grid](
            **call.tensors,
            **call.decays,
            before=before,
            y=y,
            final=final,
            chunk_states=chunk_states,
            **call.sizes,
            **call.constants,
            HAS_BEFORE=before is not None,
            SAVE=save_chunk_states,
            **call.tile.forward.options,
        )
    return y, final, chunk_states


def ssd_backward(
    dy_BLHP: Tensor,
    dstate_BHPN: Tensor | None,
    chunk_states: Tensor,
    x_BLHP: Tensor,
    a_BLH: Tensor,
    b_BLHN: Tensor,
    c_BLHN: Tensor,
    *,
    D_H: Tensor | None = None,
    state_BHPN: Tensor | None = None,
    seq_idx_BL: Tensor | None = None,
    softplus: bool = True,
    n_segments: int | None = None,
    row_BLC: Tensor | None = None,
) -> Gradients:
    """The gradients of `ssd_forward`'s arguments, from those of y and of the final state (None for
    zero).

    Those of x, B and C are slices of ``row_BLC``, if given, as x, B and C are of their row.
    """
    call = _Call.of(
        x_BLHP,
        a_BLH,
        b_BLHN,
        c_BLHN,
        D_H,
        state_BHPN,
        seq_idx_BL,
        softplus,
        n_segments,
        backward=True,
    )
    check_shape("dy_BLHP", dy_BLHP, call.shape, "BLHP")
    check_shape("chunk_states", chunk_states, call.chunk_states_shape, "BMHNP")
    # bf16 as the forward's operands: an fp32 dy would be rounded in the products anyway.
    dy = dy_BLHP.to(call.x.dtype).contiguous()
    if dstate_BHPN is not None:
        check_shape("dstate_BHPN", dstate_BHPN, call.state_shape, "BHPN")
        dstate_BHPN = dstate_BHPN.float().contiguous()
    # Before the main kernels, which run on all segments at once.
    after = call.gradients_after_segments(dy, dstate_BHPN)

    like: dict[str, Any] = {"device": call.x.device, "dtype": call.x.dtype}
    wide: dict[str, Any] = {"device": call.x.device, "dtype": torch.float32}
    da = torch.empty_like(call.a)
    if row_BLC is None:
        dx, db, dc = (torch.empty(t.shape, **like) for t in (x_BLHP, b_BLHN, c_BLHN))
    else:
        dx, db, dc = (
            row_BLC.as_strided(t.shape, t.stride(), t.storage_offset())
            for t in (x_BLHP, b_BLHN, c_BLHN)
        )
    to_tokens, from_tokens = torch.empty(2, *call.decay_shape, **wide)
    over = torch.empty(call.decay_shape[:3], **wide)
    # One number per program, summed below in a fixed order instead of by atomics.
    dD = None if D_H is None else torch.empty(call.batch, call.n_segments, call.n_heads, **wide)
    dstate = None if state_BHPN is None else torch.empty(call.state_shape, **wide)
    with torch.cuda.device_of(call.x):
        # One to three launches: where one kernel would spill registers, each finds a part.
        for gradients in BACKWARD_KERNELS[call.tile.n_backward]:
            _backward[call.grid](
                **call.tensors,
                **call.decays,
                dy=dy,
                chunk_states=chunk_states,
                after=after,
                dx=dx,
                to_tokens=to_tokens,
                from_tokens=from_tokens,
                over=over,
                db=db,
                dc=dc,
                dD=dD,
                dstate=dstate,
                **call.sizes,
                **call.constants,
                HAS_AFTER=after is not None,
                HAS_STATE=dstate is not None,
                IN_ROW=row_BLC is not None,
                **wanted(gradients),
                **call.tile.backward.options,
            )
        _decay_gradients[call.decay_grid](
            a=call.a,
            to_tokens=to_tokens,
            from_tokens=from_tokens,
            over=over,
            da=da,
            **call.decay_options,
            MODE=dot_mode(call.x.dtype),
        )
    return Gradients(
        dx,
        da,
        db,
        dc,
        None if dD is None or D_H is None else dD.sum((0, 1)).to(D_H.dtype),
        None if dstate is None or state_BHPN is None else dstate.to(state_BHPN.dtype),
    )


@dataclass(frozen=True)
class _Call:
    """Checked arguments, laid out for the kernels, and how they are launched."""

    x: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    D: Tensor | None
    state: Tensor | None
    seq_idx: Tensor | None
    softplus: bool
    x_row: int
    b_row: int
    c_row: int
    tile: Tile
    n_segments: int

    @classmethod
    def of(
        cls,
        x,
        a,
        b,
        c,
        D,
        state,
        seq_idx,
        softplus: bool,
        n_segments: int | None,
        *,
        backward: bool,
    ) -> _Call:
        _check(x, a, b, c, D, state, seq_idx, n_segments)
        batch, length, n_heads, head_dim = x.shape
        tile = tile_for(_capability(x.device), x.dtype, b.shape[-1], head_dim)
        n_chunks = triton.cdiv(length, tile.chunk)
        launch = tile.backward if backward else tile.forward
        # More segments cost a pass of their own, so only as many as fill the device.
        n_wanted = n_segments or _segments_that_fill(
            x.device, batch * n_heads, n_chunks, launch.resident
        )
        x, x_row = rows(x)
        b, b_row = rows(b)
        c, c_row = rows(c)
        return cls(
            x=x,
            a=a.contiguous(),
            b=b,
            c=c,
            D=None if D is None else D.contiguous(),
            # fp32 between segments and calls: a bf16 state would lose the small terms of a long
            # row.
            state=None if state is None else state.float().contiguous(),
            seq_idx=None if seq_idx is None else seq_idx.contiguous(),
            softplus=softplus,
            x_row=x_row,
            b_row=b_row,
            c_row=c_row,
            tile=tile,
            # Rounding chunks per segment up may leave the last segments empty; this counts the
            # others.
            n_segments=triton.cdiv(n_chunks, triton.cdiv(n_chunks, n_wanted)),
        )

    @property
    def shape(self) -> torch.Size:
        return self.x.shape

    @property
    def batch(self) -> int:
        return self.x.shape[0]

    @property
    def n_heads(self) -> int:
        return self.x.shape[2]

    @property
    def n_chunks(self) -> int:
        return triton.cdiv(self.x.shape[1], self.tile.chunk)

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (self.batch, self.n_heads, self.x.shape[3], self.b.shape[3])

    @property
    def chunk_states_shape(self) -> tuple[int, ...]:
        return (self.batch, self.n_chunks, self.n_heads, self.b.shape[3], self.x.shape[3])

    @property
    def grid(self) -> tuple[int, int, int]:
        """Heads change fastest: neighbors read the same cache lines where a head's row is narrower
        than one."""
        return (self.n_heads, self.batch, self.n_segments)

    @property
    def tensors(self) -> dict[str, Tensor | None]:
        return dict(x=self.x, b=self.b, c=self.c, D=self.D, seq_idx=self.seq_idx)

    @property
    def decay_shape(self) -> tuple[int, ...]:
        return (self.batch, self.n_heads, self.n_chunks, self.tile.chunk)

    @property
    def decay_grid(self) -> tuple[int, int, int]:
        return (self.n_chunks, self.batch, triton.cdiv(self.n_heads, DECAY_HEADS))

    @property
    def decay_options(self) -> dict[str, Any]:
        return dict(
            seq_idx=self.seq_idx,
            L=self.x.shape[1],
            H=self.n_heads,
            Q=self.tile.chunk,
            HEADS=DECAY_HEADS,
            SOFTPLUS=self.softplus,
            PACKED=self.seq_idx is not None,
            **DECAYS.options,
        )

    @cached_property
    def decays(self) -> dict[str, Tensor]:
        """Those of every chunk, as `_decays` describes them."""
        wide: dict[str, Any] = {"device": self.x.device, "dtype": torch.float32}
        cum, from_start, to_end = torch.empty(3, *self.decay_shape, **wide)
        found = dict(
            cum=cum,
            from_start=from_start,
            to_end=to_end,
            through=torch.empty(self.decay_shape[:3], **wide),
        )
        with torch.cuda.device_of(self.x):
            _decays[self.decay_grid](a=self.a, **found, **self.decay_options)
        return found

    @property
    def sizes(self) -> dict[str, int]:
        return dict(
            L=self.x.shape[1],
            H=self.n_heads,
            chunks_per_segment=triton.cdiv(self.n_chunks, self.n_segments),
            x_row=self.x_row,
            b_row=self.b_row,
            c_row=self.c_row,
        )

    @property
    def constants(self) -> dict[str, Any]:
        return dict(HAS_D=self.D is not None, PACKED=self.seq_idx is not None, **self._blocks)

    @property
    def _blocks(self) -> dict[str, Any]:
        head_dim, d_state = self.state_shape[2:]
        return dict(
            P=head_dim,
            N=d_state,
            BLOCK_P=block_of(head_dim),
            BLOCK_N=block_of(d_state),
            Q=self.tile.chunk,
            MODE=dot_mode(self.x.dtype),
        )

    def states_before_segments(self) -> Tensor | None:
        """[B, S, H, P, N], or None where they are zero."""
        if self.n_segments == 1:
            return self.state
        return self._carry(
            self.x, self.x_row, self.b, self.b_row, self.decays["to_end"], self.state, reverse=False
        )

    def gradients_after_segments(self, dy: Tensor, dstate: Tensor | None) -> Tensor | None:
        """Those of the states after each segment, [B, S, H, P, N], or None where they are zero."""
        if self.n_segments == 1:
            return dstate
        return self._carry(
            dy,
            dy[0, 0].numel(),
            self.c,
            self.c_row,
            self.decays["from_start"],
            dstate,
            reverse=True,
        )

    def _carry(
        self,
        v: Tensor,
        v_row: int,
        k: Tensor,
        k_row: int,
        weights: Tensor,
        first: Tensor | None,
        *,
        reverse: bool,
    ) -> Tensor:
        size = (self.batch, self.n_segments, *self.state_shape[1:])
        states = torch.empty(size, dtype=torch.float32, device=v.device)
        kept = torch.empty(size[:3], dtype=torch.float32, device=v.device)
        sizes = {name: self.sizes[name] for name in ("L", "H", "chunks_per_segment")}
        elements = size[3] * size[4]
        with torch.cuda.device_of(v):
            _segment_states[self.grid](
                v=v,
                k=k,
                weights=weights,
                through=self.decays["through"],
                states=states,
                kept=kept,
                **sizes,
                v_row=v_row,
                k_row=k_row,
                **self._blocks,
                REVERSE=reverse,
                **self.tile.forward.options,
            )
            _carry_over[(self.n_heads, self.batch, triton.cdiv(elements, CARRY_BLOCK))](
                states=states,
                kept=kept,
                first=first,
                H=self.n_heads,
                n_segments=self.n_segments,
                SIZE=elements,
                BLOCK=CARRY_BLOCK,
                HAS_FIRST=first is not None,
                REVERSE=reverse,
            )
        return states


def _check(x, a, b, c, D, state, seq_idx, n_segments: int | None) -> None:
    check_shape("x_BLHP", x, (None,) * 4, "BLHP")
    check_not_empty("x_BLHP", x)
    batch, length, n_heads, head_dim = x.shape
    check_shape("b_BLHN", b, (batch, length, n_heads, None), "BLHN")
    check_not_empty("b_BLHN", b)
    d_state = b.shape[-1]
    for name, size, largest in (
        ("head dim P", head_dim, LARGEST_HEAD_DIM),
        ("state size N", d_state, LARGEST_STATE),
    ):
        if size > largest:
            raise ValueError(
                f"the {name} is {size}; the kernels hold at most {largest}: use the torch "
                "implementation."
            )
    check_dtype("x_BLHP", x)
    given = (
        ("a_BLH", a, (batch, length, n_heads), DTYPES),
        ("b_BLHN", b, (batch, length, n_heads, d_state), (x.dtype,)),
        ("c_BLHN", c, (batch, length, n_heads, d_state), (x.dtype,)),
        ("D_H", D, (n_heads,), DTYPES),
        ("state_BHPN", state, (batch, n_heads, head_dim, d_state), DTYPES),
    )
    check_device("x_BLHP", x, x)
    for name, tensor, shape, dtypes in given:
        if tensor is not None:
            check_shape(name, tensor, shape, name.rpartition("_")[2])
            check_dtype(name, tensor, dtypes)
            check_device(name, tensor, x)
    if seq_idx is not None:
        check_device("seq_idx_BL", seq_idx, x)
        check_seq_idx(seq_idx, batch, length)
    if n_segments is not None and n_segments < 1:
        raise ValueError(
            f"n_segments is {n_segments}; it counts parts of a row: pass at least 1, or None to "
            "choose."
        )


def _capability(device: torch.device) -> int:
    """90 for an H100; the interpreter takes the same tiles, AMD's GPUs those of sm_80, which spill
    less on gfx942."""
    if torch.version.hip:
        return 80
    # A fake tensor's device need not exist
    if device.type != "cuda" or not torch.cuda.is_available():
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _segments_that_fill(device: torch.device, programs: int, n_chunks: int, resident: int) -> int:
    """Return into how many segments a row is cut; 1 in the interpreter."""
    if device.type != "cuda":
        return 1
    return segments(
        programs,
        n_chunks,
        resident * torch.cuda.get_device_properties(device).multi_processor_count,
    )
