"""Choice of the kernels that students run on: one option of every recipe and command that runs
students.

torch and transformers are imported inside functions: commands name `Kernels` before they load them.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal, TypeVar

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


Kernels = Literal["auto", "triton", "mamba_ssm", "torch"]
"""Implementations of `kernel_choice.IMPLEMENTATIONS` to choose from; "reference" is for tests. ``auto`` takes
Triton's kernels on a GPU, if they pass the test at first use, else torch."""
NEED_A_GPU = ("triton", "mamba_ssm")

Model = TypeVar("Model", bound="PreTrainedModel")


def check_kernels(kernels: Kernels, device: torch.device, flag: str = "--kernels") -> None:
    """Raise ValueError, naming ``flag``, for kernels that cannot run on a device."""
    from .model.kernel_choice import check_implementation

    try:
        check_implementation(kernels)
    except RuntimeError as error:
        raise ValueError(f"{flag} is {kernels!r}: {error}") from error
    if not run_on(kernels, device):
        raise ValueError(
            f"{flag} is {kernels!r}, which needs a GPU, and this process has {device}; pass auto or torch."
        )


def run_on(kernels: str, device: torch.device) -> bool:
    """Return True if a device of this kind is one that the kernels run on."""
    is_interpreted = kernels == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    return kernels not in NEED_A_GPU or device.type == "cuda" or is_interpreted


def use_kernels(model: Model, kernels: Kernels, device: torch.device) -> Model:
    """Let a student run on these kernels and return it; other models have none. Raises as
    `check_kernels` does."""
    from .model import HybridForCausalLM

    if isinstance(model, HybridForCausalLM):
        check_kernels(kernels, device)
        model.set_ssm_implementation(kernels)
    elif kernels != "auto":
        raise ValueError(
            f"--kernels is {kernels!r}, and {type(model).__name__} has no recurrent heads; leave it out."
        )
    return model
