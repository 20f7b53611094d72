"""This machine's programs, GPUs and threads, and the share of them that each of several jobs gets."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path


def program_here(launcher: str) -> str:
    """Find a launcher's program beside this Python or on the PATH. Raises ValueError if it is in neither."""
    program = shlex.split(launcher)[0]
    # An environment's programs are not on the PATH if only its Python was called.
    places = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    path = shutil.which(program, path=os.pathsep.join(places))
    if path is None:
        raise ValueError(
            f"--launcher is {launcher!r}, and there is no program {program!r} here; "
            "pass one that is installed, such as 'accelerate launch'."
        )
    return path


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, by the names that CUDA_VISIBLE_DEVICES takes."""
    import torch

    n_gpus = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        # Names may be UUIDs, and CUDA ignores those behind the first that it does not know.
        return visible.split(",")[:n_gpus]
    return [str(i) for i in range(n_gpus)]


def share_of_machine(slot: int, slots: int, n_gpus: int = 1) -> dict[str, str]:
    """Return the environment of one of several jobs: its threads and GPUs, which submitit hides.

    Jobs share GPUs only if together they need more than there are.
    """
    threads = max(1, _n_cores() // slots)
    if os.environ.get("OMP_NUM_THREADS"):
        threads = min(threads, int(os.environ["OMP_NUM_THREADS"]))
    share = {"OMP_NUM_THREADS": str(threads)}
    gpus = visible_gpus()
    if gpus:
        first = slot * n_gpus
        own = [gpus[i % len(gpus)] for i in range(first, first + n_gpus)]
        share["CUDA_VISIBLE_DEVICES"] = ",".join(own)
    return share


def _n_cores() -> int:
    # A container or taskset may allow fewer than the machine has; macOS cannot tell.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
