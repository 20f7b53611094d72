"""The fused decode kernel against the model's own chain of operations in double precision."""

import pytest
import torch
import torch.nn.functional as F
from messages import naming
from torch import Tensor

pytest.importorskip("triton", reason="the kernels are written in triton")
from hybrid_kernels import common
from hybrid_kernels.step import ssd_step
from ssd_problem import relative_error

from hybrid_distill.model import convolution, ssd
from hybrid_distill.model.decays import MIN_LOG_DECAY, log_decay

# dtype -> error relative to the largest value; bf16 is the rounding of the result
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-3}
NAMES = ("xbc_BC", "a_BH", "z_BHP", "conv_weight_CK", "D_H", "conv_state_BCK", "ssm_state_BHPN")

pytestmark = pytest.mark.skipif(not common.RUNS_HERE, reason="needs TRITON_INTERPRET=1, or a GPU")


def draw(
    heads: int, head_dim: int, d_state: int, width: int = 4, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Draw the arguments of a step, `NAMES`, of two sequences."""
    channels = heads * (head_dim + 2 * d_state)
    # In fp32 always.
    ssm_state = torch.randn(2, heads, head_dim, d_state)
    return [
        torch.randn(2, channels).to(dtype),
        torch.randn(2, heads).to(dtype),
        torch.randn(2, heads, head_dim).to(dtype),
        torch.randn(channels, width).to(dtype),
        torch.randn(heads).to(dtype),
        torch.randn(2, channels, width - 1).to(dtype),
        ssm_state,
    ]


def reference(xbc, a, z, conv_weight, D, conv_state, ssm_state) -> tuple[Tensor, Tensor, Tensor]:
    """The operations of the model's SSM heads for one token: output, conv state, ssm state."""
    _, heads, head_dim, d_state = ssm_state.shape
    conv, conv_state = convolution.causal_conv(xbc.unsqueeze(1), conv_weight, state_BCK=conv_state)
    sizes = [heads * size for size in (head_dim, d_state, d_state)]
    parts = conv[:, 0].split(sizes, dim=-1)
    x, b, c = (part.unflatten(-1, (heads, -1)) for part in parts)
    log_a = log_decay(a).clamp_min(MIN_LOG_DECAY)
    y, ssm_state = ssd.ssd_step(x, log_a, b, c, ssm_state)
    return (y + D.unsqueeze(-1) * x) * F.silu(z), conv_state, ssm_state


def check(inputs: list[Tensor], dtype: torch.dtype = torch.float32) -> float:
    """Return the error of the output, after asserting that it and the states are right."""
    y_expected, conv_expected, ssm_expected = reference(*(t.double() for t in inputs))
    *_, conv_state, ssm_state = inputs
    y = ssd_step(*inputs)  # which writes the states
    assert y.dtype == dtype
    assert torch.equal(conv_state.double(), conv_expected)
    error_of_y = relative_error(y, y_expected)
    error_of_state = relative_error(ssm_state, ssm_expected)
    assert error_of_y <= TOLERANCE[dtype]
    assert error_of_state <= 1e-5
    return error_of_y


SIZES = [(3, 16, n) for n in (4, 5, 8, 16, 32, 64, 128)]
SIZES += [(1, 16, 8), (1, 48, 8), (3, 128, 8), (7, 16, 8)]
SIZES += [(1, 80, 128)]  # a state larger than a block


@pytest.mark.parametrize(("heads", "head_dim", "d_state"), SIZES)
def test_sizes(heads, head_dim, d_state, poison):
    check(draw(heads, head_dim, d_state))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [2, 3, 4])
def test_widths_and_dtypes(width, dtype, poison):
    check(draw(2, 16, 8, width, dtype), dtype)


def test_extreme_decays_neither_overflow_nor_lose_the_state():
    inputs = draw(2, 16, 4)
    inputs[1] = torch.tensor([[200.0, -200.0], [40.0, -20.0]])
    check(inputs)


def test_many_steps_are_the_scan():
    heads = 2
    head_dim = 16
    d_state = 4
    _, _, _, weight, D, conv_state, ssm_state = draw(heads, head_dim, d_state)
    steps = [draw(heads, head_dim, d_state)[:3] for _ in range(5)]
    conv_reference = conv_state.double()
    ssm_reference = ssm_state.double()
    for xbc, a, z in steps:
        y = ssd_step(xbc, a, z, weight, D, conv_state, ssm_state)
        wide = [t.double() for t in (xbc, a, z, weight, D)]
        expected, conv_reference, ssm_reference = reference(*wide, conv_reference, ssm_reference)
        torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-4)


def check_padding(inputs: list[Tensor]) -> None:
    """Read a token of the first sequence alone; what stands at padding does not matter."""
    padded = [t.clone() for t in inputs]
    xbc, *_, conv_state, ssm_state = padded
    *_, conv_before, ssm_before = inputs
    xbc[1] = float("nan")
    y = ssd_step(*padded, token_mask_B=torch.tensor([1, 0]))

    y_expected, conv_expected, ssm_expected = reference(*(t.double() for t in inputs))
    tolerance = 1e-4 if y.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(y[0].double(), y_expected[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(ssm_state[0].double(), ssm_expected[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(conv_state[0].double(), conv_expected[0])
    assert torch.equal(ssm_state[1], ssm_before[1])
    assert torch.equal(conv_state[1], conv_before[1])


def test_padding_leaves_both_states_alone(poison):
    check_padding(draw(2, 16, 4))


def test_inputs_of_any_strides():
    inputs = draw(2, 16, 4)
    strided = [t.clone() for t in inputs]
    for place in (0, 1, 2, 3):
        tensor = strided[place]
        strided[place] = tensor.unsqueeze(-1).expand(*tensor.shape, 2)[..., 0]
    # A token of a longer row.
    strided[0] = torch.stack([strided[0]] * 3, 1)[:, 1]
    assert torch.equal(ssd_step(*inputs), ssd_step(*strided))


@pytest.mark.parametrize(
    ("name", "value", "facts"),
    [
        ("xbc_BC", torch.zeros(2, 47), ("xbc_BC", "(2, 47)")),
        ("conv_weight_CK", torch.zeros(48, 7), ("conv_weight_CK", 7)),
        ("conv_state_BCK", torch.zeros(2, 3, 48).mT, ("conv_state_BCK", "(144, 1, 48)")),
        ("ssm_state_BHPN", torch.zeros(2, 2, 16, 4).bfloat16(), ("ssm_state_BHPN", "bfloat16")),
        ("ssm_state_BHPN", torch.zeros(2, 2, 16, 129), ("ssm_state_BHPN", "N=129")),
        ("D_H", torch.zeros(2, requires_grad=True), ("torch.no_grad",)),
        ("token_mask_B", torch.ones(3), ("token_mask_B", "(3,)")),
    ],
)
def test_bad_input_is_named(name, value, facts):
    inputs = dict(zip(NAMES, draw(2, 16, 4)))
    with pytest.raises(ValueError, match=naming(*facts)):
        ssd_step(**{**inputs, name: value})
