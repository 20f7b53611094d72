"""Shared by the benchmarks: command lines, CPU time, and records of what a result was made with."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from hybrid_distill.provenance import installed as versions
from hybrid_distill.provenance import mute_imports

__all__ = [
    "RESULTS",
    "ROOT",
    "about",
    "cpu_time",
    "device_name",
    "environment",
    "parser_of",
    "read",
    "versions",
    "write",
]

mute_imports()
ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
Result = TypeVar("Result")


def parser_of(doc: str | None, out: Path | None = None) -> argparse.ArgumentParser:
    """Return a parser whose help is a script's docstring, with ``--out`` if there is a record to write."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if out is not None:
        parser.add_argument("--out", type=Path, default=out)
    return parser


def cpu_time(work: Callable[[], Result]) -> tuple[Result, float]:
    """Return a result and the CPU seconds of this process: others may use the machine meanwhile."""
    started = time.process_time()
    result = work()
    return result, time.process_time() - started


def device_name(device: str = "cpu", threads: int | None = None) -> str:
    """Return the GPU's own name, or the kind of CPU and its threads, by default those that torch computes with."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name()
    threads = threads or torch.get_num_threads()
    plural = "s" if threads != 1 else ""
    return f"{platform.machine()} CPU, {threads} thread{plural}"


def about(
    what: str,
    device: str = "cpu",
    packages: tuple[str, ...] = ("torch", "transformers"),
    threads: int | None = None,
) -> dict[str, Any]:
    """Return the head of a record: what was measured, on which device, with which versions, when."""
    return {
        "what": what,
        "device": device_name(device, threads),
        "versions": versions(packages),
        "date": datetime.date.today().isoformat(),
    }


def read(path: Path) -> dict[str, Any]:
    """Return a record, empty if there is none yet."""
    if not path.exists():
        return {}
    return json.loads(path.read_text())


def write(path: Path, record: Any, *, indent: int = 1, sort_keys: bool = False) -> None:
    path.write_text(json.dumps(record, indent=indent, sort_keys=sort_keys) + "\n")


def environment(tree: Path, **more: str) -> dict[str, str]:
    """Return the environment of a process that runs the sources of a tree on one thread."""
    places = [str(tree), str(tree / "kernels")]
    if "PYTHONPATH" in os.environ:
        # Packages of the caller's: they come after the tree's own.
        places.append(os.environ["PYTHONPATH"])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1", **more}
