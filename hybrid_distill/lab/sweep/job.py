"""`hybrid-distill sweep`: from flags and a recipe to a finished folder."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import tyro

from ...config import PlanConfig, RunConfig, ask_recipe, config_of
from ...distributed import check_trackers
from ...locking import locked
from ...pipeline import Run, shape_of_teacher
from ...plan import HeadPlan
from .grid import Grid
from .record import Sweep, Task
from .results import write_results
from .running import Cluster, Here, Processes, Workers, run_tasks, split_launcher
from .sharing import saving
from .status import progress, status

AXES = {"heads": "0,2,4,8,all", "d_state": "4,8,16,64", "seeds": 3, "selection": "top,random"}
"""The grid where neither the command nor the recipe says otherwise."""
EXAMPLES = {"set": "distill.steps=100", "options": "timeout_min=1440"}


class SweepFailed(Exception):
    """Some cells failed, perhaps all."""


@dataclass(frozen=True)
class SweepJob:
    """Which students to make, how, and where; the folder can be looked at while it runs, and be gone on with."""

    recipe: Path = Path("recipes/hybrid_tiny.py")
    """What everything but the grid is taken from. It may have a grid of its own, grid()."""
    heads: str | None = None
    """Heads kept, over all layers: ``0,2,4,8,all``."""
    d_state: str | None = None
    """State sizes of the recurrent heads: ``4,8,16,64``."""
    seeds: int | None = None
    """How many; they begin with the recipe's."""
    selection: str | None = None
    """``top`` (scores), ``random``, ``layers`` (the best whole layers, by their heads' scores), ``restoration``."""
    set: tuple[str, ...] = ()
    """Fields of the recipe to change: ``distill.steps=100 export=False evaluation.n-pairs=4,8``."""
    out: Path = Path("runs/sweep")
    jobs: int = 1
    """Cells at a time: above 1 in processes of their own, with their share of the threads and a GPU in turn."""
    cluster: Literal["slurm", "local"] | None = None
    """Run cells as jobs, ``jobs`` of them at a time (submitit). ``local`` tries that out without a cluster."""
    options: tuple[str, ...] = ()
    """Of the cluster's jobs, in submitit's words: ``slurm_partition=gpu gpus_per_node=8 timeout_min=1440``."""
    launcher: str = ""
    """What starts a cell's processes, for example ``accelerate launch --config_file launch/ddp.yaml``."""
    share: bool = True
    """One alignment for all cells of a state size and seed, head by head; without it each cell aligns as in the
    recipe."""
    trackers: tuple[str, ...] = ()
    """``tensorboard``, ``trackio``, ``wandb``: one run for each cell, the sweep as their group. By default the
    recipe's."""


def sweep(job: SweepJob, recipe: Any) -> Sweep:
    """Run the sweep that a job describes, or what is left of it, and print how it stands.

    ``recipe`` is the module of ``job.recipe``. Raises ValueError for what cannot be asked for, before anything runs;
    SweepFailed when cells have failed, at the end; Interrupted when stopped.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError(
            "a sweep starts the processes of its cells itself; give what launches them as "
            "--launcher 'accelerate launch ...', and start the sweep without it."
        )
    base = _base(job, recipe)
    check_trackers(base.trackers)
    grid = _grid(job, recipe, base)
    run = Run(base)
    for check in (run.check_data, run.check_evaluation, partial(run.check_student, PlanConfig("none", k=0))):
        check()
    shape = HeadPlan.none(shape_of_teacher(base.teacher))
    cells = grid.cells(shape)
    workers = _workers(job)
    with locked(job.out):
        this = Sweep.open(base, grid, cells, share=job.share)
        this.record["command"] = " ".join(["--recipe", str(job.recipe), *(["--set", *job.set] if job.set else [])])
        if left_out := grid.left_out(shape):
            print(left_out)

        def changed(task: Task) -> None:
            this.save()
            write_results(this)
            outcome = this.outcome(task)
            print(f"{task.name}: {outcome.error or outcome.state}")
            print(f"  {progress(this, at_once=workers.slots)}", flush=True)

        try:
            run_tasks(this, workers, changed)
        finally:
            this.record["saving"] = saving(this)
            this.save()
            print(f"results: {write_results(this)}")
    print(status(job.out))
    _raise_for_failures(this)
    return this


def _base(job: SweepJob, recipe: Any) -> RunConfig:
    """The recipe's config, with the fields that the command changes."""
    flags = [word for name, value in _pairs("set", job.set) for word in _as_flag(name, value)]
    base = tyro.cli(RunConfig, default=config_of(recipe), args=flags)
    if base.resume != "auto":
        raise ValueError(
            f"resume is {base.resume!r}, and a sweep always goes on where it was stopped; leave it out, or use another "
            "--out to begin again."
        )
    return replace(base, out=job.out, dry_run=False, trackers=job.trackers or base.trackers)


def _grid(job: SweepJob, recipe: Any, base: RunConfig) -> Grid:
    """The command's values, else the recipe's, else the usual ones."""
    of_recipe = ask_recipe(recipe, "grid") if hasattr(recipe, "grid") else {}
    asked = {name: value for name in AXES if (value := getattr(job, name)) is not None}
    return Grid.parse(**{**AXES, **of_recipe, **asked}, first_seed=base.seed)


def _workers(job: SweepJob) -> Workers:
    if job.jobs < 1:
        raise ValueError(f"--jobs is {job.jobs}; give a whole number of at least 1.")
    launcher = split_launcher(job.launcher)
    if job.cluster is not None:
        options = {
            name: int(value) if value.isdigit() else value for name, value in _pairs("options", job.options)
        }
        return Cluster(job.out / "jobs", job.cluster, job.jobs, launcher, options)
    if job.options:
        raise ValueError("--options are for jobs of a cluster; give --cluster slurm too, or leave them out.")
    return Processes(job.jobs, launcher) if job.jobs > 1 or job.launcher else Here()


def _as_flag(name: str, value: str) -> list[str]:
    """``export=False`` and ``evaluation.n-pairs=4,8`` as the command line has them."""
    section, dot, field = name.rpartition(".")
    if value.lower() in ("true", "false"):
        return [f"--{section}{dot}{'' if value.lower() == 'true' else 'no-'}{field}"]
    return [f"--{name}", *value.split(",")]


def _pairs(flag: str, pairs: tuple[str, ...]) -> list[tuple[str, str]]:
    split = [pair.partition("=") for pair in pairs]
    if odd := [pair for pair, (name, equals, value) in zip(pairs, split) if not (name and equals and value)]:
        raise ValueError(f"--{flag} has {odd[0]!r}; write NAME=VALUE, for example --{flag} {EXAMPLES[flag]}.")
    return [(name, value) for name, _, value in split]


def _raise_for_failures(this: Sweep) -> None:
    outcomes = {cell.name: this.outcome(this.tasks[cell.name]) for cell in this.cells}
    errors = Counter(outcome.error for outcome in outcomes.values() if outcome.state == "failed")
    if not errors:
        return
    n_failed, n_cells = errors.total(), len(outcomes)
    cause, n_times = errors.most_common(1)[0]
    which = "every cell" if n_failed == n_cells else f"{n_failed} of {n_cells} cells"
    of_them = "" if n_times == n_failed else f", {n_times} of them of this"
    raise SweepFailed(f"{which} failed{of_them}: {cause} (tracebacks: {this.out}/tasks/*.log)")
