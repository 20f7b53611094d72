"""Every kernel, compiled as the launcher compiles it and run in the emulator of `ptx_emulator`, equals float64.

Values, gradients, bounds and races. A few tiles; with PROVE=1 (`make prove`) all of them.
"""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from hybrid_kernels.loss import KINDS
from hybrid_kernels.ssd_tiles import TILES

PROVE = os.environ.get("PROVE") == "1"
BF16, FP32 = torch.bfloat16, torch.float32
QUICK = {(BF16, 90, 64, 64): [(True, True)], (BF16, 80, 16, 64): [(True, False), (False, True)]}
QUICK |= {(FP32, 80, 16, 16): [(False, False)]}
BOTH = (False, True)
RUNS = [(key, gated, packed) for key in TILES for gated in BOTH for packed in BOTH] if PROVE else [
    (key, *options) for key, chosen in QUICK.items() for options in chosen
]  # fmt: skip
CAPABILITIES = (80, 90) if PROVE else (90,)
MUTATED = ("bar.sync", "cp.async", "wgmma.wait", "fence.proxy", "st.shared", "stmatrix", "st.global")
NOTICED = 0.95  # of the mutants, at least


def run_ssd(key: tuple[torch.dtype, int, int, int], gated: bool, packed: bool, n_segments: int = 1) -> None:
    """Compare values and gradients of two heads with the recurrence."""
    import test_ssd_kernel as interpreted
    from emulated_device import emulated

    dtype, capability, d_state, head_dim = key
    torch.manual_seed(0)
    given = interpreted.problem(1, 70, 2, head_dim, d_state, dtype=dtype, gated=gated, state=gated)
    seq_idx = interpreted.documents(1, 70) if packed else None
    with emulated(capability):
        interpreted.check(given, dtype=dtype, seq_idx=seq_idx, n_segments=n_segments)


def run_conv(capability: int, dtype: torch.dtype, activation: str | None, packed: bool) -> None:
    import test_conv_kernel as interpreted
    from emulated_device import emulated
    from hybrid_kernels.conv import causal_conv

    torch.manual_seed(0)
    inputs = interpreted.draw(70, 72, 4, dtype, packed)
    seq_idx = interpreted.documents(70) if packed else None
    weighting = torch.randn(interpreted.BATCH, 70, 72)
    with emulated(capability):
        ours = interpreted.gradients(
            lambda x, w, s: causal_conv(x, w, activation=activation, state_BCK=s, seq_idx_BL=seq_idx), inputs, weighting
        )
    wide = [None if t is None else t.double() for t in inputs]
    expected = interpreted.gradients(
        lambda x, w, s: interpreted.reference(x, w, s, seq_idx, activation), wide, weighting.double()
    )
    for actual, wanted in zip(ours, expected):
        interpreted.close(actual, wanted, dtype)


