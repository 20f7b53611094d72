"""Choice of an implementation: which kernels run on this device, and what "auto" stands for.

"auto" takes a kernel only after its first use on a device has matched torch. Packages of kernels are
imported by string: transformers would list other imports as requirements of an export.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .once import once

IMPLEMENTATIONS = ("auto", "torch", "reference", "triton", "mamba_ssm")
PACKAGES = {"triton": "hybrid_kernels", "mamba_ssm": "mamba_ssm"}
KERNEL_WIDTHS = (2, 3, 4)  # widths of convolutions
DELTA_RULE = "gated delta rule"

MODULES = {
    "ssd": "hybrid_kernels.ssd",
    "causal_conv": "hybrid_kernels.conv",
    "ssd_step": "hybrid_kernels.step",
    "delta_rule": "hybrid_kernels.delta_rule",
}
KERNELS: dict[str, Callable[..., Any]] = {}
"""Functions of `MODULES`, filled before "triton" is the answer of `choose_implementation`. A dictionary, because
torch.compile cannot trace an import."""

log = logging.getLogger(__name__)


class KernelCall(NamedTuple):
    """A call of a kernel as its test at first use describes it."""

    kernel: str
    dtype: torch.dtype
    sizes: tuple[int, ...]
    options: dict[str, Any]


class Limits(NamedTuple):
    """Dtypes, and largest head dim and state size, for which "auto" takes a kernel."""

    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)
    largest: int = 128

    def reason_against(self, dtype: torch.dtype, sizes: tuple[int, ...]) -> str | None:
        """Return in one line why a call does not fit; None if it does."""
        if dtype in self.dtypes and max(sizes, default=0) <= self.largest:
            return None
        names = " and ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
        return f"it takes {names}, sizes up to {self.largest}; got {dtype}, {sizes}"


OUR_LIMITS = Limits()
# flash-linear-attention's kernel, which refuses float32.
LIMITS = {DELTA_RULE: Limits((torch.bfloat16, torch.float16), 256)}


def check_implementation(impl: str) -> None:
    """Raise ValueError for a name not in IMPLEMENTATIONS, RuntimeError for one that cannot run
    here."""
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl is {impl!r}; it must be one of {', '.join(IMPLEMENTATIONS)}.")
    if reason := _import_kernels(impl):
        raise RuntimeError(f"impl {impl!r} cannot run: {reason}. Pass 'auto' or 'torch'.")


def choose_implementation(impl: str, kernel: str, x: Tensor, *sizes: int, **options: bool) -> str:
    """Resolve "auto" for a kernel, given a tensor and the sizes it must handle; check and return
    any other name."""
    if impl != "auto":
        check_implementation(impl)
        return impl
    if not x.is_cuda:
        return "torch"
    return _best_on_gpu(
        kernel, x.device, x.dtype, sizes, torch.is_grad_enabled(), tuple(options.items())
    )


def describe_choice(
    impl: str,
    kernel: str,
    device: torch.device,
    dtype: torch.dtype,
    *sizes: int,
    training: bool,
    **options: bool,
) -> str:
    """Describe the answer of `choose_implementation`, with the reason if "auto" does not take a kernel."""
    if impl != "auto":
        return impl
    if device.type != "cuda":
        return "torch"
    reason = _reason_against(kernel, device, dtype, sizes, training, tuple(options.items()))
    if reason is None:
        return "triton"
    return f"torch ({reason})"


def try_together(device: torch.device, calls: Iterable[KernelCall]) -> None:
    """Test the kernels that "auto" will soon be asked for in one child process.

    One for each kernel would take 10 to 25 seconds to start. `choose_implementation` then finds the verdicts.
    """
    if device.type != "cuda" or not torch.cuda.is_available() or _import_kernels("triton"):
        return
    selftest = importlib.import_module("hybrid_kernels.selftest")
    trials = []
    for kernel, dtype, sizes, options in calls:
        # The loss is tried with its gradients always.
        training = options.get("training", True)
        if _reason_not_to_try(kernel, device, dtype, sizes, training) is None:
            trials.append(selftest.trial_of(kernel, device, dtype, *sizes, **options))
    selftest.check_kernels(trials)


@once
def _best_on_gpu(
    kernel: str,
    device: torch.device,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    training: bool,
    options: Any,
) -> str:
    """Return "triton" if it runs and its first use on this device matches torch; else log why and
    return "torch"."""
    reason = _reason_against(kernel, device, dtype, sizes, training, options)
    if reason is None:
        return "triton"
    log.warning("the %s runs on torch, not on its kernel: %s", kernel, reason)
    return "torch"


@once
def _reason_against(
    kernel: str,
    device: torch.device,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    training: bool,
    options: Any,
) -> str | None:
    """Return in one line why a kernel must not run: it cannot, is known to fail, or failed when it
    was tried."""
    reason = _reason_not_to_try(kernel, device, dtype, sizes, training)
    if reason is None:
        check_kernel = importlib.import_module("hybrid_kernels.selftest").check_kernel
        reason = check_kernel(kernel, device, dtype, *sizes, training=training, **dict(options))
    return reason


def _reason_not_to_try(
    kernel: str, device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...], training: bool
) -> str | None:
    """Return in one line why a kernel must not even be tried."""
    reason = _import_kernels("triton")
    if reason is None and kernel == DELTA_RULE:
        delta_rule = importlib.import_module("hybrid_kernels.delta_rule")
        reason = delta_rule.unusable(training=training)
    if reason is None:
        reason = LIMITS.get(kernel, OUR_LIMITS).reason_against(dtype, sizes)
    if reason is None:
        reason = importlib.import_module("hybrid_kernels.known_bad").known_bad(kernel, device)
    return reason


@once
def _import_kernels(impl: str) -> str | None:
    """Import an implementation's kernels into `KERNELS`; return in one line why it cannot run, None if it can.

    Importing a broken package raises.
    """
    package = PACKAGES.get(impl)
    if package is None:
        return None
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    if impl != "triton":
        return None
    reason = importlib.import_module(package).unusable()
    if reason is None:
        for name, module in MODULES.items():
            KERNELS[name] = getattr(importlib.import_module(module), name)
    return reason
