"""The gated delta rule: definition, precision, kernel; test_ssd.py has what it shares with SSD."""

import importlib
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_ssd import BATCH, HEAD_DIM, STATE, some_state
from test_ssd import delta_inputs as inputs

from hybrid_distill.model import gated_delta
from hybrid_distill.model.gated_delta import delta_scan, delta_step
from hybrid_distill.model.recurrent_heads import SSMHeads

EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}


def test_a_step_is_the_rule_of_the_paper() -> None:
    x, log_a, write, k, c = (t[0, 0, 0] for t in inputs(1))
    state = some_state()[0, 0]
    forgetting = log_a.exp() * (torch.eye(STATE) - write * torch.outer(k, k))
    expected = state @ forgetting + write * torch.outer(x, k)
    y, new_state = delta_step(x, log_a, write, k, c, state)
    torch.testing.assert_close(new_state, expected, **EXACT)
    torch.testing.assert_close(y, expected @ c, **EXACT)


@pytest.mark.parametrize("write", [None, 1.0])
@pytest.mark.parametrize("same_keys", [False, True])
def test_float32_is_near_float64(same_keys: bool, write: float | None) -> None:
    """Keys repeat at every token or never, with whole writes and without any decay."""
    x, log_a, writes, k, c = inputs(200, torch.float32)
    if same_keys:
        k = k[:, :1].expand_as(k)
    if write is not None:
        log_a = torch.zeros_like(log_a)
        writes = torch.full_like(writes, write)

    def run(dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in (x, log_a, writes, k, c)]
        y, state = delta_scan(*leaves)
        loss = y.square().sum() + state.sum()
        return [y, state, *torch.autograd.grad(loss, leaves)]

    exact = run(torch.float64)
    # Gradients that cancel out, as the decay's under repeated keys, are as exact as the others.
    sizes = [t.abs().max() for t in exact]
    largest_gradient = max(sizes[2:])
    for place, (actual, expected) in enumerate(zip(run(torch.float32), exact, strict=True)):
        size = sizes[place] if place < 2 else largest_gradient
        assert (actual - expected).abs().max() < 1e-5 * size


class Index(int):
    """A loop's number, which kernels cast."""

    def to(self, dtype: Any) -> int:
        return self


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run flash-linear-attention's kernels in triton's interpreter.

    It cannot time them, and counts in plain integers.
    """
    if os.environ["TRITON_INTERPRET"] != "1":
        pytest.skip("needs TRITON_INTERPRET=1")
    pytest.importorskip(gated_delta.KERNEL, reason="flash-linear-attention is not installed")
    autotuner = importlib.import_module("triton.runtime.autotuner").Autotuner
    monkeypatch.setattr(autotuner, "do_bench", lambda self, call, quantiles: [1.0] * len(quantiles))
    states = importlib.import_module("fla.ops.common.chunk_delta_h")

    def indices(*bounds: Any) -> Iterator[Index]:
        return map(Index, range(*map(int, bounds)))

    monkeypatch.setattr(states, "range", indices, raising=False)


@pytest.mark.usefixtures("kernel")
def test_the_kernel_and_its_gradients_are_those_of_torch() -> None:
    """Two documents behind a state, in fp32: the interpreter cannot multiply bfloat16."""
    args = [*inputs(70, torch.float32), some_state().float()]
    leaves = [t.detach().requires_grad_() for t in args]
    seq_idx = (torch.arange(70) > 40).long().expand(BATCH, -1)

    def with_gradients(y: torch.Tensor, state: torch.Tensor) -> list[torch.Tensor]:
        loss = y.sin().sum() + state.cos().sum()
        return [y, state, *torch.autograd.grad(loss, leaves)]

    on_kernel = with_gradients(*gated_delta._on_kernel(*leaves, seq_idx))
    options: dict[str, Any] = {"seq_idx_BL": seq_idx, "impl": "torch"}
    of_torch = with_gradients(*delta_scan(*leaves[:5], state_BHPN=leaves[5], **options))
    for actual, expected in zip(on_kernel, of_torch, strict=True):
        assert (actual - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_kernel_that_works_is_used(dtype: torch.dtype) -> None:
    assert gated_delta._mistake(torch.device("cpu"), dtype, 32, 16) is None


def test_a_kernel_that_does_not_work_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def shapes(recurrence: str) -> dict[str, tuple[int, ...]]:
    heads = SSMHeads(12, 3, 4, 5, 4, recurrence=recurrence)
    return {name: tuple(parameter.shape) for name, parameter in heads.named_parameters()}


def test_the_write_gate_is_all_that_heads_have_more_than_discrete_ones() -> None:
    gate = {"a_proj.weight": (6, 12), "a_proj.bias": (6,)}
    assert shapes("gdn") == {**shapes("discrete"), **gate}
