"""Launches of the recurrence's kernels: checked arguments, grids, and how many parts of a row run at once.

Shapes as in `ssd`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from .common import (
    DTYPES,
    check_device,
    check_dtype,
    check_not_empty,
    check_seq_idx,
    check_shape,
    dot_mode,
    rows,
)
from .ssd_tiles import (
    BACKWARD_KERNELS,
    DECAY_HEADS,
    DECAYS,
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
    _segment_states,
    wanted,
)

CARRY_BLOCK = 1024
"""Elements of a state that one program carries over segments."""


class ScanArguments(NamedTuple):
    """Arguments of `ssd` but for the gate, which is a pass of its own."""

    x_BLHP: Tensor
    a_BLH: Tensor
    b_BLHN: Tensor
    c_BLHN: Tensor
    D_H: Tensor | None = None
    state_BHPN: Tensor | None = None
    seq_idx_BL: Tensor | None = None
    softplus: bool = True
    n_segments: int | None = None


class Gradients(NamedTuple):
    """Gradients, each in the dtype of its argument; None for an absent argument."""

    x_BLHP: Tensor
    a_BLH: Tensor
    b_BLHN: Tensor
    c_BLHN: Tensor
    D_H: Tensor | None
    state_BHPN: Tensor | None


def ssd_forward(
    arguments: ScanArguments, *, save_chunk_states: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run `ssd` without autograd and gate: return y_BLHP, the last state_BHPN and the states before each chunk.

    The last, [B, M, H, N, P] in the dtype of x, are for `ssd_backward`; None without
    ``save_chunk_states``.
    """
    call = _Call.of(arguments, backward=False)
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
    arguments: ScanArguments,
    *,
    row_BLC: Tensor | None = None,
) -> Gradients:
    """Return the gradients of `ssd_forward`'s arguments, from those of y and of the last state (None for zero).

    With ``row_BLC``, the gradients of x, B and C are written into it, where x, B and C lie in the row that they share.
    """
    call = _Call.of(arguments, backward=True)
    D_H = arguments.D_H
    state_BHPN = arguments.state_BHPN
    check_shape("dy_BLHP", dy_BLHP, call.shape, "BLHP")
    check_shape("chunk_states", chunk_states, call.chunk_states_shape, "BMHNP")
    # bf16 as the forward's operands: an fp32 dy would be rounded in the products anyway.
    dy = dy_BLHP.to(call.x.dtype).contiguous()
    if dstate_BHPN is not None:
        check_shape("dstate_BHPN", dstate_BHPN, call.state_shape, "BHPN")
        dstate_BHPN = dstate_BHPN.float().contiguous()
    # Before the main kernels, which run on all segments at once.
    after = call.gradients_after_segments(dy, dstate_BHPN)

    da = torch.empty_like(call.a)
    outputs = _backward_outputs(call, arguments, row_BLC)
    with torch.cuda.device_of(call.x):
        # One to three launches: where one kernel would spill registers, each finds a part.
        for gradients in BACKWARD_KERNELS[call.tile.n_backward]:
            _backward[call.grid](
                **call.tensors,
                **call.decays,
                dy=dy,
                chunk_states=chunk_states,
                after=after,
                **outputs._asdict(),
                **call.sizes,
                **call.constants,
                HAS_AFTER=after is not None,
                HAS_STATE=outputs.dstate is not None,
                IN_ROW=row_BLC is not None,
                **wanted(gradients),
                **call.tile.backward.options,
            )
        _decay_gradients[call.decay_grid](
            a=call.a,
            to_tokens=outputs.to_tokens,
            from_tokens=outputs.from_tokens,
            over=outputs.over,
            da=da,
            **call.decay_options,
            MODE=dot_mode(call.x.dtype),
        )
    dD_H = None
    if outputs.dD is not None and D_H is not None:
        dD_H = outputs.dD.sum((0, 1)).to(D_H.dtype)
    dstate_before = None
    if outputs.dstate is not None and state_BHPN is not None:
        dstate_before = outputs.dstate.to(state_BHPN.dtype)
    return Gradients(outputs.dx, da, outputs.db, outputs.dc, dD_H, dstate_before)


