"""Launch of this process as its environment describes it, and launches that would go wrong.

Uses the standard library only, for the command line asks before it loads torch. Everything here
works before and after the processes of a launch are connected.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

CPU_REQUESTED = "ACCELERATE_USE_CPU"
"""accelerate's variable for computing on the CPU, set from a launch file's ``use_cpu``."""
FSDP_REQUESTED = "ACCELERATE_USE_FSDP"
DEEPSPEED_REQUESTED = "ACCELERATE_USE_DEEPSPEED"
FSDP_MUST_BE_OFF = (
    # Ignored silently: `fsdp2.Fsdp2` shards the stage, not accelerate.
    "FSDP_OFFLOAD_PARAMS",
    "FSDP_ACTIVATION_CHECKPOINTING",
    # On by default! transformers then loads teachers without weights on all processes but one, and
    # relies on accelerate to broadcast them when it wraps the model (transformers#25107).
    "FSDP_CPU_RAM_EFFICIENT_LOADING",
)
"""accelerate's settings for FSDP that must be off."""
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class WorldError(RuntimeError):
    """The running processes are not those that were asked for."""


class LaunchRefused(WorldError):
    """All processes of a launch found that they must not compute together; each raises this."""


def is_on(variable: str) -> bool:
    """Check whether an environment variable is set to a yes."""
    return os.environ.get(variable, "false").lower() in ("1", "true", "yes")


def is_launched() -> bool:
    """Check whether `accelerate launch` or torchrun started this process."""
    return "LOCAL_RANK" in os.environ or "ACCELERATE_MIXED_PRECISION" in os.environ


def launched_world() -> int:
    """Return the number of processes that a launcher announced; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", 1))


def launched_local_rank() -> int:
    """Return the number of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", 0))


def is_launched_main() -> bool:
    """Check whether this is the main or only process."""
    return int(os.environ.get("RANK", 0)) == 0


def is_launched_with_others() -> bool:
    """Check whether a launcher announced several processes."""
    return launched_world() > 1


def is_first_on_machine() -> bool:
    """Check whether this is the first or only process on its machine."""
    return launched_local_rank() == 0


def is_on_several_machines() -> bool:
    """Check whether a launcher announced processes on more than one machine."""
    on_this_machine = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return launched_world() > on_this_machine


def check_environment() -> None:
    """Raise WorldError for a launch that would start but train something else."""
    if is_on(FSDP_REQUESTED):
        _check_fsdp()
    # `accelerate launch --cpu --num_processes 2`, and configs with MULTI_CPU, start one process and
    # do not warn (accelerate#2741). Their launcher sets MASTER_ADDR all the same.
    is_by_accelerate = "ACCELERATE_MIXED_PRECISION" in os.environ
    if is_by_accelerate and "MASTER_ADDR" in os.environ and "WORLD_SIZE" not in os.environ:
        raise WorldError(
            "several processes were asked for and accelerate started one (it does for `--cpu` and MULTI_CPU configs); "
            "launch with `accelerate launch --multi_gpu --num_processes N`, on CPU too."
        )


def _check_fsdp() -> None:
    version = os.environ.get("FSDP_VERSION", "1")
    if version != "2":
        raise WorldError(
            f"FSDP version {version} is not supported; launch with --config_file launch/fsdp2.yaml."
        )
    for name in FSDP_MUST_BE_OFF:
        if is_on(name):
            raise WorldError(
                f"{name.lower()} is on, which is not supported here; launch with --config_file "
                f"launch/fsdp2.yaml, or add --{name.lower()} false."
            )


def die_with_launcher() -> None:
    """Die with a launcher that is killed, so as not to write alongside the next launch."""
    if "LOCAL_RANK" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
