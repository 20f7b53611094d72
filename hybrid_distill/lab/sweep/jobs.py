"""Commands as jobs of submitit, on this machine or on SLURM.

Imports nothing heavy: each job loads a `Command` from here, and starts a process of its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from submitit import AutoExecutor
    from submitit.helpers import DelayedSubmission

NO_LIMIT = 60 * 24 * 365
"""Minutes that a job on this machine may take; submitit's default is 5."""


@dataclass
class Command:
    """A program and where its output goes. A job that is preempted or out of time is queued again and continues."""

    argv: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)

    def __call__(self) -> int:
        environment = {**os.environ, **self.environment}
        with self.log.open("a") as log:
            process = subprocess.Popen(
                self.argv,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C must not reach it too: it is asked to save once
            )

        def save_once(number: int, frame: object) -> None:
            for each in (signal.SIGTERM, signal.SIGINT):
                signal.signal(each, signal.SIG_IGN)
            process.terminate()

        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, save_once)
        return process.wait()

    def checkpoint(self) -> DelayedSubmission:
        """Queue the same command again; submitit asks for it."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def executor(folder: Path, cluster: Literal["slurm", "local"], options: Mapping[str, str | int]) -> AutoExecutor:
    """Open submitit's executor; ``options`` are its own: ``slurm_partition``, ``gpus_per_node``, ``timeout_min`` ...

    Raises ValueError for an unknown option, without submitit, and where there is no such cluster.
    """
    try:
        import submitit
    except ImportError as error:
        raise ValueError(
            "jobs of their own need submitit; run `pip install 'hybrid-distill[sweep]'`, or pass --jobs 1."
        ) from error
    try:
        found = submitit.AutoExecutor(folder=folder, cluster=cluster)
        found.update_parameters(**{**({"timeout_min": NO_LIMIT} if cluster == "local" else {}), **options})
    except Exception as error:  # submitit raises what its plugins raise
        reason = " ".join(str(error).split())
        raise ValueError(f"submitit cannot use --cluster {cluster} with these options: {reason}") from error
    return found
