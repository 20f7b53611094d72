"""A triton driver without a GPU: the real launcher compiles for it, and the emulator or the caller
gets the launch."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import itertools
import pkgutil
import re
import struct
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import hybrid_kernels
import numpy as np
import torch
import triton
from hybrid_kernels import common, ssd_launch
from ptx import Memory, Program
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend

MAX_SHARED_BYTES = 227 * 1024
"""Shared memory of an H100's program; an A100's is smaller, which `test_compiled` looks at."""


class Race(AssertionError):
    """Findings of the emulator in a launch."""


def instructions(beginning: str) -> re.Pattern[str]:
    """Match the PTX statements that begin so."""
    return re.compile(rf"\b{re.escape(beginning)}[^;]*;")


class Launch(NamedTuple):
    """A compiled kernel with its grid and arguments."""

    name: str
    files: dict[str, Path]  # by suffix: "ptx", "ttgir", "cubin"
    n_threads: int
    shared_bytes: int
    grid: tuple[int, int, int]
    arguments: list[tuple[str, Any]]  # type, value

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [value for kind, value in self.arguments if kind.startswith("*")]

    def program(self, without: str = "", nth: int | None = None) -> Program:
        """Translate the kernel; leave out the instructions that begin with ``without``, or the
        ``nth`` of them."""
        ptx = self.files["ptx"].read_text()
        if without:
            place = itertools.count()

            def replacement(statement: re.Match[str]) -> str:
                is_left_out = nth is None or nth == next(place)
                return ";" if is_left_out else statement[0]

            ptx = instructions(without).sub(replacement, ptx)
        return Program(ptx, self.n_threads)

    def run(self, program: Program) -> None:
        """Execute on the tensors' memory, programs in a random order. Raises Race or Fault."""
        order = list(itertools.product(*map(range, self.grid)))
        np.random.default_rng(len(order)).shuffle(order)
        bits = [_bits(kind, value) for kind, value in self.arguments]
        buffers = [_memory(tensor) for tensor in self.tensors]
        findings = program.run(self.grid, bits, self.shared_bytes, buffers, order)
        if findings:
            lines = [f"{count} x {what}" for what, count in findings.most_common(8)]
            raise Race("\n".join(lines))


def _memory(tensor: torch.Tensor) -> tuple[int, Memory]:
    """Address and bytes of a tensor, from its first element to its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    n_bytes = (last + 1) * tensor.element_size()
    address = tensor.data_ptr()
    # Not tensor.numpy(): numpy has no bf16, and a view would be copied.
    view = (ctypes.c_uint8 * n_bytes).from_address(address)
    return address, Memory(np.frombuffer(view, np.uint8), "global")


def _bits(kind: str, value: Any) -> int:
    """Return the bits of an argument."""
    if kind.startswith("*"):
        return value.data_ptr()
    if kind == "fp32":
        (bits,) = struct.unpack("I", struct.pack("f", value))
        return bits
    return int(value)


_translated: dict[Path, Program] = {}


def execute(launch: Launch) -> None:
    """Run a launch in the emulator; kernels are translated once."""
    path = launch.files["ptx"]
    if path not in _translated:
        _translated[path] = launch.program()
    launch.run(_translated[path])


class Driver:
    """The part of triton's driver interface that its launcher uses."""

    def __init__(self, capability: int, launch: Callable[[Launch], None]) -> None:
        self.capability = capability
        self.launch = launch
        self.utils = types.SimpleNamespace(
            load_binary=_load_binary,
            unload_module=lambda module: None,
            get_device_properties=lambda device: {"max_shared_mem": MAX_SHARED_BYTES},
        )

    def launcher_cls(self, source, metadata) -> Callable[..., None]:
        """Return what triton calls with a grid and all arguments; ``function`` is the second value
        of `_load_binary`."""
        kinds = list(source.signature.values())

        def launcher(
            x, y, z, stream, function, packed, launch_metadata, enter, leave, *values
        ) -> None:
            launch = Launch(
                **function,
                n_threads=metadata.num_warps * 32,
                grid=(x, y, z),
                arguments=[
                    (kind, value) for kind, value in zip(kinds, values) if kind != "constexpr"
                ],
            )
            # The driver of now, not `self`: a compiled kernel outlives a driver.
            triton.runtime.driver.active.launch(launch)

        return launcher

    def get_current_device(self) -> int:
        # Triton keeps compiled kernels by device.
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


def _load_binary(name: str, code: bytes, shared_bytes: int, device: int) -> tuple[object, ...]:
    """Return a module, a function, and its registers, spills and most threads."""
    module = object()
    # `_note_files` adds to it.
    function = {"name": name, "shared_bytes": shared_bytes}
    return module, function, 0, 0, 1024


def _note_files(module, function: dict, name: str, files: dict[str, str], digest: str) -> None:
    function["files"] = {Path(file).suffix[1:]: Path(path) for file, path in files.items()}


def _poisoned(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def poisoned(*arguments: Any, **options: Any) -> torch.Tensor:
        tensor = plain(*arguments, **options)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    return poisoned


@contextlib.contextmanager
def emulated(
    capability: int, launch: Callable[[Launch], None] = execute, machine_code: bool = False
) -> Iterator[None]:
    """Hand every launch on CPU tensors, compiled for a device, to ``launch``; new memory holds NaN.

    Without ``machine_code``, ptxas is left out, so triton's cache must be a private one
    (TRITON_CACHE_DIR)."""
    with contextlib.ExitStack() as stack:

        def replace(owner: object, name: str, value: object) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        replace(triton.runtime.driver, "_active", Driver(capability, launch))
        replace(triton.knobs.runtime, "kernel_load_end_hook", _note_files)
        replace(ssd_launch, "_capability", lambda device: capability)
        if not machine_code:
            replace(CUDABackend, "make_cubin", lambda *arguments: b"")
        # It refuses tensors of the CPU; each module imports the function by name.
        refuses = common.check_device
        for entry in pkgutil.iter_modules(hybrid_kernels.__path__):
            module = importlib.import_module(f"hybrid_kernels.{entry.name}")
            if getattr(module, refuses.__name__, None) is refuses:
                replace(module, refuses.__name__, lambda *arguments: None)
        for name in ("empty", "empty_like"):
            replace(torch, name, _poisoned(getattr(torch, name)))
        yield
