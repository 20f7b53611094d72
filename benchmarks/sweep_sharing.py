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
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from records import RESULTS, ROOT, about, cpu_time, parser_of, read, write

from hybrid_distill.config import RunConfig
from hybrid_distill.data import open_rows
from hybrid_distill.evaluation.evaluate import EvalResult
from hybrid_distill.lab.sweep.cells import cell_config
from hybrid_distill.lab.sweep.flags import SweepJob
from hybrid_distill.lab.sweep.folder import Sweep
from hybrid_distill.lab.sweep.grid import Cell
from hybrid_distill.lab.sweep.job import run_sweep
from hybrid_distill.pipeline import RunInputs
from hybrid_distill.pipeline.run import choose_heads, evaluate_run, prepare, train
from hybrid_distill.plan import HeadPlan
from hybrid_distill.student.build import build_student
from hybrid_distill.train.config import StageConfig
from hybrid_distill.train.loop import train_stage
from hybrid_distill.train.stages import make_stage
from hybrid_distill.vocabulary import vocabulary_size

HEADS = "0,2,6"
D_STATE = 16
SEEDS = 2
FIGURES = ("kv_choice_8", "perplexity", "kl_to_teacher")
CLIPS = {"clip 1": 1.0, "no clipping": 1e9}
# Steps of each stage, and of those that are timed.
ALIGN = 60
DISTILL = 24
TIMED = 8


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
    """Print each part as it is measured, write the JSON."""
    parser = parser_of(__doc__, RESULTS / "sweep_sharing.json")
    parser.add_argument("parts", nargs="*", help=f"some of {', '.join(PARTS)}; by default all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    record = read(options.out)
    for name in options.parts or PARTS:
        record[name] = PARTS[name]() | about(name)
        print(name, json.dumps(record[name], indent=1))
        write(options.out, record)


def students() -> dict[str, Any]:
    """Return CPU seconds and figures of students with a shared alignment and as independent runs."""
    with tempfile.TemporaryDirectory() as folder:
        return compare_students(Path(folder))


def compare_students(folder: Path) -> dict[str, Any]:
    job = SweepJob(
        out=folder / "shared",
        heads=HEADS,
        d_state=str(D_STATE),
        seeds=SEEDS,
        selection="top,random",
    )
    recipe = ModuleType("sweep_sharing")
    vars(recipe).update(config=config, __file__=__file__)
    shared, shared_seconds = cpu_time(lambda: run_sweep(job, recipe))

    independent_seconds = 0.0
    rows: dict[str, dict[str, list[float]]] = {}
    for cell in shared.cells:
        alone, seconds = cpu_time(partial(_independent, shared, cell, folder / "alone"))
        independent_seconds += seconds
        from_sweep = EvalResult.load(shared.out / "cells" / cell.name / "evaluation.json")
        row = rows.setdefault(f"{cell.selection} {cell.heads}", {})
        for way, result in (("shared", from_sweep), ("independent", alone)):
            figures = result.figures()
            for figure in FIGURES:
                row.setdefault(f"{figure}, {way}", []).append(figures[figure])

    return {
        "settings": {
            "heads": HEADS,
            "d_state": D_STATE,
            "seeds": SEEDS,
            "align": ALIGN,
            "distill": DISTILL,
        },
        "cpu_seconds": {
            "shared": round(shared_seconds, 1),
            "independent": round(independent_seconds, 1),
            "times_cheaper": round(independent_seconds / shared_seconds, 2),
        },
        "students": rows,
        "difference": {figure: _difference(rows, figure) for figure in FIGURES},
    }


def _independent(shared: Sweep, cell: Cell, folder: Path) -> EvalResult:
    """Run the same cell by itself: its own scores, its own alignment, its own evaluation of the teacher."""
    base = config()
    planned = cell_config(shared, cell)
    alone = replace(
        base,
        out=folder / cell.name,
        seed=cell.seed,
        data=planned.data,
        plan=planned.plan,
        student=replace(base.student, d_state=D_STATE),
    )
    run = RunInputs(alone)
    prepare(run)
    student = train(run, choose_heads(run))
    return evaluate_run(run, student)


def _difference(rows: dict[str, dict[str, list[float]]], figure: str) -> dict[str, float]:
    """Return mean absolute differences: of the two ways, seed by seed; of neighboring seeds, in one way."""
    ways = []
    seeds = []
    for row in rows.values():
        shared = row[f"{figure}, shared"]
        alone = row[f"{figure}, independent"]
        ways += [abs(a - b) for a, b in zip(shared, alone)]
        for way in (shared, alone):
            seeds += [abs(a - b) for a, b in pairwise(way)]
    return {
        "between_ways": round(sum(ways) / len(ways), 4),
        "between_seeds": round(sum(seeds) / len(seeds), 4),
    }


def heads() -> dict[str, Any]:
    """Return how far apart a head ends that was aligned beside kept heads and without, relative to its way."""
    base = config()
    run = RunInputs(base)
    none = HeadPlan.none(run.teacher)
    some = HeadPlan.random(run.teacher, 6, seed=0)
    distances = {}
    for name, clip in CLIPS.items():
        align = replace(base.stage("align"), steps=DISTILL, clip=clip)
        distances[name] = _apart(run, none, some, align)
    return distances


def _apart(run: RunInputs, none: HeadPlan, some: HeadPlan, align: StageConfig) -> float:
    start = _recurrent(run, none, some, None)
    alone = _recurrent(run, none, some, align)
    beside = _recurrent(run, some, some, align)
    relative = distance(alone, beside) / distance(alone, start)
    return float(f"{relative:.2g}")


def distance(some: list[torch.Tensor], others: list[torch.Tensor]) -> torch.Tensor:
    return sum((a - b).square().sum() for a, b in zip(some, others)) ** 0.5


def _recurrent(
    run: RunInputs, plan: HeadPlan, some: HeadPlan, align: StageConfig | None
) -> list[torch.Tensor]:
    """Return the weights of the heads that ``some`` makes recurrent, after alignment under ``plan``."""
    rows = open_rows(run.config.data, run.tokenizer)
    student, _ = build_student(
        run.teacher,
        plan,
        d_state=D_STATE,
        init="fitted",
        calibration=rows.batch(0, 8),
    )
    if align is not None:
        with tempfile.TemporaryDirectory() as out:
            train_stage(make_stage(align, student, run.teacher), rows, out, progress=False)
    weights = []
    for layer, mixer in enumerate(student.mixers()):
        picked = [mixer.replaced.index(head) for head in some.replaced_in(layer)]
        for name in ("x_proj", "b_proj", "c_proj", "z_proj"):
            weight = getattr(mixer.ssm, name).weight.detach()
            by_head = weight.unflatten(0, (len(mixer.replaced), -1))
            weights.append(by_head[picked].clone())
    return weights


def steps() -> dict[str, Any]:
    """Return CPU seconds of a step, by state size: alignment of all heads, distillation of a student with 4."""
    base = config()
    run = RunInputs(base)
    rows = open_rows(base.data, run.tokenizer)
    plans = {
        "align": HeadPlan.none(run.teacher),
        "distill": HeadPlan.random(run.teacher, 4, seed=0),
    }
    n_ids = vocabulary_size(run.tokenizer)
    by_stage: dict[str, dict[str, float]] = {"align": {}, "distill": {}}
    for d_state, (name, plan) in product((4, 16, 64), plans.items()):
        student, _ = build_student(run.teacher, plan, d_state=d_state, init="teacher")
        options = replace(base.stage(name), steps=TIMED)
        stage = make_stage(options, student, run.teacher, vocab_size=n_ids)
        with tempfile.TemporaryDirectory() as out:
            _, seconds = cpu_time(partial(train_stage, stage, rows, Path(out), progress=False))
        by_stage[name][str(d_state)] = round(seconds / TIMED, 3)
    return {"cpu_seconds_a_step": by_stage}


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "students": students,
    "heads": heads,
    "steps": steps,
}

if __name__ == "__main__":
    main()
