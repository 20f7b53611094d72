"""Run a sweep's tasks in an order in which each finds the results it needs, as many at a time as workers have slots."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from ...locking import is_locked
from .submission import PATIENCE
from .workers import SubmittedJobs, ThisProcess

if TYPE_CHECKING:
    from submitit import Job

    from .folder import Sweep
    from .tasks import Task

POLL = 0.2
"""Seconds between polls of running jobs."""


def run_tasks(
    sweep: Sweep, workers: ThisProcess | SubmittedJobs, report: Callable[[Task], None]
) -> None:
    """Run every task that is not done, including failed ones; call ``report`` after each.

    Raises KeyboardInterrupt when asked to stop, after running tasks have saved (at most
    ``PATIENCE`` seconds later).
    """
    pending = {name: task for name, task in sweep.tasks.items() if task.outcome().state != "done"}
    for task in pending.values():
        # Failed tasks run again: an old outcome must not be taken for the new one.
        task.outcome_path.unlink(missing_ok=True)
    running: dict[str, Running] = {}
    try:
        while pending or running:
            ended = _collect(sweep, running)
            for task in ended:
                report(task)
            task = _next_task(pending, running)
            if task is None or len(running) == workers.slots:
                # A task that has just ended may have freed another.
                time.sleep(0 if ended else POLL)
                continue
            del pending[task.name]
            error = _error_of_needed(sweep, task)
            if error:
                task.end(error)
                report(task)
                continue
            taken_slots = {each.slot for each in running.values()}
            # A free slot: two running jobs must not get the same GPUs.
            slot = min(set(range(workers.slots)) - taken_slots)
            with workers.starting():
                running[task.name] = Running(workers.start(sweep, task, slot), slot)
    except KeyboardInterrupt:
        _stop(sweep, workers, running)
        raise


class Running(NamedTuple):
    """Job of a task that has started, and its slot: its share of the machine."""

    job: ThisProcess | Job[int]
    slot: int


def _collect(sweep: Sweep, running: dict[str, Running]) -> list[Task]:
    """Remove the tasks whose jobs have ended, and return them; each has an outcome."""
    ended = [sweep.tasks[name] for name, each in running.items() if each.job.done()]
    for task in ended:
        job = running.pop(task.name).job
        # Such as a job that somebody else has canceled, or the machine has killed.
        if task.outcome().state not in ("done", "failed"):
            task.end(f"its job ended ({job.state}) without a result; see {task.log_path}.")
    return ended


def _next_task(pending: Mapping[str, Task], running: Mapping[str, Running]) -> Task | None:
    """Return the first task whose predecessors are done."""
    unfinished = {*pending, *running}
    for task in pending.values():
        if unfinished.isdisjoint(task.after):
            return task
    return None


def _error_of_needed(sweep: Sweep, task: Task) -> str:
    """Return the error of a task that this one needs; empty if all are done."""
    for name in task.after:
        error = sweep.tasks[name].outcome().error
        if error:
            return error
    return ""


def _stop(
    sweep: Sweep, workers: ThisProcess | SubmittedJobs, running: Mapping[str, Running]
) -> None:
    """Cancel running jobs, and wait until they have saved."""
    for each in running.values():
        workers.cancel(each.job)
    limit = time.monotonic() + PATIENCE
    while time.monotonic() < limit and any(_is_saving(sweep, *item) for item in running.items()):
        time.sleep(POLL)
        for each in running.values():
            workers.cancel(each.job, again=True)


def _is_saving(sweep: Sweep, name: str, running: Running) -> bool:
    # A submitit job ends before the process that it started, which holds the lock.
    return not running.job.done() or is_locked(sweep.tasks[name].folder)
