"""Recurrences of the replaced heads: what their scans, decoding steps and mixing matrices share and where they differ.

Shapes: B batch, L length, S source length, N state size, R recurrent heads, G rates per head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor

from .decays import log_decay
from .gated_delta import (
    decay_and_write,
    delta_mixing_matrix,
    gated_delta_scan,
    gated_delta_step,
    unit_keys,
)
from .kernel_choice import DELTA_RULE
from .ssd import gated_ssd_scan, gated_ssd_step, mixing_matrix


def _ssd_matrix(
    raw_BLR: Tensor, b_BLRN: Tensor, c_BLRN: Tensor, seq_idx_BL: Tensor | None = None
) -> Tensor:
    return mixing_matrix(log_decay(raw_BLR), b_BLRN, c_BLRN, seq_idx_BL)


def _delta_matrix(
    raw_BLRG: Tensor, k_BLRN: Tensor, c_BLRN: Tensor, seq_idx_BL: Tensor | None = None
) -> Tensor:
    return delta_mixing_matrix(*decay_and_write(raw_BLRG), k_BLRN, c_BLRN, seq_idx_BL)


def _unscaled(b: Tensor, raw: Tensor) -> Tensor:
    return b


def _by_step_size(b: Tensor, raw: Tensor) -> Tensor:
    step_size = -log_decay(raw)
    return b * step_size.unsqueeze(-1).to(b.dtype)


def _to_unit_length(b: Tensor, raw: Tensor) -> Tensor:
    return unit_keys(b)


class ScanKernel(NamedTuple):
    """Kernel that a scan asks for, as `kernel_choice` names it."""

    name: str
    options: Mapping[str, bool]


SSD_KERNEL = ScanKernel("recurrence", {"gated": True})


class Recurrence(NamedTuple):
    """Everything in which the `RECURRENCES` differ.

    ``scan``, ``step`` and ``matrix`` read the raw rates ([B, L, R], or [B, L, R, G] for several), and B as
    ``scale_b`` returns it, given B and the raw rates.
    """

    title: str
    """Name in a model card."""
    scan: Callable[..., tuple[Tensor, Tensor]] = gated_ssd_scan
    step: Callable[..., tuple[Tensor, Tensor]] = gated_ssd_step
    matrix: Callable[..., Tensor] = _ssd_matrix
    scale_b: Callable[[Tensor, Tensor], Tensor] = _unscaled
    n_rates: int = 1
    """Rows of ``a_proj`` per head: the raw decay and, for the delta rule, the raw write gate."""
    has_silu: bool = False
    """Hold the biases of x, B and C in the convolution, and apply a SiLU after it."""
    has_output_gate_bias: bool = True
    delta_rule: bool = False
    """Overwrite what the state holds for a key, by a write gate (the second rate), instead of adding to it."""
    kernel: ScanKernel | None = SSD_KERNEL
    """Kernel that the scan asks for; None if it has only torch."""
    steps_in_place: bool = False
    """Decoding step may run in one kernel."""


_MAMBA2 = Recurrence("Mamba-2", scale_b=_by_step_size, has_silu=True)
FORMS = {
    "discrete": Recurrence("discrete Mamba-2", steps_in_place=True),
    "mamba2": _MAMBA2,
    "mamba2-stock": _MAMBA2._replace(has_output_gate_bias=False),
    "gdn": Recurrence(
        "gated delta rule",
        scan=gated_delta_scan,
        step=gated_delta_step,
        matrix=_delta_matrix,
        scale_b=_to_unit_length,
        n_rates=2,
        delta_rule=True,
        kernel=ScanKernel(DELTA_RULE, {}),
    ),
}
"""Forms of the recurrent heads, by name (`RECURRENCES`)."""
