"""Carry out the tasks of a sweep: in this process, or as jobs of submitit beside it or on a cluster."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ...locking import is_locked
from ...train.loop import Interrupted
from .cells import PATIENCE, perform
from .jobs import Command
from .record import Sweep, Task

if TYPE_CHECKING:
    from submitit import AutoExecutor, Job

POLL = 0.2
"""Seconds between looks at what runs elsewhere."""


@dataclass
class Here:
    """Run tasks in this process, which loads the teacher once. It is its own job, done when it has started."""

    slots: int = 1
    state: str = "FINISHED"

    def start(self, sweep: Sweep, task: Task, slot: int) -> Here:
        perform(sweep, task)
        return self

    def done(self) -> bool:
        return True

    def cancel(self) -> None: ...


@dataclass
class Jobs:
    """Run each task, ``slots`` at a time, in a job of its own; jobs on this machine share its threads and GPUs.

    ``launcher`` goes before ``-m``, by default this Python; ``accelerate launch --config_file ...`` gives each task
    several processes.
    """

    executor: AutoExecutor
    slots: int
    launcher: str = ""

    def start(self, sweep: Sweep, task: Task, slot: int) -> Job[int]:
        launcher = shlex.split(self.launcher) or [sys.executable]
        argv = [*launcher, "-m", "hybrid_distill.lab.sweep", str(sweep.out), task.name]
        here = _share_of_machine(slot, self.slots) if self.executor.cluster == "local" else {}
        return self.executor.submit(Command(argv, sweep.log_path(task), here))


def _share_of_machine(slot: int, slots: int) -> dict[str, str]:
    """Return the environment of one of several jobs: its threads and its GPUs, which submitit would hide."""
    n_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = max(1, n_cpus // slots)
    share = {"OMP_NUM_THREADS": str(min(threads, int(os.environ.get("OMP_NUM_THREADS") or threads)))}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    if gpus:
        share["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[slot::slots]) or gpus[slot % len(gpus)]
    return share


def run_tasks(sweep: Sweep, workers: Here | Jobs, changed: Callable[[Task], None]) -> None:
    """Carry out every task that is not done, failed ones too; call ``changed`` after each.

    Raises Interrupted when asked to stop, after everything that runs has saved.
    """
    pending = {name: task for name, task in sweep.tasks.items() if sweep.outcome(task).state != "done"}
    running: dict[str, tuple[Here | Job[int], int]] = {}
    for task in pending.values():
        sweep.forget(task)
    try:
        while pending or running:
            ended = [sweep.tasks[name] for name, (job, _) in running.items() if job.done()]
            for task in ended:
                job, _ = running.pop(task.name)
                if sweep.outcome(task).state not in ("done", "failed"):  # also where somebody else has stopped it
                    sweep.end(task, f"its job ended ({job.state}) without a result; see {sweep.log_path(task)}.")
                changed(task)
            task = next((task for task in pending.values() if not {*pending, *running}.intersection(task.after)), None)
            if task is None or len(running) == workers.slots:
                time.sleep(0 if ended else POLL)
                continue
            del pending[task.name]
            before = [sweep.outcome(sweep.tasks[name]) for name in task.after]
            if errors := [outcome.error for outcome in before if outcome.state == "failed"]:
                sweep.end(task, errors[0])
                changed(task)
                continue
            slot = min(set(range(workers.slots)) - {taken for _, taken in running.values()})
            running[task.name] = (workers.start(sweep, task, slot), slot)
    except KeyboardInterrupt:
        for job, _ in running.values():
            job.cancel()
        limit = time.monotonic() + PATIENCE  # a job of submitit ends before the process that it started
        while any(not job.done() or is_locked(sweep.folder(sweep.tasks[name])) for name, (job, _) in running.items()):
            if time.monotonic() > limit:
                break
            time.sleep(POLL)
        raise Interrupted("the sweep stopped and has saved what ran; the same command continues it.") from None
