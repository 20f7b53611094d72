"""A test of each kernel on the user's own device, before its first use: tiny inputs, forward and
backward, against the definition in float64 on the CPU.

No machine can try every GPU, driver and version of triton beforehand. This test finds a kernel that
does not compile, does not launch or computes something else, so that the caller can use torch
instead."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import conv, delta_rule, loss_torch, loss_triton, ssd, ssd_launch, ssd_operators, step
from .loss_types import Options, Tokens

# Tokens: at least two chunks and a ragged end.
LENGTH = 150
N_HEADS = 3
# Tokens of a document, so that documents end inside of chunks.
DOCUMENT = 37
# Relative to the largest element: mistakes, not rounding.
TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 1e-2, torch.float32: 1e-3}


@functools.cache
def mistake_of(
    kernel: str, device: torch.device, dtype: torch.dtype, *sizes: int, **options: Any
) -> str | None:
    """Return what is wrong with a kernel on a device, in one line; None if it is right, or the
    device does not exist.

    ``kernel`` is one of `TESTS`, which say what sizes and options are. Runs in a thread of its own,
    where no mode, hook or graph of the caller reaches."""
    # The device of a fake tensor need not exist.
    if device.type == "cuda" and not torch.cuda.is_available():
        return None
    # Autocast, inference mode, hooks and dispatch modes are per thread.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_first_mistake, kernel, device, dtype, sizes, options).result()


def _first_mistake(
    kernel: str,
    device: torch.device,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    options: dict[str, Any],
) -> str | None:
    draw = _Draw(device, dtype)
    try:
        for name, actual, expected in TESTS[kernel](draw, *sizes, **options):
            error = _relative_error(actual, expected)
            if error > TOLERANCE[dtype]:
                return (
                    f"on {device} its {name} is off by {error:.1e} of the largest element "
                    f"({dtype}, sizes {sizes})"
                )
    # Whatever a compiler, a driver or a launch may raise.
    except Exception as error:
        first_line = next(iter(str(error).strip().splitlines()), "")
        return (
            f"on {device} it fails with {type(error).__name__}: {first_line[:200]} "
            f"({dtype}, sizes {sizes})"
        )
    return None


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest element: small elements are differences
    of large numbers and carry their rounding error."""
    scale = expected.abs().max().clamp_min(1e-12)
    largest = (actual.cpu().double() - expected).abs().max()
    # A NaN would be less than any tolerance.
    return (largest / scale).nan_to_num(torch.inf).item()


class _Draw:
    """Draw leaves in float64 on the CPU that hold what the kernel's dtype can represent."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        self.generator = torch.Generator("cpu").manual_seed(0)

    def __call__(self, *size: int) -> Tensor:
        values = torch.randn(size, generator=self.generator, dtype=torch.float64, device="cpu")
        return self.rounded(values)

    def rounded(self, values: Tensor) -> Tensor:
        """Return a leaf: rounded first, so that definition and kernel start from the same
        numbers."""
        return values.detach().to(self.dtype).double().requires_grad_()

    def to_device(self, leaf: Tensor | None, dtype: torch.dtype | None = None) -> Any:
        """Return a leaf as the kernel gets it: on the device, in ``dtype`` or the kernel's own."""
        if leaf is None:
            return None
        return leaf.detach().to(self.device, dtype or self.dtype)


def _documents(draw: _Draw, packed: bool) -> tuple[Tensor, Tensor | None]:
    """Return the document of each token, [L], and the kernel's seq_idx_BL: one document and None, unless ``packed``."""
    tokens = torch.arange(LENGTH, device="cpu")
    if not packed:
        return torch.zeros_like(tokens), None
    document = tokens // DOCUMENT
    return document, document.unsqueeze(0).to(draw.device)


Triples = Iterator[tuple[str, Tensor, Tensor]]
"""Name of an output or gradient, the kernel's and the definition's."""


def _recurrence(draw: _Draw, head_dim: int, d_state: int, **options: bool) -> Triples:
    """Test the kernels of `ssd`, for each size of the blocks that it cuts a large state into."""
    for p, n in ssd.block_sizes(draw.dtype, head_dim, d_state):
        yield from _block_of_recurrence(draw, p, n, **options)


class _Leaves(NamedTuple):
    """Inputs of the recurrence, in float64."""

    x: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    D: Tensor | None
    z: Tensor | None
    state: Tensor | None


