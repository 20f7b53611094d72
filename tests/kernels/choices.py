"""The choice of "auto" as it would be made for a tensor on a GPU, which no test needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybrid_distill.model import kernel_choice

REMEMBERING = ("_import_kernels", "_reason_against", "_best_on_gpu")
"""Functions of `kernel_choice` that compute once for each call."""


def forget_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `kernel_choice` ask anew; what it finds is forgotten after the test."""
    for name in REMEMBERING:
        compute = getattr(kernel_choice, name).__wrapped__
        monkeypatch.setattr(kernel_choice, name, kernel_choice.once(compute))


def choice_on_gpu(kernel: str, dtype: torch.dtype, sizes: tuple[int, ...], **options: Any) -> str:
    """Return what "auto" stands for in training; kernels run on the CPU, in the interpreter."""
    device = torch.device("cpu")
    training = True
    return kernel_choice._best_on_gpu(
        kernel, device, dtype, sizes, training, tuple(options.items())
    )
