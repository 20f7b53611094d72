"""The choice of "auto" on a GPU: versions, dtypes and sizes it refuses, and a kernel that computes
something else."""

from __future__ import annotations

import logging
import sys
import types

import pytest
import torch
from messages import naming

pytest.importorskip("triton", reason="triton is not installed")

import hybrid_kernels
import triton
import triton.language as tl
from choices import choice_on_gpu, forget_choices
from hybrid_kernels import (
    common,
    conv,
    definitions,
    loss_choice,
    loss_triton,
    selftest,
    ssd,
    ssd_operators,
    step,
)
from hybrid_kernels.loss_types import KINDS

from hybrid_distill.model import kernel_choice

pytestmark = pytest.mark.skipif(
    not common.INTERPRETED, reason="triton was imported before TRITON_INTERPRET=1 was set"
)

CPU = torch.device("cpu")
BF16 = torch.bfloat16
FP32 = torch.float32
# Sizes and options, all of them on.
CALLS = {
    "recurrence": ((16, 4), {"gated": True, "packed": True}),
    "convolution": ((4,), {"packed": True}),
    "decoding step": ((16, 4, 4), {"masked": True}),
}
LOSSES = [(kind, from_head) for kind in KINDS for from_head in (True, False)]


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    """Forget what was found before, here and afterwards; draw less than on a GPU."""
    monkeypatch.setattr(definitions, "LENGTH", 70)
    monkeypatch.setattr(definitions, "N_HEADS", 2)
    # Planted mistakes are in this process, not in the child's.
    monkeypatch.setattr(selftest, "check_kernel", definitions.mistake_of)
    remembering = (
        definitions.mistake_of,
        loss_choice.is_right,
        loss_choice.reason_against,
        hybrid_kernels.unusable,
    )
    for function in remembering:
        function.cache_clear()
    yield
    for function in remembering:
        function.cache_clear()


def mistake(
    kernel: str, dtype: torch.dtype = FP32, training: bool = True, **options: bool
) -> str | None:
    """Return what is wrong with a kernel; None if it is right."""
    sizes, all_on = CALLS[kernel]
    options = {**all_on, **options}
    return definitions.mistake_of(kernel, CPU, dtype, *sizes, training=training, **options)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("kernel", CALLS)
def test_right_kernels_pass(kernel: str, dtype: torch.dtype) -> None:
    """In training, then without options."""
    _, all_on = CALLS[kernel]
    all_off = dict.fromkeys(all_on, False)
    assert mistake(kernel, dtype) is None
    assert mistake(kernel, dtype, training=False, **all_off) is None


@pytest.mark.parametrize("kind, from_head", LOSSES)
def test_the_right_loss_passes(kind: str, from_head: bool) -> None:
    options = {"kind": kind, "from_head": from_head}
    assert definitions.mistake_of("distillation loss", CPU, BF16, **options) is None


@triton.jit
def forgets_the_largest(largest, total, x):
    return largest, total + tl.sum(tl.exp2(x), 1)


