"""Submit commands as submitit jobs, on this machine or on SLURM.

Imports nothing heavy: each job loads its `Command` from here and starts a process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from submitit import AutoExecutor
    from submitit.helpers import DelayedSubmission

NO_LIMIT = 60 * 24 * 365
"""Minutes that a job on this machine may take; submitit's default is 5."""
REQUEUES = 1000
"""Times that a job which ran out of time, or was preempted, may start again; submitit gives up after 3."""
CPUS_OF_GPU = 4
"""Cores that a SLURM job asks for with each GPU: its process, two data workers, checkpoints."""
PATIENCE = 120.0
"""Seconds to wait for a process of a stopped sweep that is still saving a task."""
WARNING = 180
"""Seconds before its time limit at which SLURM warns a job: it may save for `PATIENCE`; submitit's default is 90."""
STOPPING = (signal.SIGTERM, signal.SIGINT)
SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Variable with the seconds that a launcher waits for processes it has asked to stop; torch's default is 30."""
POLL = 0.1
"""Seconds between looks at the process of a job."""


@dataclass
class Command:
    """Program and its log file. A job that is preempted or out of time saves, starts again and resumes."""

    argv: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = field(default=None, init=False, compare=False)
    """Process of the job that runs it."""
    was_stopped: bool = field(default=False, init=False, compare=False)
    """True once the process has been asked to save and end."""

    def __call__(self) -> bool:
        """Run it to its end; return whether it was asked to save and end."""
        environment = {SHUTDOWN_TIMEOUT: f"{PATIENCE:.0f}", **os.environ, **self.environment}
        with self.log.open("a") as log:
            try:
                self.process = subprocess.Popen(
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
        for each in STOPPING:
            signal.signal(each, self._save_once)
        # Not `wait` without a timeout: it holds a lock, and `checkpoint`, which interrupts it, would wait in vain.
        while self.process.poll() is None:
            time.sleep(POLL)
        return self.was_stopped

    def _save_once(self, number: int | None = None, frame: FrameType | None = None) -> None:
        # A second signal would interrupt the saving.
        for each in STOPPING:
            signal.signal(each, signal.SIG_IGN)
        if self.process is not None and not self.was_stopped:
            self.was_stopped = True
            self.process.terminate()

    def checkpoint(self) -> DelayedSubmission:
        """Have the process save and end, and return the same command.

        submitit calls this when SLURM warns the job, and then has SLURM requeue it, which kills the job.
        """
        from submitit.helpers import DelayedSubmission

        self._save_once()
        if self.process is not None:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=PATIENCE)
        # A copy without the process, which cannot be pickled.
        return DelayedSubmission(replace(self))


def job_options(
    cluster: Literal["slurm", "local"], n_gpus: int, minutes: int
) -> dict[str, str | int]:
    """Return submitit's options for a job; its own ask SLURM for 5 minutes and no GPU."""
    if cluster == "local":
        return {"timeout_min": NO_LIMIT}
    n_cpus = CPUS_OF_GPU * max(1, n_gpus)
    options: dict[str, str | int] = {
        "timeout_min": minutes,
        "cpus_per_task": n_cpus,
        # A short job works for half of its time.
        "slurm_signal_delay_s": min(WARNING, 30 * minutes),
    }
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
