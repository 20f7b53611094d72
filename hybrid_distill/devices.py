"""Devices that processes compute on: a launch for GPUs never falls back to the CPU."""

from __future__ import annotations

import os
import platform
import re
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from glob import glob
from pathlib import Path

from .validation import first_line

CPU_ASKED = "ACCELERATE_USE_CPU"
"""accelerate's variable for computing on the CPU, set from a launch file's ``use_cpu``."""
ON_CPU = f"to compute on the CPU, set {CPU_ASKED}=true or use launch/cpu.yaml"
NVIDIA_DRIVER = ("/sys/module/nvidia/version", "/proc/driver/nvidia/version")
AMD_DRIVER = ("/sys/module/amdgpu/version",)
NVIDIA_SIGNS = ("/dev/nvidia[0-9]*", *NVIDIA_DRIVER)
"""Files of a machine with an NVIDIA GPU; a container without GPUs has those of the driver alone."""
AMD_SIGNS = ("/dev/kfd",)
"""The same for AMD. Many laptops have it, so it counts only for a torch that is built for AMD."""
HIDDEN = ("", "-1", "NoDevFiles")
"""Values of CUDA_VISIBLE_DEVICES that hide every GPU."""


def flag(name: str) -> bool:
    """Return whether an environment variable is set to a yes."""
    return os.environ.get(name, "false").lower() in ("1", "true", "yes")


def is_launched() -> bool:
    """Check whether `accelerate launch` or torchrun started this process."""
    return "LOCAL_RANK" in os.environ or "ACCELERATE_MIXED_PRECISION" in os.environ


def computes_on_gpu() -> bool:
    """Check whether torch can use a GPU and nobody asked for the CPU."""
    import torch

    return torch.cuda.is_available() and not flag(CPU_ASKED)


@dataclass(frozen=True)
class DeviceFacts:
    """Device of one process, and the versions that it computes with."""

    host: str
    kind: str
    """``cuda`` or ``cpu``."""
    name: str
    torch: str
    cuda: str
    """Version of CUDA, or ROCm, that torch was built with; empty without."""
    driver: str
    """Version of the GPU's driver; empty without."""
    problem: str
    """Reason why this process must not compute; empty if it may."""

    @classmethod
    def find(cls) -> DeviceFacts:
        """Look at this process's own device."""
        import torch

        kind = "cuda" if computes_on_gpu() else "cpu"
        problem = _problem()
        name = platform.processor() or platform.machine()
        if kind == "cuda" and not problem:
            name = torch.cuda.get_device_name(int(os.environ.get("LOCAL_RANK", 0)))
        cuda = torch.version.cuda or torch.version.hip or ""
        return cls(
            socket.gethostname(), kind, name, torch.__version__, cuda, driver_version(), problem
        )

    def summary(self, kernels: str) -> str:
        """Describe device, kernels, torch, CUDA and driver in one line."""
        cuda = f"CUDA {self.cuda}" if self.cuda else "no CUDA"
        driver = f"driver {self.driver}" if self.driver else "no GPU driver"
        return f"{self.kind} ({self.name}), {kernels}, torch {self.torch}, {cuda}, {driver}"


def driver_version() -> str:
    """Return the version of the GPU's driver; empty if there is none."""
    import torch

    files = AMD_DRIVER if torch.version.hip else NVIDIA_DRIVER
    for path in map(Path, files):
        with suppress(OSError):
            if version := re.search(r"\d+\.\d+(\.\d+)*", path.read_text()):
                return version[0]
    return ""


def signs_of_gpu() -> list[str]:
    """List the files that show a GPU on this machine; empty if the user has hidden all GPUs."""
    import torch

    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in HIDDEN:
        return []
    patterns = AMD_SIGNS if torch.version.hip else NVIDIA_SIGNS
    return sorted(path for pattern in patterns for path in glob(pattern))


def unusable_gpu() -> str:
    """Return a sentence about a GPU that this machine has and torch cannot use; empty otherwise."""
    import torch

    signs = signs_of_gpu()
    if torch.cuda.is_available() or flag(CPU_ASKED) or not signs:
        return ""
    version = torch.__version__
    return f"this machine has a GPU ({signs[0]}), and torch {version} cannot use it: {_reason()}"


def is_built_for_gpu() -> bool:
    """Check whether the installed torch can use a GPU at all."""
    import torch

    return bool(torch.version.cuda or torch.version.hip)


def _reason() -> str:
    """Return why torch sees no GPU, in its own words."""
    import torch

    if not is_built_for_gpu():
        return f"it was built without CUDA; install a build for CUDA, or {ON_CPU}."
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return f"{first_line(error).rstrip('.')}; repair that, or {ON_CPU}."
    return f"it finds none; start the container with its GPUs (docker run --gpus all), or {ON_CPU}."


def _problem() -> str:
    """Return why this process must not compute on the device that it would get; empty if it may."""
    import torch

    if flag(CPU_ASKED):
        return ""
    if not torch.cuda.is_available():
        if is_launched():
            version = torch.__version__
            return f"it was launched for a GPU, and torch {version} cannot use one: {_reason()}"
        # Somebody who installed a torch without CUDA expects the CPU: `distributed` only warns.
        return unusable_gpu() if is_built_for_gpu() else ""
    number, n_gpus = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if number >= n_gpus:
        return (
            f"it is number {number + 1} on its machine, where torch sees {n_gpus} GPUs; start at "
            f"most {n_gpus} processes on each machine."
        )
    return ""


def problem_of_launch(facts: Sequence[DeviceFacts]) -> str:
    """Return in one line why these processes must not compute together; empty if they may."""
    refused = {rank: fact for rank, fact in enumerate(facts) if fact.problem}
    if refused:
        rank, first = next(iter(refused.items()))
        others = f" ({len(refused)} of {len(facts)} processes cannot.)" if len(refused) > 1 else ""
        name = f"process {rank} of {len(facts)} on {first.host}"
        return f"{name} must not compute: {first.problem}{others}"
    return _difference(facts, "kind", f"Start all processes on GPUs, or {ON_CPU} on all machines.")


def note_on_launch(facts: Sequence[DeviceFacts]) -> str:
    """Return a note on devices or versions that differ between processes; empty if none do."""
    notes = [_difference(facts, name, "") for name in ("name", "torch", "cuda", "driver")]
    return " ".join(note.strip() for note in notes if note)


def _difference(facts: Sequence[DeviceFacts], name: str, advice: str) -> str:
    first_with: dict[str, int] = {}
    for rank, fact in enumerate(facts):
        first_with.setdefault(str(getattr(fact, name)), rank)
    if len(first_with) < 2:
        return ""
    found = ", ".join(
        f"process {rank} on {facts[rank].host} has {value or 'none'}"
        for value, rank in first_with.items()
    )
    return f"the processes of this launch differ in their {LABELS[name]}: {found}. {advice}".strip()


LABELS: Mapping[str, str] = {
    "kind": "device",
    "name": "GPU",
    "torch": "torch",
    "cuda": "CUDA version",
    "driver": "GPU driver",
}
