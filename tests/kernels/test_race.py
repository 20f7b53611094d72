"""The interpreter that `conftest` puts under every test of a kernel notices what it is there
for."""

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
def _copy(source, target, step, shift):
    program = tl.program_id(0)
    tl.store(target + program * step, tl.load(source + program + shift))


def test_correct_programs_run_in_any_order(watch: Watch) -> None:
    given = torch.arange(40.0)
    out = torch.empty(40)
    _copy[(40,)](given, out, 1, 0)
    assert torch.equal(out, given)
    assert watch.order != sorted(watch.order)


BOTH = torch.zeros(9)


@pytest.mark.parametrize(
    ("source", "target", "step", "shift", "message"),
    [
        (torch.zeros(4), torch.zeros(5), 1, 1, "1 elements loaded outside every argument"),
        (torch.zeros(4), torch.zeros(5), 2, 0, "stored outside every argument"),
        (torch.zeros(4), torch.zeros(5), 0, 0, "stores what another program has stored"),
        # Between the rows of a view
        (torch.zeros(4), torch.zeros(4, 8)[:, :4], 5, 0, "stored outside"),
        (BOTH, BOTH, 1, 1, "another program has"),
    ],
)
def test_what_a_kernel_must_not_do_is_reported(
    source, target, step: int, shift: int, message: str
) -> None:
    with pytest.raises(Exception, match=message):
        _copy[(4,)](source, target, step, shift)
