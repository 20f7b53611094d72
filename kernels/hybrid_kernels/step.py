"""One decoded token of a layer's recurrent heads in one kernel, in place on the cache.

    x | B | C = conv(xbc)        a = exp(-softplus(raw))
    S <- a S + x B^T             y = (S C + D x) silu(z)

One program per sequence and head; the state is read once and written once, which is all that the
time goes into.

Shapes: B batch, H head, P head dim, N state size, C channels (H P of x, then H N of B and H N of
C), K conv width (K - 1 in a state)."""

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

from .common import (
    Compilation,
    check_device,
    check_dtype,
    check_not_empty,
    check_shape,
    dot_mode,
    narrow,
)
from .conv import WIDTHS

SMALLEST_DECAY = tl.constexpr(9.357622968840175e-14)  # exp(-30), as in the other kernels
LARGEST_STATE = LARGEST_HEAD_DIM = 128
STATE_BLOCK = 4096  # elements of the state that a program holds at a time: 32 registers a thread
NUM_WARPS = 4


def ssd_step(
    xbc_BC: Tensor,
    a_BH: Tensor,
    z_BHP: Tensor,
    conv_weight_CK: Tensor,
    D_H: Tensor,
    conv_state_BCK: Tensor,
    ssm_state_BHPN: Tensor,
    *,
    token_mask_B: Tensor | None = None,
) -> Tensor:
    """y_BHP in the dtype of xbc, after D and the gate; writes both states, which hold the past, in
    place.

    ``xbc_BC`` is what enters the convolution, ``a_BH`` the raw decay. Where ``token_mask_B`` is 0
    there is padding instead of a token: both states stay as they are, and y means nothing. All
    arithmetic is in fp32. There is no gradient.

    Raises ValueError for shapes that do not fit, dtypes other than bfloat16 and float32, states
    that are not contiguous or an ssm_state that is not float32, an empty batch, and for inputs that
    need a gradient."""
    given = (xbc_BC, a_BH, z_BHP, conv_weight_CK, D_H, conv_state_BCK, ssm_state_BHPN)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
        raise ValueError(
            "an argument needs a gradient, which a step in place has not: use torch.no_grad()."
        )
    # Torch takes 30 µs to call an operator that writes in place
    run = _op if torch.compiler.is_compiling() else _run
    return run(*given, token_mask_B)


def _run(xbc, a, z, weight, D, conv_state, ssm_state, mask) -> Tensor:
    _check(xbc, a, z, weight, D, conv_state, ssm_state)
    if mask is not None:
        check_shape("token_mask_B", mask, (len(xbc),), "B")
        check_device("token_mask_B", mask, xbc)
        mask = mask.to(torch.int32).contiguous()
    xbc, a, z, weight, D = (t.contiguous() for t in (xbc, a, z, weight, D))
    batch, n_heads, head_dim, d_state = ssm_state.shape
    y = torch.empty(z.shape, dtype=xbc.dtype, device=xbc.device)
    with torch.cuda.device_of(xbc):
        _step[(batch * n_heads,)](
            xbc,
            a,
            z,
            weight,
            D,
            conv_state,
            ssm_state,
            mask,
            y,
            n_heads,
            P=head_dim,
            N=d_state,
            **_blocks(head_dim, d_state),
            WIDTH=weight.shape[1],
            MASKED=mask is not None,
            MODE=dot_mode(xbc.dtype),
            num_warps=NUM_WARPS,
            # Threads that compute the same element must round alike: all of them store it
            enable_fp_fusion=False,
        )
    return y


_op = custom_op(
    "hybrid_kernels::ssd_step",
    _run,
    mutates_args=("conv_state", "ssm_state"),
    schema="(Tensor xbc, Tensor a, Tensor z, Tensor weight, Tensor D, "
    "Tensor(a!) conv_state, Tensor(b!) ssm_state, "
    "Tensor? mask) -> Tensor",
)


@_op.register_fake
def _(xbc, a, z, weight, D, conv_state, ssm_state, mask) -> Tensor:
    return xbc.new_empty(z.shape)


