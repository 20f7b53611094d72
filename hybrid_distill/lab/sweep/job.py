"""`hybrid-distill sweep`: from flags and a recipe to a finished folder."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Literal

import tyro

from ...config import PlanConfig, RunConfig, ask_recipe, config_of, current_flags
from ...data import PINS, write_pins
from ...distributed import check_trackers
from ...limits import COUNT
from ...locking import locked
from ...pipeline import Run
from ...pipeline.inputs import shape_of_teacher
from ...plan import HeadPlan
from ...train.loop import Interrupted
from .cells import perform
from .folder import Sweep, Task
from .grid import Grid
from .jobs import Here, Jobs, executor, run_tasks
from .results import progress, status, write_results

AXES = {"heads": "0,2,4,8,all", "d_state": "4,8,16,64", "seeds": 3, "selection": "top,random"}
"""Default grid, where neither the command nor the recipe sets an axis."""


class SweepFailed(Exception):
    """Failure of some or all cells."""


@dataclass(frozen=True)
class SweepJob:
    """Students to make, how, and where; the same command resumes a stopped sweep."""

    recipe: Path = Path("recipes/hybrid_tiny.py")
    """Recipe of all cells; the grid replaces its plan, state size and seed. Its grid(), if any, sets the defaults."""
    heads: str | None = None
    """Numbers of heads to keep, over all layers: ``0,2,4,8,all``."""
    d_state: str | None = None
    """State sizes of the recurrent heads: ``4,8,16,64``."""
    seeds: int | None = None
    """Number of seeds, counted up from the recipe's."""
    selection: str | None = None
    """``top`` (scores), ``random``, ``layers`` (the best whole layers, by their heads' scores), ``restoration``."""
    set: tuple[str, ...] = ()
    """Fields of the recipe to change: ``distill.steps=100 export=False evaluation.n-pairs=4,8``."""
    out: Path = Path("runs/sweep")
    jobs: int = 1
    """Cells to run in parallel. 1 runs in this process; more are submitit jobs that share threads and GPUs."""
    cluster: Literal["slurm", "local"] | None = None
    """Where jobs run (submitit); by default on this machine (``local``)."""
    options: tuple[str, ...] = ()
    """Options of the jobs, as submitit names them: ``slurm_partition=gpu gpus_per_node=8 timeout_min=1440``."""
    launcher: str = ""
    """Command that starts a cell's processes, for example ``accelerate launch --config_file launch/ddp.yaml``."""
    share: bool = True
    """Share one head-by-head alignment between all cells of a state size and seed; otherwise each cell aligns as in the
    recipe."""
    trackers: tuple[str, ...] = ()
    """``tensorboard``, ``trackio``, ``wandb``: one run per cell, grouped by sweep. By default the
    recipe's."""


def sweep(job: SweepJob, recipe: ModuleType) -> Sweep:
    """Run a job's sweep, or resume it, and print its state.

    ``recipe`` is the module of ``job.recipe``. Raises ValueError for an invalid request, before anything runs;
    SweepFailed at the end, if cells have failed; Interrupted if stopped.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError("a sweep starts the processes of its cells itself; pass --launcher 'accelerate launch ...'.")
    base = base_config(job, recipe)
    check_trackers(base.trackers)
    of_recipe = ask_recipe(recipe, "grid") if hasattr(recipe, "grid") else {}
    asked = {name: value for name in AXES if (value := getattr(job, name)) is not None}
    grid = Grid.parse(**{**AXES, **of_recipe, **asked}, first_seed=base.seed)
    run = Run(base)
    run.check_teachers()
    run.check_data()
    run.check_evaluation()
    run.check_student(PlanConfig("none", k=0))
    cells, workers = grid.cells(HeadPlan.none(shape_of_teacher(base.teacher))), _workers(job)
    command = " ".join(["--recipe", str(job.recipe), *(["--set", *job.set] if job.set else [])])
    with locked(job.out):
        this = Sweep.open(base, grid, cells, share=job.share, command=command)
        if run.pins:  # all cells read the same commits of sources on the hub, and none of them asks
            write_pins(job.out / PINS, run.pins)

        def changed(task: Task) -> None:
            write_results(this)
            outcome = task.outcome()
            print(f"{task.name}: {outcome.error or outcome.state}")
            print(f"  {progress(this, at_once=workers.slots)}", flush=True)

        try:
            run_tasks(this, workers, changed)
        except (KeyboardInterrupt, Interrupted):
            raise Interrupted("the sweep stopped and has saved what ran; the same command continues it.") from None
        finally:
            print(f"results: {write_results(this)}")
    print(status(job.out))
    errors = Counter(this.tasks[cell.name].outcome().error for cell in this.cells)
    del errors[""]
    for cause, n_times in errors.most_common(1):
        failed = f"{errors.total()} of {len(cells)} cells failed, {n_times} of them: {cause}"
        raise SweepFailed(f"{failed} (tracebacks: {this.out}/tasks/*.log)")
    return this


def base_config(job: SweepJob, recipe: ModuleType) -> RunConfig:
    """Return the recipe's config with the command's changes."""
    flags = []
    for name, value in _pairs("set", job.set, "distill.steps=100"):
        section, dot, field = name.rpartition(".")
        if value.lower() in ("true", "false"):
            flags.append(f"--{section}{dot}{'' if value.lower() == 'true' else 'no-'}{field}")
        else:
            flags += [f"--{name}", *value.split(",")]
    base = tyro.cli(RunConfig, default=config_of(recipe), args=current_flags(flags))
    if base.resume != "auto":
        raise ValueError(
            f"resume is {base.resume!r}, and a sweep always resumes; leave it out, or pass another --out to start over."
        )
    return replace(base, out=job.out, dry_run=False, trackers=job.trackers or base.trackers)


def _workers(job: SweepJob) -> Here | Jobs:
    COUNT.check("--jobs", job.jobs)
    pairs = _pairs("options", job.options, "timeout_min=1440")
    options = {name: int(value) if value.isdigit() else value for name, value in pairs}
    if options and job.cluster is None:
        raise ValueError("--options are for jobs of a cluster; pass --cluster slurm too, or leave them out.")
    if job.jobs == 1 and not job.launcher and job.cluster is None:
        return Here(perform)
    return Jobs(executor(job.out / "jobs", job.cluster or "local", options), job.jobs, job.launcher)


def _pairs(flag: str, pairs: tuple[str, ...], example: str) -> list[tuple[str, str]]:
    split = [pair.partition("=") for pair in pairs]
    if odd := [pair for pair, (name, equals, value) in zip(pairs, split) if not (name and equals and value)]:
        raise ValueError(f"--{flag} has {odd[0]!r}; write NAME=VALUE, for example --{flag} {example}.")
    return [(name, value) for name, _, value in split]
