"""Triton kernels of the recurrence (mathematics: `ssd`), and their configurations for compiling
ahead of time."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .common import Compilation, mm, narrow
from .ssd_tiles import (
    BACKWARD_KERNELS,
    DECAY_HEADS,
    DECAYS,
    TILES,
    Launch,
    architecture_of,
    block_of,
)

# Forgets all an fp32 state holds; lower values would only blur the sums
MIN_LOG_DECAY = tl.constexpr(-30.0)
LOG2_E = tl.constexpr(1.4426950408889634)


def compilations(capability: int) -> list[Compilation]:
    """Every entry of the tile table with all options on, for compiling ahead of time."""
    found = [compilation(kind, 16, 16, 32, DECAYS) for kind in ("decays", "decay gradients")]
    for (dtype, architecture, block_n, block_p), tile in TILES.items():
        if architecture != architecture_of(capability):
            continue
        backward = [f"backward {gradients}" for gradients in BACKWARD_KERNELS[tile.n_backward]]
        launches = {"forward": tile.forward, "segments": tile.forward} | dict.fromkeys(
            backward, tile.backward
        )
        for kind, launch in launches.items():
            of_tile = compilation(kind, block_n, block_p, tile.chunk, launch, dtype=dtype)
            resident = 0 if kind == "segments" else launch.resident
            found.append(of_tile._replace(max_spills=tile.spills, min_resident=resident))
    return found


def compilation(
    kind: str,
    d_state: int,
    head_dim: int,
    chunk: int,
    launch: Launch,
    *,
    dtype=torch.bfloat16,
    full: bool = True,
) -> Compilation:
    """Describe one kernel with all options (``full``: skip, first state, packed documents) or
    none."""
    name, _, gradients = kind.partition(" ")
    kernels = dict(
        forward=_forward,
        segments=_segment_states,
        backward=_backward,
        decays=_decays,
        decay=_decay_gradients,
    )
    kernel = kernels[name]
    known = dict(
        P=head_dim,
        N=d_state,
        BLOCK_P=block_of(head_dim),
        BLOCK_N=block_of(d_state),
        Q=chunk,
        HEADS=DECAY_HEADS,
        SOFTPLUS=True,
        REVERSE=True,
        SAVE=True,
        MODE="gpu" if dtype == torch.bfloat16 else "tf32x3",
        **wanted(gradients),
        **dict.fromkeys(
            ("PACKED", "HAS_D", "HAS_BEFORE", "HAS_AFTER", "HAS_STATE", "IN_ROW"), full
        ),
    )
    if not full:
        known |= dict.fromkeys(("D", "seq_idx", "before", "after", "dD", "dstate"))
    element = "*bf16" if dtype == torch.bfloat16 else "*fp32"
    arguments = {
        argument: known[argument] if argument in known else _RUNTIME_TYPES.get(argument, element)
        for argument in kernel.arg_names
    }
    return Compilation(
        name=f"ssd {kind} N={d_state} P={head_dim} {str(dtype).removeprefix('torch.')}",
        kernel=kernel,
        arguments=arguments,
        constants=frozenset(known) & frozenset(arguments),
        divisible=frozenset(arguments) - frozenset(known) - {"L", "H", "chunks_per_segment"},
        tensor_cores=not name.startswith("decay"),
        **launch.options,
    )


def wanted(gradients: str) -> dict[str, bool]:
    """Return which gradients a backward kernel finds, as its arguments."""
    return {f"GRAD_{name}": name in gradients for name in "CBX"}


_FP32 = (
    "a",
    "cum",
    "from_start",
    "to_end",
    "through",
    "weights",
    "D",
    "before",
    "after",
    "final",
    "states",
    "kept",
    "da",
    "to_tokens",
    "from_tokens",
    "over",
    "dD",
    "dstate",
)
_RUNTIME_TYPES = dict.fromkeys(_FP32, "*fp32")
_RUNTIME_TYPES |= dict.fromkeys(
    ("L", "H", "chunks_per_segment", "x_row", "b_row", "c_row", "v_row", "k_row"), "i32"
)
_RUNTIME_TYPES |= {"seq_idx": "*i64"}


@triton.jit
def _log_decay(a, valid, SOFTPLUS: tl.constexpr):
    """log a of some tokens, 0 where they are not valid, and its derivative by what was given."""
    given = tl.load(a, mask=valid, other=float("-inf") if SOFTPLUS else 0.0).to(tl.float32)
    if SOFTPLUS:
        # softplus(r) = max(r, 0) + log1p(exp(-|r|)): neither branch overflows.
        e = tl.exp2(-tl.abs(given) * LOG2_E)
        # Kahan's log1p, as libdevice's does not run in the interpreter: log(1 + e) e / ((1 + e) -
        # 1), cancels the rounding of 1 + e; where 1 + e rounds to 1, log1p(e) is e.
        one_e = 1.0 + e
        rounded_off = one_e == 1.0
        log1p = tl.where(
            rounded_off, e, tl.log(one_e) * e / tl.where(rounded_off, 1.0, one_e - 1.0)
        )
        log_a = -tl.maximum(given, 0.0) - log1p
        slope = -tl.where(given > 0.0, 1.0, e) / one_e
    else:
        log_a = given
        slope = tl.full(given.shape, 1.0, tl.float32)
    # A floored decay is a constant, so that no gradient passes.
    floored = log_a < MIN_LOG_DECAY
    return tl.where(floored, MIN_LOG_DECAY, log_a), tl.where(floored, 0.0, slope)


@triton.jit
def _add_within(sum_0, begins_0, sum_1, begins_1):
    """For `tl.associative_scan`: a sum that restarts wherever a document begins."""
    return tl.where(begins_1 != 0, sum_1, sum_0 + sum_1), begins_0 | begins_1


@triton.jit
def _documents(seq_idx, row, token, L):
    """The documents of some tokens of a row; what is before or after the row is of its first or
    last one."""
    return tl.load(seq_idx + row * L + tl.minimum(tl.maximum(token, 0), L - 1)).to(tl.int32)


@triton.jit(do_not_specialize=["L"])
def _decays(
    a,
    seq_idx,
    cum,
    from_start,
    to_end,
    through,
    L,
    H,
    Q: tl.constexpr,
    HEADS: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Write the log2 of the decay up to each token of a chunk, from where its document or the chunk
    starts; the decays from its start to each token, from each token to its end, and over all of it,
    0 where another document begins on the way. No bit of one document enters another's.

    Once for all: in the loops of the kernels that follow, logarithms and sums would be chains of
    waits."""
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    n_chunks = tl.num_programs(0)
    q = tl.arange(0, Q)[:, None]
    head = tl.program_id(2) * HEADS + tl.arange(0, HEADS)[None, :]
    start = chunk * Q
    log_a, _ = _log_decay(
        a + (row * L + start + q) * H + head, (start + q < L) & (head < H), SOFTPLUS
    )
    log2_a = log_a * LOG2_E
    # The neighbors' documents, not a flag in the row: a chunk must know what came before its first
    # token and what follows its last one.
    if PACKED:
        document = _documents(seq_idx, row, start + q, L)
        incoming = _documents(seq_idx, row, start - 1, L)
        last = _documents(seq_idx, row, start + Q - 1, L)
        begins = (document != _documents(seq_idx, row, start + q - 1, L)).to(tl.int32)
        sums, _ = tl.associative_scan((log2_a, tl.broadcast_to(begins, [Q, HEADS])), 0, _add_within)
        # Only of the last document: nothing of an earlier one reaches the chunk's end.
        total = tl.sum(tl.where(document == last, log2_a, 0.0), 0)[None, :]
        onward = tl.where(document == incoming, tl.exp2(sums), 0.0)
        rest = tl.where(document == last, tl.exp2(total - sums), 0.0)
        over = tl.where(incoming == last, tl.exp2(total), 0.0)
    else:
        sums = tl.cumsum(log2_a, 0)
        total = tl.sum(log2_a, 0)[None, :]
        onward = tl.exp2(sums)
        rest = tl.exp2(total - sums)
        over = tl.exp2(total)
    # [B, H, M, Q]: a program of the main kernels walks along M and reads whole vectors of Q.
    place = (row * H + head) * n_chunks + chunk
    tl.store(cum + place * Q + q, sums, mask=head < H)
    tl.store(from_start + place * Q + q, onward, mask=head < H)
    tl.store(to_end + place * Q + q, rest, mask=head < H)
    tl.store(through + place, over, mask=head < H)


