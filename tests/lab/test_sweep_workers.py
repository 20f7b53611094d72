"""Where a sweep's cells run: the commands as documented, the jobs that they ask for, and the GPUs of each job."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from training import small_run

from hybrid_distill.cli.app import main
from hybrid_distill.lab.sweep import schedule
from hybrid_distill.lab.sweep.flags import SweepJob
from hybrid_distill.lab.sweep.folder import Definition, Sweep
from hybrid_distill.lab.sweep.grid import Grid
from hybrid_distill.lab.sweep.job import _defaults, dry_run, run_sweep
from hybrid_distill.lab.sweep.machine import share_of_machine
from hybrid_distill.lab.sweep.schedule import run_tasks
from hybrid_distill.lab.sweep.submission import PATIENCE, Command, executor, job_options
from hybrid_distill.lab.sweep.tasks import Task
from hybrid_distill.lab.sweep.worker_options import JOB_DEFAULTS, WorkerOptions
from hybrid_distill.lab.sweep.workers import JobSubmitter, SubmittedJob
from hybrid_distill.plan import HeadPlan

pytest.importorskip("submitit", reason="submitit is not installed")

ROOT = Path(__file__).parents[2]
PAGES = ["docs/sweeps.md", "docs/how_to.md", "recipes/sweep_llama_1b.py", "recipes/sweep_tiny.py"]
HEADS = "0,2"
SHAPE = HeadPlan(6, 8, 4, ())


def documented(page: str) -> list[str]:
    """The commands of a page that start a sweep, as they stand there."""
    continued_line = "\\\n"
    text = (ROOT / page).read_text().replace(continued_line, " ")
    commands = re.findall(r"^(?:`|)hybrid-distill sweep ([^`\n#]*)", text, re.MULTILINE)
    # A table of flags alone, in the first column.
    _, _, where_it_runs = text.partition("## Where it runs")
    for flags in re.findall(r"^\| `(--[^|]*)` \|[^|\n]*\|$", where_it_runs, re.MULTILINE):
        commands.append(f"tiny {flags}")
    return [command.strip() for command in commands]


COMMANDS: list[tuple[str, str]] = []
for _page in PAGES:
    COMMANDS += [(_page, command) for command in documented(_page)]


def recipe(**functions: Any) -> Any:
    return SimpleNamespace(config=small_run, __file__="recipe.py", **functions)


@pytest.fixture
def n_gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``n_gpus(8)``: torch sees so many from now on."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return lambda n: monkeypatch.setattr(torch.cuda, "device_count", lambda: n)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """SLURM's commands as submitit calls them; the submitted files go to this folder."""
    commands = tmp_path / "bin"
    submitted = tmp_path / "submitted"
    commands.mkdir()
    submitted.mkdir()
    bodies = {
        "srun": "",
        "sbatch": f'cp "$1" {submitted}/file\necho "Submitted batch job 4711"\n',
    }
    for name, body in bodies.items():
        (commands / name).write_text(f"#!/bin/sh\n{body}")
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:/usr/bin:/bin")
    return submitted


