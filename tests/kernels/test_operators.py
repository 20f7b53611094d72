"""The kernels as operators of torch: what torch.compile, fake tensors and autograd are promised
holds."""

from __future__ import annotations

import pytest
import torch
from messages import naming
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from hybrid_kernels import common, conv, ssd, ssd_operators, ssd_triton, step
from torch._subclasses.fake_tensor import FakeTensorMode

from hybrid_distill.model.convolution import causal_conv
from hybrid_distill.model.kernel_choice import choose_implementation
from hybrid_distill.model.ssd import gated_ssd_scan, ssd_scan, step_in_place

pytestmark = pytest.mark.skipif(
    not common.INTERPRETED, reason="triton was imported before TRITON_INTERPRET=1 was set"
)

# Rows, tokens, heads, head dim, state size, taps.
B = 2
L = 21
H = 1
P = 16
N = 4
K = 4


def scan_arguments(length: int = L) -> list[Tensor]:
    """Draw x, raw decays, B, C, D, z and the state before."""
    tokens = (B, length, H)
    sizes = [
        (*tokens, P),
        tokens,
        (*tokens, N),
        (*tokens, N),
        (H,),
        (*tokens, P),
        (B, H, P, N),
    ]
    return [torch.randn(size, requires_grad=True) for size in sizes]


def documents(length: int = L) -> Tensor:
    return torch.arange(length).expand(B, length) // 8


def step_arguments() -> list[Tensor]:
    channels = H * (P + 2 * N)
    sizes = [
        (B, channels),
        (B, H),
        (B, H, P),
        (channels, K),
        (H,),
        (B, channels, K - 1),
        (B, H, P, N),
    ]
    return [torch.randn(size) for size in sizes]


@pytest.mark.parametrize("full", [False, True])
def test_operators_keep_what_torch_asks_of_them(full: bool) -> None:
    """Schema, fake kernels, autograd and the traced program, as `torch.library.opcheck` compares
    them."""
    x, a, b, c, D, z, state = scan_arguments()
    options = (D, state, documents()) if full else (None, None, None)
    torch.library.opcheck(ssd_operators.scan_forward, (x, a, b, c, *options, True, None, True))
    torch.library.opcheck(ssd_operators.gate, (x, z))

    x_BLC = torch.randn(B, L, 12, requires_grad=True)
    weight_CK = torch.randn(12, K, requires_grad=True)
    state_BCK = torch.randn(B, 12, K - 1, requires_grad=True) if full else None
    torch.library.opcheck(conv._forward_op, (x_BLC, weight_CK, state_BCK, None, full))

    token_mask_B = torch.tensor([1, 0]) if full else None
    torch.library.opcheck(step._op, (*step_arguments(), token_mask_B))


def layer(given: list[Tensor], weight_CK: Tensor, seq_idx_BL: Tensor) -> Tensor:
    """Run every kernel of training one after another; return a loss."""
    x_BLHP, raw_BLH, b_BLHN, c_BLHN, D_H, z_BLHP = given
    options = {"seq_idx_BL": seq_idx_BL, "impl": "triton"}
    x_BLC, _ = causal_conv(x_BLHP.flatten(2), weight_CK, **options)
    convolved_BLHP = x_BLC.view_as(x_BLHP)
    y_BLHP, state = gated_ssd_scan(convolved_BLHP, raw_BLH, b_BLHN, c_BLHN, D_H, z_BLHP, **options)
    plain_BLHP, _ = ssd_scan(y_BLHP, -raw_BLH.exp(), b_BLHN, c_BLHN, impl="triton")
    return plain_BLHP.square().sum() + state.sum()


def test_a_layer_compiles_without_a_graph_break_and_once_for_all_lengths() -> None:
    graphs = []

    def record(graph, inputs):
        graphs.append(graph)
        return graph.forward

    whole = torch.compile(layer, fullgraph=True, backend=record, dynamic=True)
    weight_CK = torch.randn(H * P, K, requires_grad=True)
    for length in (L, 7):
        given = scan_arguments(length)[:6]
        seq_idx_BL = documents(length)
        leaves = [*given, weight_CK]
        expected = torch.autograd.grad(layer(given, weight_CK, seq_idx_BL), leaves)
        actual = torch.autograd.grad(whole(given, weight_CK, seq_idx_BL), leaves)
        for compiled, eager in zip(actual, expected, strict=True):
            torch.testing.assert_close(compiled, eager)
    assert len(graphs) == 1


@torch.no_grad()
def test_a_decoding_step_compiles_without_a_graph_break() -> None:
    whole = torch.compile(step_in_place, fullgraph=True, backend="aot_eager")
    arguments = step_arguments()
    same_arguments = [t.clone() for t in arguments]
    compiled = whole(*arguments, impl="triton")
    eager = step_in_place(*same_arguments, impl="triton")
    torch.testing.assert_close(compiled, eager)
    # The last two are states, which a step writes.
    for written, expected in zip(arguments[-2:], same_arguments[-2:], strict=True):
        assert torch.equal(written, expected)


@torch.no_grad()
def test_a_fake_gpu_needs_no_gpu() -> None:
    """A plan of memory traces the kernels on a machine that has none."""
    with FakeTensorMode():
        *inputs, state = [torch.empty(t.shape, device="cuda") for t in scan_arguments()]
        x = inputs[0]
        assert (
            choose_implementation("auto", "recurrence", x, P, N, gated=True, packed=False)
            == "triton"
        )
        y, final = gated_ssd_scan(*inputs, state_BHPN=state)
        assert y.is_cuda
        assert y.shape == x.shape
        assert final.shape == state.shape


def test_second_derivatives_are_refused_in_words() -> None:
    x, a, b, c, *_ = scan_arguments()
    scanned, _ = ssd.ssd(x, a, b, c)
    x_BLC = torch.randn(B, L, 12, requires_grad=True)
    convolved, _ = conv.causal_conv(x_BLC, torch.randn(12, K))
    for output, source in ((scanned, x), (convolved, x_BLC)):
        (dx,) = torch.autograd.grad(output.square().sum(), source, create_graph=True)
        with pytest.raises(RuntimeError, match=naming("create_graph")):
            dx.sum().backward()


def test_no_kernel_is_compiled_anew_for_each_length() -> None:
    """Lengths are not part of the key that the compiler caches by, whether they are 1, multiples of
    16, or neither."""
    kernels = [
        ssd_triton._forward,
        ssd_triton._backward,
        ssd_triton._segment_states,
        ssd_triton._carry_over,
        conv._forward,
        conv._through_silu,
        conv._backward,
    ]
    for kernel in kernels:
        lengths = {"L", "chunks_per_segment", "n_segments"} & set(kernel.arg_names)
        assert lengths
        assert lengths <= set(kernel.kwargs["do_not_specialize"])
