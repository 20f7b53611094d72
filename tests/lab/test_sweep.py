"""Sweeps: which cells there are, what they share, and that neither a failure nor a kill changes the others."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from head_tables import some_scores
from messages import has_facts, naming
from test_pipeline import weights
from torch.testing import assert_close
from training import ALIGN, DISTILL, small_run

from hybrid_distill.cli.recipes import load_recipe
from hybrid_distill.config import PlanConfig, RunConfig, from_json, to_json
from hybrid_distill.io import write_json
from hybrid_distill.lab.sweep import cells, schedule
from hybrid_distill.lab.sweep.cells import best_layers, cell_config, perform, teacher_run
from hybrid_distill.lab.sweep.flags import SweepJob
from hybrid_distill.lab.sweep.folder import Definition, Sweep
from hybrid_distill.lab.sweep.grid import Cell, Grid
from hybrid_distill.lab.sweep.job import SweepFailed, base_config, checked, dry_run, run_sweep
from hybrid_distill.lab.sweep.schedule import run_tasks
from hybrid_distill.lab.sweep.status import progress, status
from hybrid_distill.lab.sweep.tasks import Outcome, Task
from hybrid_distill.locking import is_locked, locked
from hybrid_distill.pipeline import RunInputs, RunPaths, finished_run, trained_student
from hybrid_distill.pipeline.folder import obsolete_results
from hybrid_distill.pipeline.run import build, choose_heads, run
from hybrid_distill.plan import HeadPlan
from hybrid_distill.scoring import HeadScores
from hybrid_distill.train.tracking import TrackedRun

SHAPE = HeadPlan(6, 8, 4, ())
RECIPES = Path(__file__).parents[2] / "recipes"


def grid(
    heads: str = "0,2,all",
    d_state: str = "4",
    selection: str = "top",
    seeds: int = 1,
    window: str = "0",
) -> Grid:
    return Grid.parse(heads=heads, d_state=d_state, selection=selection, seeds=seeds, window=window)


def recipe(**changes: Any) -> Any:
    """A recipe's module whose run learns nothing, in a second."""
    return SimpleNamespace(config=lambda: small_run(**changes), __file__="recipe.py")


def test_cells_that_are_equal_are_one_cell() -> None:
    cells = grid("0,2,4,8,all", "4,8,16,64", "top,random,layers", 3).cells(SHAPE)

    names = [cell.name for cell in cells]
    assert len(set(names)) == len(names)
    # Without heads nothing is selected, with all of them there is no state; layers are of 8 heads.
    n_states = 4
    n_seeds = 3
    assert Counter(cell.selection for cell in cells) == {
        "none": n_states * n_seeds,
        "all": n_seeds,
        "top": 3 * n_states * n_seeds,
        "random": 3 * n_states * n_seeds,
        "layers": n_states * n_seeds,
    }
    assert {cell.heads for cell in cells if cell.selection == "layers"} == {8}

    assert grid("48,all", "4,8").cells(SHAPE) == [Cell("all", 48, None, 0)]


def test_windows_are_an_axis_and_stand_alone_with_state_0() -> None:
    cells = grid("0,2", "0,8", window="0,32").cells(SHAPE)
    assert [cell.name for cell in cells] == [
        "none-n0-w32-s0",
        "top2-n0-w32-s0",
        "none-n8-s0",
        "top2-n8-s0",
        "none-n8-w32-s0",
        "top2-n8-w32-s0",
    ]
    with pytest.raises(ValueError, match="window"):
        grid("0", "0").cells(SHAPE)
    # Nothing aligns heads that have a window alone.
    restored = grid("2", "0,8", "restoration", window="32").cells(SHAPE)
    assert [cell.name for cell in restored] == ["restoration2-n8-w32-s0"]


