"""The convolution kernels against the torch convolution in double precision: values and
gradients."""

import pytest
import torch
from messages import naming
from torch import Tensor

pytest.importorskip("triton", reason="the kernels are written in triton")
from hybrid_kernels import common, conv
from hybrid_kernels.conv import causal_conv

from hybrid_distill.model import convolution

# dtype -> error relative to the largest value; bf16 is one rounding of the result, of the
# gradients' operands another
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3}
BATCH = 2

pytestmark = pytest.mark.skipif(not common.RUNS_HERE, reason="needs TRITON_INTERPRET=1, or a GPU")


def reference(x, weight, state, seq_idx, activation):
    y, last = convolution.causal_conv(x, weight, state_BCK=state, seq_idx_BL=seq_idx)
    if activation:
        y = torch.nn.functional.silu(y)
    return y, last


def draw(
    length: int, channels: int, width: int, dtype: torch.dtype, stateful: bool
) -> list[Tensor | None]:
    x = torch.randn(BATCH, length, channels).to(dtype)
    weight = torch.randn(channels, width).to(dtype)
    state = None
    if stateful:
        state = torch.randn(BATCH, channels, width - 1).to(dtype)
    return [x, weight, state]


def documents(length: int) -> Tensor:
    return (torch.rand(BATCH, length) < 0.3).long().cumsum(-1)


def values_and_gradients(run, inputs: list[Tensor | None], to_y: Tensor) -> list[Tensor]:
    """Return outputs, the last inputs, and the gradient of every input."""
    arguments = []
    leaves = []
    for tensor in inputs:
        if tensor is not None:
            tensor = tensor.detach().clone().requires_grad_()
            leaves.append(tensor)
        arguments.append(tensor)
    y, last = run(*arguments)
    loss = (y * to_y.to(y.dtype)).sum() + last.square().sum()
    return [y.detach(), last.detach(), *torch.autograd.grad(loss, leaves)]


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that few tokens and channels fill several, and a part of one."""
    monkeypatch.setattr(conv, "FORWARD", conv.Tile(tokens=8, channels=16, num_warps=4))
    monkeypatch.setattr(conv, "BACKWARD", conv.Tile(tokens=16, channels=8, num_warps=4))


def check(
    inputs: list[Tensor | None], seq_idx: Tensor | None = None, activation: str | None = None
) -> float:
    """Return the largest error of values and gradients, after asserting that it is small."""
    x = inputs[0]
    assert x is not None
    to_y = torch.randn(x.shape)

    def kernels(x: Tensor, weight: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        return causal_conv(x, weight, activation=activation, state_BCK=state, seq_idx_BL=seq_idx)

    def torch_alone(x: Tensor, weight: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        return reference(x, weight, state, seq_idx, activation)

    ours = values_and_gradients(kernels, inputs, to_y)
    wide = [None if tensor is None else tensor.double() for tensor in inputs]
    expected = values_and_gradients(torch_alone, wide, to_y.double())
    errors = []
    for actual, right in zip(ours, expected):
        assert actual.dtype == x.dtype
        largest = right.abs().max().clamp_min(1e-30)
        difference = (actual.double() - right).abs().max()
        errors.append((difference / largest).item())
    assert all(error <= TOLERANCE[x.dtype] for error in errors), errors
    return max(errors)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("whole", [False, True])
def test_values_and_gradients(width, activation, dtype, whole, poison):
    """With a state before packed documents, or neither."""
    seq_idx = documents(19) if whole else None
    inputs = draw(19, 20, width, dtype, whole)
    check(inputs, seq_idx, activation)


@pytest.mark.parametrize("length", [1, 2, 3, 16])
@pytest.mark.parametrize("channels", [1, 29])
@pytest.mark.parametrize("stateful", [False, True])
def test_short_rows_and_odd_channels(length, channels, stateful, poison):
    check(draw(length, channels, 4, torch.float32, stateful))


def test_two_halves_with_the_state_between_are_the_whole():
    x, weight, _ = draw(25, 12, 4, torch.float32, False)
    border = 11
    whole, last = causal_conv(x, weight)
    first, state = causal_conv(x[:, :border], weight)
    second, last_of_halves = causal_conv(x[:, border:], weight, state_BCK=state)
    assert torch.equal(whole, torch.cat([first, second], 1))
    assert torch.equal(last, last_of_halves)


def test_packed_documents_are_the_documents_alone():
    x, weight, _ = draw(22, 8, 4, torch.float32, False)
    # Numbers of documents need not follow one another.
    seq_idx = torch.tensor([0] * 2 + [3] * 9 + [4] * 11).expand(BATCH, -1)
    packed, _ = causal_conv(x, weight, seq_idx_BL=seq_idx)
    alone = []
    for part in x.split([2, 9, 11], dim=1):
        y, _ = causal_conv(part, weight)
        alone.append(y)
    assert torch.equal(packed, torch.cat(alone, 1))


def test_any_strides():
    x, weight, _ = draw(20, 8, 3, torch.float32, False)
    expected, _ = causal_conv(x, weight)
    wide = torch.randn(BATCH, 20, 24)
    wide[..., 8:16] = x
    slice_of_a_row = wide[..., 8:16]
    channels_first = x.transpose(0, 2).contiguous().transpose(0, 2)
    columns = weight.mT.contiguous().mT
    for same in (slice_of_a_row, channels_first):
        y, _ = causal_conv(same, columns)
        assert torch.equal(y, expected)


def test_gradients_are_the_same_bits_every_time():
    inputs = draw(40, 20, 4, torch.float32, True)
    to_y = torch.randn(BATCH, 40, 20)

    def kernels(x: Tensor, weight: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return causal_conv(x, weight, state_BCK=state)

    once = values_and_gradients(kernels, inputs, to_y)
    again = values_and_gradients(kernels, inputs, to_y)
    for one, other in zip(once, again):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"x_BLC": torch.zeros(0, 5, 8)}, ("x_BLC", "(0, 5, 8)")),
        ({"x_BLC": torch.zeros(2, 5, 8).half()}, ("x_BLC", "float16")),
        ({"weight_CK": torch.zeros(8, 5)}, ("weight_CK", 5)),
        ({"activation": "gelu"}, ("activation", "'gelu'")),
        ({"state_BCK": torch.zeros(2, 8, 4)}, ("state_BCK", "(2, 8, 4)")),
        ({"seq_idx_BL": torch.tensor([[0, 0, 1, 0, 0]] * 2)}, ("seq_idx_BL", "row 0", "token 3")),
    ],
)
def test_bad_input_is_named(change, facts):
    good = {"x_BLC": torch.zeros(2, 5, 8), "weight_CK": torch.zeros(8, 4)}
    with pytest.raises(ValueError, match=naming(*facts)):
        causal_conv(**{**good, **change})
