"""The gated delta rule: definition and precision. test_ssd.py has what it shares with SSD,
tests/kernels/test_delta_rule.py its kernel."""

from typing import Any

import pytest
import torch
from test_ssd import STATE, some_state
from test_ssd import delta_inputs as inputs
from torch import Tensor

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

    def run(dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
        """Return outputs and gradients."""
        leaves = [t.detach().to(dtype).requires_grad_() for t in (x, log_a, writes, k, c)]
        y, state = delta_scan(*leaves)
        loss = y.square().sum() + state.sum()
        return [y, state], list(torch.autograd.grad(loss, leaves))

    outputs, gradients = run(torch.float32)
    exact_outputs, exact_gradients = run(torch.float64)
    for actual, exact in zip(outputs, exact_outputs, strict=True):
        assert (actual - exact).abs().max() < 1e-5 * exact.abs().max()
    # Gradients that cancel out, as the decay's under repeated keys, are as exact as the others.
    largest = max(gradient.abs().max() for gradient in exact_gradients)
    for actual, exact in zip(gradients, exact_gradients, strict=True):
        assert (actual - exact).abs().max() < 1e-5 * largest


def shapes(recurrence: str) -> dict[str, tuple[int, ...]]:
    heads = SSMHeads(12, 3, 4, 5, 4, recurrence=recurrence)
    return {name: tuple(parameter.shape) for name, parameter in heads.named_parameters()}


def test_the_write_gate_is_all_that_heads_have_more_than_discrete_ones() -> None:
    gate = {"a_proj.weight": (6, 12), "a_proj.bias": (6,)}
    assert shapes("gdn") == {**shapes("discrete"), **gate}
