"""Time our kernels at the shapes that goals are set for, and other libraries' where they are installed.

The last part of `gpu_kernels.py`. Times are of forward and backward in bf16: medians of replays of a CUDA graph, so
that Python and its launches, which run ahead of the device in training, are not in them. Another library must agree
with ours before it is timed. mamba-ssm and flash-linear-attention compute the recurrence without gate and skip, Liger
the loss. The gated delta rule is timed on both that students run on: flash-linear-attention's kernels, and ours after
torch's products.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from traffic import DEVICES, Device, Shape, limit, mamba_ssm, milliseconds

from hybrid_distill.model.decays import log_decay
from hybrid_distill.model.gated_delta import delta_scan, unit_keys

AGREEMENT = 5e-2  # of another library's output with ours, relative to the largest entry; bf16
# Of the loss: tokens, words and width of the hidden states.
N_TOKENS = 16_384
N_WORDS = 128_256
WIDTH = 2048
MOST_OF_LOSS = 53.0  # milliseconds
DELTA_STATES = (16, 64)  # state sizes of the gated delta rule
Function = Callable[..., Tensor]


class Goal(NamedTuple):
    """Bounds that a training step's forward and backward, or the loss, must reach; ``most`` in milliseconds."""

    name: str
    measure: Callable[[], float | str]
    """Returns milliseconds, or the reason that there are none."""
    most: float


class Target(NamedTuple):
    """A shape, the share of the limit that its time must reach (None: any), and whether the gate is on."""

    batch: int
    length: int
    d_state: int
    share: float | None
    gated: bool = False

    @property
    def shape(self) -> Shape:
        return Shape(self.batch, self.length, 32, 64, self.d_state, 32)


TARGETS = (
    Target(8, 2048, 4, None),
    Target(8, 2048, 16, 0.5),
    Target(8, 2048, 64, 0.7),
    Target(8, 2048, 64, 0.5, gated=True),
    Target(8, 2048, 128, None),
    Target(1, 32768, 64, 0.6),
)


def rates_of_device() -> Device:
    """Return the rates of this GPU, those of an H100 if it is unknown."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "H100"
    for known, rates in DEVICES.items():
        if known in name:
            return rates
    return DEVICES["H100"]


def goals() -> list[Goal]:
    """Return the goals: shares of the limit of `traffic.py`, a third of mamba-ssm's traffic, 53 ms a loss."""
    rates = rates_of_device()
    listed = [goal_of(target, rates) for target in TARGETS]
    listed.append(Goal(f"loss, {N_TOKENS:,} tokens, {N_WORDS:,} words", time_loss, MOST_OF_LOSS))
    return listed


def goal_of(target: Target, rates: Device) -> Goal:
    """Return a shape's goal: a third of mamba-ssm's traffic, or its share of the limit if that is less."""
    shape = target.shape
    bound = milliseconds(shape, limit(shape), rates, backward=True)
    if target.gated:
        # The gate reads z in both directions and writes its gradient once.
        bound += 3e3 * shape.x() / rates.bandwidth
    most = milliseconds(shape, mamba_ssm(shape), rates, backward=True) / 3
    reason = "a third of mamba-ssm's traffic"
    if target.share is not None and bound / target.share < most:
        most = bound / target.share
        reason = f"{target.share:.0%} of the limit"
    gate = " gated" if target.gated else ""
    name = f"ssd B={target.batch} L={target.length} N={target.d_state}{gate}, {reason}"
    return Goal(name, partial(time_recurrence, target), most)


def peers() -> dict[str, Callable[[], float | str]]:
    """Return what times other libraries: at the shapes without a gate that have a goal, and of the loss."""
    timed: dict[str, Callable[[], float | str]] = {}
    for target in TARGETS:
        if target.gated or target.share is None:
            continue
        words = f"B={target.batch} L={target.length} N={target.d_state}"
        inputs = partial(draw, target.shape)
        timed[f"mamba-ssm {words}"] = partial(time_peer, mamba_ssm_scan, our_scan, inputs)
        timed[f"fla {words}"] = partial(time_peer, fla_scan, our_scan, inputs)
    for d_state in DELTA_STATES:
        shape = Shape(8, 2048, 32, 64, d_state, 32)
        words = f"gated delta rule B={shape.B} L={shape.L} N={shape.N}"
        timed[f"fla {words}"] = partial(time_peer, fla_delta, our_delta, partial(draw_delta, shape))
        timed[f"ours {words}"] = partial(time_delta, shape)
    timed["liger loss"] = partial(time_peer, liger_loss, our_loss, draw_loss)
    return timed


def draw(shape: Shape) -> list[Tensor]:
    """Draw x, raw decays, B and C."""
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = ((shape.H, shape.P), (shape.H,), (shape.H, shape.N), (shape.H, shape.N))
    drawn = []
    for size in sizes:
        drawn.append(torch.randn(shape.B, shape.L, *size, generator=generator, device="cuda"))
    x, raw, b, c = drawn
    return [x.bfloat16(), raw, b.bfloat16(), c.bfloat16()]


