"""Run a sweep's tasks: in this process, or as submitit jobs on this machine or on SLURM.

Imports nothing heavy: each submitit job loads a `Command` from here and starts a process.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from ...locking import is_locked

if TYPE_CHECKING:
    from submitit import AutoExecutor, Job
    from submitit.helpers import DelayedSubmission

    from .folder import Sweep
    from .tasks import Task

NO_LIMIT = 60 * 24 * 365
"""Minutes that a job on this machine may take; submitit's default is 5."""
REQUEUES = 1000
"""Times that SLURM may requeue a job which ran out of time; submitit gives up after 3."""
CPUS_OF_GPU = 4
"""Cores that a SLURM job asks for with each GPU: its process, two data workers, checkpoints."""
POLL = 0.2
"""Seconds between polls of running jobs."""
PATIENCE = 120.0
"""Seconds to wait for a process of a stopped sweep that is still saving a task."""
STOPPING = (signal.SIGTERM, signal.SIGINT)
SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Variable with the seconds that a launcher waits for processes it has asked to stop; torch's default is 30."""


@dataclass
class Here:
    """Worker in this process, which loads the teacher once. It is its own job, done as soon as
    it has started."""

    perform: Callable[[Sweep, Task], None]
    slots: int = 1
    state: str = "FINISHED"

    def described(self) -> str:
        return "one at a time, in this process"

    def start(self, sweep: Sweep, task: Task, slot: int) -> Here:
        self.perform(sweep, task)
        return self

    def done(self) -> bool:
        return True

    def starting(self) -> AbstractContextManager[None]:
        """Return a context that leaves Ctrl-C as it is: the task runs inside."""
        return nullcontext()

    def cancel(self, job: Here | Job[int], *, again: bool = False) -> None:
        """Do nothing: a task that runs here has ended when the sweep is asked to stop."""


@dataclass
class Jobs:
    """Submitit jobs, one process each.

    Jobs on this machine share its threads, and each has its own ``n_gpus`` GPUs. ``launcher``
    goes before ``-m``, by default this Python; ``accelerate launch ...`` gives a task several
    processes.
    """

    executor: AutoExecutor
    slots: int
    launcher: str = ""
    n_gpus: int = 1
    options: Mapping[str, str | int] = field(default_factory=dict)

    def described(self) -> str:
        """Describe the jobs in a line, and on this machine the GPUs of each."""
        where = f"{self.slots} at a time, jobs of {self.executor.cluster}"
        if self.executor.cluster != "local":
            pairs = [f"{name}={value}" for name, value in self.options.items()]
            return f"{where}, each {' '.join(pairs)}"
        shares = [share_of_machine(slot, self.slots, self.n_gpus) for slot in range(self.slots)]
        gpus = [share.get("CUDA_VISIBLE_DEVICES", "none") for share in shares]
        threads = shares[0]["OMP_NUM_THREADS"]
        return f"{where}; GPUs of each: {' | '.join(gpus)}; {threads} threads each"

    def start(self, sweep: Sweep, task: Task, slot: int) -> Job[int]:
        launcher = shlex.split(self.launcher) or [sys.executable]
        here: dict[str, str] = {}
        if self.executor.cluster == "local":
            here = share_of_machine(slot, self.slots, self.n_gpus)
            if self.launcher:
                launcher[0] = program_here(self.launcher)
        argv = [*launcher, "-m", "hybrid_distill.lab.sweep", str(sweep.out), task.name]
        try:
            return self.executor.submit(Command(argv, task.log_path, here))
        except Exception as error:  # submitit raises what the cluster's commands answer
            reason = " ".join(str(error).split())
            raise ValueError(
                f"{self.executor.cluster} did not accept the job {task.name}: {reason}. Pass other "
                "--options, --minutes or --gpus; the same command continues with what has run."
            ) from error

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Block SIGINT in this thread and, for good, in the processes that it starts.

        A terminal sends Ctrl-C to submitit's processes too, which would end before the jobs have saved. This process
        hears of it when the block ends, and then knows the job.
        """
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def cancel(self, job: Here | Job[int], *, again: bool = False) -> None:
        """Ask a job to save and end; ``again`` if it has been asked and has not ended.

        submitit ignores what comes while it loads a job, and a job that saves ignores a second request.
        """
        assert not isinstance(job, Here)
        if self.executor.cluster != "local":
            if not again:
                job.cancel()
        elif not job.done():
            # Not `job.cancel`: its SIGINT makes submitit's controller print a traceback and kill the job within a
            # second, and does nothing where SIGINT is ignored, as under `nohup`. SIGTERM it passes on, and waits.
            os.kill(int(job.job_id), signal.SIGTERM)


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


def program_here(launcher: str) -> str:
    """Find a launcher's program beside this Python or on the PATH. Raises ValueError if it is in neither."""
    program = shlex.split(launcher)[0]
    # An environment's programs are not on the PATH if only its Python was called.
    places = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    path = shutil.which(program, path=os.pathsep.join(places))
    if path is None:
        raise ValueError(
            f"--launcher is {launcher!r}, and there is no program {program!r} here; "
            "pass one that is installed, such as 'accelerate launch'."
        )
    return path


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


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, by the names that CUDA_VISIBLE_DEVICES takes."""
    import torch

    n_gpus = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        # Names may be UUIDs, and CUDA ignores those behind the first that it does not know.
        return visible.split(",")[:n_gpus]
    return [str(i) for i in range(n_gpus)]


def share_of_machine(slot: int, slots: int, n_gpus: int = 1) -> dict[str, str]:
    """Return the environment of one of several jobs: its threads and GPUs, which submitit hides.

    Jobs share GPUs only if together they need more than there are.
    """
    threads = max(1, _n_cores() // slots)
    if os.environ.get("OMP_NUM_THREADS"):
        threads = min(threads, int(os.environ["OMP_NUM_THREADS"]))
    share = {"OMP_NUM_THREADS": str(threads)}
    gpus = visible_gpus()
    if gpus:
        first = slot * n_gpus
        own = [gpus[i % len(gpus)] for i in range(first, first + n_gpus)]
        share["CUDA_VISIBLE_DEVICES"] = ",".join(own)
    return share


def _n_cores() -> int:
    # A container or taskset may allow fewer than the machine has; macOS cannot tell.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_tasks(sweep: Sweep, workers: Here | Jobs, report: Callable[[Task], None]) -> None:
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

    job: Here | Job[int]
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


def _stop(sweep: Sweep, workers: Here | Jobs, running: Mapping[str, Running]) -> None:
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