class _BackwardOutputs(NamedTuple):
    """Tensors that the main kernels of the backward write, by the names of their arguments."""

    dx: Tensor
    db: Tensor
    dc: Tensor
    to_tokens: Tensor
    from_tokens: Tensor
    over: Tensor
    dD: Tensor | None
    """One number per program, summed afterwards in a fixed order instead of by atomics."""
    dstate: Tensor | None


def _backward_outputs(
    call: _Call, arguments: ScanArguments, row_BLC: Tensor | None
) -> _BackwardOutputs:
    """Allocate what the main kernels of the backward write; in ``row_BLC``, if given, lie dx, dB and dC."""
    wide: dict[str, Any] = {"device": call.x.device, "dtype": torch.float32}
    in_row = []
    for part in (arguments.x_BLHP, arguments.b_BLHN, arguments.c_BLHN):
        if row_BLC is None:
            in_row.append(torch.empty(part.shape, device=call.x.device, dtype=call.x.dtype))
        else:
            in_row.append(slice_like(part, row_BLC))
    dx, db, dc = in_row
    to_tokens, from_tokens = torch.empty(2, *call.decay_shape, **wide)
    over = torch.empty(call.decay_shape[:3], **wide)
    dD = None
    if arguments.D_H is not None:
        dD = torch.empty(call.batch, call.n_segments, call.n_heads, **wide)
    dstate = None
    if arguments.state_BHPN is not None:
        dstate = torch.empty(call.state_shape, **wide)
    return _BackwardOutputs(dx, db, dc, to_tokens, from_tokens, over, dD, dstate)