@pytest.mark.parametrize("share", [True, False])
def test_states_are_aligned_though_the_recipe_has_none(tmp_path: Path, share: bool) -> None:
    windows = replace(small_run().student, d_state=0, window=8, sinks=2)
    job = SweepJob(out=tmp_path, heads="0", d_state="0,4", window="0,8", seeds=1, selection="top")
    request = checked(job, recipe(student=windows, tokens="64K", align_share=0.5))

    this = Sweep.open(replace(request.definition, share=share))

    own_stages = [stage.name for stage in this.own_stages]
    alignments = alignments_of(this)
    if share:
        assert own_stages == ["distill"]
        # With a window and without.
        assert len(alignments) == 2
    else:
        assert own_stages == ["align", "distill"]
        assert alignments == []

    # Whatever has nothing to align gets all tokens for the rest.
    by_name = {cell.name: cell for cell in this.cells}
    alone = cell_config(this, by_name["none-n0-w8-s0"])
    (distill,) = alone.stages
    assert distill.name == "distill"
    assert distill.steps == 64_000 // alone.tokens_per_step(distill)
    if not share:
        both = cell_config(this, by_name["none-n4-w8-s0"])
        assert [stage.name for stage in both.stages] == ["align", "distill"]
        assert both.stages[1].steps == distill.steps // 2


def alignments_of(this: Sweep) -> list[Task]:
    """List the alignments that several cells take their heads from."""
    return [task for task in this.tasks.values() if task.d_state and not task.cell]


def windows_run() -> RunConfig:
    """A run of windows alone that the embedded teacher's heads can be ranked for."""
    base = small_run()
    scoring = replace(
        base.scoring,
        n_pairs=4,
        n_examples=4,
        n_queries=None,
        min_accuracy=None,
    )
    windows_alone = replace(base.student, d_state=0, window=12, sinks=2)
    return replace(base, student=windows_alone, scoring=scoring, stages=())


def test_all_cells_are_asked_at_the_distance_of_the_largest_window(tmp_path: Path) -> None:
    job = SweepJob(out=tmp_path, heads="0", d_state="4", window="0,8,12", seeds=2, selection="top")
    this = Sweep.open(replace(checked(job, recipe()).definition, share=False))
    distances = set()
    for cell in this.cells:
        distances.add(RunInputs(cell_config(this, cell)).evaluation_distance)
    assert distances == {12}


def test_a_wider_window_may_not_move_the_questions_of_finished_cells(tmp_path: Path) -> None:
    job = SweepJob(out=tmp_path, heads="0", d_state="4", window="0,8", seeds=1, selection="top")
    with_distance = replace(small_run().evaluation, distance=12)

    def extended(window: str, **changes: Any) -> Sweep:
        definition = checked(replace(job, window=window), recipe(**changes)).definition
        return Sweep.open(replace(definition, share=False))

    this = extended("0,8")
    teacher_evaluation = this.paths.of_seed(0).teacher_evaluation
    teacher_evaluation.parent.mkdir(parents=True)
    teacher_evaluation.write_text('{"distance": 8}')
    with pytest.raises(ValueError, match=naming(tmp_path, "8", "12")):
        extended("0,8,12")
    assert this.evaluation == extended("0,4,8").evaluation

    # Cells without windows have answered none, and the teacher is asked again.
    teacher_evaluation.unlink()
    extended("0")
    write_json(this.paths.of_seed(0).config, to_json(teacher_run(this, 0).config))
    this.paths.of_seed(0).scores.write_text("{}")
    teacher_evaluation.write_text('{"distance": 0}')
    with_windows = extended("0,8")
    assert not teacher_evaluation.exists()
    assert obsolete_results(teacher_run(with_windows, 0).config) == []
    this.paths.of_seed(0).scores.unlink()

    # A distance of the recipe's own stays, whatever the windows.
    extended("0,8", evaluation=with_distance)
    teacher_evaluation.write_text('{"distance": 12}')
    assert extended("0,4,8,12", evaluation=with_distance).evaluation.distance == 12
    assert teacher_evaluation.exists()


def test_another_spelling_of_the_folder_continues_the_same_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    configs = []
    for out in ("sweep", tmp_path / "sweep", "link/sweep"):
        job = SweepJob(out=Path(out), heads="2", d_state="0", window="8", seeds=1, selection="top")
        this = Sweep.open(checked(job, recipe(stages=())).definition)
        configs.append(cell_config(this, this.cells[0]))
    assert configs[0] == configs[1] == configs[2]


