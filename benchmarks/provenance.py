"""Record the device and versions behind a benchmark's results."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterable

import torch


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of the installed packages; leave out absent ones."""
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def device_name(device: str = "cpu", threads: int | None = None) -> str:
    """Return the GPU's own name, or the kind of CPU and its threads, by default those that torch computes with."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name()
    threads = threads or torch.get_num_threads()
    return f"{platform.machine()} CPU, {threads} thread{'s' * (threads != 1)}"
