"""The recurrence of SSM heads, one forward and one backward pass with the state in registers.

Per head, with one decay per token, a skip D and a gate z (the last two optional):

    S_t = a_t S_{t-1} + x_t B_t^T        y_t = (S_t C_t + D x_t) silu(z_t)        log a = -softplus(raw)

A program owns one head of one row and walks over its chunks of Q tokens. With cum_i = sum_{s <= i} log a_s inside the
chunk and S the state before it, kept as [N, P] so that no product ever needs it transposed:

    scores_ij = (C_i . B_j) exp(cum_i - cum_j) for j <= i        y = scores x + exp(cum) C S
    S <- exp(cum_Q) S + B^T (exp(cum_Q - cum) x)

The backward walks in reverse with dS, the gradient of the state after the chunk, and the state before each chunk, which
the forward has stored. With dscores_ij = (dy_i . x_j) exp(cum_i - cum_j) for j <= i:

    dC = dscores B + exp(cum) dy S^T                             dB^T = C^T dscores + (dS x^T) exp(cum_Q - cum)
    dx = scores^T dy + exp(cum_Q - cum) B dS + D dy              dS <- exp(cum_Q) dS + C^T (exp(cum) dy)
    dlog a_t = sum_{i >= t > j} scores_ij (dy_i . x_j)           from a token before t to one after it
             + sum_{i >= t} exp(cum_i) dy_i . (S^T C_i)          from the state before to a token after t
             + sum_{j < t} exp(cum_Q - cum_j) x_j . (dS^T B_j)   from a token before t to the state after
             + exp(cum_Q) <dS, S>                                from state to state

scores^T is computed as B C^T, never by transposing what a product has left in registers: triton before 3.7.1 compiles
that wrongly for Hopper. Nothing is shared between programs, so results do not depend on the order they run in.

Where rows and heads are too few for the device, a row is cut into segments: one kernel finds what each adds to the
state, a small one carries the states over, and the main kernels then run on every segment at once.

Shapes: B batch, L length, H head, P head dim, N state size, Q tokens in a chunk, M chunks, S segments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from .common import (
    DTYPES,
    Compilation,
    check_device,
    check_dtype,
    check_not_empty,
    check_seq_idx,
    check_shape,
    dot_mode,
    mm,
    narrow,
    once,
    rows,
)

MIN_LOG_DECAY = tl.constexpr(-30.0)  # forgets all an fp32 state holds; lower values would only blur the sums
LOG2_E = tl.constexpr(1.4426950408889634)
LARGEST_STATE = LARGEST_HEAD_DIM = 128
LARGEST_FP32_BLOCK = {90: 64, 80: 32}  # architecture -> of N and of P, in one program
SMALLEST_BLOCK = 16  # of a dimension that a product contracts
MIN_CHUNKS_PER_SEGMENT = 4
CARRY_BLOCK = 1024
BACKWARD_KERNELS = {1: ("CBX",), 2: ("C", "BX"), 3: ("C", "B", "X")}  # the gradients each of them finds, in order


class Launch(NamedTuple):
    """Warps of a kernel, and how many chunks ahead it loads."""

    num_warps: int
    num_stages: int


class Tile(NamedTuple):
    """One entry of the tile table. The more kernels the backward is cut into, the fewer values each holds."""

    chunk: int
    forward: Launch
    backward: Launch
    n_backward: int = 1
    spills: int = 0  # instructions, known and accepted


# By architecture and the blocks of N and P. Chunks of 16 save twice the states that chunks of 32 do, a further kernel
# backward reads the inputs again: each entry is the first of (chunk, n_backward) = (32, 1), (16, 1), (32, 2), (16, 2),
# (32, 3), (16, 3) that keeps its values in registers, as compiled by triton 3.6.0
# (benchmarks/results/kernel_resources.json). Longer chunks spill hundreds of them.
_BF16_TILES = {
    (90, 16, 16): Tile(32, Launch(4, 2), Launch(4, 1), n_backward=1, spills=0),
    (90, 16, 32): Tile(16, Launch(4, 2), Launch(4, 1), n_backward=1, spills=0),
    (90, 16, 64): Tile(32, Launch(4, 2), Launch(4, 1), n_backward=1, spills=0),
    (90, 16, 128): Tile(32, Launch(8, 2), Launch(8, 1), n_backward=1, spills=0),
    (90, 32, 16): Tile(16, Launch(4, 2), Launch(4, 1), n_backward=1, spills=0),
    (90, 32, 32): Tile(16, Launch(4, 2), Launch(4, 1), n_backward=1, spills=0),
    (90, 32, 64): Tile(32, Launch(4, 2), Launch(4, 1), n_backward=1, spills=0),
    (90, 32, 128): Tile(16, Launch(4, 2), Launch(8, 1), n_backward=1, spills=0),
    (90, 64, 16): Tile(16, Launch(4, 2), Launch(8, 1), n_backward=1, spills=0),
    (90, 64, 32): Tile(16, Launch(4, 2), Launch(4, 1), n_backward=1, spills=0),
    (90, 64, 64): Tile(32, Launch(4, 2), Launch(8, 1), n_backward=1, spills=2),
    (90, 64, 128): Tile(32, Launch(8, 2), Launch(8, 1), n_backward=3, spills=0),
    (90, 128, 16): Tile(16, Launch(4, 2), Launch(4, 1), n_backward=2, spills=0),
    (90, 128, 32): Tile(16, Launch(4, 2), Launch(8, 1), n_backward=1, spills=0),
    (90, 128, 64): Tile(16, Launch(4, 2), Launch(8, 1), n_backward=2, spills=0),
    (90, 128, 128): Tile(16, Launch(8, 2), Launch(8, 1), n_backward=2, spills=0),
    (80, 16, 16): Tile(32, Launch(4, 2), Launch(8, 1), n_backward=1, spills=0),
    (80, 16, 32): Tile(16, Launch(4, 2), Launch(4, 1), n_backward=1, spills=0),
    (80, 16, 64): Tile(32, Launch(4, 2), Launch(4, 1), n_backward=1, spills=0),
    (80, 16, 128): Tile(16, Launch(4, 2), Launch(4, 1), n_backward=1, spills=0),
    (80, 32, 16): Tile(16, Launch(4, 2), Launch(4, 1), n_backward=1, spills=0),
    (80, 32, 32): Tile(16, Launch(4, 2), Launch(4, 1), n_backward=1, spills=0),
    (80, 32, 64): Tile(16, Launch(4, 2), Launch(8, 1), n_backward=1, spills=0),
    (80, 32, 128): Tile(16, Launch(4, 2), Launch(4, 1), n_backward=2, spills=0),
    (80, 64, 16): Tile(16, Launch(4, 2), Launch(4, 1), n_backward=1, spills=0),
    (80, 64, 32): Tile(16, Launch(4, 2), Launch(4, 1), n_backward=1, spills=0),
    (80, 64, 64): Tile(16, Launch(4, 2), Launch(8, 1), n_backward=1, spills=0),
    (80, 64, 128): Tile(32, Launch(8, 1), Launch(8, 1), n_backward=3, spills=0),
    (80, 128, 16): Tile(16, Launch(4, 2), Launch(4, 1), n_backward=2, spills=0),
    (80, 128, 32): Tile(16, Launch(4, 2), Launch(4, 1), n_backward=3, spills=0),
    (80, 128, 64): Tile(16, Launch(8, 2), Launch(8, 1), n_backward=3, spills=0),
    (80, 128, 128): Tile(16, Launch(8, 1), Launch(8, 1), n_backward=3, spills=34),
}
# To check by, not to train with: three products for one take twice the registers, so larger states run in blocks.
_FP32_TILES = {
    (90, 16, 16): Tile(16, Launch(8, 1), Launch(8, 1), n_backward=2, spills=0),
    (90, 16, 32): Tile(16, Launch(8, 1), Launch(8, 1), n_backward=1, spills=0),
    (90, 16, 64): Tile(16, Launch(8, 1), Launch(8, 1), n_backward=1, spills=0),
    (90, 32, 16): Tile(16, Launch(8, 1), Launch(8, 1), n_backward=3, spills=0),
    (90, 32, 32): Tile(16, Launch(8, 1), Launch(8, 1), n_backward=3, spills=0),
    (90, 32, 64): Tile(16, Launch(8, 1), Launch(8, 1), n_backward=3, spills=0),
    (90, 64, 16): Tile(16, Launch(8, 1), Launch(8, 1), n_backward=3, spills=0),
    (90, 64, 32): Tile(16, Launch(8, 1), Launch(8, 1), n_backward=3, spills=0),
    (90, 64, 64): Tile(16, Launch(8, 1), Launch(8, 1), n_backward=3, spills=0),
    (80, 16, 16): Tile(16, Launch(8, 1), Launch(8, 1), n_backward=1, spills=0),
    (80, 16, 32): Tile(16, Launch(8, 1), Launch(8, 1), n_backward=2, spills=0),
    (80, 32, 16): Tile(16, Launch(8, 1), Launch(8, 1), n_backward=3, spills=0),
    (80, 32, 32): Tile(16, Launch(8, 1), Launch(8, 1), n_backward=3, spills=0),
}
TILES = {(torch.bfloat16, *key): tile for key, tile in _BF16_TILES.items()}
TILES |= {(torch.float32, *key): tile for key, tile in _FP32_TILES.items()}


def tile_for(capability: int, dtype: torch.dtype, d_state: int, head_dim: int) -> Tile:
    """The entry of the tile table. ValueError where there is none."""
    architecture = _architecture(capability)
    key = (dtype, architecture, _block(d_state), _block(head_dim))
    if key not in TILES:
        raise ValueError(
            f"the float32 state has N={d_state} and P={head_dim}; one kernel holds at most "
            f"{LARGEST_FP32_BLOCK[architecture]} of each here: call `ssd`, which runs it in blocks."
        )
    return TILES[key]


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
    """y_BLHP in the dtype of x, and the state after the last token in fp32; differentiable in every float argument.

    ``a_BLH`` is the raw decay, log a = -softplus(raw), and -inf means "no decay"; with ``softplus=False`` it is log a.
    Below -30 log a counts as -30 and gets no gradient. ``state_BHPN`` is the state before the first token (zero if
    absent). ``seq_idx_BL`` numbers the documents packed in a row, ascending: the state restarts where the number
    changes, and a given state belongs to the first document. ``n_segments`` overrides how many parts of a row run at
    once, which otherwise follows from the shape and the device.

    bfloat16 inputs are multiplied as bf16 with fp32 sums, float32 ones nearly as fp32, a large N or P in blocks; states
    stay in fp32.

    Raises ValueError for shapes that do not fit, other dtypes, an empty x, N or P above 128, a falling seq_idx (looked
    at on a CPU, or with HYBRID_KERNELS_DEBUG=1).
    """
    given = (x_BLHP, a_BLH, b_BLHN, c_BLHN, D_H, z_BLHP, state_BHPN, seq_idx_BL)
    block = LARGEST_FP32_BLOCK[_architecture(_capability(x_BLHP.device))]
    if x_BLHP.dtype == torch.float32 and max(x_BLHP.shape[-1], b_BLHN.shape[-1]) > block:
        _check(*given, n_segments)
        return _in_blocks(block, *given, softplus, n_segments)
    return _SSD.apply(*given, softplus, n_segments)


def _in_blocks(
    block: int, x, a, b, c, D, z, state, seq_idx, softplus: bool, n_segments: int | None
) -> tuple[Tensor, Tensor]:
    """`ssd` block by block of the state, none of which enters another; y sums over N, so skip and gate come last."""

    def blocks(size: int) -> list[slice]:
        return [slice(first, first + block) for first in range(0, size, block)]

    def run(p: slice, n: slice) -> tuple[Tensor, Tensor]:
        before = None if state is None else state[:, :, p, n]
        return _SSD.apply(x[..., p], a, b[..., n], c[..., n], None, None, before, seq_idx, softplus, n_segments)

    runs = [[run(p, n) for n in blocks(b.shape[-1])] for p in blocks(x.shape[-1])]
    y = torch.cat([torch.stack([y for y, _ in same_p]).sum(0) for same_p in runs], dim=-1)
    final = torch.cat([torch.cat([final for _, final in same_p], dim=-1) for same_p in runs], dim=-2)
    if D is not None:
        y = y + D.unsqueeze(-1) * x
    return y if z is None else y * F.silu(z), final


class _SSD(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, a, b, c, D, z, state, seq_idx, softplus, n_segments) -> tuple[Tensor, Tensor]:
        options = dict(D_H=D, z_BLHP=z, state_BHPN=state, seq_idx_BL=seq_idx, softplus=softplus, n_segments=n_segments)
        needs_gradient = any(ctx.needs_input_grad)
        y, final, chunk_states = ssd_forward(x, a, b, c, **options, save_chunk_states=needs_gradient)
        ctx.save_for_backward(x, a, b, c, D, z, state, seq_idx, chunk_states)
        ctx.softplus, ctx.n_segments = softplus, n_segments
        ctx.set_materialize_grads(False)
        return y, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dstate: Tensor | None) -> tuple[Tensor | None, ...]:
        x, a, b, c, D, z, state, seq_idx, chunk_states = ctx.saved_tensors
        gradients = ssd_backward(
            torch.zeros_like(x) if dy is None else dy, dstate, chunk_states, x, a, b, c,
            D_H=D, z_BLHP=z, state_BHPN=state, seq_idx_BL=seq_idx, softplus=ctx.softplus, n_segments=ctx.n_segments,
        )  # fmt: skip
        return *gradients, None, None, None


class Gradients(NamedTuple):
    """Each in the dtype of what it is the gradient of; None for what was absent."""

    x_BLHP: Tensor
    a_BLH: Tensor
    b_BLHN: Tensor
    c_BLHN: Tensor
    D_H: Tensor | None
    z_BLHP: Tensor | None
    state_BHPN: Tensor | None


def ssd_forward(
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
    save_chunk_states: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`ssd` without autograd: y_BLHP, the final state_BHPN, and the states before each chunk, [B, M, H, N, P].

    The last are what `ssd_backward` needs, in the dtype of x; None without ``save_chunk_states``.
    """
    call = _Call.of(x_BLHP, a_BLH, b_BLHN, c_BLHN, D_H, z_BLHP, state_BHPN, seq_idx_BL, softplus, n_segments)
    before = call.states_before_segments()
    y = torch.empty(call.shape, dtype=call.x.dtype, device=call.x.device)
    final = torch.empty(call.state_shape, dtype=torch.float32, device=call.x.device)
    chunk_states = None
    if save_chunk_states:
        chunk_states = torch.empty(call.chunk_states_shape, dtype=call.x.dtype, device=call.x.device)
    with torch.cuda.device_of(call.x):
        _forward[call.grid](
            **call.tensors, before=before, y=y, final=final, chunk_states=chunk_states,
            **call.sizes, **call.constants, HAS_BEFORE=before is not None, SAVE=save_chunk_states,
            **call.tile.forward._asdict(),
        )  # fmt: skip
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
    z_BLHP: Tensor | None = None,
    state_BHPN: Tensor | None = None,
    seq_idx_BL: Tensor | None = None,
    softplus: bool = True,
    n_segments: int | None = None,
) -> Gradients:
    """The gradients of `ssd_forward`'s arguments, from those of y and of the final state (None for zero)."""
    call = _Call.of(x_BLHP, a_BLH, b_BLHN, c_BLHN, D_H, z_BLHP, state_BHPN, seq_idx_BL, softplus, n_segments)
    check_shape("dy_BLHP", dy_BLHP, call.shape, "BLHP")
    check_shape("chunk_states", chunk_states, call.chunk_states_shape, "BMHNP")
    dy = dy_BLHP.to(call.x.dtype).contiguous()
    if dstate_BHPN is not None:
        check_shape("dstate_BHPN", dstate_BHPN, call.state_shape, "BHPN")
        dstate_BHPN = dstate_BHPN.float().contiguous()
    after = call.gradients_after_segments(dy, dstate_BHPN)

    like: dict[str, Any] = {"device": call.x.device, "dtype": call.x.dtype}
    wide: dict[str, Any] = {"device": call.x.device, "dtype": torch.float32}
    dx, dz = torch.empty(call.shape, **like), None if call.z is None else torch.empty(call.shape, **like)
    db, dc = torch.empty(b_BLHN.shape, **like), torch.empty(c_BLHN.shape, **like)
    da = torch.empty_like(call.a)
    partial = torch.empty(a_BLH.shape, **wide) if call.tile.n_backward > 1 else None
    dD = None if D_H is None else torch.empty(call.batch, call.n_segments, call.n_heads, **wide)
    dstate = None if state_BHPN is None else torch.empty(call.state_shape, **wide)
    with torch.cuda.device_of(call.x):
        for gradients in BACKWARD_KERNELS[call.tile.n_backward]:
            _backward[call.grid](
                **call.tensors, dy=dy, chunk_states=chunk_states, after=after,
                dx=dx, da=da, db=db, dc=dc, dD=dD, dz=dz, dstate=dstate, partial=partial,
                **call.sizes, **call.constants, HAS_AFTER=after is not None, HAS_STATE=dstate is not None,
                **_wanted(gradients),
                **call.tile.backward._asdict(),
            )  # fmt: skip
    return Gradients(
        dx, da, db, dc,
        None if dD is None or D_H is None else dD.sum((0, 1)).to(D_H.dtype),
        dz,
        None if dstate is None or state_BHPN is None else dstate.to(state_BHPN.dtype),
    )  # fmt: skip


