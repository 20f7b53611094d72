"""Device of this process: a launch for GPUs never falls back to the CPU.

torch is imported inside functions, because the command line imports this module before it loads
torch.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import socket
from contextlib import suppress
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..validation import first_line
from .launch import CPU_REQUESTED, is_launched, is_launched_main, is_on, launched_local_rank

if TYPE_CHECKING:
    import torch

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
"""Dtype of a model's weights, as an option."""
ON_CPU = f"to compute on the CPU, set {CPU_REQUESTED}=true or use launch/cpu.yaml"
NVIDIA_DRIVER = ("/sys/module/nvidia/version", "/proc/driver/nvidia/version")
AMD_DRIVER = ("/sys/module/amdgpu/version",)
NVIDIA_SIGNS = ("/dev/nvidia[0-9]*", *NVIDIA_DRIVER)
"""Files of a machine with an NVIDIA GPU; a container without GPUs has those of the driver alone."""
AMD_SIGNS = ("/dev/kfd",)
"""The same for AMD. Many laptops have it, so it counts only for a torch that is built for AMD."""
HIDDEN = ("", "-1", "NoDevFiles")
"""Values of CUDA_VISIBLE_DEVICES that hide every GPU."""

log = logging.getLogger(__name__)


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

        kind = "cpu"
        name = platform.processor() or platform.machine()
        problem = _problem()
        if computes_on_gpu():
            kind = "cuda"
            # With a problem, there is no GPU of this process's number to ask.
            if not problem:
                name = torch.cuda.get_device_name(launched_local_rank())
        return cls(
            host=socket.gethostname(),
            kind=kind,
            name=name,
            torch=torch.__version__,
            cuda=torch.version.cuda or torch.version.hip or "",
            driver=driver_version(),
            problem=problem,
        )

    def summary(self, kernels: str) -> str:
        """Describe device, kernels, torch, CUDA and driver in one line."""
        cuda = "no CUDA"
        if self.cuda:
            cuda = f"CUDA {self.cuda}"
        driver = "no GPU driver"
        if self.driver:
            driver = f"driver {self.driver}"
        return f"{self.kind} ({self.name}), {kernels}, torch {self.torch}, {cuda}, {driver}"


def computes_on_gpu() -> bool:
    """Check whether torch can use a GPU and nobody asked for the CPU."""
    import torch

    return torch.cuda.is_available() and not is_on(CPU_REQUESTED)


def is_built_for_gpu() -> bool:
    """Check whether the installed torch can use a GPU at all."""
    import torch

    return bool(torch.version.cuda or torch.version.hip)


def driver_version() -> str:
    """Return the version of the GPU's driver; empty if there is none."""
    import torch

    files = NVIDIA_DRIVER
    if torch.version.hip:
        files = AMD_DRIVER
    for path in files:
        with suppress(OSError):
            version = re.search(r"\d+\.\d+(\.\d+)*", Path(path).read_text())
            if version:
                return version[0]
    return ""


def signs_of_gpu() -> list[str]:
    """List the files that show a GPU on this machine; empty if the user has hidden all GPUs."""
    import torch

    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in HIDDEN:
        return []
    patterns = NVIDIA_SIGNS
    if torch.version.hip:
        patterns = AMD_SIGNS
    signs: list[str] = []
    for pattern in patterns:
        signs += glob(pattern)
    return sorted(signs)


def unusable_gpu() -> str:
    """Return a sentence about a GPU that this machine has and torch cannot use; empty otherwise."""
    import torch

    if torch.cuda.is_available() or is_on(CPU_REQUESTED):
        return ""
    signs = signs_of_gpu()
    if not signs:
        return ""
    version = torch.__version__
    return f"this machine has a GPU ({signs[0]}), and torch {version} cannot use it: {_reason()}"


def chosen_dtype(dtype: str) -> str:
    """Return the dtype that ``auto`` stands for on this process's device: bfloat16 if it has instructions for it."""
    if dtype != "auto":
        return dtype
    return "bfloat16" if multiplies_bf16() else "float32"


def multiplies_bf16() -> bool:
    """Check whether this process's device has bfloat16 instructions: GPUs since Ampere, some CPUs since 2020."""
    import torch

    if computes_on_gpu():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return _cpu_multiplies_bf16()


def _cpu_multiplies_bf16() -> bool:
    import torch

    # Not a public name. Without it, nothing is known against the CPU.
    is_native = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    return is_native()


def warn_of_emulation(device: torch.device, flag: str) -> None:
    """Warn if a CPU without bfloat16 instructions is about to compute in it.

    ``flag`` is the flag for float32.
    """
    if device.type == "cpu" and is_launched_main() and not _cpu_multiplies_bf16():
        log.warning(
            "this CPU emulates bfloat16, about ten times slower than float32; pass %s", flag
        )


def _reason() -> str:
    """Return why torch sees no GPU, in its own words."""
    import torch

    if not is_built_for_gpu():
        return f"it was built without CUDA; install a build for CUDA, or {ON_CPU}."
    try:
        # torch.cuda.is_available() swallows the driver's error; this raises it.
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return f"{first_line(error).rstrip('.')}; repair that, or {ON_CPU}."
    return f"it finds none; start the container with its GPUs (docker run --gpus all), or {ON_CPU}."


def _problem() -> str:
    """Return why this process must not compute on the device that it would get; empty if it may."""
    import torch

    if is_on(CPU_REQUESTED):
        return ""
    if torch.cuda.is_available():
        return _problem_of_number(torch.cuda.device_count())
    if is_launched():
        return (
            f"it was launched for a GPU, and torch {torch.__version__} cannot use one: {_reason()}"
        )
    if is_built_for_gpu():
        return unusable_gpu()
    # Somebody who installed a torch without CUDA expects the CPU: `device_check` only warns.
    return ""


def _problem_of_number(n_gpus: int) -> str:
    number = launched_local_rank()
    if number < n_gpus:
        return ""
    return (
        f"it is number {number + 1} on its machine, where torch sees {n_gpus} GPUs; start at most "
        f"{n_gpus} processes on each machine."
    )
