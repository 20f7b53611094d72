"""Products of a CPU in float32: the same as torch's own, forward and backward, whatever the library."""

import pytest
import torch
from hybrid_kernels import products
from torch.nn import functional as F

pytestmark = pytest.mark.skipif(not products._has_onednn(), reason="oneDNN is not the faster library on this CPU")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("frozen", [None, "input", "weight"])
def test_linear_layers_are_the_same(monkeypatch, bias, frozen):
    torch.manual_seed(0)
    monkeypatch.setattr(products, "LARGE", 0)
    given = {"input": torch.randn(2, 1, 3, 8).expand(2, 5, 3, 8), "weight": torch.randn(6, 8), "bias": torch.randn(6)}
    given = {name: t.requires_grad_(name != frozen) for name, t in given.items() if bias or name != "bias"}
    wanted = [t for t in given.values() if t.requires_grad]
    expected = F.linear(*given.values())
    with products.on_fast_cpu(torch.device("cpu")):
        found = F.linear(*given.values())
        assert type(found.grad_fn).__name__ == "_LinearBackward"
        gradients = torch.autograd.grad(found.square().sum(), wanted)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected.square().sum(), wanted))


def test_other_dtypes_and_autocast_are_left_to_torch():
    x, weight = torch.randn(3, 8), torch.randn(6, 8)
    with products.on_fast_cpu(torch.device("cpu")):
        assert torch.equal(F.linear(x.double(), weight.double()), x.double() @ weight.double().mT)
        with torch.autocast("cpu", torch.bfloat16):
            assert F.linear(x, weight).dtype == torch.bfloat16
        assert F.linear(x[:0], weight).shape == (0, 6)


def test_small_weights_keep_their_bits():
    x, weight = torch.randn(3, 8), torch.randn(6, 8)
    with products.on_fast_cpu(torch.device("cpu")):
        assert torch.equal(F.linear(x, weight), torch._C._nn.linear(x, weight))