def compilations(capability: int) -> list[Compilation]:
    """Every entry of the tile table with all options on, for compiling ahead of time."""
    found = []
    for (dtype, architecture, block_n, block_p), tile in TILES.items():
        if architecture != _architecture(capability):
            continue
        element = "*bf16" if dtype == torch.bfloat16 else "*fp32"
        constants = dict(
            P=block_p, N=block_n, BLOCK_P=block_p, BLOCK_N=block_n, Q=tile.chunk, SOFTPLUS=True, PACKED=True,
            HAS_D=True, HAS_Z=True, HAS_BEFORE=True, HAS_AFTER=True, HAS_STATE=True, SAVE=True,
            MODE="gpu" if dtype == torch.bfloat16 else "tf32x3",
        )  # fmt: skip
        kernels = [
            ("forward", _forward, tile.forward, {}),
            ("segments", _segment_states, tile.forward, {"REVERSE": True}),
        ]
        for gradients in BACKWARD_KERNELS[tile.n_backward]:
            kernels.append((f"backward {gradients}", _backward, tile.backward, _wanted(gradients)))
        for name, kernel, launch, more in kernels:
            known = constants | more
            arguments = {
                argument: known[argument] if argument in known else _RUNTIME_TYPES.get(argument, element)
                for argument in kernel.arg_names
            }
            found.append(
                Compilation(
                    name=f"ssd {name} N={block_n} P={block_p} {str(dtype).removeprefix('torch.')}",
                    kernel=kernel,
                    arguments=arguments,
                    constants=frozenset(known) & frozenset(arguments),
                    divisible=frozenset(arguments) - frozenset(known) - {"L", "H", "chunks_per_segment"},
                    max_spills=tile.spills,
                    **launch._asdict(),
                )
            )
    return found