def _draw_leaves(
    draw: _Draw, head_dim: int, d_state: int, *, gated: bool, has_state: bool
) -> _Leaves:
    tokens = (1, LENGTH, N_HEADS)
    x = draw(*tokens, head_dim)
    a = draw(*tokens)
    b = draw(*tokens, d_state)
    c = draw(*tokens, d_state)
    # A log decay, as it is used without a gate, is never positive.
    if not gated:
        a = -a.detach().abs().requires_grad_()
    D = None
    z = None
    if gated:
        D = draw(N_HEADS)
        z = draw(*tokens, head_dim)
    state = None
    if has_state:
        state = draw(1, N_HEADS, head_dim, d_state)
    return _Leaves(x, a, b, c, D, z, state)


def _block_of_recurrence(
    draw: _Draw, head_dim: int, d_state: int, *, gated: bool, packed: bool, training: bool
) -> Triples:
    """Test in one part of the row and without a state, then in two parts and with one."""
    document, seq_idx = _documents(draw, packed)
    for n_segments in (1, 2):
        has_state = n_segments > 1
        leaves = _draw_leaves(draw, head_dim, d_state, gated=gated, has_state=has_state)
        y, final = _define_recurrence(*leaves, document)
        arguments = _scan_arguments(draw, leaves, seq_idx, n_segments)
        before_gate, actual_final, chunk_states = ssd_launch.ssd_forward(
            arguments, save_chunk_states=training
        )
        output = before_gate
        if leaves.z is not None:
            output = ssd_operators.gate(before_gate, draw.to_device(leaves.z))
        yield "output", output, y
        yield "last state", actual_final, final
        if training and chunk_states is not None:
            # So that no sum over tokens is small by chance.
            dy = draw(*y.shape).detach().abs() * leaves.x.detach().sign()
            loss = (y * dy).sum()
            dfinal = None
            if has_state:
                dfinal = draw(*final.shape).detach()
                loss = loss + (final * dfinal).sum()
            actual = _kernel_gradients(
                draw, leaves, dy, dfinal, before_gate, chunk_states, arguments
            )
            yield from _gradients(loss, leaves._asdict(), actual)


def _scan_arguments(
    draw: _Draw, leaves: _Leaves, seq_idx: Tensor | None, n_segments: int
) -> ssd_launch.ScanArguments:
    """Return the leaves as the kernel reads them. A recurrence with a gate has raw steps (softplus)."""
    return ssd_launch.ScanArguments(
        draw.to_device(leaves.x),
        draw.to_device(leaves.a, torch.float32),
        draw.to_device(leaves.b),
        draw.to_device(leaves.c),
        D_H=draw.to_device(leaves.D),
        state_BHPN=draw.to_device(leaves.state, torch.float32),
        seq_idx_BL=seq_idx,
        softplus=leaves.z is not None,
        n_segments=n_segments,
    )


def _kernel_gradients(
    draw: _Draw,
    leaves: _Leaves,
    dy: Tensor,
    dfinal: Tensor | None,
    before_gate: Tensor,
    chunk_states: Tensor,
    arguments: ssd_launch.ScanArguments,
) -> dict[str, Tensor]:
    """Run the backward kernels; return the gradient of each leaf by its name."""
    upstream = draw.to_device(dy)
    actual = {}
    if leaves.z is not None:
        upstream, actual["z"] = ssd_operators.gate_gradients(
            upstream, before_gate, draw.to_device(leaves.z)
        )
    gradients = ssd_launch.ssd_backward(
        upstream, draw.to_device(dfinal, torch.float32), chunk_states, arguments
    )
    for name, gradient in gradients._asdict().items():
        # Without the dimensions: x_BLHP is x.
        actual[name.rpartition("_")[0]] = gradient
    return actual


def _gradients(
    loss: Tensor, leaves: dict[str, Tensor | None], actual: dict[str, Tensor]
) -> Triples:
    """Compare the gradients of the leaves that there are with those of the definition's loss."""
    present = {name: leaf for name, leaf in leaves.items() if leaf is not None}
    expected = torch.autograd.grad(loss, list(present.values()))
    for name, gradient in zip(present, expected):
        yield f"gradient of {name}", actual[name], gradient


