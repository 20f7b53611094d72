"""One alignment for all plans, or one for each: what that saves, and whether the students are the same.

    python benchmarks/sweep_sharing.py           # writes benchmarks/results/sweep_sharing.json; 12 minutes of one core
    python benchmarks/sweep_sharing.py steps     # a part of it alone: students, heads or steps

A small sweep of the embedded teacher is run with its alignments shared, and each of its cells once more as an
independent run, which scores, aligns and evaluates the teacher itself. Compared are CPU seconds and the finished
students, beside the spread between seeds. Then recurrent heads are aligned for one plan and for none: with clipping,
which ties all heads by the norm of their gradients, and without, where nothing does. Last, what a step costs.
"""

from __future__ import annotations

import json
import runpy
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from provenance import ROOT, about, read, write

from hybrid_distill.config import RunConfig
from hybrid_distill.data import open_rows
from hybrid_distill.evaluation.evaluate import EvalResult
from hybrid_distill.lab.sweep.cells import cell_config
from hybrid_distill.lab.sweep.folder import Sweep
from hybrid_distill.lab.sweep.grid import Cell
from hybrid_distill.lab.sweep.job import SweepJob, sweep
from hybrid_distill.pipeline import RunInputs
from hybrid_distill.pipeline.run import choose_heads, evaluate_run, prepare, train
from hybrid_distill.plan import HeadPlan
from hybrid_distill.student.build import build_student
from hybrid_distill.train.config import StageConfig
from hybrid_distill.train.loop import train_stage
from hybrid_distill.train.stages import make_stage
from hybrid_distill.vocabulary import vocabulary_size

RESULTS = ROOT / "benchmarks" / "results" / "sweep_sharing.json"
HEADS, D_STATE, SEEDS = "0,2,6", 16, 2
FIGURES = ("kv_choice_8", "perplexity", "kl_to_teacher")
CLIPS = {"clip 1": 1.0, "no clipping": 1e9}
ALIGN, DISTILL, TIMED = 60, 24, 8


def config() -> RunConfig:
    """The tiny recipe with fewer steps and questions."""
    base = runpy.run_path(str(ROOT / "recipes" / "hybrid_tiny.py"))["config"]()
    base = replace(
        base,
        scoring=replace(base.scoring, n_examples=32),
        evaluation=replace(base.evaluation, n_pairs=(8,), n_examples=128, n_texts=32),
        export=False,
    )
    return base.with_stage("align", steps=ALIGN).with_stage("distill", steps=DISTILL)


def main() -> None:
    """Print what was found, write the JSON."""
    torch.set_num_threads(1)
    record = read(RESULTS)
    for name in sys.argv[1:] or PARTS:
        record[name] = PARTS[name]() | about(name)
        print(name, json.dumps(record[name], indent=1))
        write(RESULTS, record)


def students() -> dict[str, Any]:
    """CPU seconds and figures of students with a shared alignment and as independent runs."""
    with tempfile.TemporaryDirectory() as folder:
        return _students(Path(folder))


def _students(folder: Path) -> dict[str, Any]:
    job = SweepJob(out=folder / "shared", heads=HEADS, d_state=str(D_STATE), seeds=SEEDS, selection="top,random")
    shared, shared_seconds = _timed(lambda: sweep(job, SimpleNamespace(config=config, __file__=__file__)))
    seconds: dict[str, float] = {}
    rows: dict[str, dict[str, list[float]]] = {}
    for cell in shared.cells:
        alone, seconds[cell.name] = _timed(lambda cell=cell: _independent(shared, cell, folder / "alone"))
        found = EvalResult.load(shared.out / "cells" / cell.name / "evaluation.json")
        kind = f"{cell.selection} {cell.heads}"
        for name, result in (("shared", found), ("independent", alone)):
            for figure in FIGURES:
                rows.setdefault(kind, {}).setdefault(f"{figure}, {name}", []).append(result.figures()[figure])
    return {
        "settings": {"heads": HEADS, "d_state": D_STATE, "seeds": SEEDS, "align": ALIGN, "distill": DISTILL},
        "cpu_seconds": {
            "shared": round(shared_seconds, 1),
            "independent": round(sum(seconds.values()), 1),
            "times_cheaper": round(sum(seconds.values()) / shared_seconds, 2),
        },
        "students": rows,
        "difference": {figure: _difference(rows, figure) for figure in FIGURES},
    }