def slice_like(part: Tensor, row_BLC: Tensor) -> Tensor:
    """Return the slice of a row that lies there as ``part`` does in its own row."""
    return row_BLC.as_strided(part.shape, part.stride(), part.storage_offset())


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
    def of(cls, arguments: ScanArguments, *, backward: bool) -> _Call:
        check_scan(arguments)
        x, a, b, c, D, state, seq_idx, softplus, n_segments = arguments
        batch, length, n_heads, head_dim = x.shape
        tile = tile_on(x.device, x.dtype, b.shape[-1], head_dim)
        n_chunks = triton.cdiv(length, tile.chunk)
        if n_segments is None:
            resident = tile.backward.resident if backward else tile.forward.resident
            # More segments cost a pass of their own, so only as many as fill the device.
            n_segments = _segments_that_fill(x.device, batch * n_heads, n_chunks, resident)
        # Rounding chunks per segment up may leave the last segments empty: the others count.
        chunks_per_segment = triton.cdiv(n_chunks, n_segments)
        n_filled = triton.cdiv(n_chunks, chunks_per_segment)
        if state is not None:
            # fp32 between segments and calls: a bf16 state would lose the small terms of a long row.
            state = state.float()
        x, x_row = rows(x)
        b, b_row = rows(b)
        c, c_row = rows(c)
        return cls(
            x=x,
            a=a.contiguous(),
            b=b,
            c=c,
            D=_contiguous(D),
            state=_contiguous(state),
            seq_idx=_contiguous(seq_idx),
            softplus=softplus,
            x_row=x_row,
            b_row=b_row,
            c_row=c_row,
            tile=tile,
            n_segments=n_filled,
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
        """Grid of the main kernels.

        Heads change fastest: neighbors read the same cache lines where a head's row is narrower than one.
        """
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
        """Decays of every chunk, as `_decays` describes them."""
        wide: dict[str, Any] = {"device": self.x.device, "dtype": torch.float32}
        cum, from_start, to_end = torch.empty(3, *self.decay_shape, **wide)
        through = torch.empty(self.decay_shape[:3], **wide)
        decays = dict(cum=cum, from_start=from_start, to_end=to_end, through=through)
        with torch.cuda.device_of(self.x):
            _decays[self.decay_grid](a=self.a, **decays, **self.decay_options)
        return decays

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
        """Return the states before each segment, [B, S, H, P, N]; None where they are zero."""
        if self.n_segments == 1:
            return self.state
        return self._carry(
            self.x, self.x_row, self.b, self.b_row, self.decays["to_end"], self.state, reverse=False
        )

    def gradients_after_segments(self, dy: Tensor, dstate: Tensor | None) -> Tensor | None:
        """Return the gradients of the states after each segment, [B, S, H, P, N]; None where they are zero."""
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
        """Find what each segment adds to the state, then carry the states over, from the end if ``reverse``."""
        size = (self.batch, self.n_segments, *self.state_shape[1:])
        states = torch.empty(size, dtype=torch.float32, device=v.device)
        kept = torch.empty(size[:3], dtype=torch.float32, device=v.device)
        sizes = {name: self.sizes[name] for name in ("L", "H", "chunks_per_segment")}
        elements = size[3] * size[4]
        carry_grid = (self.n_heads, self.batch, triton.cdiv(elements, CARRY_BLOCK))
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
            _carry_over[carry_grid](
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


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    return tensor.contiguous()


def check_scan(arguments: ScanArguments) -> None:
    """Raise ValueError for arguments that do not fit one another or the kernels."""
    x, a, b, c, D, state, seq_idx, _, n_segments = arguments
    check_shape("x_BLHP", x, (None,) * 4, "BLHP")
    check_not_empty("x_BLHP", x)
    batch, length, n_heads, head_dim = x.shape
    check_shape("b_BLHN", b, (batch, length, n_heads, None), "BLHN")
    check_not_empty("b_BLHN", b)
    d_state = b.shape[-1]
    limits = (("head dim P", head_dim, LARGEST_HEAD_DIM), ("state size N", d_state, LARGEST_STATE))
    for name, size, largest in limits:
        if size > largest:
            raise ValueError(
                f"the {name} is {size}; the kernels hold at most {largest}: use the torch "
                "implementation."
            )
    check_dtype("x_BLHP", x)
    check_device("x_BLHP", x, x)
    others = (
        ("a_BLH", a, (batch, length, n_heads), DTYPES),
        ("b_BLHN", b, (batch, length, n_heads, d_state), (x.dtype,)),
        ("c_BLHN", c, (batch, length, n_heads, d_state), (x.dtype,)),
        ("D_H", D, (n_heads,), DTYPES),
        ("state_BHPN", state, (batch, n_heads, head_dim, d_state), DTYPES),
    )
    for name, tensor, shape, dtypes in others:
        if tensor is not None:
            _, _, dims = name.rpartition("_")
            check_shape(name, tensor, shape, dims)
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


def tile_on(device: torch.device, dtype: torch.dtype, d_state: int, head_dim: int) -> Tile:
    """Return the tile of a shape on a device, which may be that of fake tensors."""
    return tile_for(_capability(device), dtype, d_state, head_dim)


def _capability(device: torch.device) -> int:
    """Return the compute capability, 90 for an H100.

    The interpreter takes the same tiles, AMD's GPUs those of sm_80, which spill less on gfx942.
    """
    if torch.version.hip:
        return 80
    # A fake tensor's device need not exist.
    if device.type != "cuda" or not torch.cuda.is_available():
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _segments_that_fill(device: torch.device, programs: int, n_chunks: int, resident: int) -> int:
    """Return into how many segments a row is cut; 1 in the interpreter."""
    if device.type != "cuda":
        return 1
    n_processors = torch.cuda.get_device_properties(device).multi_processor_count
    return segments(programs, n_chunks, resident * n_processors)