@pytest.mark.parametrize("kind, from_head", LOSSES)
def test_a_mistake_in_the_loss_takes_it_to_torch(
    kind: str, from_head: bool, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(loss_triton, "_add_exponentials", forgets_the_largest)
    assert not loss_choice.is_right(CPU, FP32, kind, from_head)
    assert len(caplog.records) == 1


@triton.jit
def too_small(y, z, out, n, BLOCK: tl.constexpr, MODE: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < n
    value = tl.load(y + place, mask=inside, other=0.0)
    gate = tl.load(z + place, mask=inside, other=0.0)
    tl.store(out + place, 0.9 * value * tl.sigmoid(gate) * gate, mask=inside)


@triton.jit
def writes_nothing(y, z, dout, dy, dz, n, BLOCK: tl.constexpr, MODE: tl.constexpr):
    pass


@triton.jit
def mirrored(weight, channel, back, C, WIDTH: tl.constexpr):
    return tl.load(weight + channel * WIDTH + back, mask=channel < C, other=0.0).to(tl.float32)


@triton.jit
def keeps_the_past(newest, conv_state, channel, mask, WIDTH: tl.constexpr, MODE: tl.constexpr):
    pass


@triton.jit
def does_not_launch(y, z, dout, dy, dz, n, BLOCK: tl.constexpr, MODE: tl.constexpr):
    return y.no_such_thing


# The kernel, a part of it, what stands in for the part, and the verdict.
PLANTED = {
    "a gate too small": (
        "recurrence",
        (ssd_operators, "_gate"),
        too_small,
        "output is off by",
    ),
    "gradients not written": (
        "recurrence",
        (ssd_operators, "_gate_gradients"),
        writes_nothing,
        "gradient of x is off by",
    ),
    "does not compile": (
        "recurrence",
        (ssd_operators, "_gate_gradients"),
        does_not_launch,
        "fails with",
    ),
    "taps mirrored": (
        "convolution",
        (conv, "_weight"),
        mirrored,
        "output is off by",
    ),
    "state not moved": (
        "decoding step",
        (step, "_push"),
        keeps_the_past,
        "new inputs is off by",
    ),
}


@pytest.mark.parametrize(
    ("kernel", "part", "wrong", "verdict"), PLANTED.values(), ids=PLANTED.keys()
)
def test_a_planted_mistake_is_found(kernel, part, wrong, verdict, monkeypatch, poison) -> None:
    monkeypatch.setattr(*part, wrong)
    assert verdict in mistake(kernel)


def test_a_test_leaves_no_trace_in_the_caller(monkeypatch) -> None:
    """Inside a checkpointed, autocast, seeded region: neither hooks, nor modes, nor the random
    numbers see it."""
    saved = []
    state = torch.get_rng_state()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda t: t):
            assert mistake("recurrence") is None
    assert not saved
    assert torch.equal(torch.get_rng_state(), state)


def best(dtype: torch.dtype = FP32, sizes: tuple[int, ...] = (16, 4)) -> str:
    """Return what "auto" stands for in the recurrence."""
    return choice_on_gpu("recurrence", dtype, sizes, gated=True, packed=True)


@pytest.fixture
def fresh_choice(monkeypatch) -> None:
    forget_choices(monkeypatch)


def test_auto_takes_right_kernels_in_silence(fresh_choice, caplog) -> None:
    assert best() == "triton"
    assert not caplog.records


OLD_TRITON = types.SimpleNamespace(__version__="3.2.0")


@pytest.mark.parametrize("case", ["mistake", "float16", "N=256", "triton 3.2", "no triton"])
def test_auto_falls_back_to_torch_with_one_warning(
    case: str, fresh_choice, monkeypatch, caplog
) -> None:
    dtype = torch.float16 if case == "float16" else FP32
    sizes = (16, 4)
    if case == "N=256":
        dtype = BF16
        sizes = (64, 256)
    elif case == "mistake":
        monkeypatch.setattr(ssd_operators, "_gate", too_small)
    elif case == "triton 3.2":
        monkeypatch.setitem(sys.modules, "triton", OLD_TRITON)
    elif case == "no triton":
        # An import of it fails.
        monkeypatch.setitem(sys.modules, "triton", None)

    with caplog.at_level(logging.WARNING):
        choices = [best(dtype, sizes) for _ in range(3)]
    assert choices == ["torch"] * 3
    (record,) = caplog.records
    assert (record.name, record.levelno) == (kernel_choice.__name__, logging.WARNING)
    assert "\n" not in record.message


@pytest.mark.parametrize(
    "version, usable", [("3.4.0", False), ("3.5.0", True), ("3.10.0+git1", True), ("4.0", True)]
)
def test_kernels_named_on_an_old_triton_are_a_clear_error(
    version, usable, fresh_choice, monkeypatch
) -> None:
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(__version__=version))
    assert (hybrid_kernels.unusable() is None) == usable
    if not usable:
        with pytest.raises(RuntimeError, match=naming("triton", version)):
            kernel_choice.check_implementation("triton")


def test_a_large_float32_state_is_tested_in_the_blocks_that_it_runs_in() -> None:
    assert ssd.block_sizes(FP32, 64, 63) == [(32, 32), (32, 31)]
    assert ssd.block_sizes(BF16, 64, 63) == [(64, 63)]
    options = {"gated": False, "packed": False, "training": False}
    assert definitions.mistake_of("recurrence", CPU, FP32, 40, 16, **options) is None