def run_step(capability: int, head_dim: int, d_state: int, dtype: torch.dtype) -> None:
    """One token of two sequences, then one of the first alone."""
    import test_step_kernel as interpreted
    from emulated_device import emulated
    from hybrid_kernels.step import ssd_step

    torch.manual_seed(0)
    both, first = (interpreted.draw(3, head_dim, d_state, dtype=dtype) for _ in range(2))
    y, conv_state, state = interpreted.reference(*(t.double() for t in first))
    unchanged = first[5][1].clone(), first[6][1].clone()
    with emulated(capability):
        interpreted.check(both, dtype)
        y_masked = ssd_step(*first, token_mask_B=torch.tensor([1, 0]))
    torch.testing.assert_close(y_masked[0].double(), y[0], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(first[6][0].double(), state[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(first[5][0].double(), conv_state[0])
    assert torch.equal(first[5][1], unchanged[0]) and torch.equal(first[6][1], unchanged[1])


def run_loss(capability: int, kind: str) -> None:
    """A vocabulary longer than a block, and not divisible by 16; the teacher's own head, then its top 5."""
    import test_loss_kernel as interpreted
    from emulated_device import emulated
    from hybrid_kernels.loss import distillation_loss

    torch.manual_seed(0)
    with mock.patch.multiple(interpreted, V=5003, W=5008, REAL=4999), emulated(capability):
        case = interpreted.Case(BF16)
        options = {"kind": kind, "temperature": 2.0, "hard_weight": 0.25, "beta": 0.3}
        more = {"labels_BL": case.labels, "vocab_size": interpreted.REAL, "chunk_size": 8, "impl": "triton"}
        ours = case.run(lambda *given: distillation_loss(*given, case.mask, **more, **options))
        top = interpreted.stored(case, 5, 2.0)
        of_top = case.run(lambda hidden, head, _: distillation_loss(hidden, head, top, case.mask, **more, **options))
    with mock.patch.multiple(interpreted, V=5003, W=5008, REAL=4999):
        tolerance = interpreted.TOLERANCE["triton", BF16]
        interpreted.close(ours, case.expected(**options), tolerance)
        interpreted.close(of_top, interpreted.coarse_loss(case, top, kind, 2.0, 0.25), tolerance)


def mutants(key: tuple[torch.dtype, int, int, int], step: int) -> dict[str, dict[str, list]]:
    """By kernel and kind of instruction: how many were left out, and those that nobody noticed."""
    import test_ssd_kernel as interpreted
    from emulated_device import emulated, execute, survivors
    from hybrid_kernels.ssd import ssd

    dtype, capability, d_state, head_dim = key
    torch.manual_seed(0)
    given = interpreted.in_dtype(interpreted.problem(1, 70, 1, head_dim, d_state, dtype=dtype), dtype)
    launches = []

    def record(launch) -> None:
        before = [tensor.clone() for tensor in launch.tensors]
        execute(launch)
        launches.append((launch, before))

    with emulated(capability, record):
        y, state = ssd(*given[:4], D_H=given.D, z_BLHP=given.z, state_BHPN=given.state)
        torch.autograd.grad(y.float().sum() + state.sum(), given.leaves())
    return {f"{launch.name} {place}": survivors(launch, before, MUTATED, step)
            for place, (launch, before) in enumerate(launches)}  # fmt: skip


@pytest.mark.parametrize(("key", "gated", "packed"), RUNS, ids=str)
def test_a_tile_of_the_recurrence(key, gated: bool, packed: bool, compiled) -> None:
    compiled(run_ssd, key, gated, packed)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_segments_of_a_row(capability: int, compiled) -> None:
    compiled(run_ssd, (BF16, capability, 16, 64), True, True, 2)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("dtype", "activation", "packed"), [(BF16, "silu", True), (FP32, None, False)])
def test_the_convolution(capability: int, dtype, activation, packed: bool, compiled) -> None:
    compiled(run_conv, capability, dtype, activation, packed)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("head_dim", "d_state"), [(64, 16), (64, 64), (128, 128), (16, 4)] if PROVE else [(64, 16)])
@pytest.mark.parametrize("dtype", [BF16, FP32] if PROVE else [BF16])
def test_the_step(capability: int, head_dim: int, d_state: int, dtype, compiled) -> None:
    compiled(run_step, capability, head_dim, d_state, dtype)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("kind", KINDS if PROVE else ["jsd"])
def test_the_loss(capability: int, kind: str, compiled) -> None:
    compiled(run_loss, capability, kind)


@pytest.mark.parametrize("key", [(BF16, 90, 64, 64), (BF16, 80, 16, 64)] if PROVE else [(BF16, 90, 16, 64)], ids=str)
def test_what_is_left_out_is_noticed(key, compiled) -> None:
    """Barriers, waits, fences, copies and stores, one at a time."""
    by_kernel = compiled(mutants, key, 1 if PROVE else 12)
    n_mutants = n_missed = 0
    for kernel, by_kind in by_kernel.items():
        for kind, (count, missed) in by_kind.items():
            n_mutants, n_missed = n_mutants + count, n_missed + len(missed)
            print(f"{kernel}: without {kind}: {count - len(missed)} of {count} noticed", *missed, sep="\n    ")
    assert n_mutants > 20
    assert n_missed <= (1 - NOTICED) * n_mutants, f"{n_missed} of {n_mutants} were not noticed"
