"""Record the device and versions behind a benchmark's results."""

from __future__ import annotations

import platform

import torch

from hybrid_distill.provenance import installed as versions

__all__ = ["device_name", "versions"]


def device_name(device: str = "cpu", threads: int | None = None) -> str:
    """Return the GPU's own name, or the kind of CPU and its threads, by default those that torch computes with."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name()
    threads = threads or torch.get_num_threads()
    return f"{platform.machine()} CPU, {threads} thread{'s' * (threads != 1)}"