@triton.jit(do_not_specialize=["L"])
def _decay_gradients(
    a,
    seq_idx,
    to_tokens,
    from_tokens,
    over,
    da,
    L,
    H,
    Q: tl.constexpr,
    HEADS: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    PACKED: tl.constexpr,
    MODE: tl.constexpr,
):
    """Add up, into the gradient of each token's decay, what `_backward` has found of the tokens and
    of the chunk."""
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    n_chunks = tl.num_programs(0)
    q = tl.arange(0, Q)[:, None]
    head = tl.program_id(2) * HEADS + tl.arange(0, HEADS)[None, :]
    start = chunk * Q
    place = (row * H + head) * n_chunks + chunk
    # Every token of a chunk lies between its start and its end, so that each gets all of `over`.
    dlog_a = tl.load(over + place, mask=head < H, other=0.0)
    # Exclusive: a decay acts on what the tokens before it wrote, hence q - 1.
    dlog_a += tl.cumsum(
        tl.load(from_tokens + place * Q + q - 1, mask=(head < H) & (q > 0), other=0.0), 0
    )
    to = tl.load(to_tokens + place * Q + q, mask=head < H, other=0.0)
    if PACKED:
        ends = _documents(seq_idx, row, start + q, L) != _documents(seq_idx, row, start + q + 1, L)
        ends = tl.broadcast_to(ends.to(tl.int32), [Q, HEADS])
        later, _ = tl.associative_scan((to, ends), 0, _add_within, reverse=True)
    else:
        later = tl.cumsum(to, 0, reverse=True)
    token = (row * L + start + q) * H + head
    valid = (start + q < L) & (head < H)
    _, slope = _log_decay(a + token, valid, SOFTPLUS)
    tl.store(da + token, narrow((dlog_a + later) * slope, da.dtype.element_ty, MODE), mask=valid)


