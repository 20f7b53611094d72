"""Combinations of triton, torch and GPU that are known to miscompile, read by "auto" before a
kernel is tried.

A test at first use finds what fails every time. What fails now and then, it may not.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class KnownBad(NamedTuple):
    """Versions, without local parts, and the compute capability on which ``kernels`` must not
    run."""

    triton: str
    torch: str
    """Empty for any version."""
    capability: tuple[int, int]
    kernels: tuple[str, ...]
    """Names as in `definitions.TESTS`."""
    report: str


KNOWN_BAD = (
    KnownBad(
        triton="3.7.1",
        torch="",
        capability=(9, 0),
        # Those whose programs multiply several times.
        kernels=("recurrence", "gated delta rule"),
        report=(
            "triton-lang/triton#11366: wgmma reads illegal addresses, several products in 4 warps"
        ),
    ),
)
"""One row a public report. #11366 was seen with torch 2.9.1 on an H20, and 3.5.1 was clean there;
#10486 may be the same. `make prove` found nothing of it in our kernels, but an emulator has no
wgmma of its own."""


def known_bad(kernel: str, device: torch.device) -> str | None:
    """Return in one line why a kernel must not run on a device, if that is known."""
    if device.type != "cuda" or torch.version.hip or not torch.cuda.is_available():
        return None
    import triton

    versions = triton.__version__.partition("+")[0], torch.__version__.partition("+")[0]
    capability = torch.cuda.get_device_capability(device)
    for row in KNOWN_BAD:
        is_version = versions[0] == row.triton and row.torch in ("", versions[1])
        if is_version and capability == row.capability and kernel in row.kernels:
            return (
                f"triton {versions[0]} is known to fail on this GPU ({row.report}); install "
                "another "
                "version of it"
            )
    return None
