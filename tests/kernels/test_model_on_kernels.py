"""The whole student on the kernels is the student on torch: training, packed documents, prefill and
decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from hybrid_kernels import common
from students import COMPUTATIONS
from torch.utils._python_dispatch import TorchDispatchMode

from hybrid_distill.model import HybridForCausalLM, HybridLayerCache, SSMHeads
from hybrid_distill.plan import HeadPlan
from hybrid_distill.student.build import build_student

SHAPE = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


pytestmark = pytest.mark.skipif(not common.RUNS_HERE, reason="needs TRITON_INTERPRET=1, or a GPU")


@pytest.fixture
def student(family_model) -> HybridForCausalLM:
    """Layers that keep one head and none."""
    # Built on a CPU: a seed draws other weights on a GPU, where these tests run too.
    with torch.device("cpu"):
        teacher = family_model("llama", **SHAPE)
        torch.manual_seed(0)
        student, _ = build_student(teacher, HeadPlan.from_pairs(teacher, [(0, 1)]), d_state=8)
    return student.eval().to(torch.get_default_device())


def logits_and_gradients(
    student: HybridForCausalLM, impl: str, **inputs
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    student.set_ssm_implementation(impl)
    student.zero_grad()
    logits = student(**inputs, use_cache=False).logits
    logits.square().mean().backward()
    by_name = {}
    for name, parameter in student.named_parameters():
        if parameter.grad is not None:
            by_name[name] = parameter.grad.clone()
    return logits.detach(), by_name


def test_training_on_the_kernels_is_training_on_torch(student: HybridForCausalLM) -> None:
    ids = torch.randint(0, 90, (2, 21))
    seq_idx = torch.tensor([[0] * 9 + [1] * 12] * 2)
    inputs = {"input_ids": ids, "seq_idx": seq_idx}
    expected, expected_gradients = logits_and_gradients(student, "torch", **inputs)
    actual, actual_gradients = logits_and_gradients(student, "triton", **inputs)

    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert actual_gradients.keys() == expected_gradients.keys()
    for name, gradient in actual_gradients.items():
        right = expected_gradients[name]
        scale = right.abs().max().clamp_min(1e-8)
        torch.testing.assert_close(gradient / scale, right / scale, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("recurrence", COMPUTATIONS)
@pytest.mark.parametrize(
    ("d_state", "segment_len", "packed"), [(5, None, True), (5, 7, False), (16, None, False)]
)
def test_one_input_projection_with_padded_rows(recurrence, d_state, segment_len, packed) -> None:
    """Rows of 3 heads of 5 states are padded; values, gradients and the cache are those of separate
    projections."""
    heads = SSMHeads(12, 3, 16, d_state, 4, conv_bias=True, recurrence=recurrence)
    torch.manual_seed(0)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    heads.segment_len = segment_len
    hidden = torch.randn(2, 16, 12, requires_grad=True)
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, 11:] = 0
    seq_idx = torch.tensor([[0] * 6 + [1] * 10] * 2) if packed else None
    # Outputs at padding mean nothing.
    shown = mask[:, :, None, None]

    def values_and_gradients(impl: str) -> list[torch.Tensor]:
        heads.impl = impl
        cache = None if packed else HybridLayerCache()
        y = heads(hidden, mask, seq_idx, cache) * shown
        weights = torch.linspace(-1, 1, y.numel()).view_as(y)
        gradients = torch.autograd.grad((y * weights).sum(), [hidden, *heads.parameters()])
        states = []
        if cache is not None:
            states = [cache.conv_state, cache.ssm_state]
            # The row goes on from its states.
            with torch.no_grad():
                states.append(heads(hidden, mask, None, cache) * shown)
        return [y, *states, *gradients]

    on_torch = values_and_gradients("torch")
    on_kernels = values_and_gradients("triton")
    for actual, expected in zip(on_kernels, on_torch, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)


class Concatenations(TorchDispatchMode):
    """Counts the concatenations of ``n_elements`` elements or more."""

    def __init__(self, n_elements: int) -> None:
        super().__init__()
        self.n_elements = n_elements
        self.n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.cat.default and out.numel() >= self.n_elements:
            self.n += 1
        return out


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_x_b_and_c_stay_in_one_row(impl: str) -> None:
    """On the kernels, no copy of all activations joins x, B and C forward, or their gradients
    backward."""
    heads = SSMHeads(8, 3, 16, 5, 4)
    heads.reset_parameters(std=0.3)
    heads.impl = impl
    hidden = torch.randn(2, 40, 8, requires_grad=True)
    n_activations = 2 * 40 * sum(heads.sizes)
    with Concatenations(n_activations) as forward:
        y = heads(hidden)
    with Concatenations(n_activations) as backward:
        y.sum().backward()
    needs_none = impl == "triton"
    assert (forward.n == 0) == needs_none
    assert (backward.n == 0) == needs_none


@torch.no_grad()
def test_padded_prefill_and_decoding_on_the_kernels(student: HybridForCausalLM) -> None:
    ids = torch.randint(0, 90, (2, 13))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    mask[:, 8:11] = 0
    generated = {}
    for impl in ("torch", "triton"):
        student.set_ssm_implementation(impl)
        generated[impl] = student.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=2,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    on_torch = generated["torch"]
    on_kernels = generated["triton"]
    assert torch.equal(on_kernels.sequences, on_torch.sequences)
    for actual, expected in zip(on_kernels.logits, on_torch.logits, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
