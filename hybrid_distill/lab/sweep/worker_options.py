"""Options of a sweep's workers, from flags, recipe and machine: how many jobs at a time, GPUs and time of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...validation import COUNT, COUNT_OR_NONE
from .cells import perform
from .flags import SweepJob, split_pairs
from .machine import program_here, visible_gpus
from .submission import executor, job_options
from .workers import JobSubmitter, ThisProcess

JOB_DEFAULTS: dict[str, Any] = {"launcher": "", "gpus": None, "minutes": 1440}
"""Options that a recipe's jobs() may set, and their defaults; unnamed GPUs are this machine's
choice."""


@dataclass(frozen=True)
class WorkerOptions:
    """Where cells run. ``cluster`` is None for cells in this process and for jobs on this machine."""

    cluster: Literal["slurm", "local"] | None
    launcher: str
    gpus: int
    """GPUs of each job."""
    minutes: int
    jobs: int
    """Jobs at a time."""
    options: Mapping[str, str | int]
    """Further options of submitit."""

    @classmethod
    def chosen(cls, job: SweepJob, recipe_options: Mapping[str, Any]) -> WorkerOptions:
        """Choose from the command's flags, else the recipe, else this machine.

        Raises ValueError for numbers out of range, and for GPUs that a job could not use.
        """
        chosen = {**JOB_DEFAULTS, **recipe_options}
        for name in JOB_DEFAULTS:
            flag = getattr(job, name)
            if flag is not None:
                chosen[name] = flag
        launcher = chosen["launcher"]
        COUNT.check("--minutes", chosen["minutes"])
        if job.cluster == "slurm":
            gpus = _gpus_of_slurm_job(chosen["gpus"], launcher)
            jobs = job.jobs
            if jobs is None:
                raise ValueError(
                    "--cluster slurm without --jobs; pass how many jobs may be in the queue at a time, "
                    "such as --jobs 8."
                )
        else:
            n_visible = len(visible_gpus())
            gpus = _gpus_of_job_here(
                chosen["gpus"], launcher, n_visible, is_flag=job.gpus is not None
            )
            jobs = job.jobs
            if jobs is None:
                jobs = max(1, n_visible // gpus)
        if gpus > 1 and not launcher:
            raise ValueError(
                f"--gpus is {gpus}, and a single process uses one GPU; pass --launcher "
                "'accelerate launch ...' too."
            )
        COUNT.check("--jobs", jobs)
        if launcher and job.cluster != "slurm":
            program_here(launcher)
        options = _submitit_options(job)
        return cls(job.cluster, launcher, gpus, chosen["minutes"], jobs, options)

    def workers(self, folder: Path) -> ThisProcess | JobSubmitter:
        """Make the workers; ``folder`` is for submitit's files."""
        if self.jobs == 1 and not self.launcher and self.cluster is None:
            return ThisProcess(perform)
        cluster = self.cluster or "local"
        options = {**job_options(cluster, self.gpus, self.minutes), **self.options}
        return JobSubmitter(
            executor(folder, cluster, options), self.jobs, self.launcher, self.gpus, options
        )


def _submitit_options(job: SweepJob) -> dict[str, str | int]:
    """Parse ``--options``. Raises ValueError if there is no cluster to read them."""
    options: dict[str, str | int] = {}
    for name, value in split_pairs("options", job.options, "slurm_partition=gpu"):
        options[name] = value
        # Not if it would lose a leading zero, as of the account 0123.
        if value.isdigit() and str(int(value)) == value:
            options[name] = int(value)
    if options and job.cluster is None:
        raise ValueError(
            "--options are for jobs of a cluster; pass --cluster slurm too, or leave them out."
        )
    return options


def _gpus_of_slurm_job(gpus: int | None, launcher: str) -> int:
    """Return the GPUs to ask for; this machine, where the command runs, may have none."""
    if gpus is None and launcher:
        raise ValueError(
            "--launcher starts several processes; pass --gpus too, the number of GPUs of a SLURM job."
        )
    gpus = 1 if gpus is None else gpus
    COUNT_OR_NONE.check("--gpus", gpus)
    return gpus


def _gpus_of_job_here(gpus: int | None, launcher: str, n_visible: int, *, is_flag: bool) -> int:
    """Return the GPUs of a job on this machine, where jobs use the CPU if there are none.

    Raises ValueError for more than there are; without any, only if a flag requests some.
    """
    if gpus is None:
        gpus = max(1, n_visible) if launcher else 1
    COUNT.check("--gpus", gpus)
    if gpus > n_visible and (n_visible or is_flag):
        raise ValueError(
            f"--gpus is {gpus}, and this machine has {n_visible} to use; pass at most {n_visible}, "
            "or leave it out."
        )
    return gpus
