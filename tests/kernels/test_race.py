"""The interpreter that `conftest` puts under every test of a kernel shuffles programs and finds
races."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import triton
import triton.language as tl
from hybrid_kernels import common
from race import Access, OutOfBounds, Race, Watch
from triton.runtime.errors import InterpreterError

pytestmark = pytest.mark.skipif(not common.INTERPRETED, reason="triton compiles here")


@triton.jit
def _copy(source, target, step, shift):
    """Program i writes target[i * step] = source[i + shift]."""
    program = tl.program_id(0)
    tl.store(target + program * step, tl.load(source + program + shift))


def test_correct_programs_run_in_any_order(watch: Watch) -> None:
    source = torch.arange(40.0)
    target = torch.empty(40)
    _copy[(40,)](source, target, 1, 0)
    assert torch.equal(target, source)
    assert watch.order != sorted(watch.order)


FOUR = torch.zeros(4)
BOTH = torch.zeros(9)
"""Source and target in one."""


@pytest.mark.parametrize(
    ("source", "target", "step", "shift", "kind", "is_store"),
    [
        pytest.param(FOUR, torch.zeros(5), 1, 1, OutOfBounds, False, id="load-beyond"),
        pytest.param(FOUR, torch.zeros(5), 2, 0, OutOfBounds, True, id="store-beyond"),
        pytest.param(FOUR, torch.zeros(5), 0, 0, Race, True, id="two-stores"),
        pytest.param(
            FOUR, torch.zeros(4, 8)[:, :4], 5, 0, OutOfBounds, True, id="between-rows-of-a-view"
        ),
        # Which of the two programs runs first is drawn.
        pytest.param(BOTH, BOTH, 1, 1, Race, None, id="load-and-store"),
    ],
)
def test_what_a_kernel_must_not_do_is_reported(
    source, target, step: int, shift: int, kind: type[Access], is_store: bool | None
) -> None:
    with pytest.raises(InterpreterError) as error:
        _copy[(4,)](source, target, step, shift)
    cause = error.value.__cause__
    assert type(cause) is kind
    if is_store is not None:
        assert cause.is_store == is_store
