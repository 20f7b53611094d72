"""Submit commands as submitit jobs, on this machine or on SLURM.

Imports nothing heavy: each job loads its `Command` from here and starts a process.
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
REQUEUES = 1000
"""Times that SLURM may requeue a job which ran out of time; submitit gives up after 3."""
CPUS_OF_GPU = 4
"""Cores that a SLURM job asks for with each GPU: its process, two data workers, checkpoints."""
PATIENCE = 120.0
"""Seconds to wait for a process of a stopped sweep that is still saving a task."""
STOPPING = (signal.SIGTERM, signal.SIGINT)
SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Variable with the seconds that a launcher waits for processes it has asked to stop; torch's default is 30."""


@dataclass
class Command:
    """Program and its log file. A job that is preempted or out of time is requeued and resumes."""

    argv: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)

    def __call__(self) -> int:
        environment = {SHUTDOWN_TIMEOUT: f"{PATIENCE:.0f}", **os.environ, **self.environment}
        with self.log.open("a") as log:
            try:
                process = subprocess.Popen(
                    self.argv,
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    # Ctrl-C in the terminal must not reach it: this job asks it to save.
                    start_new_session=True,
                )
            except OSError as error:
                # The errors of a sweep name this log, not submitit's.
                log.write(f"{self.argv[0]} did not start: {error}\n")
                raise

        def save_once(number: int, frame: object) -> None:
            # A second signal would interrupt the saving.
            for each in STOPPING:
                signal.signal(each, signal.SIG_IGN)
            process.terminate()

        for each in STOPPING:
            signal.signal(each, save_once)
        return process.wait()

    def checkpoint(self) -> DelayedSubmission:
        """Requeue the same command; submitit calls this."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def job_options(
    cluster: Literal["slurm", "local"], n_gpus: int, minutes: int
) -> dict[str, str | int]:
    """Return submitit's options for a job; its own ask SLURM for 5 minutes and no GPU."""
    if cluster == "local":
        return {"timeout_min": NO_LIMIT}
    n_cpus = CPUS_OF_GPU * max(1, n_gpus)
    options: dict[str, str | int] = {"timeout_min": minutes, "cpus_per_task": n_cpus}
    if n_gpus:
        options["gpus_per_node"] = n_gpus
    return options


def executor(
    folder: Path,
    cluster: Literal["slurm", "local"],
    options: Mapping[str, str | int],
) -> AutoExecutor:
    """Open submitit's executor with its options: ``slurm_partition``, ``gpus_per_node``,
    ``timeout_min`` ...

    Raises ValueError for an unknown option, if submitit is not installed, and if there is no
    such cluster.
    """
    try:
        import submitit
    except ImportError as error:
        raise ValueError(
            "separate jobs need submitit; run `pip install 'hybrid-distill[sweep]'`, or pass --jobs 1."
        ) from error
    try:
        submitter = submitit.AutoExecutor(
            folder=folder, cluster=cluster, slurm_max_num_timeout=REQUEUES
        )
        submitter.update_parameters(**options)
    except Exception as error:  # submitit raises what its plugins raise
        reason = " ".join(str(error).split())
        raise ValueError(
            f"submitit cannot use --cluster {cluster} with these options: {reason}"
        ) from error
    return submitter