def test_pages_have_commands() -> None:
    assert {page for page, _ in COMMANDS} == set(PAGES)
    assert len(COMMANDS) >= 7
    assert any("--cluster slurm" in command for _, command in COMMANDS)


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_documented_commands_start(
    page: str,
    command: str,
    tmp_path: Path,
    cluster: Path,
    n_gpus: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A dry run of each, where no clone is: the recipes of a wheel are found by name."""
    n_gpus(8)
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)
    if words[0] == "recipe.py":  # the reader's own
        (tmp_path / "recipe.py").write_text((ROOT / "recipes/hybrid_tiny.py").read_text())
    if "llama" in words[0]:
        words += ["--set", "teacher=tiny"]

    main(["sweep", *words, "--dry-run"])

    assert re.search(r"\d+ cells", capsys.readouterr().out)
    assert not (tmp_path / "runs").exists(), "a dry run writes nothing"


def filled(job: SweepJob, **functions: Any) -> WorkerOptions:
    """Fill in what neither the flags nor the recipe say."""
    of_recipe = _defaults(recipe(**functions), "jobs", JOB_DEFAULTS)
    return WorkerOptions.chosen(job, of_recipe)


def gpus_of(slots: int, n_gpus: int) -> list[str]:
    """Return the GPUs that each of so many jobs sees."""
    visible: list[str] = []
    for slot in range(slots):
        environment = share_of_machine(slot, slots, n_gpus)
        visible.append(environment["CUDA_VISIBLE_DEVICES"])
    return visible


def test_one_job_for_each_gpu_by_default(n_gpus: Any) -> None:
    n_gpus(8)
    job = filled(SweepJob())
    assert job.jobs == 8
    assert job.gpus == 1
    assert job.minutes == 24 * 60
    assert gpus_of(8, n_gpus=1) == list("01234567")
    assert filled(SweepJob(jobs=3)).jobs == 3
    assert gpus_of(16, n_gpus=1)[9] == "1", "more jobs than GPUs share them"


def test_a_launcher_gets_all_gpus_by_default(n_gpus: Any) -> None:
    n_gpus(8)
    job = filled(SweepJob(launcher="accelerate launch"))
    assert job.jobs == 1
    assert job.gpus == 8

    job = filled(SweepJob(launcher="accelerate launch", gpus=2))
    assert job.jobs == 4
    assert job.gpus == 2
    assert gpus_of(4, n_gpus=2) == ["0,1", "2,3", "4,5", "6,7"]


def test_jobs_on_a_cpu_share_its_threads(n_gpus: Any) -> None:
    n_gpus(0)
    job = filled(SweepJob())
    assert job.jobs == 1
    assert job.gpus == 1
    assert "CUDA_VISIBLE_DEVICES" not in share_of_machine(0, 1, 1)
    # Of any machine, 64 jobs leave one thread to each.
    assert share_of_machine(0, 64)["OMP_NUM_THREADS"] == "1"


def test_only_visible_gpus_are_given_out(n_gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    n_gpus(2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    assert filled(SweepJob()).jobs == 2
    assert gpus_of(2, n_gpus=1) == ["GPU-a", "GPU-b"]
    # CUDA stops at the first that does not exist.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,2,-1,7")
    assert gpus_of(2, n_gpus=1) == ["5", "2"]


def test_an_account_that_begins_with_zero_is_not_a_number(n_gpus: Any) -> None:
    n_gpus(0)
    options = ("slurm_account=0123", "mem_gb=128")
    job = filled(SweepJob(cluster="slurm", jobs=1, options=options))
    assert job.options == {"slurm_account": "0123", "mem_gb": 128}


def test_flags_come_before_the_recipe_and_the_recipe_before_defaults(n_gpus: Any) -> None:
    n_gpus(8)
    of_recipe = {"gpus": 4, "minutes": 90, "launcher": "accelerate launch"}
    job = filled(SweepJob(), jobs=lambda: of_recipe)
    assert job.gpus == 4
    assert job.minutes == 90
    assert job.launcher == "accelerate launch"
    assert job.jobs == 2

    assert filled(SweepJob(launcher="", gpus=1), jobs=lambda: of_recipe).launcher == ""

    job = filled(SweepJob(gpus=2, minutes=30), jobs=lambda: of_recipe)
    assert job.gpus == 2
    assert job.minutes == 30
    assert job.jobs == 4

    with pytest.raises(ValueError, match="timeout"):
        filled(SweepJob(), jobs=lambda: {"timeout": 5})


@pytest.mark.parametrize(
    ("job", "gpus", "value"),
    [
        (SweepJob(gpus=4), 8, "4"),
        (SweepJob(gpus=9, launcher="x"), 8, "9"),
        (SweepJob(gpus=2, launcher="x"), 0, "2"),
        (SweepJob(gpus=-1), 8, "-1"),
        (SweepJob(minutes=0), 8, "0"),
        (SweepJob(cluster="slurm"), 8, "--jobs"),
        (SweepJob(cluster="slurm", jobs=2, launcher="x"), 8, "--gpus"),
    ],
    ids=[
        "several GPUs without a launcher",
        "more GPUs than there are",
        "GPUs on a CPU",
        "negative GPUs",
        "no time",
        "a cluster without --jobs",
        "a cluster without --gpus",
    ],
)
def test_jobs_that_cannot_be_are_refused(job: SweepJob, gpus: int, value: str, n_gpus: Any) -> None:
    n_gpus(gpus)
    with pytest.raises(ValueError, match=value):
        filled(job)


def opened(out: Path) -> Sweep:
    asked = Grid.parse(heads=HEADS, d_state="4,8", selection="random", seeds=1)
    return Sweep.open(Definition(small_run(out), asked, asked.cells(SHAPE), share=True))


def test_a_slurm_job_asks_for_its_gpu_and_its_time(tmp_path: Path, cluster: Path) -> None:
    """The file that submitit submits: without our defaults it asks for 5 minutes and no GPU."""
    this = opened(tmp_path / "sweep")
    options = {**job_options("slurm", 2, 90), "slurm_partition": "gpu"}
    workers = JobSubmitter(executor(tmp_path / "jobs", "slurm", options), 4, n_gpus=2)

    started = workers.start(this, this.tasks["s0"], 0)

    assert started.job.job_id == "4711"
    # submitit requeues a job three times by default.
    assert workers.executor._executor.max_num_timeout > 100
    asked = (cluster / "file").read_text()
    for line in ("--time=90", "--gpus-per-node=2", "--cpus-per-task=8", "--partition=gpu"):
        assert f"#SBATCH {line}\n" in asked
    assert "--gpus-per-node" not in str(job_options("slurm", 0, 5))
    [warning] = re.findall(r"^#SBATCH --signal=USR2@(\d+)$", asked, re.MULTILINE)
    assert int(warning) > PATIENCE, "it must have saved before SLURM kills it"


def test_a_cluster_that_refuses_a_job_is_quoted(tmp_path: Path, cluster: Path) -> None:
    sbatch = cluster.parent / "bin" / "sbatch"
    sbatch.write_text("#!/bin/sh\necho 'invalid partition nowhere' >&2; exit 1\n")
    this = opened(tmp_path / "sweep")
    workers = JobSubmitter(executor(tmp_path / "jobs", "slurm", job_options("slurm", 1, 90)), 4)
    with pytest.raises(ValueError, match="invalid partition nowhere"):
        workers.start(this, this.tasks["s0"], 0)


WORK = """
import os, pathlib, signal, sys, time

def save(*_):
    time.sleep(0.5)
    saved.touch()
    sys.exit()

signal.signal(signal.SIGTERM, save)
saved, started, resumed = map(pathlib.Path, sys.argv[1:])
if saved.exists():
    resumed.touch()
    sys.exit()
started.with_suffix(".part").write_text(str(os.getppid()))
started.with_suffix(".part").rename(started)
time.sleep(600)
"""


class Work(NamedTuple):
    """Job on this machine whose process saves when it is asked to end, and finds that when it starts again."""

    job: Any
    saved: Path
    started: Path
    """File with the process of submitit that runs the command."""
    resumed: Path

    @classmethod
    def submitted(cls, folder: Path) -> Work:
        """Submit the job, and wait until it works."""
        files = [folder / name for name in ("saved", "started", "resumed")]
        command = Command([sys.executable, "-c", WORK, *map(str, files)], folder / "log")
        here = executor(folder / "jobs", "local", job_options("local", 0, 5))
        work = cls(here.submit(command), *files)
        wait_until(work.started.exists)
        return work


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.05)


def test_a_job_out_of_time_has_saved_when_it_is_requeued(tmp_path: Path) -> None:
    """submitit's own handler, as SLURM's warning starts it, and its own requeueing."""
    work = Work.submitted(tmp_path)

    os.kill(int(work.started.read_text()), signal.SIGUSR2)

    wait_until(work.job.done)
    assert work.saved.exists()
    assert work.resumed.exists()
    assert work.job.result() is False, "nothing stopped it the second time"


@pytest.mark.parametrize("cluster", ["slurm", "local"])
def test_a_job_that_its_cluster_ended_was_preempted(cluster: str, tmp_path: Path) -> None:
    """On this machine, only its user ends a job."""
    work = Work.submitted(tmp_path)
    job = SubmittedJob(work.job, cluster)
    assert not job.was_preempted(), "it works"

    os.kill(int(work.started.read_text()), signal.SIGTERM)

    wait_until(job.done)
    assert work.saved.exists()
    assert job.was_preempted() == (cluster == "slurm")


class Fake:
    """submitit's executor, whose jobs end after a few looks with a result."""

    cluster = "local"

    def __init__(self, sweep: Sweep) -> None:
        self.sweep = sweep
        self.busy: list[str] = []
        self.seen: set[str] = set()
        self.at_once = 0

    def submit(self, command: Command) -> Any:
        gpu = command.environment["CUDA_VISIBLE_DEVICES"]
        assert gpu not in self.busy, "two jobs at once on a GPU"
        assert command.argv[0] == sys.executable
        self.busy.append(gpu)
        self.seen.add(gpu)
        self.at_once = max(self.at_once, len(self.busy))
        looks = iter(range(3))

        def done() -> bool:
            if next(looks, None) is not None:
                return False
            end(self.sweep.tasks[command.argv[-1]])
            self.busy.remove(gpu)
            return True

        return SimpleNamespace(done=done, state="FINISHED", cancel=lambda: None)


def end(task: Task) -> None:
    task.end()
    for path in task.outputs:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_every_running_job_has_a_gpu_of_its_own(
    tmp_path: Path, n_gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_gpus(3)
    monkeypatch.setattr(schedule, "POLL", 0.0)
    this = opened(tmp_path)
    fake: Any = Fake(this)

    run_tasks(this, JobSubmitter(fake, 3), lambda task: None)

    assert fake.seen == {"0", "1", "2"}
    assert fake.at_once == 3
    assert {task.outcome().state for task in this.tasks.values()} == {"done"}


def test_a_dry_run_asks_what_the_sweep_asks(tmp_path: Path, n_gpus: Any) -> None:
    n_gpus(4)
    job = SweepJob(
        out=tmp_path / "out",
        heads=HEADS,
        d_state="4",
        seeds=1,
        selection="random",
        jobs=2,
    )
    assert "0 | 1" in dry_run(job, recipe()), "a GPU for each job"

    wrong = replace(job, options=("slurm_partition=gpu",))
    for action in (dry_run, run_sweep):
        with pytest.raises(ValueError, match="--cluster"):
            action(wrong, recipe())
    assert not (tmp_path / "out").exists()
