"""Run a sweep's tasks in an order in which each finds the results it needs, as many at a time as workers have slots."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...distributed.shared_folder import SEEN_WITHIN_S
from ...locking import is_locked
from .submission import PATIENCE, REQUEUES
from .workers import JobSubmitter, StartedJob, ThisProcess

if TYPE_CHECKING:
    from .folder import Sweep
    from .tasks import Task

POLL = 0.2
"""Seconds between polls of running jobs."""
log = logging.getLogger(__name__)


def run_tasks(
    sweep: Sweep, workers: ThisProcess | JobSubmitter, report: Callable[[Task], None]
) -> None:
    """Run every task that is not done, including failed ones; call ``report`` after each.

    Tasks that jobs of a killed command still work on are waited for, and their outcomes taken.
    Raises KeyboardInterrupt when asked to stop, after running tasks have saved (at most
    ``PATIENCE`` seconds later).
    """
    pending = {name: task for name, task in sweep.tasks.items() if task.outcome().state != "done"}
    for task in pending.values():
        # Failed tasks run again: an old outcome must not be taken for the new one.
        task.outcome_path.unlink(missing_ok=True)
        if is_locked(task.folder):
            log.info("%s: waiting for the job of an earlier command", task.name)
    running: dict[str, Running] = {}
    preemptions: Counter[str] = Counter()
    try:
        while pending or running:
            ended = _collect(sweep, running)
            for task, job in ended:
                if not _has_outcome(task):
                    _end_or_repeat(task, job, pending, preemptions)
                report(task)
            task = _next_task(pending, running, workers.slots)
            if task is not None:
                del pending[task.name]
                _start_or_fail(sweep, task, workers, running)
                if task.name not in running:
                    report(task)
            elif not ended:
                time.sleep(POLL)
    except KeyboardInterrupt:
        _stop(sweep, running)
        raise


@dataclass
class Running:
    """Job of a task that has started."""

    job: StartedJob
    slot: int
    """Its share of the machine."""
    ended_at: float | None = None
    """Time at which its job was first seen to have ended."""

    def has_ended(self, task: Task) -> bool:
        """Check whether its job has ended, and the task's outcome is seen or will not come."""
        if self.ended_at is None:
            if not self.job.done():
                return False
            self.ended_at = time.monotonic()
        # An NFS may show an outcome late, and a failure that is recorded here would replace it.
        return _has_outcome(task) or time.monotonic() - self.ended_at >= SEEN_WITHIN_S


def _collect(sweep: Sweep, running: dict[str, Running]) -> list[tuple[Task, StartedJob]]:
    """Remove the tasks whose jobs have ended, and return both."""
    ended = []
    for name, each in list(running.items()):
        task = sweep.tasks[name]
        if each.has_ended(task):
            del running[name]
            ended.append((task, each.job))
    return ended


def _has_outcome(task: Task) -> bool:
    return task.outcome().state in ("done", "failed")


def _end_or_repeat(
    task: Task, job: StartedJob, pending: dict[str, Task], preemptions: Counter[str]
) -> None:
    """Make a preempted task pending again, as its state is saved; mark any other without an outcome as failed."""
    if preemptions[task.name] < REQUEUES and job.was_preempted():
        preemptions[task.name] += 1
        # SLURM may requeue the job itself; two jobs must not work on one task.
        job.cancel()
        pending[task.name] = task
    else:
        # Such as a job that the machine has killed.
        task.end(f"its job ended ({job.state}) without a result; see {task.log_path}.")


def _next_task(
    pending: Mapping[str, Task], running: Mapping[str, Running], n_slots: int
) -> Task | None:
    """Return the first task whose predecessors have ended, and that no job of an earlier command works on; None
    without one, and while all slots are taken."""
    if len(running) == n_slots:
        return None
    unfinished = {*pending, *running}
    for task in pending.values():
        if unfinished.isdisjoint(task.after) and not is_locked(task.folder):
            return task
    return None


def _start_or_fail(
    sweep: Sweep,
    task: Task,
    workers: ThisProcess | JobSubmitter,
    running: dict[str, Running],
) -> None:
    """Start a task that has no outcome in a free slot; fail it if one that it needs has failed."""
    if _has_outcome(task):
        # From a job of an earlier command.
        return
    error = _error_of_needed(sweep, task)
    if error:
        task.end(error)
        return
    slot = _free_slot(running, workers.slots)
    with workers.starting():
        running[task.name] = Running(workers.start(sweep, task, slot), slot)


def _free_slot(running: Mapping[str, Running], n_slots: int) -> int:
    # Two running jobs must not get the same GPUs.
    taken = {each.slot for each in running.values()}
    return min(set(range(n_slots)) - taken)


def _error_of_needed(sweep: Sweep, task: Task) -> str:
    """Return the error of a task that this one needs; empty if all are done."""
    for name in task.after:
        error = sweep.tasks[name].outcome().error
        if error:
            return error
    return ""


def _stop(sweep: Sweep, running: Mapping[str, Running]) -> None:
    """Cancel running jobs, and wait until they have saved."""
    for each in running.values():
        each.job.cancel()
    limit = time.monotonic() + PATIENCE
    while time.monotonic() < limit and any(_is_saving(sweep, *item) for item in running.items()):
        time.sleep(POLL)
        for each in running.values():
            each.job.cancel(again=True)


def _is_saving(sweep: Sweep, name: str, running: Running) -> bool:
    # A submitit job ends before the process that it started, which holds the lock.
    return not running.job.done() or is_locked(sweep.tasks[name].folder)