@triton.jit
def _decay_QQ(cum, document, Q: tl.constexpr, PACKED: tl.constexpr, TRANSPOSED: tl.constexpr):
    """The decay from token j to token i as [i, j], or as [j, i] if TRANSPOSED; 0 where i does not
    see j."""
    q = tl.arange(0, Q)
    if TRANSPOSED:
        seen = q[:, None] <= q[None, :]
        log2_decay = cum[None, :] - cum[:, None]
    else:
        seen = q[:, None] >= q[None, :]
        log2_decay = cum[:, None] - cum[None, :]
    if PACKED:
        seen = seen & (document[:, None] == document[None, :])
    # Mask the exponent, not the result: above the diagonal the exponent is positive and exp2 of it
    # may be inf, and inf * 0 is NaN.
    return tl.exp2(tl.where(seen, log2_decay, float("-inf")))


@triton.jit
def _load(start, n_valid, row, WIDTH: tl.constexpr, Q: tl.constexpr, BLOCK: tl.constexpr):
    """A chunk's rows as [Q, BLOCK], 0 past the end of the sequence and of the row.

    Offsets are int64 although they fit 32 bits: then a thread keeps one address a row, and the
    compiler adds columns to it in the instruction; from 32 bits it keeps every element's offset in
    a register all through the loop."""
    q = tl.arange(0, Q)[:, None]
    w = tl.arange(0, BLOCK)[None, :]
    # A mask on columns is left out where none is needed: it may cost wide loads.
    mask = q < n_valid
    if BLOCK > WIDTH:
        mask = mask & (w < WIDTH)
    return tl.load(start + q.to(tl.int64) * row + w, mask=mask, other=0.0)


@triton.jit
def _store(
    start, rows, n_valid, row, WIDTH: tl.constexpr, TRANSPOSED: tl.constexpr, MODE: tl.constexpr
):
    """The counterpart of `_load`, for [Q, BLOCK], or for [BLOCK, Q] if TRANSPOSED."""
    BLOCK: tl.constexpr = rows.shape[0] if TRANSPOSED else rows.shape[1]
    if TRANSPOSED:
        q = tl.arange(0, rows.shape[1])[None, :]
        w = tl.arange(0, BLOCK)[:, None]
    else:
        q = tl.arange(0, rows.shape[0])[:, None]
        w = tl.arange(0, BLOCK)[None, :]
    mask = q < n_valid
    if BLOCK > WIDTH:
        mask = mask & (w < WIDTH)
    tl.store(
        start + q.to(tl.int64) * row + w, narrow(rows, start.dtype.element_ty, MODE), mask=mask
    )