def _independent(shared: Sweep, cell: Cell, folder: Path) -> EvalResult:
    """The same cell by itself: its own scores, its own alignment, its own evaluation of the teacher."""
    base, planned = config(), cell_config(shared, cell)
    run = RunInputs(
        replace(
            base,
            out=folder / cell.name,
            seed=cell.seed,
            data=planned.data,
            plan=planned.plan,
            student=replace(base.student, d_state=D_STATE),
        )
    )
    prepare(run)
    return evaluate_run(run, train(run, choose_heads(run)))


def _difference(rows: dict[str, dict[str, list[float]]], figure: str) -> dict[str, float]:
    """Mean absolute difference: of the two ways, seed by seed; of neighboring seeds, in one way."""
    ways, seeds = [], []
    for row in rows.values():
        shared, alone = row[f"{figure}, shared"], row[f"{figure}, independent"]
        ways += [abs(a - b) for a, b in zip(shared, alone)]
        seeds += [abs(a - b) for way in (shared, alone) for a, b in pairwise(way)]
    return {"between_ways": round(sum(ways) / len(ways), 4), "between_seeds": round(sum(seeds) / len(seeds), 4)}


def heads() -> dict[str, Any]:
    """How far apart a recurrent head ends that was aligned beside kept heads and without, relative to its way."""
    base = config()
    run = RunInputs(base)
    none, some = HeadPlan.none(run.teacher), HeadPlan.random(run.teacher, 6, seed=0)
    distances = {}
    for name, clip in CLIPS.items():
        distances[name] = _apart(run, none, some, replace(base.stage("align"), steps=DISTILL, clip=clip))
    return distances


def _apart(run: RunInputs, none: HeadPlan, some: HeadPlan, align: StageConfig) -> float:
    start = _recurrent(run, none, some, None)
    alone, beside = (_recurrent(run, plan, some, align) for plan in (none, some))
    moved = sum((a - s).square().sum() for a, s in zip(alone, start)) ** 0.5
    apart = sum((a - b).square().sum() for a, b in zip(alone, beside)) ** 0.5
    return float(f"{apart / moved:.2g}")


def _recurrent(run: RunInputs, plan: HeadPlan, some: HeadPlan, align: StageConfig | None) -> list[torch.Tensor]:
    """The weights of the heads that ``some`` makes recurrent, after alignment under ``plan``."""
    rows = open_rows(run.config.data, run.tokenizer)
    calibration = rows.batch(0, 8)
    student, _ = build_student(run.teacher, plan, d_state=D_STATE, init="fitted", calibration=calibration)
    if align is not None:
        with tempfile.TemporaryDirectory() as out:
            train_stage(make_stage(align, student, run.teacher), rows, out, progress=False)
    found = []
    for layer, mixer in enumerate(student.mixers()):
        picked = [mixer.recurrent.index(head) for head in some.recurrent_in(layer)]
        for name in ("x_proj", "b_proj", "c_proj", "z_proj"):
            weight = getattr(mixer.ssm, name).weight.detach().unflatten(0, (len(mixer.recurrent), -1))
            found.append(weight[picked].clone())
    return found


def steps() -> dict[str, Any]:
    """CPU seconds of a step, by state size: alignment of all heads, distillation of a student with 4."""
    base = config()
    run = RunInputs(base)
    rows = open_rows(base.data, run.tokenizer)
    plans = {"align": HeadPlan.none(run.teacher), "distill": HeadPlan.random(run.teacher, 4, seed=0)}
    found: dict[str, Any] = {}
    for d_state in (4, 16, 64):
        for name, plan in plans.items():
            student, _ = build_student(run.teacher, plan, d_state=d_state, init="teacher")
            options = replace(base.stage(name), steps=TIMED)
            stage = make_stage(options, student, run.teacher, vocab_size=vocabulary_size(run.tokenizer))
            with tempfile.TemporaryDirectory() as out:
                _, seconds = _timed(lambda: train_stage(stage, rows, out, progress=False))  # noqa: B023
            found.setdefault(name, {})[str(d_state)] = round(seconds / TIMED, 3)
    return {"cpu_seconds_a_step": found}


def _timed(action: Callable[[], Any]) -> tuple[Any, float]:
    """(what it returns, CPU seconds of this process)."""
    begun = time.process_time()
    return action(), time.process_time() - begun


PARTS: dict[str, Callable[[], dict[str, Any]]] = {"students": students, "heads": heads, "steps": steps}

if __name__ == "__main__":
    main()
