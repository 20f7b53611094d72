"""`hybrid-distill sweep`: from flags and a recipe to a finished folder."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, NamedTuple

from ...config import PlanConfig, RunConfig
from ...data import write_pins
from ...distributed import is_launched_with_others
from ...flags import parse_as
from ...locking import locked
from ...pipeline import RunInputs
from ...pipeline.checks import check_data, check_evaluation, check_student, check_teachers
from ...pipeline.inputs import teacher_without_weights
from ...pipeline.planning import scores_from_file
from ...plan import HeadPlan
from ...recipe import ask_recipe, config_of, on_asked_teacher
from ...stage_flags import with_stage_flags, without_stage_flags
from ...train.stop import Interrupted, is_ctrl_c
from ...train.tracking import check_trackers
from .flags import SweepJob, split_pairs
from .folder import Definition, Sweep, widest
from .grid import Grid
from .paths import SweepPaths
from .results import write_results
from .schedule import run_tasks
from .status import progress, status
from .tasks import Task
from .worker_options import JOB_DEFAULTS, WorkerOptions

AXES = {
    "heads": "0,2,4,8,all",
    "d_state": "4,8,16,64",
    "window": "0",
    "seeds": 3,
    "selection": "top,random",
}
"""Default grid, where neither the command nor the recipe sets an axis."""


DECIDED = {
    "plan.selection": "--selection",
    "plan.k": "--heads",
    "plan.unit": "--heads, which counts single heads",
    "plan.seed": "--seeds",
    "student.d-state": "--d-state",
    "student.window": "--window",
    "cache": "--heads and --window",
    "context": "--heads and --window",
    "out": "--out",
    "dry-run": "--dry-run",
}
"""Fields of a run that the sweep sets itself, and the flag to use instead."""


class SweepFailed(Exception):
    """Failure of some or all cells."""


class Request(NamedTuple):
    """Requested sweep, checked."""

    definition: Definition
    inputs: RunInputs
    """Inputs of the cell with the largest state and window, checked."""
    workers: WorkerOptions


def checked(job: SweepJob, recipe: ModuleType) -> Request:
    """Check a job before anything runs. Raises ValueError for an invalid request."""
    if is_launched_with_others():
        raise ValueError(
            "a sweep starts the processes of its cells itself; pass --launcher 'accelerate launch ...'."
        )
    axes = {**AXES, **_defaults(recipe, "grid", AXES)}
    for name in AXES:
        flag = getattr(job, name)
        if flag is not None:
            axes[name] = flag
    grid = Grid.parse(**axes)
    base = base_config(job, recipe, grid)
    grid = replace(grid, seeds=tuple(base.seed + number for number in grid.seeds))
    check_trackers(base.trackers)
    inputs = RunInputs(widest(base, grid.d_state, grid.window))
    check_teachers(inputs)
    check_data(inputs)
    check_evaluation(inputs)
    check_student(inputs, PlanConfig("none", k=0))
    # So far, only the config of the teacher has been read.
    teacher = teacher_without_weights(base.teacher)
    scores_from_file(base, teacher)
    cells = grid.cells(HeadPlan.none(teacher))
    words = [str(job.recipe)]
    if job.set:
        words += ["--set", *job.set]
    definition = Definition(base, grid, cells, job.share, " ".join(words))
    options = WorkerOptions.chosen(job, _defaults(recipe, "jobs", JOB_DEFAULTS))
    return Request(definition, inputs, options)


def dry_run(job: SweepJob, recipe: ModuleType) -> str:
    """Describe cells and jobs of a sweep that would start. Writes nothing.

    Raises ValueError as `run_sweep` does.
    """
    request = checked(job, recipe)
    request.definition.check()
    cells = request.definition.cells
    names = ", ".join(cell.name for cell in cells)
    # submitit makes its folder at once.
    with TemporaryDirectory() as folder:
        workers = request.workers.workers(Path(folder))
    title = f"{request.definition.base.name}: {len(cells)} cells, into {job.out}: {names}"
    return f"{title}\n{workers.described()}"


def run_sweep(job: SweepJob, recipe: ModuleType) -> Sweep:
    """Run a job's sweep, or resume it, and print its state.

    ``recipe`` is the module of ``job.recipe``. Raises ValueError for an invalid request, before
    anything runs; SweepFailed at the end, if cells have failed; Interrupted if stopped.
    """
    request = checked(job, recipe)
    paths = SweepPaths(job.out)
    workers = request.workers.workers(paths.jobs)
    with locked(job.out):
        sweep = Sweep.open(request.definition)
        # All cells read the same commits of sources on the hub, and none of them queries it.
        if request.inputs.pins:
            write_pins(paths.sources, request.inputs.pins)

        def report(task: Task) -> None:
            # After every task, for users who look while the sweep runs.
            write_results(sweep)
            outcome = task.outcome()
            print(f"{task.name}: {outcome.error or outcome.state}")
            print(f"  {progress(sweep, at_once=workers.slots)}", flush=True)

        try:
            run_tasks(sweep, workers, report)
        except (KeyboardInterrupt, Interrupted) as stop:
            raise Interrupted(
                "the sweep stopped and has saved what ran; the same command continues it.",
                number=signal.SIGINT if is_ctrl_c(stop) else None,
            ) from None
        finally:
            print(f"results: {write_results(sweep)}")
    print(status(job.out))
    _raise_if_failed(sweep)
    return sweep


def _raise_if_failed(sweep: Sweep) -> None:
    """Raise SweepFailed with the most common error of the cells, if any has failed."""
    outcomes = [sweep.tasks[cell.name].outcome() for cell in sweep.cells]
    errors = Counter(outcome.error for outcome in outcomes if outcome.error)
    if errors:
        [(cause, n_times)] = errors.most_common(1)
        raise SweepFailed(
            f"{errors.total()} of {len(outcomes)} cells failed, {n_times} of them: {cause} "
            f"(tracebacks: {sweep.paths.log('*')})"
        )


def base_config(job: SweepJob, recipe: ModuleType, grid: Grid) -> RunConfig:
    """Return the recipe's config with the command's changes, of which some are read by cells of the ``grid`` alone."""
    flags = _flags_of_settings(job)
    recipe_run = on_asked_teacher(config_of(recipe), flags)
    window = max(grid.window)
    if window > recipe_run.student.window:
        flags += ["--student.window", str(window)]
    # A cell may have a state where the recipe has none.
    read_by_cells = [stage.name for stage in recipe_run.head_stages]
    if "restoration" in grid.selection:
        read_by_cells += ["scoring.n_pairs", "scoring.n_queries", "scoring.restoration_examples"]
    default = with_stage_flags(recipe_run)
    changed = parse_as(type(default), flags, default=default, prog="--set", description=None)
    base = without_stage_flags(changed, recipe_run, unchecked=read_by_cells)
    _check_can_sweep(base)
    # The grid decides what a cache would.
    base = replace(base, out=job.out.resolve(), cache=None, dry_run=False)
    if job.trackers is not None:
        base = replace(base, trackers=job.trackers)
    # Once for all cells, which may run on machines of several kinds.
    return base.with_dtypes()


def _flags_of_settings(job: SweepJob) -> list[str]:
    """Return the ``--set`` of a sweep as flags of a run. Raises ValueError for what the sweep itself decides."""
    flags: list[str] = []
    for name, value in split_pairs("set", job.set, "distill.steps=100"):
        flag = DECIDED.get(name.replace("_", "-"))
        if flag is not None:
            raise ValueError(
                f"--set holds {name}={value}, which the sweep decides for its cells; pass {flag}."
            )
        section, dot, field = name.rpartition(".")
        if value.lower() == "true":
            flags.append(f"--{name}")
        elif value.lower() == "false":
            flags.append(f"--{section}{dot}no-{field}")
        else:
            flags += [f"--{name}", *value.split(",")]
    return flags


def _check_can_sweep(base: RunConfig) -> None:
    """Raise ValueError for a run that starts over or trains a control, which cells do not."""
    if base.resume != "auto":
        raise ValueError(
            f"resume is {base.resume!r}, and a sweep always resumes; leave it out, or pass another --out to start over."
        )
    if base.control:
        raise ValueError(
            "control is set, and a sweep trains no control beside its cells; pass --set control=False, and "
            "--control to `hybrid-distill run` for one student."
        )


def _defaults(recipe: ModuleType, function: str, names: Collection[str]) -> dict[str, Any]:
    """Return the defaults that a recipe's function sets; none without the function.

    Raises ValueError for a name that is not in ``names``.
    """
    if not hasattr(recipe, function):
        return {}
    values = ask_recipe(recipe, function)
    for name in values:
        if name not in names:
            raise ValueError(
                f"{function}() of {recipe.__file__} sets {name!r}; set only {', '.join(names)}."
            )
    return values
