"""The gated delta rule: its definition, its precision and its kernel; test_ssd.py has what it shares with SSD."""

import importlib
import os
import sys
import types
from typing import Any

import pytest
import torch
from test_ssd import HEAD_DIM, STATE, some_state
from test_ssd import delta_inputs as inputs

from hybrid_distill.model import gated_delta
from hybrid_distill.model.gated_delta import delta_scan, delta_step
from hybrid_distill.model.mixer import SSMHeads

EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}


def test_a_step_is_the_rule_of_the_paper() -> None:
    x, log_a, write, k, c = (t[0, 0, 0] for t in inputs(1))
    state = some_state()[0, 0]
    expected = log_a.exp() * state @ (
        torch.eye(STATE) - write * torch.outer(k, k)
    ) + write * torch.outer(x, k)
    y, found = delta_step(x, log_a, write, k, c, state)
    torch.testing.assert_close(found, expected, **EXACT)
    torch.testing.assert_close(y, expected @ c, **EXACT)


@pytest.mark.parametrize("write", [None, 1.0])
@pytest.mark.parametrize("same_keys", [False, True])
def test_float32_is_near_float64(same_keys: bool, write: float | None) -> None:
    """Keys repeat at every token or never, with whole writes and without any decay."""
    x, log_a, writes, k, c = inputs(200, torch.float32)
    if same_keys:
        k = k[:, :1].expand_as(k)
    if write is not None:
        log_a, writes = torch.zeros_like(log_a), torch.full_like(writes, write)
    args = [t.detach().requires_grad_() for t in (x, log_a, writes, k, c)]
    wide = [t.detach().double().requires_grad_() for t in args]
    found = []
    for leaves in (args, wide):
        y, state = delta_scan(*leaves)
        found.append(
            [y, state, *torch.autograd.grad(y.square().sum() + state.sum(), leaves)]
        )
    # Gradients that cancel out, as the decay's under repeated keys, are as exact as the others.
    largest = [t.abs().max() for t in found[1]]
    for place, (actual, expected) in enumerate(zip(*found, strict=True)):
        assert (actual - expected).abs().max() < 1e-5 * (
            largest[place] if place < 2 else max(largest[2:])
        )


class Index(int):
    def to(self, dtype: Any) -> int:
        return self


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-linear-attention's kernels in triton's interpreter, which cannot time and counts in plain integers."""
    if os.environ["TRITON_INTERPRET"] != "1":
        pytest.skip("needs TRITON_INTERPRET=1")
    pytest.importorskip(
        gated_delta.KERNEL, reason="flash-linear-attention is not installed"
    )
    autotuner = importlib.import_module("triton.runtime.autotuner").Autotuner
    monkeypatch.setattr(
        autotuner, "do_bench", lambda self, call, quantiles: [1.0] * len(quantiles)
    )
    states = importlib.import_module("fla.ops.common.chunk_delta_h")
    monkeypatch.setattr(
        states, "range", lambda *bounds: map(Index, range(*map(int, bounds))), raising=False
    )


@pytest.mark.usefixtures("kernel")
def test_the_kernel_and_its_gradients_are_those_of_torch() -> None:
    """Two documents behind a state, in fp32: the interpreter cannot multiply bfloat16."""
    x, log_a, write, k, c = inputs(70, torch.float32)
    leaves = [
        t.detach().requires_grad_() for t in (x, log_a, write, k, c, some_state().float())
    ]
    seq_idx = (torch.arange(70) > 40).long().expand(len(x), -1)
    options: dict[str, Any] = {"seq_idx_BL": seq_idx, "impl": "torch"}
    found = []
    for y, state in (
        gated_delta._on_kernel(*leaves, seq_idx),
        delta_scan(*leaves[:5], state_BHPN=leaves[5], **options),
    ):
        found.append(
            [y, state, *torch.autograd.grad(y.sin().sum() + state.cos().sum(), leaves)]
        )
    for actual, expected in zip(*found, strict=True):
        assert (actual - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_kernel_that_works_is_used(dtype: torch.dtype) -> None:
    assert gated_delta._mistake(torch.device("cpu"), dtype, 32, 16) is None


def test_a_kernel_that_does_not_work_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def mistake(function: Any) -> str | None:
        kernel = types.SimpleNamespace(chunk_gated_delta_rule=function)
        monkeypatch.setitem(sys.modules, gated_delta.KERNEL, kernel)
        return gated_delta._mistake(torch.device("cpu"), torch.float32, HEAD_DIM, STATE)

    assert "off by" in str(mistake(lambda **given: (given["v"], given["initial_state"])))
    assert "fails with TypeError" in str(mistake(lambda q, k: None))


def test_without_the_kernel_one_line_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gated_delta.importlib.util, "find_spec", lambda name: None)
    for _ in range(2):
        assert not gated_delta.kernel_fits(torch.device("cuda"), torch.bfloat16, 16, 16)
    assert [record.message.rpartition(": ")[2] for record in caplog.records] == [
        "flash-linear-attention is not installed"
    ]


def test_the_write_gate_is_all_that_heads_have_more_than_discrete_ones() -> None:
    sizes = 12, 3, 4, 5, 4
    shapes = {
        name: {
            key: tuple(p.shape)
            for key, p in SSMHeads(*sizes, recurrence=name).named_parameters()
        }
        for name in ("discrete", "gdn")
    }
    assert shapes["gdn"] == {
        **shapes["discrete"],
        "a_proj.weight": (6, 12),
        "a_proj.bias": (6,),
    }