def test_a_sweep_does_not_start_in_the_folder_of_a_run(tmp_path: Path) -> None:
    RunPaths(tmp_path).config.write_text(json.dumps(to_json(small_run(out=tmp_path))))
    job = SweepJob(out=tmp_path, heads="2", d_state="4", seeds=1, selection="top")
    with pytest.raises(ValueError, match=naming(tmp_path)):
        Sweep.open(checked(job, recipe()).definition)


def test_heads_are_ranked_for_the_window_of_each_cell(tmp_path: Path) -> None:
    """As a run of this window alone ranks them."""
    out = tmp_path / "sweep"
    job = SweepJob(out=out, heads="2", d_state="0", window="8,12", seeds=1, selection="top")

    run_sweep(job, SimpleNamespace(config=windows_run, __file__="recipe.py"))

    for window in (8, 12):
        scores = HeadScores.load(out / "shared" / f"w{window}-s0" / "scores.json")
        assert scores.provenance["student"]["window"] == window

        base = windows_run()
        alone = replace(
            base,
            out=tmp_path / str(window),
            plan=PlanConfig("top", k=2),
            student=replace(base.student, window=window),
        )
        plan = choose_heads(RunInputs(alone))
        cell = out / "cells" / f"top2-n0-w{window}-s0"
        assert HeadPlan.load(cell / "plan.json").kept == plan.kept
    assert not (out / "shared" / "s0" / "scores.json").exists()


def test_a_dry_run_refuses_what_the_sweep_refuses(tmp_path: Path) -> None:
    job = SweepJob(out=tmp_path / "sweep", heads="0", d_state="4", window="8", seeds=1)
    with pytest.raises(ValueError, match="no-share"):
        dry_run(job, SimpleNamespace(config=windows_run, __file__="recipe.py"))
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=naming(tmp_path / "file")):
        dry_run(replace(job, out=tmp_path / "file"), recipe())


def test_a_control_is_refused() -> None:
    """With all heads, a control is a trained teacher; the cell of all heads is the teacher as it is."""
    for job, controlled in (
        (SweepJob(), recipe(control=True)),
        (SweepJob(set=("control=True",)), recipe()),
    ):
        with pytest.raises(ValueError, match=naming("control=False")):
            base_config(job, controlled, grid())
    base = base_config(SweepJob(set=("control=False",)), recipe(control=True), grid())
    assert not base.control


def test_the_grid_decides_what_a_cache_would() -> None:
    assert base_config(SweepJob(), recipe(cache="90%"), grid()).cache is None


def test_fields_of_the_recipe_can_be_changed() -> None:
    with pytest.raises(ValueError, match=r"--distill\.steps"):
        base_config(SweepJob(set=("distill.stesp=1",)), recipe(), grid())
    changes = (
        "export=False",
        "align.gradient-checkpointing=true",
        "evaluation.n-pairs=4,8",
        "distill.steps=3",
    )
    base = base_config(SweepJob(set=changes), recipe(), grid())
    assert not base.export
    assert base.stage("align").gradient_checkpointing
    assert base.evaluation.n_pairs == (4, 8)
    assert base.stage("distill").steps == 3


def test_trackers_without_a_name_are_none() -> None:
    tracked = recipe(trackers=("wandb",))
    assert base_config(SweepJob(), tracked, grid()).trackers == ("wandb",)
    assert base_config(SweepJob(trackers=()), tracked, grid()).trackers == ()


def test_options_that_only_some_cells_read_can_be_changed(tmp_path: Path) -> None:
    changes = ("scoring.restoration_examples=8", "student.sinks=4", "scoring.method=attribution")
    grid_of = {"heads": "2", "d_state": "4", "window": "0,8", "seeds": 1}
    grid_of |= {"selection": "top,restoration"}
    job = SweepJob(out=tmp_path, set=changes, share=False, **grid_of)

    this = Sweep.open(checked(job, recipe()).definition)

    with pytest.raises(ValueError, match=naming("restoration")):
        checked(replace(job, selection="top"), recipe())
    assert this.base.scoring.restoration_examples == 8
    top = [cell for cell in this.cells if cell.selection == "top"]
    student_of = {cell.window: cell_config(this, cell).student for cell in top}
    assert student_of[0].sinks == 0
    assert student_of[8].sinks == 4
    assert student_of[8].window == 8


