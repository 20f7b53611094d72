"""Carry out the tasks of a sweep: in this process, in some beside it, or as jobs of a cluster."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...train.loop import Interrupted
from .cells import perform
from .record import Sweep, Task

POLL = 0.2
"""Seconds between looks at what runs elsewhere."""

log = logging.getLogger(__name__)


class Job(ABC):
    """A task that runs somewhere else."""

    @abstractmethod
    def ended(self) -> str | None:
        """How it ended, for a message; None while it runs."""

    @abstractmethod
    def stop(self) -> None:
        """Ask it to save and end."""


class Workers(ABC):
    """Where tasks run, ``slots`` of them at a time."""

    slots: int

    @abstractmethod
    def start(self, sweep: Sweep, task: Task, slot: int) -> Job:
        """Begin a task in a slot, which is free again when the job has ended."""


class Here(Workers):
    """In this process: the teacher is loaded once."""

    slots = 1

    def start(self, sweep: Sweep, task: Task, slot: int) -> Job:
        perform(sweep, task)
        return _Over()


class _Over(Job):
    def ended(self) -> str:
        return "ended"

    def stop(self) -> None: ...


@dataclass
class Processes(Workers):
    """Each task in a process of its own on this machine, with its share of the CPU's threads and, in turn, a GPU.

    ``launcher`` goes before ``-m``, by default this Python; ``accelerate launch --config_file ...`` gives each task
    several processes.
    """

    slots: int
    launcher: Sequence[str] = (sys.executable,)

    def start(self, sweep: Sweep, task: Task, slot: int) -> Job:
        with sweep.log_path(task).open("a") as output:
            process = subprocess.Popen(
                worker_command(self.launcher, sweep, task),
                env={**os.environ, **_share_of_machine(slot, self.slots)},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the sweep alone, which then asks each task to save
            )
        return _Process(process)


@dataclass
class _Process(Job):
    process: subprocess.Popen[bytes]

    def ended(self) -> str | None:
        status = self.process.poll()
        return None if status is None else f"ended with exit status {status}"

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)


class Cluster(Workers):
    """Each task a job of submitit, on ``slurm`` or, to try it out, on submitit's ``local`` executor.

    ``options`` are submitit's own: ``slurm_partition``, ``gpus_per_node``, ``timeout_min`` ... Raises ValueError for
    one that it does not know, where it is not installed, and where there is no such cluster.
    """

    def __init__(
        self, folder: Path, cluster: str, slots: int, launcher: Sequence[str], options: Mapping[str, Any]
    ) -> None:
        try:
            import submitit
        except ModuleNotFoundError as error:
            raise ValueError("--cluster needs submitit; run `pip install submitit`, or use --jobs.") from error
        self.slots, self.launcher = slots, launcher
        try:
            self.executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
            self.executor.update_parameters(**options)
        except Exception as error:  # submitit raises what its plugins raise
            reason = " ".join(str(error).split())
            raise ValueError(f"submitit cannot use --cluster {cluster} with these options: {reason}") from error

    def start(self, sweep: Sweep, task: Task, slot: int) -> Job:
        return _Submitted(self.executor.submit(Command(worker_command(self.launcher, sweep, task))))


@dataclass
class _Submitted(Job):
    job: Any

    def ended(self) -> str | None:
        return f"job {self.job.job_id} ended as {self.job.state}" if self.job.done() else None

    def stop(self) -> None:
        self.job.cancel()


@dataclass
class Command:
    """What a job of the cluster runs. A job that has run out of time, or was preempted, is queued again and goes on."""

    argv: Sequence[str]

    def __call__(self) -> int:
        process = subprocess.Popen(self.argv)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: process.send_signal(signal.SIGTERM))
        return process.wait()

    def checkpoint(self) -> Any:
        """Asked for by submitit before it queues the job again; the task goes on from its last checkpoint."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)


def worker_command(launcher: Sequence[str], sweep: Sweep, task: Task) -> list[str]:
    """``python -m hybrid_distill.lab.sweep OUT TASK``."""
    return [*launcher, "-m", "hybrid_distill.lab.sweep", str(sweep.out), task.name]


def split_launcher(text: str) -> list[str]:
    """A launcher as words; empty is this Python."""
    return shlex.split(text) or [sys.executable]


def _share_of_machine(slot: int, slots: int) -> dict[str, str]:
    """Environment of one of several processes: threads, and one GPU where there are several."""
    n_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = max(1, n_cpus // slots)
    share = {"OMP_NUM_THREADS": str(min(threads, int(os.environ.get("OMP_NUM_THREADS") or threads)))}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    return share | ({"CUDA_VISIBLE_DEVICES": gpus[slot % len(gpus)]} if len(gpus) > 1 else {})


def run_tasks(sweep: Sweep, workers: Workers, changed: Callable[[Task], None]) -> None:
    """Carry out every task that is not done; ``changed`` is called after each. A failed one is tried again.

    Raises Interrupted when asked to stop, after everything that runs has saved.
    """
    pending = {name: task for name, task in sweep.tasks.items() if sweep.outcome(task).state != "done"}
    for task in pending.values():
        sweep.note(task, replace(sweep.outcome(task), state="waiting", error=""))
    running: dict[str, tuple[Job, int]] = {}
    try:
        while pending or running:
            for task in _startable(sweep, pending, running, workers.slots):
                del pending[task.name]
                if failed := [name for name in task.after if sweep.outcome(sweep.tasks[name]).state == "failed"]:
                    cause = sweep.outcome(sweep.tasks[failed[0]]).error
                    sweep.note(task, replace(sweep.outcome(task), state="failed", error=cause))
                    changed(task)
                    continue
                slot = min(set(range(workers.slots)) - {taken for _, taken in running.values()})
                running[task.name] = (workers.start(sweep, task, slot), slot)
                break  # what ran in this process has changed what can be started
            else:
                time.sleep(POLL)
            for name in [name for name, (job, _) in running.items() if job.ended() is not None]:
                job, _ = running.pop(name)
                _check_outcome(sweep, sweep.tasks[name], job)
                changed(sweep.tasks[name])
    except KeyboardInterrupt:
        _stop(running)
        raise Interrupted("the sweep stopped and has saved what ran; the same command goes on from there.") from None


def _startable(sweep: Sweep, pending: Mapping[str, Task], running: Mapping[str, Any], slots: int) -> list[Task]:
    """Tasks that need nothing any more, or never will get what they need; none when no slot is free."""
    if len(running) >= slots:
        return []
    unfinished = {*pending, *running}
    return [task for task in pending.values() if not unfinished.intersection(task.after)]


def _check_outcome(sweep: Sweep, task: Task, job: Job) -> None:
    """A task that ended without a result has failed, also one that somebody else has stopped."""
    outcome = sweep.outcome(task)
    if outcome.state not in ("done", "failed"):
        error = f"it {job.ended()} without a result; see {sweep.log_path(task)}."
        sweep.note(task, replace(outcome, state="failed", error=error))


def _stop(running: Mapping[str, tuple[Job, int]]) -> None:
    for job, _ in running.values():
        job.stop()
    while any(job.ended() is None for job, _ in running.values()):
        time.sleep(POLL)
