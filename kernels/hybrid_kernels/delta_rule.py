"""Gated delta rule by flash-linear-attention's kernels, called as `ssd.ssd` is.

They are another package's: it is imported when it is first called. Shapes as in `ssd`.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from typing import Any

import torch
from torch import Tensor

from . import ssd_triton

PACKAGE = "fla"
MODULE = "fla.ops.gated_delta_rule"
# Versions between these gave wrong gradients on Hopper.
REFUSED_TRITON = (3, 4, 0)
REPAIRED_TRITON = (3, 7, 1)
# Major compute capability.
HOPPER = 9
# The recurrence's: it erases an fp32 state, and sums of it stay finite.
MIN_LOG_DECAY: float = ssd_triton.MIN_LOG_DECAY.value


def unusable(*, training: bool = True) -> str | None:
    """Return why the kernels cannot run on the current GPU, in one line; None if they can."""
    if importlib.util.find_spec(PACKAGE) is None:
        return "flash-linear-attention is not installed; pip install fla-core"
    if training and _backward_is_refused():
        version = importlib.import_module("triton").__version__
        return (
            f"flash-linear-attention refuses triton {version} on Hopper; install triton later than "
            "3.7.1, or tilelang"
        )
    return None


def _backward_is_refused() -> bool:
    """Check what fla.ops.common.chunk_o.chunk_bwd_dqkwg does, which raises RuntimeError only after
    a minute of compiling (fla-org/flash-linear-attention#640)."""
    if torch.version.hip or not torch.cuda.is_available():
        return False
    if torch.cuda.get_device_capability()[0] != HOPPER:
        return False
    # Its backward runs in tilelang then.
    if importlib.util.find_spec("tilelang") is not None:
        return False
    version = importlib.import_module("triton").__version__
    # 3.7.1 itself passes, but `known_bad` lists it.
    numbers = tuple(map(int, re.findall(r"\d+", version)[:3]))
    return REFUSED_TRITON <= numbers < REPAIRED_TRITON


def delta_rule(
    x_BLHP: Tensor,
    log_a_BLH: Tensor,
    write_BLH: Tensor,
    k_BLHN: Tensor,
    c_BLHN: Tensor,
    *,
    state_BHPN: Tensor | None = None,
    seq_idx_BL: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return y_BLHP and the last state in fp32.

    The keys have length 1, log a at most 0, and the write gates w are in (0, 1).
    """
    if seq_idx_BL is not None:
        # Not by cu_seqlens: it wants all rows in one, and a state for every document.
        begins = torch.nn.functional.pad(seq_idx_BL.diff(dim=1) != 0, (1, 0))
        log_a_BLH = log_a_BLH.masked_fill(begins.unsqueeze(-1), MIN_LOG_DECAY)
    state_BHNP = None
    if state_BHPN is not None:
        state_BHNP = state_BHPN.float().mT.contiguous()
    # By string: the package is optional.
    kernels: Any = importlib.import_module(MODULE)
    y_BLHP, last_BHNP = kernels.chunk_gated_delta_rule(
        q=c_BLHN.to(x_BLHP.dtype).contiguous(),
        k=k_BLHN.to(x_BLHP.dtype).contiguous(),
        v=x_BLHP.contiguous(),
        g=log_a_BLH.clamp_min(MIN_LOG_DECAY),
        beta=write_BLH.to(x_BLHP.dtype),
        scale=1.0,
        initial_state=state_BHNP,
        output_final_state=True,
    )
    return y_BLHP, last_BHNP.mT