def test_all_cells_have_the_dtypes_of_the_machine_that_began_the_sweep(set_cpu_bf16) -> None:
    set_cpu_bf16(True)
    changes = ("teacher.dtype=auto", "align.precision=auto")
    base = base_config(SweepJob(set=changes), recipe(), grid())
    assert base.teacher.dtype == "bfloat16"
    assert base.stage("align").precision == "bf16"


def test_stages_that_cannot_align_a_cell_are_refused_before_anything_is_measured(
    tmp_path: Path,
) -> None:
    mixers = small_run(tmp_path, stages=(replace(ALIGN, train="mixer", target="mixer"), DISTILL))
    with pytest.raises(ValueError, match=naming("align.train", "mixer")):
        opened(mixers, grid("2"))

    distilled = small_run(tmp_path, stages=(DISTILL,))
    with pytest.raises(ValueError, match=naming("restoration")):
        opened(distilled, grid("2", selection="restoration"), share=False)
    assert not any(tmp_path.iterdir())


def opened(base: RunConfig, asked: Grid, share: bool = True) -> Sweep:
    return Sweep.open(Definition(base, asked, asked.cells(SHAPE), share))


def test_a_sweep_may_grow_but_not_change(tmp_path: Path) -> None:
    base = small_run(tmp_path)
    opened(base, grid("0", "16"))
    opened(base, grid())  # there was no result that could be lost

    (tmp_path / "shared" / "s0").mkdir(parents=True)
    (tmp_path / "shared" / "s0" / "scores.json").write_text("{}")
    larger = grid("0,2,4,all", "4,8", "top,random", 2)
    grown = opened(base, larger)
    assert Sweep(tmp_path).cells == grown.cells

    with pytest.raises(ValueError, match="all-s1, none-n4-s1"):
        opened(base, grid("0,2,4,all", "4", "top,random", 1))
    with pytest.raises(ValueError, match=r"distill.steps"):
        opened(base.with_stage("distill", steps=3), larger)
    with pytest.raises(ValueError, match="share"):
        opened(base, larger, share=False)

    # Trackers change no result.
    opened(replace(base, trackers=("tensorboard",)), larger)


def test_layers_are_ranked_by_all_their_heads() -> None:
    """Layer 3 beats layer 1 by its log-probabilities, and layer 0 by its sum."""
    drop_LH = [[0.9, 0.0], [0.5, 0.5], [0.0, 0.0], [0.5, 0.5]]
    logprob_LH = [[9.0, 0.0], [1.0, 1.0], [0.0, 0.0], [2.0, 1.0]]
    scores = some_scores(drop_LH, logprob_LH, n_kv_heads=2)
    assert best_layers(scores, 1) == (3,)
    assert best_layers(scores, 3) == (0, 1, 3)


@dataclass
class Scripted:
    """Workers whose tasks end as a table says (an error, "" done, None without a result), some looks later.

    The first jobs of ``preempted`` tasks, as many as it says, end without a result too.
    """

    slots: int
    ends: dict[str, str | None]
    preempted: dict[str, int] = field(default_factory=dict)
    canceled: list[str] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)
    busy: set[int] = field(default_factory=set)
    at_once: int = 0

    def starting(self) -> AbstractContextManager[None]:
        return nullcontext()

    def start(self, sweep: Sweep, task: Task, slot: int) -> Any:
        assert 0 <= slot < self.slots
        assert slot not in self.busy
        self.begun.append(task.name)
        self.busy.add(slot)
        self.at_once = max(self.at_once, len(self.busy))
        looks = iter(range(5))
        is_preempted = self.begun.count(task.name) <= self.preempted.get(task.name, 0)

        def done() -> bool:
            if next(looks, None) is not None:
                return False
            error = self.ends.get(task.name, "")
            if error is not None and not is_preempted:
                end(task, error)
            self.busy.remove(slot)
            return True

        return SimpleNamespace(
            state="OUT_OF_MEMORY",
            done=done,
            cancel=lambda: self.canceled.append(task.name),
            was_preempted=lambda: is_preempted,
        )


