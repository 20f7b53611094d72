"""Measurement of a run's speed and memory."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..model.modeling_hybrid import HybridForCausalLM

PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}
"""Dense bf16 FLOP/s, from the vendors' data sheets."""


class Meter:
    """Time and memory of a process between two lines of the metrics."""

    def __init__(
        self,
        flops_per_token: float,
        device: torch.device,
        world: int,
        tokens: int = 0,
    ) -> None:
        self.flops_per_token = flops_per_token
        self.device = device
        self.peak = peak_flops(device) * world
        self.waited = 0.0
        self._since = time.perf_counter()
        self._tokens = tokens

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.waited += time.perf_counter() - begun

    def read(self, tokens: int) -> dict[str, float]:
        """Measure since the last reading; ``tokens`` are those processed so far, in the loss or not.

        Returns tokens per second over all processes, the share of time spent waiting for data, the
        process's peak memory in bytes, and the MFU of the matrix products if the devices' peak is
        known.
        """
        now = time.perf_counter()
        elapsed = now - self._since
        speed = (tokens - self._tokens) / elapsed
        figures = {
            "tokens_per_s": round(speed, 1),
            "data_wait": round(self.waited / elapsed, 4),
            "memory_bytes": peak_memory(self.device),
        }
        if self.peak:
            mfu = speed * self.flops_per_token / self.peak
            figures["mfu"] = round(mfu, 4)
        self._since = now
        self._tokens = tokens
        self.waited = 0.0
        return figures


def peak_memory(device: torch.device) -> int:
    """Return the process's peak memory in bytes: the GPU's if there is one, else the host's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # macOS counts it in bytes, Linux in KiB.
    if sys.platform == "darwin":
        return peak
    return peak * 1024


def flops_per_token(
    student: HybridForCausalLM,
    teachers: Sequence[nn.Module],
    *,
    teacher_forced: bool,
) -> float:
    """Count the FLOPs per token of the matrix products in a training step.

    Per weight: 2 in the forward pass, 2 for the gradient of its input, 2 for its own if it is
    trained. Attention, scans and recomputation are not counted. ``teacher_forced`` stages run the
    teacher and only the mixers of the student; other stages run the whole student.
    """
    flops = 0
    for teacher in teachers:
        for weight in _matrices(teacher):
            flops += 2 * weight.numel()
    student_parts: Sequence[nn.Module] = [student]
    if teacher_forced:
        student_parts = student.mixers()
    for part in student_parts:
        for weight in _matrices(part):
            per_weight = 4
            if weight.requires_grad:
                per_weight = 6
            flops += per_weight * weight.numel()
    return flops


def peak_flops(device: torch.device) -> float:
    """Return the peak bf16 FLOP/s of a device, 0 if unknown."""
    if device.type != "cuda":
        return 0.0
    device_name = torch.cuda.get_device_name(device)
    for model, flops in PEAK_FLOPS.items():
        if model in device_name:
            return flops
    return 0.0


def _matrices(module: nn.Module) -> list[Tensor]:
    """Return the weights of linear layers, including the output embedding, each once."""
    # By id: tensors compare by value.
    weights = {}
    # Embeddings of the input are looked up, not multiplied, so they are left out.
    for part in module.modules():
        if isinstance(part, nn.Linear):
            weights[id(part.weight)] = part.weight
    return list(weights.values())