def _wanted(gradients: str) -> dict[str, bool]:
    return {f"GRAD_{name}": name in gradients for name in "CBX"}


_RUNTIME_TYPES = dict.fromkeys(
    ("a", "D", "before", "after", "final", "states", "through", "da", "dD", "dstate", "partial"), "*fp32"
)
_RUNTIME_TYPES |= dict.fromkeys(("L", "H", "chunks_per_segment", "x_row", "b_row", "c_row", "v_row", "k_row"), "i32")
_RUNTIME_TYPES |= {"seq_idx": "*i64"}


@dataclass(frozen=True)
class _Call:
    """Checked arguments, laid out for the kernels, and how they are launched."""

    x: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    D: Tensor | None
    z: Tensor | None
    state: Tensor | None
    seq_idx: Tensor | None
    softplus: bool
    x_row: int
    b_row: int
    c_row: int
    tile: Tile
    n_segments: int

    @classmethod
    def of(cls, x, a, b, c, D, z, state, seq_idx, softplus: bool, n_segments: int | None) -> _Call:
        _check(x, a, b, c, D, z, state, seq_idx, n_segments)
        batch, length, n_heads, head_dim = x.shape
        tile = tile_for(_capability(x.device), x.dtype, b.shape[-1], head_dim)
        n_chunks = triton.cdiv(length, tile.chunk)
        wanted = n_segments or _segments_that_fill(x.device, batch * n_heads, n_chunks)
        (x, x_row), (b, b_row), (c, c_row) = rows(x), rows(b), rows(c)
        return cls(
            x=x, a=a.contiguous(), b=b, c=c,
            D=None if D is None else D.contiguous(),
            z=None if z is None else z.contiguous(),
            state=None if state is None else state.float().contiguous(),
            seq_idx=None if seq_idx is None else seq_idx.contiguous(),
            softplus=softplus, x_row=x_row, b_row=b_row, c_row=c_row, tile=tile,
            n_segments=triton.cdiv(n_chunks, triton.cdiv(n_chunks, wanted)),
        )  # fmt: skip

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
        """Heads change fastest: neighbours read the same cache lines where a head's row is narrower than one."""
        return (self.n_heads, self.batch, self.n_segments)

    @property
    def tensors(self) -> dict[str, Tensor | None]:
        return dict(x=self.x, a=self.a, b=self.b, c=self.c, D=self.D, z=self.z, seq_idx=self.seq_idx)

    @property
    def sizes(self) -> dict[str, int]:
        return dict(
            L=self.x.shape[1], H=self.n_heads, chunks_per_segment=triton.cdiv(self.n_chunks, self.n_segments),
            x_row=self.x_row, b_row=self.b_row, c_row=self.c_row,
        )  # fmt: skip

    @property
    def constants(self) -> dict[str, Any]:
        return dict(HAS_D=self.D is not None, **self._constants(gated=self.z is not None))

    def _constants(self, gated: bool) -> dict[str, Any]:
        head_dim, d_state = self.state_shape[2:]
        return dict(
            P=head_dim, N=d_state, BLOCK_P=_block(head_dim), BLOCK_N=_block(d_state), Q=self.tile.chunk,
            SOFTPLUS=self.softplus, HAS_Z=gated, PACKED=self.seq_idx is not None, MODE=dot_mode(self.x.dtype),
        )  # fmt: skip

    def states_before_segments(self) -> Tensor | None:
        """[B, S, H, P, N], or None where they are zero."""
        if self.n_segments == 1:
            return self.state
        return self._carry(self.x, self.x_row, self.b, self.b_row, None, self.state, reverse=False)

    def gradients_after_segments(self, dy: Tensor, dstate: Tensor | None) -> Tensor | None:
        """Those of the states after each segment, [B, S, H, P, N], or None where they are zero."""
        if self.n_segments == 1:
            return dstate
        return self._carry(dy, dy[0, 0].numel(), self.c, self.c_row, self.z, dstate, reverse=True)

    def _carry(
        self, v: Tensor, v_row: int, k: Tensor, k_row: int, z: Tensor | None, first: Tensor | None, *, reverse: bool
    ) -> Tensor:
        size = (self.batch, self.n_segments, *self.state_shape[1:])
        states = torch.empty(size, dtype=torch.float32, device=v.device)
        through = torch.empty(size[:3], dtype=torch.float32, device=v.device)
        sizes = {name: self.sizes[name] for name in ("L", "H", "chunks_per_segment")}
        elements = size[3] * size[4]
        with torch.cuda.device_of(v):
            _segment_states[self.grid](
                v=v, k=k, a=self.a, z=z, seq_idx=self.seq_idx, states=states, through=through,
                **sizes, v_row=v_row, k_row=k_row, **self._constants(gated=z is not None), REVERSE=reverse,
                **self.tile.forward._asdict(),
            )  # fmt: skip
            _carry_over[(self.n_heads, self.batch, triton.cdiv(elements, CARRY_BLOCK))](
                states=states, through=through, first=first, H=self.n_heads, n_segments=self.n_segments,
                SIZE=elements, BLOCK=CARRY_BLOCK, HAS_FIRST=first is not None, REVERSE=reverse,
            )  # fmt: skip
        return states