def end(task: Task, error: str = "") -> None:
    task.end(error, seconds=10.0)
    if not error:
        for path in task.outputs:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()


@pytest.fixture
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "POLL", 0.0)
    monkeypatch.setattr(schedule, "SEEN_WITHIN_S", 0.0)


def test_a_task_comes_after_what_it_needs_and_slots_are_filled(
    tmp_path: Path, no_wait: None
) -> None:
    this = opened(small_run(tmp_path), grid("0,2,4", "4,8", "top", 1))
    workers = Scripted(3, {})
    ended: list[str] = []

    run_tasks(this, workers, lambda task: ended.append(task.name))

    assert sorted(ended) == sorted(this.tasks)
    assert workers.at_once == 3
    for task in this.tasks.values():
        for needed in task.after:
            assert ended.index(needed) < workers.begun.index(task.name)

    again = Scripted(1, {})
    run_tasks(this, again, lambda task: None)
    assert again.begun == [], "finished tasks ran again"

    (manifest,) = this.tasks["n4-s0"].outputs
    manifest.unlink()
    run_tasks(this, again, lambda task: None)
    assert again.begun == ["n4-s0"], "a stage that a user has deleted is not made again"


def test_a_failure_stops_what_needs_it_and_nothing_else(tmp_path: Path, no_wait: None) -> None:
    this = opened(small_run(tmp_path), grid("0,2,4", "4,8", "top", 1))
    # An alignment that others need, and a job that leaves no result.
    workers = Scripted(1, {"n8-s0": "it diverged", "top2-n4-s0": None})

    run_tasks(this, workers, lambda task: None)

    outcomes: dict[str, Outcome] = {name: task.outcome() for name, task in this.tasks.items()}
    failed: dict[str, str] = {}
    for name, outcome in outcomes.items():
        if outcome.state == "failed":
            failed[name] = outcome.error
    assert failed.keys() == {"n8-s0", "none-n8-s0", "top2-n8-s0", "top4-n8-s0", "top2-n4-s0"}
    assert failed["top4-n8-s0"] == "it diverged"
    assert "OUT_OF_MEMORY" in failed["top2-n4-s0"]
    assert outcomes["top4-n4-s0"].state == "done"

    text = status(tmp_path)
    assert has_facts(text, 2, 6, 4)
    assert "top4-n8-s0: it diverged" in text
    assert "| 2 heads, top | 0 of 1, 1 failed | 0 of 1, 1 failed |" in text

    again = Scripted(1, {})
    run_tasks(this, again, lambda task: None)
    assert set(again.begun) == failed.keys(), "failed tasks are tried again, finished ones are not"