def _define_recurrence(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    state: Tensor | None,
    document: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute y = T x and the last state for a row, with T[i, j] = (C_i . B_j) prod_{j < s <= i}
    a_s."""
    log_a = a
    if z is not None:
        log_a = -F.softplus(a)
    cum_BLH = log_a.cumsum(1)
    seen = (document.unsqueeze(1) == document).tril()
    log_decay_BLSH = cum_BLH.unsqueeze(2) - cum_BLH.unsqueeze(1)
    # Masked before exp: above the diagonal, the differences are positive and may overflow.
    decay_BLSH = log_decay_BLSH.masked_fill(~seen[None, :, :, None], -torch.inf).exp()
    y = torch.einsum("blsh,blhn,bshn,bshp->blhp", decay_BLSH, c, b, x)
    final = torch.einsum("bsh,bshn,bshp->bhpn", decay_BLSH[:, -1], b, x)
    if state is not None:
        # The state before the row belongs to the first document.
        is_first_L = document == document[0]
        kept_BLH = cum_BLH.exp() * is_first_L[None, :, None]
        y = y + torch.einsum("blh,blhn,bhpn->blhp", kept_BLH, c, state)
        final = final + kept_BLH[:, -1, :, None, None] * state
    if D is not None and z is not None:
        y = (y + D.unsqueeze(-1) * x) * F.silu(z)
    return y, final


def _delta_rule(
    draw: _Draw, head_dim: int, d_state: int, *, packed: bool, training: bool
) -> Triples:
    """Test `delta_rule` without and with a state."""
    tokens = (1, LENGTH, N_HEADS)
    document, seq_idx = _documents(draw, packed)
    for state in (None, draw(1, N_HEADS, head_dim, d_state)):
        x = draw(*tokens, head_dim)
        c = draw(*tokens, d_state)
        # Weak decays: with strong ones, little of a state would reach the next chunk.
        log_a = draw.rounded(-draw(*tokens).abs() / 8)
        write = draw.rounded(draw(*tokens).sigmoid())
        k = draw.rounded(F.normalize(draw(*tokens, d_state), dim=-1))
        y, final = _define_delta_rule(x, log_a, write, k, c, state, document)

        leaves = {"x": x, "log a": log_a, "write gate": write, "k": k, "c": c}
        if state is not None:
            leaves["state"] = state
        with torch.set_grad_enabled(training):
            on_device = {}
            for name, leaf in leaves.items():
                dtype = None
                # As the model passes them: gates and states are fp32.
                if name in ("log a", "write gate", "state"):
                    dtype = torch.float32
                tensor = draw.to_device(leaf, dtype)
                on_device[name] = tensor.requires_grad_(training)
            inputs = list(on_device.values())
            output, last = delta_rule.delta_rule(
                *inputs[:5], state_BHPN=on_device.get("state"), seq_idx_BL=seq_idx
            )
        yield "output", output.detach(), y
        yield "last state", last.detach(), final
        if training:
            dy = draw(*y.shape).detach()
            dfinal = draw(*final.shape).detach()
            expected = torch.autograd.grad((y, final), list(leaves.values()), (dy, dfinal))
            upstream = draw.to_device(dy), draw.to_device(dfinal, torch.float32)
            actual = torch.autograd.grad((output, last), inputs, upstream)
            for name, actual_gradient, gradient in zip(leaves, actual, expected):
                yield f"gradient of {name}", actual_gradient, gradient


def _define_delta_rule(
    x: Tensor,
    log_a: Tensor,
    write: Tensor,
    k: Tensor,
    c: Tensor,
    state: Tensor | None,
    document: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute S_t = a_t S_{t-1} + w_t (x_t - a_t S_{t-1} k_t) k_t^T and y_t = S_t C_t."""
    if state is None:
        state = x.new_zeros(1, x.shape[2], x.shape[3], k.shape[3])
    ys = []
    for t in range(x.shape[1]):
        if t > 0 and document[t] != document[t - 1]:
            state = torch.zeros_like(state)
        key = k[:, t].unsqueeze(-2)
        query = c[:, t].unsqueeze(-2)
        decayed = log_a[:, t].exp()[..., None, None] * state
        stored = (decayed * key).sum(-1)
        written = write[:, t].unsqueeze(-1) * (x[:, t] - stored)
        state = decayed + written.unsqueeze(-1) * key
        ys.append((state * query).sum(-1))
    return torch.stack(ys, dim=1), state


def _convolution(draw: _Draw, width: int, *, packed: bool, training: bool) -> Triples:
    """Test `causal_conv` without and with a state."""
    # More than a program holds.
    n_channels = 80
    document, seq_idx = _documents(draw, packed)
    with_past = torch.cat([document[:1].expand(width - 1), document])
    for state in (None, draw(1, n_channels, width - 1)):
        x = draw(1, LENGTH, n_channels)
        weight = draw(n_channels, width)
        past = x.new_zeros(1, width - 1, n_channels)
        if state is not None:
            past = state.mT
        taps_1KCL = torch.cat([past, x], 1).unfold(1, LENGTH, 1)
        taps_LCK = taps_1KCL.permute(3, 2, 1, 0).squeeze(-1)
        tap_document_LK = with_past.unfold(0, LENGTH, 1).mT
        is_own_LK = tap_document_LK == document.unsqueeze(1)
        y = (taps_LCK * weight * is_own_LK.unsqueeze(1)).sum(-1).unsqueeze(0)

        inputs = draw.to_device(x), draw.to_device(weight), draw.to_device(state), seq_idx, False
        yield "output", conv._forward_op(*inputs), y
        if training:
            dy = draw(*y.shape).detach()
            gradients = conv._backward_op(draw.to_device(dy), *inputs)
            actual = dict(zip(("x", "weight", "state"), gradients))
            yield from _gradients(
                (y * dy).sum(), {"x": x, "weight": weight, "state": state}, actual
            )


def _decoding_step(
    draw: _Draw, head_dim: int, d_state: int, width: int, *, masked: bool, training: bool
) -> Triples:
    """Test `ssd_step` on two rows, the second one padding if ``masked``."""
    parts = [N_HEADS * head_dim, N_HEADS * d_state, N_HEADS * d_state]
    xbc = draw(2, sum(parts))
    past = draw(2, sum(parts), width - 1)
    weight = draw(sum(parts), width)
    a = draw(2, N_HEADS)
    D = draw(N_HEADS)
    z = draw(2, N_HEADS, head_dim)
    state = draw(2, N_HEADS, head_dim, d_state)
    window = torch.cat([past, xbc.unsqueeze(-1)], -1)
    convolved = (window * weight).sum(-1).split(parts, 1)
    x, b, c = (part.unflatten(1, (N_HEADS, -1)) for part in convolved)
    decay = (-F.softplus(a)).exp()[..., None, None]
    new_state = decay * state + x.unsqueeze(-1) * b.unsqueeze(-2)
    read = (new_state * c.unsqueeze(-2)).sum(-1)
    y = (read + D.unsqueeze(-1) * x) * F.silu(z)

    # Updated in place.
    conv_state = draw.to_device(past)
    ssm_state = draw.to_device(state, torch.float32)
    inputs = (
        draw.to_device(xbc),
        draw.to_device(a, torch.float32),
        draw.to_device(z),
        draw.to_device(weight),
        draw.to_device(D),
    )
    is_token_B = torch.tensor([True, not masked], device="cpu")
    on_device_B = is_token_B.to(draw.device)
    token_mask_B = on_device_B if masked else None
    with torch.no_grad():
        output = step.ssd_step(*inputs, conv_state, ssm_state, token_mask_B=token_mask_B)
    yield "output", output[on_device_B], y[is_token_B]
    # Padding leaves both states as they were.
    expected_inputs = torch.where(is_token_B.view(2, 1, 1), window[..., 1:], past)
    expected_state = torch.where(is_token_B.view(2, 1, 1, 1), new_state, state)
    yield "new inputs", conv_state, expected_inputs
    yield "new state", ssm_state, expected_state


def _distillation_loss(draw: _Draw, *, kind: str, from_head: bool) -> Triples:
    """Test the loss with and without cross-entropy, on more words than a program reads at a
    time."""
    n_tokens = 3
    n_words = 9001
    n_stored = 8
    for hard_weight in (0.0, 0.3):
        options = Options(kind, temperature=1.5, beta=0.4, hard_weight=hard_weight)
        student = draw(n_tokens, n_words).detach()
        teacher = draw(n_tokens, n_words).detach()
        weights = draw(2, n_tokens)
        labels = torch.arange(n_tokens, device="cpu") * 4000
        exact = Tokens(*weights.detach().abs(), labels, torch.ones_like(labels, dtype=torch.bool))
        on_device = []
        for tensor in exact:
            dtype = torch.float32 if tensor.is_floating_point() else None
            on_device.append(tensor.to(draw.device, dtype))
        tokens = Tokens(*on_device)
        # Both write the gradient into the student's logits.
        logits = student.clone()
        logits_on_device = draw.to_device(student)
        if from_head:
            expected = loss_torch.of_head(logits, teacher, exact, options)
            actual = loss_triton.of_head(logits_on_device, draw.to_device(teacher), tokens, options)
        else:
            teacher_log_probs = (teacher / options.temperature).log_softmax(-1)
            log_probs, ids = teacher_log_probs.topk(n_stored)
            expected = loss_torch.of_top_k(logits, ids, log_probs, exact, options)
            stored = ids.to(draw.device), draw.to_device(log_probs, torch.float32)
            actual = loss_triton.of_top_k(logits_on_device, *stored, tokens, options)
        yield "value", actual[0], expected[0]
        yield "gradient", actual[1], expected[1]


TESTS: dict[str, Callable[..., Triples]] = {
    # P, N; gated (with D, on raw decays), packed.
    "recurrence": _recurrence,
    # P, N; packed.
    "gated delta rule": _delta_rule,
    # K; packed.
    "convolution": _convolution,
    # P, N, K; masked.
    "decoding step": _decoding_step,
    # Kind of the divergence, teacher as a head or as its top K.
    "distillation loss": _distillation_loss,
}