def _check(x, a, b, c, D, z, state, seq_idx, n_segments: int | None) -> None:
    check_shape("x_BLHP", x, (None,) * 4, "BLHP")
    check_not_empty("x_BLHP", x)
    batch, length, n_heads, head_dim = x.shape
    check_shape("b_BLHN", b, (batch, length, n_heads, None), "BLHN")
    check_not_empty("b_BLHN", b)
    d_state = b.shape[-1]
    for name, size, largest in (("head dim P", head_dim, LARGEST_HEAD_DIM), ("state size N", d_state, LARGEST_STATE)):
        if size > largest:
            raise ValueError(f"the {name} is {size}; the kernels hold at most {largest}: use the torch implementation.")
    check_dtype("x_BLHP", x)
    given = (
        ("a_BLH", a, (batch, length, n_heads), DTYPES),
        ("b_BLHN", b, (batch, length, n_heads, d_state), (x.dtype,)),
        ("c_BLHN", c, (batch, length, n_heads, d_state), (x.dtype,)),
        ("D_H", D, (n_heads,), DTYPES),
        ("z_BLHP", z, (batch, length, n_heads, head_dim), (x.dtype,)),
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
        raise ValueError(f"n_segments is {n_segments}; it counts parts of a row: pass at least 1, or None to choose.")


def _block(size: int) -> int:
    return max(SMALLEST_BLOCK, triton.next_power_of_2(size))


def _capability(device: torch.device) -> int:
    """90 for an H100; the interpreter takes the same tiles."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _architecture(capability: int) -> int:
    """The one whose tiles are used: what fits Hopper is used on all that is newer."""
    return 90 if capability >= 90 else 80


def _segments_that_fill(device: torch.device, programs: int, n_chunks: int) -> int:
    """Two programs per multiprocessor, unless one each is there already: cutting a row reads x and B once more."""
    if device.type != "cuda":
        return 1
    n_processors = torch.cuda.get_device_properties(device).multi_processor_count
    if programs >= n_processors:
        return 1
    return max(1, min(triton.cdiv(2 * n_processors, programs), n_chunks // MIN_CHUNKS_PER_SEGMENT))


@triton.jit
def _log_decay(a, n_valid, H, Q: tl.constexpr, SOFTPLUS: tl.constexpr):
    """log a of a chunk's tokens, 0 past the end, and its derivative by what was given."""
    q = tl.arange(0, Q)
    given = tl.load(a + q * H, mask=q < n_valid, other=float("-inf") if SOFTPLUS else 0.0).to(tl.float32)
    if SOFTPLUS:
        e = tl.exp2(-tl.abs(given) * LOG2_E)
        one_e = 1.0 + e
        rounded_off = one_e == 1.0
        log1p = tl.where(rounded_off, e, tl.log(one_e) * e / tl.where(rounded_off, 1.0, one_e - 1.0))
        log_a = -tl.maximum(given, 0.0) - log1p
        slope = -tl.where(given > 0.0, 1.0, e) / one_e
    else:
        log_a = given
        slope = tl.full([Q], 1.0, tl.float32)
    floored = log_a < MIN_LOG_DECAY
    return tl.where(floored, MIN_LOG_DECAY, log_a), tl.where(floored, 0.0, slope)


@triton.jit
def _add_within(sum_0, begins_0, sum_1, begins_1):
    """For `tl.associative_scan`: a sum that starts anew wherever a document begins."""
    return tl.where(begins_1 != 0, sum_1, sum_0 + sum_1), begins_0 | begins_1


@triton.jit
def _documents(seq_idx, row, token, L):
    """The documents of some tokens of a row; what is before or after the row is of its first or last one."""
    return tl.load(seq_idx + row * L + tl.minimum(tl.maximum(token, 0), L - 1)).to(tl.int32)


@triton.jit
def _decays(a, seq_idx, row, head, start, L, H, Q: tl.constexpr, SOFTPLUS: tl.constexpr, PACKED: tl.constexpr):
    """Return the log2 of the decay up to each token of a chunk, from where its document or the chunk starts; the decays
    from its start to each token, from each token to its end, and over all of it, 0 where another document begins
    on the way; d log a; and each token's document. No bit of one document enters another's."""
    q = tl.arange(0, Q)
    log_a, slope = _log_decay(a + (row * L + start) * H + head, L - start, H, Q, SOFTPLUS)
    log2_a = log_a * LOG2_E
    document = q
    if PACKED:
        document = _documents(seq_idx, row, start + q, L)
        incoming = _documents(seq_idx, row, start - 1, L)
        last = _documents(seq_idx, row, start + Q - 1, L)
        begins = (document != _documents(seq_idx, row, start + q - 1, L)).to(tl.int32)
        cum, _ = tl.associative_scan((log2_a, begins), 0, _add_within)
        total = tl.sum(tl.where(document == last, log2_a, 0.0), 0)
        from_start = tl.where(document == incoming, tl.exp2(cum), 0.0)
        to_end = tl.where(document == last, tl.exp2(total - cum), 0.0)
        through = tl.where(incoming == last, tl.exp2(total), 0.0)
    else:
        cum = tl.cumsum(log2_a, 0)
        total = tl.sum(log2_a, 0)
        from_start, to_end, through = tl.exp2(cum), tl.exp2(total - cum), tl.exp2(total)
    return cum, from_start, to_end, through, slope, document


@triton.jit
def _decay_QQ(cum, document, Q: tl.constexpr, PACKED: tl.constexpr, TRANSPOSED: tl.constexpr):
    """The decay from token j to token i as [i, j], or as [j, i] if TRANSPOSED; 0 where i does not see j."""
    q = tl.arange(0, Q)
    if TRANSPOSED:
        seen = q[:, None] <= q[None, :]
        log2_decay = cum[None, :] - cum[:, None]
    else:
        seen = q[:, None] >= q[None, :]
        log2_decay = cum[:, None] - cum[None, :]
    if PACKED:
        seen = seen & (document[:, None] == document[None, :])
    return tl.exp2(tl.where(seen, log2_decay, float("-inf")))


@triton.jit
def _load(start, n_valid, row, WIDTH: tl.constexpr, Q: tl.constexpr, BLOCK: tl.constexpr):
    """A chunk's rows as [Q, BLOCK], 0 past the end of the sequence and of the row.

    Offsets are int64 although they fit 32 bits: then a thread keeps one address a row, and the compiler adds columns to
    it in the instruction; from 32 bits it keeps every element's offset in a register all through the loop.
    """
    q, w = tl.arange(0, Q)[:, None], tl.arange(0, BLOCK)[None, :]
    mask = q < n_valid
    if BLOCK > WIDTH:
        mask = mask & (w < WIDTH)
    return tl.load(start + q.to(tl.int64) * row + w, mask=mask, other=0.0)


@triton.jit
def _store(start, rows, n_valid, row, WIDTH: tl.constexpr, TRANSPOSED: tl.constexpr, MODE: tl.constexpr):
    """The counterpart of `_load`, for [Q, BLOCK], or for [BLOCK, Q] if TRANSPOSED."""
    BLOCK: tl.constexpr = rows.shape[0] if TRANSPOSED else rows.shape[1]
    if TRANSPOSED:
        q, w = tl.arange(0, rows.shape[1])[None, :], tl.arange(0, BLOCK)[:, None]
    else:
        q, w = tl.arange(0, rows.shape[0])[:, None], tl.arange(0, BLOCK)[None, :]
    mask = q < n_valid
    if BLOCK > WIDTH:
        mask = mask & (w < WIDTH)
    tl.store(start + q.to(tl.int64) * row + w, narrow(rows, start.dtype.element_ty, MODE), mask=mask)


@triton.jit
def _load_state(
    start, n_stride: tl.constexpr, p_stride: tl.constexpr,
    N: tl.constexpr, P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """A state as [BLOCK_N, BLOCK_P], 0 where it has no element."""
    n, p = tl.arange(0, BLOCK_N)[:, None], tl.arange(0, BLOCK_P)[None, :]
    return tl.load(start + n.to(tl.int64) * n_stride + p * p_stride, mask=(n < N) & (p < P), other=0.0)


@triton.jit
def _store_state(
    start, state_NP, n_stride: tl.constexpr, p_stride: tl.constexpr,
    N: tl.constexpr, P: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """The counterpart of `_load_state`."""
    n, p = tl.arange(0, state_NP.shape[0])[:, None], tl.arange(0, state_NP.shape[1])[None, :]
    state_NP = narrow(state_NP, start.dtype.element_ty, MODE)
    tl.store(start + n.to(tl.int64) * n_stride + p * p_stride, state_NP, mask=(n < N) & (p < P))


@triton.jit
def _forward(
    x, a, b, c, D, z, seq_idx, before,
    y, final, chunk_states,
    L, H, chunks_per_segment, x_row, b_row, c_row,
    P: tl.constexpr, N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, Q: tl.constexpr,
    SOFTPLUS: tl.constexpr, PACKED: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr,
    HAS_BEFORE: tl.constexpr, SAVE: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    head, row, segment = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    n_chunks, n_segments = tl.cdiv(L, Q), tl.num_programs(2)

    state_NP = tl.zeros([BLOCK_N, BLOCK_P], tl.float32)
    if HAS_BEFORE:
        incoming = before + ((row * n_segments + segment) * H + head) * (P * N)
        state_NP += _load_state(incoming, 1, N, N, P, BLOCK_N, BLOCK_P)

    first = segment * chunks_per_segment
    for chunk in range(first, tl.minimum(first + chunks_per_segment, n_chunks)):
        start = chunk * Q
        token, n_valid = row * L + start, L - start
        cum, from_start, to_end, through, _, document = _decays(a, seq_idx, row, head, start, L, H, Q, SOFTPLUS, PACKED)
        x_QP = _load(x + token * x_row + head * P, n_valid, x_row, P, Q, BLOCK_P)
        b_QN = _load(b + token * b_row + head * N, n_valid, b_row, N, Q, BLOCK_N)
        c_QN = _load(c + token * c_row + head * N, n_valid, c_row, N, Q, BLOCK_N)
        if SAVE:
            saved = chunk_states + ((row * n_chunks + chunk) * H + head) * (N * P)
            _store_state(saved, state_NP, P, 1, N, P, MODE)

        scores_QQ = mm(c_QN, tl.trans(b_QN), MODE) * _decay_QQ(cum, document, Q, PACKED, False)
        y_QP = mm(c_QN, state_NP, MODE) * from_start[:, None]
        state_NP = state_NP * through + mm(tl.trans(b_QN), x_QP.to(tl.float32) * to_end[:, None], MODE)
        # Last, as the last product decides how the compiler spreads all of them over the warps: by the shape of the
        # state, it would let every warp compute all of y.
        y_QP += mm(scores_QQ, x_QP, MODE)

        if HAS_D:
            y_QP += tl.load(D + head).to(tl.float32) * x_QP.to(tl.float32)
        if HAS_Z:
            z_QP = _load(z + (token * H + head) * P, n_valid, H * P, P, Q, BLOCK_P).to(tl.float32)
            y_QP *= z_QP * _sigmoid(z_QP)
        _store(y + (token * H + head) * P, y_QP, n_valid, H * P, P, False, MODE)

    if segment == n_segments - 1:
        _store_state(final + (row * H + head) * (P * N), state_NP, 1, N, N, P, MODE)


@triton.jit
def _sigmoid(z):
    return 1.0 / (1.0 + tl.exp2(-z * LOG2_E))


@triton.jit
def _gate(y, z, MODE: tl.constexpr):
    """y silu(z), as the operand of products."""
    z = z.to(tl.float32)
    return once(y.to(tl.float32) * z * _sigmoid(z), MODE)


@triton.jit
def _dsilu(z):
    open = _sigmoid(z)
    return open * (1.0 + z * (1.0 - open))


@triton.jit
def _backward(
    x, a, b, c, D, z, seq_idx, dy, chunk_states, after,
    dx, da, db, dc, dD, dz, dstate, partial,
    L, H, chunks_per_segment, x_row, b_row, c_row,
    P: tl.constexpr, N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, Q: tl.constexpr,
    SOFTPLUS: tl.constexpr, PACKED: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr,
    HAS_AFTER: tl.constexpr, HAS_STATE: tl.constexpr, GRAD_C: tl.constexpr, GRAD_B: tl.constexpr, GRAD_X: tl.constexpr,
    MODE: tl.constexpr,
):  # fmt: skip
    """All gradients, or some: of C, z and D (GRAD_C), of B (GRAD_B), of x, the decay and the first state (GRAD_X).

    GRAD_C without GRAD_X leaves its part of the decay's gradient in ``partial``, for the kernel that comes later.
    """
    head, row, segment = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    n_chunks, n_segments = tl.cdiv(L, Q), tl.num_programs(2)
    q = tl.arange(0, Q)

    dstate_NP = tl.zeros([BLOCK_N, BLOCK_P], tl.float32)
    if HAS_AFTER:
        incoming = after + ((row * n_segments + segment) * H + head) * (P * N)
        dstate_NP += _load_state(incoming, 1, N, N, P, BLOCK_N, BLOCK_P)
    dskip = 0.0

    first = segment * chunks_per_segment
    n_own = tl.minimum(chunks_per_segment, n_chunks - first)
    for step in range(0, n_own):
        chunk = first + n_own - 1 - step
        start = chunk * Q
        token, n_valid = row * L + start, L - start
        own_P, own_N = (token * H + head) * P, (token * H + head) * N
        cum, from_start, to_end, through, slope, document = _decays(
            a, seq_idx, row, head, start, L, H, Q, SOFTPLUS, PACKED
        )
        x_QP = _load(x + token * x_row + head * P, n_valid, x_row, P, Q, BLOCK_P)
        b_QN = _load(b + token * b_row + head * N, n_valid, b_row, N, Q, BLOCK_N)
        c_QN = _load(c + token * c_row + head * N, n_valid, c_row, N, Q, BLOCK_N)
        saved = chunk_states + ((row * n_chunks + chunk) * H + head) * (N * P)
        state_NP = _load_state(saved, P, 1, N, P, BLOCK_N, BLOCK_P)
        decay_QQ = _decay_QQ(cum, document, Q, PACKED, False)
        dlog_a = tl.zeros([Q], tl.float32)
        if GRAD_X:
            dlog_a += through * tl.sum(dstate_NP * state_NP.to(tl.float32))

        if GRAD_C:
            products_QQ = mm(c_QN, tl.trans(b_QN), MODE)
            if HAS_Z:
                y_QP = mm(c_QN, state_NP, MODE) * from_start[:, None]
                y_QP += mm(products_QQ * decay_QQ, x_QP, MODE)
                if HAS_D:
                    y_QP += tl.load(D + head).to(tl.float32) * x_QP.to(tl.float32)
                z_QP = _load(z + own_P, n_valid, H * P, P, Q, BLOCK_P).to(tl.float32)
                y_QP *= _load(dy + own_P, n_valid, H * P, P, Q, BLOCK_P).to(tl.float32) * _dsilu(z_QP)
                _store(dz + own_P, y_QP, n_valid, H * P, P, False, MODE)

        dy_QP = _load(dy + own_P, n_valid, H * P, P, Q, BLOCK_P)
        if HAS_Z:  # loaded once more rather than kept: registers are what is short
            dy_QP = _gate(dy_QP, _load(z + own_P, n_valid, H * P, P, Q, BLOCK_P), MODE)
        if GRAD_C or GRAD_B:
            dscores_QQ = mm(dy_QP, tl.trans(x_QP), MODE) * decay_QQ

        if GRAD_C:
            if HAS_D:
                dskip += tl.sum(dy_QP.to(tl.float32) * x_QP.to(tl.float32))
            # Of one matrix of fp32 products: the terms that must cancel do, to the last bits.
            across_QQ = tl.where(q[:, None] > q[None, :], products_QQ * dscores_QQ, 0.0)
            dc_QN = mm(dy_QP, tl.trans(state_NP), MODE) * from_start[:, None]
            to_tokens = tl.sum(across_QQ, 1) + tl.sum(dc_QN * c_QN.to(tl.float32), 1)
            to_tokens -= tl.sum(across_QQ, 0)
            if PACKED:
                seen = (q[:, None] >= q[None, :]) & (document[:, None] == document[None, :])
                dlog_a += tl.sum(tl.where(seen, to_tokens[:, None], 0.0), 0)
            else:
                dlog_a += tl.cumsum(to_tokens, 0, reverse=True)
            dc_QN += mm(dscores_QQ, b_QN, MODE)
            _store(dc + own_N, dc_QN, n_valid, H * N, N, False, MODE)

        if GRAD_B:
            db_NQ = mm(dstate_NP, tl.trans(x_QP), MODE) * to_end[None, :]
            db_NQ += mm(tl.trans(c_QN), dscores_QQ, MODE)
            _store(db + own_N, db_NQ, n_valid, H * N, N, True, MODE)

        if GRAD_X:
            dx_QP = mm(b_QN, dstate_NP, MODE) * to_end[:, None]
            from_tokens = tl.sum(dx_QP * x_QP.to(tl.float32), 1)
            dlog_a += tl.sum(tl.where(q[:, None] < q[None, :], from_tokens[:, None], 0.0), 0)
            scores_T_QQ = mm(b_QN, tl.trans(c_QN), MODE) * _decay_QQ(cum, document, Q, PACKED, True)

        if GRAD_X or GRAD_B:
            to_state_QP = dy_QP.to(tl.float32) * from_start[:, None]
            dstate_NP = dstate_NP * through + mm(tl.trans(c_QN), to_state_QP, MODE)

        if GRAD_X:
            dx_QP += mm(scores_T_QQ, dy_QP, MODE)  # last, as in the forward
            if HAS_D:
                dx_QP += tl.load(D + head).to(tl.float32) * dy_QP.to(tl.float32)
            _store(dx + own_P, dx_QP, n_valid, H * P, P, False, MODE)

        place = token * H + head + q * H
        if GRAD_X:
            if not GRAD_C:
                dlog_a += tl.load(partial + place, mask=q < n_valid, other=0.0)
            tl.store(da + place, narrow(dlog_a * slope, da.dtype.element_ty, MODE), mask=q < n_valid)
        elif GRAD_C:
            tl.store(partial + place, dlog_a, mask=q < n_valid)

    if GRAD_C and HAS_D:
        tl.store(dD + (row * n_segments + segment) * H + head, dskip)
    if GRAD_X and HAS_STATE and segment == 0:
        _store_state(dstate + (row * H + head) * (P * N), dstate_NP, 1, N, N, P, MODE)


@triton.jit
def _segment_states(
    v, k, a, z, seq_idx, states, through,
    L, H, chunks_per_segment, v_row, k_row,
    P: tl.constexpr, N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, Q: tl.constexpr,
    SOFTPLUS: tl.constexpr, PACKED: tl.constexpr, HAS_Z: tl.constexpr, REVERSE: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Compute what a segment adds to the state, and how much of the state before it passes through.

    With (v, k) = (x, B) from left to right; with (dy, C) and REVERSE for the gradient of the state, right to left.
    """
    head, row, segment = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    place_of_segment = (row * tl.num_programs(2) + segment) * H + head
    first = segment * chunks_per_segment
    n_own = tl.minimum(chunks_per_segment, tl.cdiv(L, Q) - first)

    state_NP = tl.zeros([BLOCK_N, BLOCK_P], tl.float32)
    kept = 1.0
    for step in range(0, n_own):
        chunk = first + (n_own - 1 - step if REVERSE else step)
        start = chunk * Q
        token, n_valid = row * L + start, L - start
        _, from_start, to_end, through_chunk, _, _ = _decays(a, seq_idx, row, head, start, L, H, Q, SOFTPLUS, PACKED)
        weight = from_start if REVERSE else to_end
        v_QP = _load(v + token * v_row + head * P, n_valid, v_row, P, Q, BLOCK_P).to(tl.float32)
        k_QN = _load(k + token * k_row + head * N, n_valid, k_row, N, Q, BLOCK_N)
        if HAS_Z:
            z_QP = _load(z + (token * H + head) * P, n_valid, H * P, P, Q, BLOCK_P).to(tl.float32)
            v_QP = v_QP * z_QP * _sigmoid(z_QP)
        state_NP = state_NP * through_chunk + mm(tl.trans(k_QN), v_QP * weight[:, None], MODE)
        kept = kept * through_chunk

    _store_state(states + place_of_segment * (P * N), state_NP, 1, N, N, P, MODE)
    tl.store(through + place_of_segment, kept)


@triton.jit
def _carry_over(
    states, through, first, H, n_segments,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, HAS_FIRST: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """In place: what each segment adds becomes the state that reaches it."""
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    element = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    state = tl.zeros([BLOCK], tl.float32)
    if HAS_FIRST:
        state += tl.load(first + (row * H + head) * SIZE + element, mask=element < SIZE, other=0.0)
    for step in range(0, n_segments):
        segment = n_segments - 1 - step if REVERSE else step
        place_of_segment = (row * n_segments + segment) * H + head
        place = states + place_of_segment * SIZE + element
        added = tl.load(place, mask=element < SIZE, other=0.0)
        tl.store(place, state, mask=element < SIZE)
        state = state * tl.load(through + place_of_segment) + added