def test_jobs_that_outlive_their_command_are_waited_for(
    tmp_path: Path, no_wait: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed command cancels nothing: to start a task a second time would fail it, and what needs it."""
    this = opened(small_run(tmp_path), grid("0,2", "4,8", "top", 1))
    alignment = this.tasks["n4-s0"]
    n_looks = 0

    def locked_at_first(folder: Path) -> bool:
        nonlocal n_looks
        if folder != alignment.folder or n_looks > 5:
            return False
        n_looks += 1
        if n_looks > 5:
            end(alignment)
        return n_looks <= 5

    monkeypatch.setattr(schedule, "is_locked", locked_at_first)
    workers = Scripted(2, {})
    reported: list[str] = []

    run_tasks(this, workers, lambda task: reported.append(task.name))

    assert alignment.name not in workers.begun
    assert sorted(reported) == sorted(this.tasks)
    assert {task.outcome().state for task in this.tasks.values()} == {"done"}


def test_a_preempted_task_starts_again(
    tmp_path: Path, no_wait: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state is saved, so neither it nor what needs it has failed; but not for ever."""
    monkeypatch.setattr(schedule, "REQUEUES", 2)
    this = opened(small_run(tmp_path), grid("0,2", "4,8", "top", 1))
    workers = Scripted(2, {}, preempted={"n4-s0": 2, "n8-s0": 3})

    run_tasks(this, workers, lambda task: None)

    assert workers.begun.count("n4-s0") == 3
    assert workers.begun.count("n8-s0") == 3
    # Or the cluster may start the same job as well.
    assert Counter(workers.canceled) == {"n4-s0": 2, "n8-s0": 2}
    states = {name: task.outcome().state for name, task in this.tasks.items()}
    for name in ("n4-s0", "none-n4-s0", "top2-n4-s0"):
        assert states[name] == "done"
    for name in ("n8-s0", "none-n8-s0", "top2-n8-s0"):
        assert states[name] == "failed"


def test_an_outcome_that_is_seen_late_is_not_a_failure(
    tmp_path: Path, no_wait: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS, which tells this machine of a file only some time after another has written it."""
    monkeypatch.setattr(schedule, "SEEN_WITHIN_S", 60.0)
    this = opened(small_run(tmp_path), grid("0", "4", "top", 1))
    true_outcome = Task.outcome
    n_looks: Counter[str] = Counter()

    def late(task: Task) -> Outcome:
        outcome = true_outcome(task)
        if outcome.state != "done":
            return outcome
        n_looks[task.name] += 1
        return outcome if n_looks[task.name] > 3 else Outcome("waiting")

    monkeypatch.setattr(Task, "outcome", late)
    workers = Scripted(1, {})

    run_tasks(this, workers, lambda task: None)

    assert {true_outcome(task).state for task in this.tasks.values()} == {"done"}
    assert set(Counter(workers.begun).values()) == {1}


@pytest.mark.parametrize("is_main", [True, False])
def test_a_process_that_fails_ends_its_launch(
    is_main: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the others would wait for it in vain."""
    task = opened(small_run(tmp_path), grid("0")).tasks["s0"]
    state = SimpleNamespace(is_main_process=is_main, num_processes=2)

    def fail(*args: object) -> None:
        raise IndexError("7")

    monkeypatch.setattr(cells, "connect", lambda: state)
    monkeypatch.setattr(cells, "GRACE", 0)
    monkeypatch.setitem(cells.WORK, "teacher", fail)
    with pytest.raises(IndexError):
        perform(Sweep(tmp_path), task)
    is_recorded = task.outcome().error == "IndexError: 7"
    assert is_recorded == is_main


def test_progress_and_time_left(tmp_path: Path) -> None:
    this = opened(small_run(tmp_path), grid("0,2,4", "4", "top", 1))
    for name in ("s0", "n4-s0", "none-n4-s0"):
        end(this.tasks[name])
    # The four steps that are done took 30 s, and four are left.
    assert "1 of 3 cells, 4 of 8 steps, about 30 s left" in status(tmp_path)
    assert "about 15 s left" in progress(this, at_once=2)

    # A line that is being written does not count. A lock tells a run from a stopped one.
    run = this.tasks["top2-n4-s0"].run
    stage = run.stages / "1-distill"
    stage.mkdir(parents=True)
    (stage / "metrics.jsonl").write_text('{"step": 1}\n{"st')
    assert "top2-n4-s0: 1 of 2 steps" in status(tmp_path).partition("stopped:")[2]
    with locked(run.out):
        assert "top2-n4-s0: 1 of 2 steps" in status(tmp_path).partition("running:")[2]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of three cells on the tiny teacher, carried out in this process."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("sweep") / "small"
    job = SweepJob(
        out=out,
        heads="0,2,all",
        d_state="4",
        seeds=1,
        selection="random",
        trackers=("tensorboard",),
    )
    run_sweep(job, recipe())
    return out


def rows(out: Path) -> dict[str, dict[str, str]]:
    return {row["cell"]: row for row in csv.DictReader((out / "results.csv").open())}


def test_results_of_a_sweep(finished: Path) -> None:
    table = rows(finished)
    assert list(table) == ["teacher-s0", "none-n4-s0", "random2-n4-s0", "all-s0"]
    assert {row["state"] for row in table.values()} == {"done"}
    for kind in ("kv_choice", "kv_generation", "cache", "perplexity", "knowledge"):
        names = [name for name in table["all-s0"] if name.startswith(kind)]
        assert names, kind
        for name in names:
            assert table["all-s0"][name] == table["teacher-s0"][name], name

    row = table["random2-n4-s0"]
    result = json.loads((finished / row["dir"] / "evaluation.json").read_text())
    assert float(row["perplexity"]) == result["perplexity"]
    assert int(row["cache_bytes_2048"]) == result["cache_bytes"]["2048"]
    assert row["heads"] == "2"
    assert row["d_state"] == "4"
    assert row["steps"] == "2"


def test_a_cell_is_an_ordinary_run(finished: Path, tmp_path: Path) -> None:
    config = from_json(finished / "cells" / "random2-n4-s0" / "config.json")
    alone = run(replace(config, out=tmp_path / "alone", trackers=()))
    assert weights(alone) == weights(config.out) != {}
    for name in ("random2-n4-s0", "all-s0"):
        student, plan = trained_student(finished_run(finished / "cells" / name))
        assert sum(map(len, student.config.kept)) == plan.k


def test_cells_take_over_the_heads_of_one_alignment(finished: Path) -> None:
    this = Sweep(finished)
    assert list(weights(finished / "shared")) == ["n4-s0/aligned/stages/1-align"]
    cell = this.tasks["random2-n4-s0"].cell
    assert cell is not None
    inputs = RunInputs(cell_config(this, cell), this.teacher)

    student = build(inputs, choose_heads(inputs))

    donor, _ = trained_student(finished_run(finished / "shared/n4-s0/aligned"))
    for mixer, source in zip(student.mixers(), donor.mixers()):
        picked = [source.replaced.index(head) for head in mixer.replaced]
        assert_close(mixer.ssm.D, source.ssm.D[picked], rtol=0, atol=0)


def test_cells_open_the_alignment_that_they_share_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that wrote its config.json at once failed now and then."""
    this = opened(small_run(tmp_path), grid("2", selection="restoration"))
    was_locked: list[bool] = []

    def align(inputs: RunInputs) -> None:
        was_locked.append(is_locked(inputs.paths.out))

    monkeypatch.setattr(cells, "align_all_heads", align)
    monkeypatch.setattr(cells, "last_stage", lambda paths: paths.out)
    monkeypatch.setattr(
        cells, "restored_plan", lambda run, k: PlanConfig("file", k=k, file=tmp_path)
    )
    assert cell_config(this, this.cells[0]).plan.k == 2
    assert was_locked == [True]


@pytest.mark.parametrize("tracker", ["wandb", "trackio"])
def test_trackers_are_told_the_group(tracker: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {}

    def init_trackers(project: str, init_kwargs: dict[str, Any]) -> None:
        options.update(init_kwargs[tracker])

    accelerator: Any = SimpleNamespace(log_with=[tracker], init_trackers=init_trackers)
    first = TrackedRun(tmp_path, "top4-n16-s0", "my-sweep", config={"seed": 3})
    first.start(accelerator)
    assert options["config"] == {"seed": 3}
    assert options["group"] == "my-sweep"
    assert options["name"].startswith("top4-n16-s0")
    assert options["resume"] == "allow"

    options_of_first = dict(options)
    later = TrackedRun(tmp_path, "top4-n16-s0", "my-sweep", 5, {"seed": 3})
    later.start(accelerator)
    assert options == options_of_first, "a later stage, or a resumed one, must find the same run"


def test_a_recipe_that_fails_in_all_cells(tmp_path: Path) -> None:
    base = small_run()
    failing = recipe(teacher=replace(base.teacher, dtype="bfloat16"))
    job = SweepJob(out=tmp_path, heads="0,2", d_state="4", seeds=1, selection="random")

    with pytest.raises(SweepFailed, match=naming("precision", "'fp32'")):
        run_sweep(job, failing)

    students = [row for row in rows(tmp_path).values() if row["selection"] != "teacher"]
    assert [row["state"] for row in students] == ["failed", "failed"]


LONGER = """
from dataclasses import replace
from training import small_run

def config():
    base = small_run()
    return replace(base, stages=tuple(replace(stage, steps=40, checkpoint_every=2) for stage in base.stages))
"""


GRID: dict[str, Any] = {"heads": "0,2", "d_state": "4", "seeds": 1, "selection": "random"}


def begun(
    recipe_file: Path, out: Path, *, jobs: int = 1, on_ctrl_c: signal.Handlers = signal.SIG_DFL
) -> subprocess.Popen[str]:
    """A sweep in a process group of its own, once its first student has saved a checkpoint."""
    command = [sys.executable, "-m", "hybrid_distill", "sweep", str(recipe_file)]
    command += ["--out", str(out)]
    command += ["--jobs", str(jobs)]
    for name, value in GRID.items():
        flag = "--" + name.replace("_", "-")
        command += [flag, str(value)]
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": path},
        text=True,
        stderr=subprocess.PIPE,
        start_new_session=True,
        # Where tests run in the background, it is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, on_ctrl_c),
    )
    checkpoint = "cells/none-n4-s0/stages/*/checkpoints/step-*/rank-*.json"
    while process.poll() is None and not any(out.glob(checkpoint)):
        time.sleep(0.05)
    return process


@pytest.fixture(scope="module")
def longer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe whose stages save checkpoints."""
    path = tmp_path_factory.mktemp("recipe") / "longer.py"
    path.write_text(LONGER)
    return path


@pytest.fixture(scope="module")
def whole(longer: Path) -> Path:
    """A sweep by two jobs at a time that nothing stopped."""
    job = SweepJob(longer, out=longer.parent / "whole", jobs=2, **GRID)
    return run_sweep(job, load_recipe(longer)).out


def rows_without_times(out: Path) -> list[dict[str, str]]:
    return [{**row, "train_seconds": ""} for row in rows(out).values()]


@pytest.mark.launched
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_sweep_that_was_stopped_ends_with_the_same_table(
    how: signal.Signals, longer: Path, whole: Path, tmp_path: Path
) -> None:
    process = begun(longer, tmp_path)
    process.send_signal(how)
    process.communicate()

    # SIGTERM is a request to save and leave, and is met.
    assert process.returncode == (0 if how == signal.SIGTERM else -signal.SIGKILL)
    was_over = (tmp_path / "cells/none-n4-s0/evaluation.json").exists()
    assert not was_over, "it was over before it was stopped"
    assert "none-n4-s0" in status(tmp_path).partition("stopped:")[2]

    run_sweep(SweepJob(longer, out=tmp_path, **GRID), load_recipe(longer))

    assert weights(tmp_path / "cells") == weights(whole / "cells") != {}
    assert rows_without_times(tmp_path) == rows_without_times(whole)


@pytest.mark.launched
@pytest.mark.parametrize(
    ("how", "on_ctrl_c", "status_after"),
    [
        (signal.SIGINT, signal.SIG_DFL, 130),
        (signal.SIGTERM, signal.SIG_IGN, 0),
        (signal.SIGHUP, signal.SIG_DFL, 0),
    ],
    ids=["ctrl-c", "nohup", "hangup"],
)
def test_jobs_that_are_stopped_save_and_say_nothing_themselves(
    how: signal.Signals,
    on_ctrl_c: signal.Handlers,
    status_after: int,
    longer: Path,
    whole: Path,
    tmp_path: Path,
) -> None:
    """A terminal sends Ctrl-C and its end to the whole group, a shell's background jobs ignore Ctrl-C."""
    pytest.importorskip("submitit")
    process = begun(longer, tmp_path, jobs=2, on_ctrl_c=on_ctrl_c)
    if how in (signal.SIGINT, signal.SIGHUP):
        os.killpg(process.pid, how)
    else:
        process.send_signal(how)
    _, errors = process.communicate()

    assert process.returncode == status_after
    assert "Traceback" not in errors
    this = Sweep(tmp_path)
    states = {this.tasks[name].outcome().state for name in ("none-n4-s0", "random2-n4-s0")}
    assert not states & {"failed", "running"}
    assert "stopped" in states, "they trained on"

    run_sweep(SweepJob(longer, out=tmp_path, **GRID), load_recipe(longer))
    assert weights(tmp_path / "cells") == weights(whole / "cells")
    assert rows_without_times(tmp_path) == rows_without_times(whole)


def test_jobs_need_submitit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ValueError, match=r"pip install 'hybrid-distill\[sweep\]'"):
        run_sweep(SweepJob(out=tmp_path, heads="0", d_state="4", seeds=1, jobs=2), recipe())
