"""Triton kernels of the recurrence (mathematics: `ssd`), and their configurations for compiling ahead of time."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .common import Compilation, mm, narrow, once
from .ssd_tiles import BACKWARD_KERNELS, TILES, architecture_of

MIN_LOG_DECAY = tl.constexpr(-30.0)  # forgets all an fp32 state holds; lower values would only blur the sums
LOG2_E = tl.constexpr(1.4426950408889634)


def compilations(capability: int) -> list[Compilation]:
    """Every entry of the tile table with all options on, for compiling ahead of time."""
    found = []
    for (dtype, architecture, block_n, block_p), tile in TILES.items():
        if architecture != architecture_of(capability):
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
            kernels.append((f"backward {gradients}", _backward, tile.backward, wanted(gradients)))
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


def wanted(gradients: str) -> dict[str, bool]:
    """Return which gradients a backward kernel finds, as its arguments."""
    return {f"GRAD_{name}": name in gradients for name in "CBX"}


_RUNTIME_TYPES = dict.fromkeys(
    ("a", "D", "before", "after", "final", "states", "through", "da", "dD", "dstate", "partial"), "*fp32"
)
_RUNTIME_TYPES |= dict.fromkeys(("L", "H", "chunks_per_segment", "x_row", "b_row", "c_row", "v_row", "k_row"), "i32")
_RUNTIME_TYPES |= {"seq_idx": "*i64"}


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


@triton.jit(do_not_specialize=["L", "chunks_per_segment"])
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


@triton.jit(do_not_specialize=["L", "chunks_per_segment"])
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


@triton.jit(do_not_specialize=["L", "chunks_per_segment"])
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


@triton.jit(do_not_specialize=["n_segments"])
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
