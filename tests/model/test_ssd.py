"""The recurrence, its matmul form, its single step and its mixing matrix are one function."""

import math
import sys
import types
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from messages import naming
from torch import Tensor

from hybrid_distill.model import chunked_scan, kernel_choice
from hybrid_distill.model.convolution import causal_conv
from hybrid_distill.model.decays import log_decay, raw_decay
from hybrid_distill.model.gated_delta import (
    decay_and_write,
    delta_mixing_matrix,
    delta_scan,
    delta_step,
    unit_keys,
)
from hybrid_distill.model.ssd import mixing_matrix, ssd_scan, ssd_step

# dtype of the inputs -> relative and absolute tolerance
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 1e-2}
LENGTHS = (1, 31, 32, 33, 77)
BATCH = 2
HEADS = 3
HEAD_DIM = 4
STATE = 5


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype = torch.float64) -> None:
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def inputs(
    length: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x, log a, B and C."""
    x = torch.randn(BATCH, length, HEADS, HEAD_DIM, dtype=dtype)
    b = torch.randn(BATCH, length, HEADS, STATE, dtype=dtype)
    c = torch.randn(BATCH, length, HEADS, STATE, dtype=dtype)
    log_a = log_decay(2 * torch.randn(BATCH, length, HEADS, dtype=dtype))
    return x, log_a, b, c


def delta_inputs(length: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Return x, log a, the write gate, keys and C of the gated delta rule."""
    x, _, b, c = inputs(length, dtype)
    log_a, write = decay_and_write(2 * torch.randn(BATCH, length, HEADS, 2, dtype=dtype))
    return x, log_a, write, unit_keys(b), c


def delta_steps(
    x: Tensor,
    log_a: Tensor,
    write: Tensor,
    k: Tensor,
    c: Tensor,
    *,
    state_BHPN: Tensor,
    seq_idx_BL: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Run the gated delta rule token by token."""
    ys = []
    state = state_BHPN
    for t in range(x.shape[1]):
        if seq_idx_BL is not None and t > 0:
            goes_on = seq_idx_BL[:, t] == seq_idx_BL[:, t - 1]
            state = state * goes_on[:, None, None, None]
        y, state = delta_step(x[:, t], log_a[:, t], write[:, t], k[:, t], c[:, t], state)
        ys.append(y)
    return torch.stack(ys, dim=1), state


ssd_steps = partial(ssd_scan, impl="reference")
EVERY_RECURRENCE = pytest.mark.parametrize(
    ("inputs", "scan", "matrix"),
    [
        (inputs, ssd_scan, mixing_matrix),
        (delta_inputs, delta_scan, delta_mixing_matrix),
    ],
    ids=["ssd", "gated delta"],
)


def some_state(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(BATCH, HEADS, HEAD_DIM, STATE, dtype=dtype)


def documents(length: int) -> Tensor:
    """Return documents of random lengths, 1 to about 20 tokens, different in each row."""
    return (torch.rand(BATCH, length) < 0.1).long().cumsum(-1)


def document_slices(seq_idx_L: Tensor) -> list[slice]:
    borders = torch.nonzero(seq_idx_L.diff()).flatten() + 1
    ends = [0, *borders.tolist(), len(seq_idx_L)]
    return [slice(begin, end) for begin, end in pairwise(ends)]


def test_reference_is_the_recurrence_of_the_paper() -> None:
    x, log_a, b, c = inputs(7)
    state = torch.zeros(HEAD_DIM, STATE, dtype=torch.float64)
    for t in range(7):
        state = log_a[0, t, 0].exp() * state + torch.outer(x[0, t, 0], b[0, t, 0])
        y, final = ssd_scan(x[:, : t + 1], log_a[:, : t + 1], b, c, impl="reference")
        close(y[0, t, 0], state @ c[0, t, 0])
        close(final[0, 0], state)


def values_and_gradients(
    args: Sequence[Tensor],
    seq_idx: Tensor | None,
    scan: Any = ssd_scan,
    start: Tensor | None = None,
    **options: Any,
) -> list[Tensor]:
    """Return y, the final state, and the gradients of ``args`` and, if given, the state before."""
    leaves = [t.detach().requires_grad_() for t in args]
    before = None
    if start is not None:
        before = start.detach().requires_grad_()
    y, state = scan(*leaves, state_BHPN=before, seq_idx_BL=seq_idx, **options)
    if before is not None:
        leaves.append(before)
    upstream = []
    for output in (y, state):
        weight = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).cos()
        upstream.append(weight.view_as(output))
    gradients = torch.autograd.grad((y, state), leaves, upstream)
    return [y.detach(), state.detach(), *gradients]


@pytest.mark.parametrize(
    ("inputs", "scan", "steps"),
    [(inputs, ssd_scan, ssd_steps), (delta_inputs, delta_scan, delta_steps)],
    ids=["ssd", "gated delta"],
)
@pytest.mark.parametrize("chunk_size", [1, 16, 32])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_chunks_equal_steps(length: int, packed: bool, chunk_size: int, inputs, scan, steps):
    """In values, final state and gradients; the state before belongs to the first document."""
    args = inputs(length)
    seq_idx = documents(length) if packed else None
    start = some_state()
    by_chunk = values_and_gradients(args, seq_idx, scan, start, chunk_size=chunk_size)
    by_step = values_and_gradients(args, seq_idx, steps, start)
    for actual, expected in zip(by_chunk, by_step, strict=True):
        close(actual, expected)


@pytest.mark.parametrize("packed", [False, True])
def test_states_are_carried_over_blocks_of_chunks(
    packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked_scan, "CHUNKS_PER_BLOCK", 3)
    test_chunks_equal_steps(77, packed, 8, inputs, ssd_scan, ssd_steps)


@EVERY_RECURRENCE
@pytest.mark.parametrize("packed", [False, True])
def test_scan_is_the_mixing_matrix_times_the_values(
    packed: bool, inputs: Any, scan: Any, matrix: Any
) -> None:
    x, *others = inputs(45)
    seq_idx = documents(45) if packed else None
    mixing_BHLS = matrix(*others, seq_idx)
    assert torch.equal(mixing_BHLS, mixing_BHLS.tril())
    y, _ = scan(x, *others, seq_idx_BL=seq_idx)
    close(torch.einsum("bhls,bshp->blhp", mixing_BHLS, x), y)


def test_scan_is_prefill_then_steps() -> None:
    args = inputs(21)
    start = some_state()
    y, state = ssd_scan(*(t[:, :13] for t in args), state_BHPN=start)
    ys = [y]
    for t in range(13, 21):
        y, state = ssd_step(*(part[:, t] for part in args), state)
        ys.append(y.unsqueeze(1))
    expected_y, expected_state = ssd_scan(*args, state_BHPN=start)
    close(torch.cat(ys, dim=1), expected_y)
    close(state, expected_state)


@EVERY_RECURRENCE
def test_packed_documents_equal_the_same_documents_alone(inputs, scan, matrix) -> None:
    args = inputs(77)
    seq_idx = documents(77)
    y, state = scan(*args, seq_idx_BL=seq_idx)
    for row in range(BATCH):
        for document in document_slices(seq_idx[row]):
            y_alone, state_alone = scan(*(t[row : row + 1, document] for t in args))
            close(y[row : row + 1, document], y_alone)
        close(state[row : row + 1], state_alone)


def test_decay_of_zero_and_of_one() -> None:
    """Raw values far outside what training reaches: no NaN, no overflow, and the math holds."""
    x, _, b, c = inputs(77, torch.float32)
    raw = torch.randn(BATCH, 77, HEADS).sign() * 1e4
    log_a = log_decay(raw)
    leaves = [t.requires_grad_() for t in (x, log_a, b, c)]
    y, state = ssd_scan(*leaves)
    expected_y, expected_state = ssd_scan(*leaves, impl="reference")
    close(y, expected_y, torch.float32)
    close(state, expected_state, torch.float32)
    for gradient in torch.autograd.grad(y.sum() + state.sum(), leaves):
        assert gradient.isfinite().all()
    mixing_BHLS = mixing_matrix(log_a, b, c)
    close(torch.einsum("bhls,bshp->blhp", mixing_BHLS, x), expected_y, torch.float32)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("per_token", [1e-4, 1e-2, 1.0, 3.0, 10.0, 29.0, None])
def test_decays_of_any_strength_lose_no_precision(per_token: float | None, packed: bool) -> None:
    """Float32 is within 1e-6 of float64; None stands for all strengths in one row."""
    x, _, b, c = inputs(200, torch.float32)
    share = torch.rand(BATCH, 200, HEADS)
    if per_token is None:
        log_a = -(30 * share**8 + 1e-4)
    else:
        log_a = -per_token * (0.9 + 0.1 * share)
    args = [x, log_a, b, c]
    seq_idx = documents(200) if packed else None
    wide = [t.double() for t in args]
    by_chunk = values_and_gradients(args, seq_idx)
    by_step = values_and_gradients(wide, seq_idx, ssd_steps)
    for actual, expected in zip(by_chunk, by_step):
        # 1e-15: the rounding of sums around 1 in float64, beside which the gradients of the
        # strongest decays are 1e-12.
        assert (actual - expected).abs().max() < 1e-6 * expected.abs().max() + 1e-15


@pytest.mark.parametrize("changed", [slice(0, 75), slice(75, 140), slice(140, 200)])
def test_another_document_changes_no_bit(changed: slice, monkeypatch) -> None:
    """Neither of values nor of gradients, whatever the decays; borders lie inside chunks."""
    monkeypatch.setattr(chunked_scan, "CHUNKS_PER_BLOCK", 3)
    length = 200
    seq_idx = torch.tensor([0] * 75 + [1] * 65 + [2] * 60).expand(BATCH, -1)
    x, _, b, c = inputs(length, torch.float32)
    log_a = -30 * torch.rand(BATCH, length, HEADS) ** 8
    args = [x, log_a, b, c]
    others = [t.clone() for t in args]
    for t in others:
        t[:, changed] *= 7 * torch.rand_like(t[:, changed])
    kept = seq_idx[0] != seq_idx[0, changed.start]

    y, state, *gradients = values_and_gradients(args, seq_idx)
    other_y, other_state, *other_gradients = values_and_gradients(others, seq_idx)
    for one, other in zip([y, *gradients], [other_y, *other_gradients]):
        assert torch.equal(one[:, kept], other[:, kept])
        assert not torch.equal(one[:, changed], other[:, changed])
    # The final state is the last document's alone.
    is_last = changed.stop == length
    assert torch.equal(state, other_state) == (not is_last)
    mixing_BHLS = mixing_matrix(*args[1:], seq_idx)
    other_BHLS = mixing_matrix(*others[1:], seq_idx)
    assert torch.equal(mixing_BHLS[:, :, kept], other_BHLS[:, :, kept])


@EVERY_RECURRENCE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neither_half_precision_nor_autocast_reach_the_states(
    dtype: Any, inputs: Any, scan: Any, matrix: Any
) -> None:
    args = [t.to(dtype) for t in inputs(45, torch.float32)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, state = scan(*args)
    expected_y, expected_state = scan(*(t.float() for t in args))
    assert (y.dtype, state.dtype) == (dtype, torch.float32)
    assert torch.equal(y, expected_y.to(dtype))
    assert torch.equal(state, expected_state)


@EVERY_RECURRENCE
def test_no_tokens_leave_the_state_alone(inputs: Any, scan: Any, matrix: Any) -> None:
    start = some_state()
    y, state = scan(*inputs(0), state_BHPN=start)
    assert y.shape == (BATCH, 0, HEADS, HEAD_DIM)
    assert torch.equal(state, start)


def test_raw_decay_gives_the_half_life() -> None:
    half_lives = torch.tensor([1.0, 2.0, 100.0, 1e4], dtype=torch.float64)
    log_a = log_decay(raw_decay(half_lives))
    close(log_a * half_lives, torch.full_like(half_lives, -math.log(2.0)))


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 2, 9])
def test_convolution_is_a_depthwise_conv1d(length: int, width: int) -> None:
    x = torch.randn(2, length, 6, dtype=torch.float64)
    weight = torch.randn(6, width, dtype=torch.float64)
    past = torch.randn(2, 6, width - 1, dtype=torch.float64)
    y, state = causal_conv(x, weight, state_BCK=past)
    all_inputs = torch.cat([past, x.mT], dim=-1)
    close(y, F.conv1d(all_inputs, weight.unsqueeze(1), groups=6).mT)
    assert torch.equal(state, all_inputs[..., length:])
    from_nothing, _ = causal_conv(x, weight)
    from_zeros, _ = causal_conv(x, weight, state_BCK=torch.zeros_like(past))
    close(from_nothing, from_zeros)


def test_convolution_does_not_cross_documents() -> None:
    x = torch.randn(BATCH, 77, 6)
    weight = torch.randn(6, 4)
    seq_idx = documents(77)
    y, _ = causal_conv(x, weight, seq_idx_BL=seq_idx)
    for row in range(BATCH):
        for document in document_slices(seq_idx[row]):
            alone, _ = causal_conv(x[row : row + 1, document], weight)
            assert torch.equal(y[row : row + 1, document], alone)


def test_a_carried_convolution_state_is_of_the_first_document() -> None:
    x = torch.randn(1, 6, 6)
    weight = torch.randn(6, 4)
    past = torch.randn(1, 6, 3)
    seq_idx = torch.tensor([[3, 3, 4, 4, 4, 4]])
    y, _ = causal_conv(x, weight, state_BCK=past, seq_idx_BL=seq_idx)
    first, _ = causal_conv(x[:, :2], weight, state_BCK=past)
    second, _ = causal_conv(x[:, 2:], weight)
    assert torch.equal(y[:, :2], first)
    assert torch.equal(y[:, 2:], second)


def test_what_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    args = inputs(3)
    reasons = {"mamba_ssm": "missing"}
    monkeypatch.setattr(kernel_choice, "_import_kernels", reasons.get)
    with pytest.raises(ValueError, match=naming("'cuda'", "auto", "torch")):
        ssd_scan(*args, impl="cuda")
    with pytest.raises(RuntimeError, match="missing"):
        ssd_scan(*args, impl="mamba_ssm")
    with pytest.raises(ValueError, match=naming("chunk_size", 0)):
        ssd_scan(*args, chunk_size=0)


def test_an_installed_package_that_is_broken_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice, "_import_kernels", lambda impl: None)
    for name in list(sys.modules):
        if name.startswith("mamba_ssm."):
            monkeypatch.delitem(sys.modules, name)
    without_parts = types.ModuleType("mamba_ssm")
    monkeypatch.setitem(sys.modules, "mamba_ssm", without_parts)
    with pytest.raises(ModuleNotFoundError, match="mamba_ssm"):
        ssd_scan(*inputs(3), impl="mamba_ssm")
