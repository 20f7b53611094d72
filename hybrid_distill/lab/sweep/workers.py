"""Workers, which start tasks: in this process, or as submitit jobs."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from .machine import program_here, share_of_machine
from .submission import Command

if TYPE_CHECKING:
    from submitit import AutoExecutor, Job

    from .folder import Sweep
    from .tasks import Task


class StartedJob(Protocol):
    """Job that runs a task, or has run it."""

    @property
    def state(self) -> str: ...

    def done(self) -> bool: ...

    def cancel(self, *, again: bool = False) -> None:
        """Ask it to save and end; ``again`` if it has been asked and has not ended."""

    def was_preempted(self) -> bool:
        """Check whether it has ended because the cluster asked it to save and end."""
        ...


class FinishedJob:
    """Job that this process ran to its end before `ThisProcess.start` returned."""

    state = "FINISHED"

    def done(self) -> bool:
        return True

    def cancel(self, *, again: bool = False) -> None:
        # It has ended.
        pass

    def was_preempted(self) -> bool:
        return False


@dataclass
class SubmittedJob:
    """Job of submitit, and the cluster that runs it."""

    job: Job[bool]
    cluster: str

    @property
    def state(self) -> str:
        return self.job.state

    def done(self) -> bool:
        return self.job.done()

    def cancel(self, *, again: bool = False) -> None:
        """Ask it to save and end; ``again`` if it has been asked and has not ended.

        submitit ignores what comes while it loads a job, and a job that saves ignores a second request.
        """
        if self.cluster != "local":
            if not again:
                # SLURM refuses to cancel a job that has just ended; the next one must be canceled all the same.
                self.job.cancel(check=False)
        elif not self.job.done():
            # Not `job.cancel`: its SIGINT makes submitit's controller print a traceback and kill the job within a
            # second, and does nothing where SIGINT is ignored, as under `nohup`. SIGTERM it passes on, and waits.
            os.kill(int(self.job.job_id), signal.SIGTERM)

    def was_preempted(self) -> bool:
        if self.cluster == "local":
            return False
        # submitit would wait for the result of a job that was killed.
        has_result = self.job.paths.result_pickle.exists()
        return has_result and self.job.exception() is None and self.job.result()


@dataclass
class ThisProcess:
    """Worker that runs one task after the other, and loads the teacher once."""

    perform: Callable[[Sweep, Task], None]
    slots: int = 1

    def described(self) -> str:
        return "one at a time, in this process"

    def start(self, sweep: Sweep, task: Task, slot: int) -> FinishedJob:
        self.perform(sweep, task)
        return FinishedJob()

    def starting(self) -> AbstractContextManager[None]:
        """Return a context that leaves Ctrl-C as it is: the task runs inside."""
        return nullcontext()


@dataclass
class JobSubmitter:
    """Worker that submits each task as a job of submitit, with one process.

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

    def start(self, sweep: Sweep, task: Task, slot: int) -> SubmittedJob:
        launcher = shlex.split(self.launcher) or [sys.executable]
        here: dict[str, str] = {}
        if self.executor.cluster == "local":
            here = share_of_machine(slot, self.slots, self.n_gpus)
            if self.launcher:
                launcher[0] = program_here(self.launcher)
        argv = [*launcher, "-m", "hybrid_distill.lab.sweep", str(sweep.out), task.name]
        try:
            job = self.executor.submit(Command(argv, task.log_path, here))
        except Exception as error:  # submitit raises what the cluster's commands answer
            reason = " ".join(str(error).split())
            raise ValueError(
                f"{self.executor.cluster} did not accept the job {task.name}: {reason}. Pass other "
                "--options, --minutes or --gpus; the same command continues with what has run."
            ) from error
        return SubmittedJob(job, self.executor.cluster)

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
