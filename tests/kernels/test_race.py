"""The interpreter that `conftest` puts under every test of a kernel notices what it is there for."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import triton
import triton.language as tl
from hybrid_kernels import common

if common.INTERPRETED:
    from race import Watch

pytestmark = pytest.mark.skipif(not common.INTERPRETED, reason="triton compiles here")


@triton.jit
def _copy(source, target, step, shift, loads: tl.constexpr):
    program = tl.program_id(0)
    value = 1.0
    if loads:
        value = tl.load(source + program + shift)
    tl.store(target + program * step, value)


def test_correct_programs_run_in_any_order(watch: Watch) -> None:
    given, out = torch.arange(40.0), torch.empty(40)
    _copy[(40,)](given, out, 1, 0, True)
    assert torch.equal(out, given)
    assert watch.order != sorted(watch.order)


@pytest.mark.parametrize(
    ("step", "shift", "message"),
    [
        (1, 1, "1 elements loaded outside every argument"),
        (2, 0, "1 elements stored outside every argument"),
        (0, 0, "stores what another program has stored"),
    ],
)
def test_bounds_and_stores(step: int, shift: int, message: str) -> None:
    with pytest.raises(Exception, match=message):
        _copy[(4,)](torch.zeros(4), torch.zeros(5), step, shift, True)


def test_between_the_rows_of_a_view_nothing_is_allowed() -> None:
    with pytest.raises(Exception, match="stored outside"):
        _copy[(8,)](torch.zeros(8), torch.zeros(4, 8)[:, :4], 1, 0, True)


def test_what_one_program_loads_no_other_stores() -> None:
    both = torch.zeros(9)
    with pytest.raises(Exception, match="another program has"):
        _copy[(8,)](both, both, 1, 1, True)
