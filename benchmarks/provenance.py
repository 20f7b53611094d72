"""Shared by the benchmarks: records of what a result was made with, and the environment of their processes."""

from __future__ import annotations

import datetime
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

from hybrid_distill.provenance import installed as versions

__all__ = ["ROOT", "about", "device_name", "environment", "read", "versions", "write"]

ROOT = Path(__file__).resolve().parents[1]


def device_name(device: str = "cpu", threads: int | None = None) -> str:
    """Return the GPU's own name, or the kind of CPU and its threads, by default those that torch computes with."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name()
    threads = threads or torch.get_num_threads()
    return f"{platform.machine()} CPU, {threads} thread{'s' * (threads != 1)}"


def about(
    what: str, device: str = "cpu", packages: tuple[str, ...] = ("torch", "transformers"), threads: int | None = None
) -> dict[str, Any]:
    """Return the head of a record: what was measured, on which device, with which versions, when."""
    today = datetime.date.today().isoformat()
    return {"what": what, "device": device_name(device, threads), "versions": versions(packages), "date": today}


def read(path: Path) -> dict[str, Any]:
    """Return a record, empty if there is none yet."""
    return json.loads(path.read_text()) if path.exists() else {}


def write(path: Path, record: dict[str, Any], **options: Any) -> None:
    path.write_text(json.dumps(record, **{"indent": 1, **options}) + "\n")


def environment(tree: Path, **more: str) -> dict[str, str]:
    """Return the environment of a process that runs the sources of a tree on one thread."""
    return {**os.environ, "PYTHONPATH": f"{tree}{os.pathsep}{tree / 'kernels'}", "OMP_NUM_THREADS": "1", **more}