def compilations(capability: int) -> list[Compilation]:
    """Every size of block, for compiling ahead of time; the same ones for every ``capability``."""
    floats = ("xbc", "z", "weight", "D", "conv_state", "y")
    runtime = dict.fromkeys(floats, "*bf16") | {
        "a": "*fp32",
        "ssm_state": "*fp32",
        "mask": "*i32",
        "n_heads": "i32",
    }
    found = []
    for head_dim, d_state in itertools.product((16, 32, 64, 128), (4, 8, 16, 32, 64, 128)):
        blocks = _blocks(head_dim, d_state)
        constants = {
            "P": head_dim,
            "N": d_state,
            **blocks,
            "WIDTH": 4,
            "MASKED": True,
            "MODE": "gpu",
        }
        arguments = {**runtime, **constants}
        found.append(
            Compilation(
                name=f"step N={d_state} P={head_dim}",
                kernel=_step,
                arguments={argument: arguments[argument] for argument in _step.arg_names},
                constants=frozenset(constants),
                divisible=frozenset(runtime) - {"n_heads"},
                num_warps=NUM_WARPS,
                num_stages=1,
                tensor_cores=False,
            )
        )
    return found


def _blocks(head_dim: int, d_state: int) -> dict[str, int]:
    block_n = triton.next_power_of_2(d_state)
    return {
        "BLOCK_P": min(triton.next_power_of_2(head_dim), STATE_BLOCK // block_n),
        "BLOCK_N": block_n,
    }


def _check(
    xbc: Tensor,
    a: Tensor,
    z: Tensor,
    weight: Tensor,
    D: Tensor,
    conv_state: Tensor,
    ssm_state: Tensor,
) -> None:
    check_shape("ssm_state_BHPN", ssm_state, (None, None, None, None), "BHPN")
    check_not_empty("ssm_state_BHPN", ssm_state)
    batch, n_heads, head_dim, d_state = ssm_state.shape
    if head_dim > LARGEST_HEAD_DIM or d_state > LARGEST_STATE:
        raise ValueError(
            f"ssm_state_BHPN has P={head_dim} and N={d_state}; the kernel goes up to "
            f"P={LARGEST_HEAD_DIM} and "
            f"N={LARGEST_STATE}: use the torch implementation."
        )
    channels = n_heads * (head_dim + 2 * d_state)
    check_shape("conv_weight_CK", weight, (channels, None), "CK")
    width = weight.shape[1]
    if width not in WIDTHS:
        raise ValueError(
            f"conv_weight_CK has width {width}; the kernel has widths 2, 3 and 4: pad it with "
            "zeros."
        )
    check_shape("xbc_BC", xbc, (batch, channels), "BC")
    check_shape("a_BH", a, (batch, n_heads), "BH")
    check_shape("z_BHP", z, (batch, n_heads, head_dim), "BHP")
    check_shape("D_H", D, (n_heads,), "H")
    check_shape("conv_state_BCK", conv_state, (batch, channels, width - 1), "BCK")
    inputs = {"xbc_BC": xbc, "a_BH": a, "z_BHP": z, "conv_weight_CK": weight, "D_H": D}
    states = {"conv_state_BCK": conv_state, "ssm_state_BHPN": ssm_state}
    for name, tensor in (inputs | states).items():
        check_dtype(
            name,
            tensor,
            (torch.float32,) if tensor is ssm_state else (torch.bfloat16, torch.float32),
        )
        check_device(name, tensor, xbc)
    for name, tensor in states.items():
        if not tensor.is_contiguous():
            raise ValueError(
                f"{name} has strides {tensor.stride()}; it is written in place: make it contiguous."
            )


@triton.jit
def _shifted(xbc, weight, conv_state, channel, mask, WIDTH: tl.constexpr):
    """The new input of these channels and their convolution with the past, in fp32."""
    newest = tl.load(xbc + channel, mask=mask, other=0.0)
    out = newest.to(tl.float32) * tl.load(
        weight + channel * WIDTH + WIDTH - 1, mask=mask, other=0.0
    ).to(tl.float32)
    for tap in tl.static_range(WIDTH - 1):
        past = tl.load(conv_state + channel * (WIDTH - 1) + tap, mask=mask, other=0.0).to(
            tl.float32
        )
        out += past * tl.load(weight + channel * WIDTH + tap, mask=mask, other=0.0).to(tl.float32)
    return newest, out


@triton.jit
def _push(newest, conv_state, channel, mask, WIDTH: tl.constexpr, MODE: tl.constexpr):
    """Shift the past of these channels by one token. Each thread first reads all that any thread
    will write."""
    place = conv_state + channel * (WIDTH - 1)
    if WIDTH == 4:
        second = tl.load(place + 1, mask=mask)
        third = tl.load(place + 2, mask=mask)
        tl.debug_barrier()
        tl.store(place, second, mask=mask)
        tl.store(place + 1, third, mask=mask)
    elif WIDTH == 3:
        second = tl.load(place + 1, mask=mask)
        tl.debug_barrier()
        tl.store(place, second, mask=mask)
    else:
        tl.debug_barrier()
    newest = narrow(newest.to(tl.float32), conv_state.dtype.element_ty, MODE)
    tl.store(place + WIDTH - 2, newest, mask=mask)


@triton.jit
def _step(
    xbc,
    a,
    z,
    weight,
    D,
    conv_state,
    ssm_state,
    mask,
    y,
    n_heads,
    P: tl.constexpr,
    N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr,
    MODE: tl.constexpr,
):
    head = tl.program_id(0) % n_heads
    row = (tl.program_id(0) // n_heads).to(tl.int64)
    n_channels = n_heads * (P + 2 * N)
    xbc += row * n_channels
    conv_state += row * n_channels * (WIDTH - 1)
    ssm_state += (row * n_heads + head) * P * N
    z += (row * n_heads + head) * P
    y += (row * n_heads + head) * P

    raw = tl.load(a + row * n_heads + head).to(tl.float32)
    # Exp(-softplus(raw)) without a logarithm
    # -30 is the floor of log a in the other kernels: the step must not forget more than the scan.
    decay = tl.maximum(1.0 / (1.0 + tl.exp(raw)), SMALLEST_DECAY)
    skip = tl.load(D + head).to(tl.float32)
    n = tl.arange(0, BLOCK_N)
    # of both states; none where there is padding
    n_written = N
    p_written = P
    if MASKED:
        is_token = tl.load(mask + row) != 0
        n_written = tl.where(is_token, N, 0)
        p_written = tl.where(is_token, P, 0)
    b_channel = n_heads * P + head * N + n
    c_channel = b_channel + n_heads * N
    newest_b, b = _shifted(xbc, weight, conv_state, b_channel, n < N, WIDTH)
    newest_c, c = _shifted(xbc, weight, conv_state, c_channel, n < N, WIDTH)
    # B and C of this program's head only: no other program reads these channels.
    _push(newest_b, conv_state, b_channel, n < n_written, WIDTH, MODE)
    _push(newest_c, conv_state, c_channel, n < n_written, WIDTH, MODE)

    # Block by block of P: rows of the state are independent, and all of N is summed at once.
    for start in tl.static_range(0, P, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        newest_x, x = _shifted(xbc, weight, conv_state, head * P + p, p < P, WIDTH)
        place = ssm_state + p[:, None] * N + n[None, :]
        inside = (p < P)[:, None] & (n < N)[None, :]
        # fp32 in memory too: a bf16 state would round away what is below 1/256 of it at each token.
        state = tl.load(place, mask=inside, other=0.0) * decay + x[:, None] * b[None, :]
        gate = tl.load(z + p, mask=p < P, other=0.0).to(tl.float32)
        out = (tl.sum(state * c[None, :], 1) + skip * x) * gate * tl.sigmoid(gate)
        # In which threads wait for each other, so that none still reads the old state.
        _push(newest_x, conv_state, head * P + p, p < p_written, WIDTH, MODE)
        tl.store(place, state, mask=(p < p_written)[:, None] & (n < n_written)[None, :])
        tl.store(y + p, narrow(out, y.dtype.element_ty, MODE), mask=p < P)
