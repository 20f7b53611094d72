"""Two processes of one launch, each started by hand with its own environment."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from training import free_port

ON_CPU = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
"""Variables of a launch that is meant for CPUs."""


class Ended(NamedTuple):
    """A process that has ended."""

    status: int
    out: str
    err: str


def start_two(
    program: Path,
    *arguments: object,
    own: Sequence[Mapping[str, str]] = ({}, {}),
    timeout: float = 120.0,
) -> list[Ended]:
    """Run a program as the two processes of a launch; ``own`` adds to the environment of each."""
    common = os.environ | ON_CPU
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    command = [sys.executable, str(program), *map(str, arguments)]
    running = []
    try:
        for rank, changes in enumerate(own):
            environment = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | dict(changes)
            running.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    text=True,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
            )
        ended = []
        for process in running:
            out, err = process.communicate(timeout=timeout)
            ended.append(Ended(process.returncode, out, err))
        return ended
    finally:
        for process in running:
            process.kill()
