"""A triton driver whose device is the emulator: the real launcher compiles for it as it would for a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import itertools
import pkgutil
import struct
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import hybrid_kernels
import numpy as np
import torch
import triton
from hybrid_kernels import ssd
from ptx_emulator import Memory, Program
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend

MAX_SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}


class Race(AssertionError):
    """What the emulator found in a launch."""


class Binary:
    """A loaded kernel. ``ptx`` and ``n_threads`` come with triton's hook for loaded kernels and with the launch."""

    def __init__(self, shared_bytes: int) -> None:
        self.shared_bytes, self.ptx, self.program = shared_bytes, "", None


class Launcher:
    """What triton calls with a grid and the arguments of a kernel."""

    def __init__(self, source, metadata) -> None:
        self.n_threads, self.types = metadata.num_warps * 32, list(source.signature.values())

    def __call__(self, x, y, z, stream, binary: Binary, packed, launch_metadata, enter, leave, *arguments) -> None:
        if binary.program is None:
            binary.program = Program(binary.ptx, self.n_threads)
        given = [(kind, value) for kind, value in zip(self.types, arguments) if kind != "constexpr"]
        buffers = [memory_of(value) for kind, value in given if kind.startswith("*")]
        order = list(itertools.product(range(x), range(y), range(z)))
        np.random.default_rng(len(order)).shuffle(order)
        bits = [bits_of(kind, value) for kind, value in given]
        found = binary.program.run((x, y, z), bits, binary.shared_bytes, buffers, order)
        if found:
            raise Race("\n".join(f"{count} x {what}" for what, count in found.most_common(8)))


def memory_of(tensor: torch.Tensor) -> tuple[int, Memory]:
    """Return the address and the bytes of a tensor, from its first element to its last."""
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())) + 1
    view = (ctypes.c_uint8 * (extent * tensor.element_size())).from_address(tensor.data_ptr())
    return tensor.data_ptr(), Memory(np.frombuffer(view, np.uint8), "global")


def bits_of(kind: str, value) -> int:
    """Return an argument as a kernel gets it."""
    if kind.startswith("*"):
        return value.data_ptr()
    return struct.unpack("I", struct.pack("f", value))[0] if kind == "fp32" else int(value)


class Driver:
    """The part of triton's driver interface that its launcher uses."""

    launcher_cls = Launcher

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.utils = types.SimpleNamespace(
            load_binary=lambda name, kernel, shared, device: (object(), Binary(shared), 0, 0, 1024),
            unload_module=lambda module: None,
            get_device_properties=lambda device: {"max_shared_mem": MAX_SHARED_BYTES[capability]},
        )

    def get_current_device(self) -> int:
        return self.capability  # compiled kernels are kept by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


def _note_ptx(module, binary: Binary, name: str, files, digest: str) -> None:
    binary.ptx = next(Path(path) for file, path in files.items() if file.endswith(".ptx")).read_text()


@contextlib.contextmanager
def emulated(capability: int) -> Iterator[None]:
    """Launch kernels on CPU tensors in the emulator, compiled for a device; new memory holds NaN.

    Triton's cache must be a private one (TRITON_CACHE_DIR): what is compiled here has no machine code.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(triton.runtime.driver, "_active", Driver(capability)))
        stack.enter_context(mock.patch.object(triton.knobs.runtime, "kernel_load_end_hook", _note_ptx))
        stack.enter_context(mock.patch.object(CUDABackend, "make_cubin", lambda *arguments: b""))  # seconds of ptxas
        stack.enter_context(mock.patch.object(ssd, "_capability", lambda device: capability))
        for found in pkgutil.iter_modules(hybrid_kernels.__path__):
            module = importlib.import_module(f"hybrid_kernels.{found.name}")
            if hasattr(module, "check_device"):
                stack.enter_context(mock.patch.object(module, "check_device", lambda *arguments: None))
        for name in ("empty", "empty_like"):
            stack.enter_context(mock.patch.object(torch, name, _poisoned(getattr(torch, name))))
        yield


def _poisoned(plain):
    def poisoned(*arguments, **options):
        tensor = plain(*arguments, **options)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    return poisoned
