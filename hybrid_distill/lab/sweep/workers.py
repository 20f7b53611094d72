"""Workers, which start tasks: in this process, or as submitit jobs."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .machine import program_here, share_of_machine
from .submission import Command

if TYPE_CHECKING:
    from submitit import AutoExecutor, Job

    from .folder import Sweep
    from .tasks import Task


@dataclass
class ThisProcess:
    """Worker that loads the teacher once. It is its own job, done as soon as it has started."""

    perform: Callable[[Sweep, Task], None]
    slots: int = 1
    state: str = "FINISHED"

    def described(self) -> str:
        return "one at a time, in this process"

    def start(self, sweep: Sweep, task: Task, slot: int) -> ThisProcess:
        self.perform(sweep, task)
        return self

    def done(self) -> bool:
        return True

    def starting(self) -> AbstractContextManager[None]:
        """Return a context that leaves Ctrl-C as it is: the task runs inside."""
        return nullcontext()

    def cancel(self, job: ThisProcess | Job[bool], *, again: bool = False) -> None:
        """Do nothing: a task that runs here has ended when the sweep is asked to stop."""

    def was_preempted(self, job: ThisProcess | Job[bool]) -> bool:
        """Return False: nobody else gives out this process's time."""
        return False


@dataclass
class SubmittedJobs:
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

    def start(self, sweep: Sweep, task: Task, slot: int) -> Job[bool]:
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
        """Block SIGINT and SIGHUP in this thread and, for good, in the processes that it starts.

        A terminal sends Ctrl-C and its hangup to submitit's processes too, which would end before the jobs have saved.
        This process hears of them when the block ends, and then knows the job.
        """
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def cancel(self, job: ThisProcess | Job[bool], *, again: bool = False) -> None:
        """Ask a job to save and end; ``again`` if it has been asked and has not ended.

        submitit ignores what comes while it loads a job, and a job that saves ignores a second request.
        """
        assert not isinstance(job, ThisProcess)
        if self.executor.cluster != "local":
            if not again:
                # SLURM refuses to cancel a job that has just ended; the next one must be canceled all the same.
                job.cancel(check=False)
        elif not job.done():
            # Not `job.cancel`: its SIGINT makes submitit's controller print a traceback and kill the job within a
            # second, and does nothing where SIGINT is ignored, as under `nohup`. SIGTERM it passes on, and waits.
            os.kill(int(job.job_id), signal.SIGTERM)

    def was_preempted(self, job: ThisProcess | Job[bool]) -> bool:
        """Check whether the cluster asked a job, which has ended, to save and end."""
        assert not isinstance(job, ThisProcess)
        if self.executor.cluster == "local":
            return False
        # submitit would wait for the result of a job that was killed.
        has_result = job.paths.result_pickle.exists()
        return has_result and job.exception() is None and job.result()