@triton.jit
def _load_state(
    start,
    n_stride: tl.constexpr,
    p_stride: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """A state as [BLOCK_N, BLOCK_P], 0 where it has no element."""
    n = tl.arange(0, BLOCK_N)[:, None]
    p = tl.arange(0, BLOCK_P)[None, :]
    return tl.load(
        start + n.to(tl.int64) * n_stride + p * p_stride, mask=(n < N) & (p < P), other=0.0
    )


@triton.jit
def _store_state(
    start,
    state_NP,
    n_stride: tl.constexpr,
    p_stride: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    MODE: tl.constexpr,
):
    """The counterpart of `_load_state`."""
    n = tl.arange(0, state_NP.shape[0])[:, None]
    p = tl.arange(0, state_NP.shape[1])[None, :]
    state_NP = narrow(state_NP, start.dtype.element_ty, MODE)
    tl.store(start + n.to(tl.int64) * n_stride + p * p_stride, state_NP, mask=(n < N) & (p < P))


@triton.jit(do_not_specialize=["L", "chunks_per_segment"])
def _forward(
    x,
    cum,
    from_start,
    to_end,
    through,
    b,
    c,
    D,
    seq_idx,
    before,
    y,
    final,
    chunk_states,
    L,
    H,
    chunks_per_segment,
    x_row,
    b_row,
    c_row,
    P: tl.constexpr,
    N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    Q: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_D: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
    SAVE: tl.constexpr,
    MODE: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    segment = tl.program_id(2)
    n_chunks = tl.cdiv(L, Q)
    n_segments = tl.num_programs(2)

    # In registers for the whole walk. [N, P], the layout in which both products that touch it,
    # C S and B^T x, take it without a transpose.
    state_NP = tl.zeros([BLOCK_N, BLOCK_P], tl.float32)
    if HAS_BEFORE:
        incoming = before + ((row * n_segments + segment) * H + head) * (P * N)
        state_NP += _load_state(incoming, 1, N, N, P, BLOCK_N, BLOCK_P)

    # chunks_per_segment is rounded up, so the last segment may be shorter.
    first = segment * chunks_per_segment
    end = tl.minimum(first + chunks_per_segment, n_chunks)
    place = (row * H + head) * n_chunks
    upcoming = tl.load(through + place + first)  # a chunk ahead: nothing waits for it
    skip = tl.load(D + head).to(tl.float32) if HAS_D else 0.0
    for chunk in range(first, end):
        # row is int64, and so is every offset of a row; what is inside of a chunk fits 32 bits.
        start = chunk * Q
        token = row * L + start
        n_valid = L - start
        kept = upcoming
        upcoming = tl.load(through + place + tl.minimum(chunk + 1, n_chunks - 1))
        vector = (place + chunk) * Q + tl.arange(0, Q)
        cum_Q = tl.load(cum + vector)
        from_start_Q = tl.load(from_start + vector)
        to_end_Q = tl.load(to_end + vector)
        document_Q = _documents(seq_idx, row, start + tl.arange(0, Q), L) if PACKED else cum_Q
        x_QP = _load(x + token * x_row + head * P, n_valid, x_row, P, Q, BLOCK_P)
        b_QN = _load(b + token * b_row + head * N, n_valid, b_row, N, Q, BLOCK_N)
        c_QN = _load(c + token * c_row + head * N, n_valid, c_row, N, Q, BLOCK_N)
        # Before the chunk changes it: the backward needs the state that each chunk started from.
        if SAVE:
            saved = chunk_states + ((row * n_chunks + chunk) * H + head) * (N * P)
            _store_state(saved, state_NP, P, 1, N, P, MODE)

        # Recomputed by the backward: written out they would be Q numbers a token and head, more
        # than all of its inputs.
        scores_QQ = mm(c_QN, tl.trans(b_QN), MODE) * _decay_QQ(cum_Q, document_Q, Q, PACKED, False)
        y_QP = mm(c_QN, state_NP, MODE) * from_start_Q[:, None]
        state_NP = state_NP * kept + mm(
            tl.trans(b_QN), x_QP.to(tl.float32) * to_end_Q[:, None], MODE
        )
        # Last, as the last product decides how the compiler spreads all of them over the warps: by
        # the shape of the state, it would let every warp compute all of y.
        y_QP += mm(scores_QQ, x_QP, MODE)

        if HAS_D:
            y_QP += skip * x_QP.to(tl.float32)
        _store(y + (token * H + head) * P, y_QP, n_valid, H * P, P, False, MODE)

    # The other segments end inside of the row.
    if segment == n_segments - 1:
        _store_state(final + (row * H + head) * (P * N), state_NP, 1, N, N, P, MODE)


@triton.jit(do_not_specialize=["L", "chunks_per_segment"])
def _backward(
    x,
    cum,
    from_start,
    to_end,
    through,
    b,
    c,
    D,
    seq_idx,
    dy,
    chunk_states,
    after,
    dx,
    to_tokens,
    from_tokens,
    over,
    db,
    dc,
    dD,
    dstate,
    L,
    H,
    chunks_per_segment,
    x_row,
    b_row,
    c_row,
    P: tl.constexpr,
    N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    Q: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_D: tl.constexpr,
    HAS_AFTER: tl.constexpr,
    HAS_STATE: tl.constexpr,
    IN_ROW: tl.constexpr,
    GRAD_C: tl.constexpr,
    GRAD_B: tl.constexpr,
    GRAD_X: tl.constexpr,
    MODE: tl.constexpr,
):
    """All gradients, or some: of C and D (GRAD_C), of B (GRAD_B), of x and the first state
    (GRAD_X).

    Of the decay's gradient, what reaches each token from those before it and from the state
    (``to_tokens``, with GRAD_C), what reaches the state from each token (``from_tokens``, with
    GRAD_X) and what from state to state (``over``, with GRAD_X); `_decay_gradients` adds them up.
    IN_ROW, dx, dB and dC are laid out as x, B and C."""
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    segment = tl.program_id(2)
    n_chunks = tl.cdiv(L, Q)
    n_segments = tl.num_programs(2)
    q = tl.arange(0, Q)
    # 1. dS, the gradient of the state after this segment. In registers for the whole walk, from right to left.
    dstate_NP = tl.zeros([BLOCK_N, BLOCK_P], tl.float32)
    if HAS_AFTER:
        incoming = after + ((row * n_segments + segment) * H + head) * (P * N)
        dstate_NP += _load_state(incoming, 1, N, N, P, BLOCK_N, BLOCK_P)
    # A matrix of which only the diagonal counts: dD = sum_i dy_i . x_i is the diagonal of dy x^T,
    # which exists anyway; one reduction, after the loop, is cheaper than one in each chunk.
    dskip_QQ = tl.zeros([Q, Q], tl.float32)
    skip = tl.load(D + head).to(tl.float32) if HAS_D else 0.0
    # 2. The walk: for each chunk its loads, then dC with dD, dB and dx, then dS before the chunk.
    first = segment * chunks_per_segment
    n_own = tl.minimum(chunks_per_segment, n_chunks - first)
    place = (row * H + head) * n_chunks
    upcoming = tl.load(through + place + first + n_own - 1)  # a chunk ahead: nothing waits for it
    for step in range(0, n_own):
        chunk = first + n_own - 1 - step
        start = chunk * Q
        token = row * L + start
        n_valid = L - start
        if IN_ROW:  # one stride of all, in one register
            b_row = x_row
            c_row = x_row
        dx_row = x_row if IN_ROW else H * P
        db_row, dc_row = (x_row, x_row) if IN_ROW else (H * N, H * N)
        kept = upcoming
        upcoming = tl.load(through + place + tl.maximum(chunk - 1, 0))
        vector = (place + chunk) * Q + q
        cum_Q = tl.load(cum + vector)
        from_start_Q = tl.load(from_start + vector)
        to_end_Q = tl.load(to_end + vector)
        document_Q = _documents(seq_idx, row, start + q, L) if PACKED else cum_Q
        x_QP = _load(x + token * x_row + head * P, n_valid, x_row, P, Q, BLOCK_P)
        b_QN = _load(b + token * b_row + head * N, n_valid, b_row, N, Q, BLOCK_N)
        c_QN = _load(c + token * c_row + head * N, n_valid, c_row, N, Q, BLOCK_N)
        saved = chunk_states + ((row * n_chunks + chunk) * H + head) * (N * P)
        state_NP = _load_state(saved, P, 1, N, P, BLOCK_N, BLOCK_P)
        # Also for dscores: the same decay that the forward applied to the scores.
        decay_QQ = _decay_QQ(cum_Q, document_Q, Q, PACKED, False)
        if GRAD_X:
            # <dS, S> before dS moves on to the chunk's start.
            tl.store(over + place + chunk, kept * tl.sum(dstate_NP * state_NP.to(tl.float32)))
        # dscores, the gradient of the scores before their decay, is what dC and dB share.
        dy_QP = _load(dy + (token * H + head) * P, n_valid, H * P, P, Q, BLOCK_P)
        if GRAD_C or GRAD_B:
            dscores_QQ = mm(dy_QP, tl.trans(x_QP), MODE) * decay_QQ
        # dC = dscores B + from_start dy S^T
        if GRAD_C:
            if HAS_D:
                dskip_QQ += tl.where(q[:, None] == q[None, :], dscores_QQ, 0.0)
            # Of one matrix of fp32 products: the terms that must cancel do, to the last bits.
            across_QQ = mm(c_QN, tl.trans(b_QN), MODE) * dscores_QQ
            # Strictly below the diagonal: from i to i there is no decay on the way.
            across_QQ = tl.where(q[:, None] > q[None, :], across_QQ, 0.0)
            dc_QN = mm(dy_QP, tl.trans(state_NP), MODE) * from_start_Q[:, None]
            tl.store(
                to_tokens + vector,
                tl.sum(across_QQ, 1)
                + tl.sum(dc_QN * c_QN.to(tl.float32), 1)
                - tl.sum(across_QQ, 0),
            )
            dc_QN += mm(dscores_QQ, b_QN, MODE)
            _store(dc + token * dc_row + head * N, dc_QN, n_valid, dc_row, N, False, MODE)
        # dB = dscores^T C + to_end x dS^T
        if GRAD_B:
            # [N, Q], as its products come out; the store transposes by addresses, which costs
            # nothing, where tl.trans of an accumulator is what Hopper's compiler got wrong.
            db_NQ = mm(dstate_NP, tl.trans(x_QP), MODE) * to_end_Q[None, :]
            db_NQ += mm(tl.trans(c_QN), dscores_QQ, MODE)
            _store(db + token * db_row + head * N, db_NQ, n_valid, db_row, N, True, MODE)
        # dx = scores^T dy + to_end B dS + D dy: the first term's product waits until dS has moved on.
        if GRAD_X:
            dx_QP = mm(b_QN, dstate_NP, MODE) * to_end_Q[:, None]
            # Before the term of the scores is added: this one is the state's alone.
            tl.store(from_tokens + vector, tl.sum(dx_QP * x_QP.to(tl.float32), 1))
            scores_T_QQ = mm(b_QN, tl.trans(c_QN), MODE) * _decay_QQ(
                cum_Q, document_Q, Q, PACKED, True
            )
        # dS = kept dS + C^T from_start dy
        # dS is not needed to find dC alone.
        if GRAD_X or GRAD_B:
            to_state_QP = dy_QP.to(tl.float32) * from_start_Q[:, None]
            dstate_NP = dstate_NP * kept + mm(tl.trans(c_QN), to_state_QP, MODE)
        # The rest of dx.
        if GRAD_X:
            dx_QP += mm(scores_T_QQ, dy_QP, MODE)  # last, as in the forward
            if HAS_D:
                dx_QP += skip * dy_QP.to(tl.float32)
            _store(dx + token * dx_row + head * P, dx_QP, n_valid, dx_row, P, False, MODE)
    # 3. What the walk has summed up.
    if GRAD_C and HAS_D:
        tl.store(dD + (row * n_segments + segment) * H + head, tl.sum(dskip_QQ))
    # After the walk, dS is that of the state before the row's first token.
    if GRAD_X and HAS_STATE and segment == 0:
        _store_state(dstate + (row * H + head) * (P * N), dstate_NP, 1, N, N, P, MODE)


@triton.jit(do_not_specialize=["L", "chunks_per_segment"])
def _segment_states(
    v,
    k,
    weights,
    through,
    states,
    kept,
    L,
    H,
    chunks_per_segment,
    v_row,
    k_row,
    P: tl.constexpr,
    N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    Q: tl.constexpr,
    REVERSE: tl.constexpr,
    MODE: tl.constexpr,
):
    """Compute what a segment adds to the state, and how much of the state before it passes through.

    With (v, k) = (x, B) from left to right, weighted by the decays to the chunk's end; for the
    gradient of the state with (dy, C) and REVERSE, weighted by those from its start."""
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    segment = tl.program_id(2)
    place_of_segment = (row * tl.num_programs(2) + segment) * H + head
    first = segment * chunks_per_segment
    n_chunks = tl.cdiv(L, Q)
    n_own = tl.minimum(chunks_per_segment, n_chunks - first)
    place = (row * H + head) * n_chunks

    state_NP = tl.zeros([BLOCK_N, BLOCK_P], tl.float32)
    # How much of any earlier state passes: the product of all chunks' decays.
    product = 1.0
    for step in range(0, n_own):
        chunk = first + (n_own - 1 - step if REVERSE else step)
        start = chunk * Q
        token = row * L + start
        n_valid = L - start
        weight_Q = tl.load(weights + (place + chunk) * Q + tl.arange(0, Q))
        through_chunk = tl.load(through + place + chunk)
        v_QP = _load(v + token * v_row + head * P, n_valid, v_row, P, Q, BLOCK_P).to(tl.float32)
        k_QN = _load(k + token * k_row + head * N, n_valid, k_row, N, Q, BLOCK_N)
        state_NP = state_NP * through_chunk + mm(tl.trans(k_QN), v_QP * weight_Q[:, None], MODE)
        product = product * through_chunk

    _store_state(states + place_of_segment * (P * N), state_NP, 1, N, N, P, MODE)
    tl.store(kept + place_of_segment, product)


@triton.jit(do_not_specialize=["n_segments"])
def _carry_over(
    states,
    kept,
    first,
    H,
    n_segments,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """In place: what each segment adds becomes the state that reaches it."""
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    element = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    state = tl.zeros([BLOCK], tl.float32)
    if HAS_FIRST:
        state += tl.load(first + (row * H + head) * SIZE + element, mask=element < SIZE, other=0.0)
    for step in range(0, n_segments):
        segment = n_segments - 1 - step if REVERSE else step
        place_of_segment = (row * n_segments + segment) * H + head
        place = states + place_of_segment * SIZE + element
        # Read, then overwritten by the same thread with the state that reaches the segment: in
        # place, without a second buffer of states.
        added = tl.load(place, mask=element < SIZE, other=0.0)
        tl.store(place, state, mask=element < SIZE)
        state = state * tl.load(kept + place_of_segment) + added


@triton.jit
def _sigmoid(z):
    return 1.0 / (1.0 + tl.exp2(-z * LOG2_E))


@triton.jit
def _dsilu(z):
    open = _sigmoid(z)
    return open * (1.0 + z * (1.0 - open))


@triton.jit
def _gate(y, z, out, n, BLOCK: tl.constexpr, MODE: tl.constexpr):
    """out = y silu(z)."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(z + place, mask=place < n, other=0.0).to(tl.float32)
    gated = tl.load(y + place, mask=place < n, other=0.0).to(tl.float32) * gate * _sigmoid(gate)
    tl.store(out + place, narrow(gated, out.dtype.element_ty, MODE), mask=place < n)


@triton.jit
def _gate_gradients(y, z, dout, dy, dz, n, BLOCK: tl.constexpr, MODE: tl.constexpr):
    """The gradients of both factors."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(z + place, mask=place < n, other=0.0).to(tl.float32)
    given = tl.load(dout + place, mask=place < n, other=0.0).to(tl.float32)
    by_gate = given * tl.load(y + place, mask=place < n, other=0.0).to(tl.float32) * _dsilu(gate)
    tl.store(
        dy + place, narrow(given * gate * _sigmoid(gate), dy.dtype.element_ty, MODE), mask=place < n
    )
    tl.store(dz + place, narrow(by_gate, dz.dtype.element_ty, MODE), mask=place < n)