def draw_delta(shape: Shape) -> list[Tensor]:
    """Draw x, log a, write gates, keys of length 1 and C."""
    x, raw, keys, c = draw(shape)
    write = torch.rand_like(raw)
    return [x, log_decay(raw), write, unit_keys(keys), c]


def draw_loss() -> list[Tensor]:
    """Draw hidden states and head of student and teacher; logits of a language model's size."""
    generator = torch.Generator("cuda").manual_seed(0)
    drawn: list[Tensor] = []
    for _ in ("student", "teacher"):
        hidden = torch.randn(N_TOKENS, WIDTH, generator=generator, device="cuda")
        unit = torch.randn(N_WORDS, WIDTH, generator=generator, device="cuda")
        # Logits of deviation 2.
        head = unit * 2.0 / WIDTH**0.5
        drawn += [hidden.bfloat16(), head.bfloat16()]
    return drawn


def our_scan(x: Tensor, raw: Tensor, b: Tensor, c: Tensor, **options: Any) -> Tensor:
    from hybrid_kernels.ssd import ssd

    return ssd(x, raw, b, c, **options)[0]


def mamba_ssm_scan(x: Tensor, raw: Tensor, b: Tensor, c: Tensor) -> Tensor:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    # It scales x by dt and decays by exp(-dt).
    dt = -log_decay(raw)
    scaled = (x / dt.unsqueeze(-1)).to(x.dtype)
    a = -torch.ones(x.shape[2], device=x.device)
    chunk_size = 128
    return mamba_chunk_scan_combined(scaled, dt, a, b, c, chunk_size)


def fla_scan(x: Tensor, raw: Tensor, b: Tensor, c: Tensor) -> Tensor:
    from fla.ops.simple_gla import chunk_simple_gla

    # Decorated in a way that hides its parameters from type checkers.
    scan: Any = chunk_simple_gla
    return scan(q=c, k=b, v=x, g=log_decay(raw), scale=1.0)[0]


def our_delta(x: Tensor, log_a: Tensor, write: Tensor, k: Tensor, c: Tensor) -> Tensor:
    return delta_scan(x, log_a, write, k, c, impl="triton")[0]


def fla_delta(x: Tensor, log_a: Tensor, write: Tensor, k: Tensor, c: Tensor) -> Tensor:
    from hybrid_kernels.delta_rule import delta_rule

    return delta_rule(x, log_a, write, k, c)[0]


def our_loss(hidden: Tensor, head: Tensor, teacher_hidden: Tensor, teacher_head: Tensor) -> Tensor:
    from hybrid_kernels.loss import distillation_loss
    from hybrid_kernels.loss_types import TeacherHead

    return distillation_loss(hidden, head, TeacherHead(teacher_hidden, teacher_head), kind="jsd")


def liger_loss(
    hidden: Tensor, head: Tensor, teacher_hidden: Tensor, teacher_head: Tensor
) -> Tensor:
    from liger_kernel.transformers.fused_linear_jsd import LigerFusedLinearJSD

    return LigerFusedLinearJSD(jsd_beta=0.5)(hidden, head, teacher_hidden, teacher_head, None)


def time_recurrence(target: Target) -> float | str:
    inputs = draw(target.shape)
    options = {}
    if target.gated:
        skip = torch.ones(target.shape.H, device="cuda", requires_grad=True)
        gate = torch.randn_like(inputs[0]).requires_grad_()
        options = {"D_H": skip, "z_BLHP": gate}
    return time_step(our_scan, inputs, **options)


def time_loss() -> float | str:
    return time_step(our_loss, draw_loss())


def time_delta(shape: Shape) -> float | str:
    return time_step(our_delta, draw_delta(shape))


def time_peer(
    theirs: Function, ours: Function, draw_inputs: Callable[[], list[Tensor]]
) -> float | str:
    """Time another library's function if it agrees with ours."""
    inputs = draw_inputs()
    try:
        with torch.no_grad():
            expected = ours(*inputs)
            error = (theirs(*inputs) - expected).abs().max() / expected.abs().max()
    # Of somebody else's package, or out of memory: it belongs into the table.
    except Exception as error:
        return reason_of(error)
    if not error < AGREEMENT:
        return f"differs by {error:.1e} of the largest output; not timed"
    return time_step(theirs, inputs)


def time_step(function: Function, inputs: list[Tensor], **options: Tensor) -> float | str:
    """Return the milliseconds of forward and backward, or the reason that there are none."""
    from triton.testing import do_bench_cudagraph

    # The loss has gradients of the student alone.
    n_trained = 2 if function in (our_loss, liger_loss) else len(inputs)
    leaves = [t.detach().requires_grad_(place < n_trained) for place, t in enumerate(inputs)]
    trained = [*leaves[:n_trained], *options.values()]

    def step() -> Any:
        output = function(*leaves, **options)
        return torch.autograd.grad(output, trained, torch.ones_like(output))

    try:
        for _ in range(3):  # compiles, and lets autotuners choose, which a graph cannot hold
            step()
        milliseconds: Any = do_bench_cudagraph(step, return_mode="median")
        return milliseconds
    except Exception as error:  # it belongs into the table
        return reason_of(error)
    finally:
        torch.cuda.empty_cache()


def reason_of(error: Exception) -> str:
    first_line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first_line}"[:160]
