"""`hybrid-distill demo`: the method's central claim in one table, from students that keep different heads.

Heads are scored once and recurrent heads are aligned once, so every student starts from the same recurrent heads and
differs only in its plan::

    scores.json  teacher/  aligned/  <student>/...  compare.json  report.md
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..config import PlanConfig, RunConfig, config_of
from ..data.documents import PROBE_LIKE
from ..distributed import alone_in, is_launched_main, on_main_process
from ..io import write_json
from ..lab.reporting.run import write_report
from ..lab.sweep.cells import restored_plan, variant_config
from ..limits import CountOrZero
from ..pipeline import Run, run_beside
from .recipes import load_recipe

EXPORTED = "top"
"""Name of the student to export."""


@dataclass(frozen=True)
class Variant:
    """One student of the table; ``probe_like`` also distills on the probe's own questions, as a control."""

    name: str
    label: str
    plan: PlanConfig
    probe_like: bool = False


def command(
    recipe: Path = Path("recipes/hybrid_tiny.py"),
    /,
    out: Path = Path("runs/demo"),
    k: CountOrZero | None = None,
    random_seeds: tuple[CountOrZero, ...] = (0,),
    restoration: bool = False,
    probe_like: bool = False,
) -> None:
    """Show the central result in one table: teacher, 0 heads, k random heads, top k heads; writes OUT/report.md.

    Args:
        recipe: The recipe, by name or as a file, for everything except the kept heads.
        out: The folder for the students and the report; a stopped demo resumes there.
        k: Attention heads to keep; by default the recipe's number.
        random_seeds: Seeds of the random selections; each seed adds a student.
        restoration: Add a student whose heads are chosen by restoration instead of ablation.
        probe_like: Distill each student a second time with the probe's own questions mixed in, as a control.
    """
    base = replace(config_of(load_recipe(recipe)), out=out)
    k = base.plan.k if k is None else k
    students = [Variant("none", "0 heads", PlanConfig("none", k=0))]
    for seed in random_seeds:
        plan = PlanConfig("random", k=k, seed=seed)
        students.append(Variant(f"random-{seed}", f"{k} random heads (seed {seed})", plan))
    students.append(Variant("top", f"top {k} by ablation", PlanConfig("top", k=k)))
    if restoration:
        students.append(Variant("restoration", f"top {k} by restoration", PlanConfig("restoration", k=k)))
    if probe_like:
        students += [replace(student, name=f"{student.name}-probe", probe_like=True) for student in students]
    report = compare(base, students)
    if is_launched_main():
        print(f"report: {report}")


def compare(base: RunConfig, students: Sequence[Variant]) -> Path:
    """Run every student in its own folder below ``base.out``; return the path of the report. Finished work is reused.

    Raises as `pipeline.run` does.
    """
    shared, report = Run(base), base.out / "report.md"
    with alone_in(base.out):
        for student in students:
            shared.check_student(student.plan)
        shared.prepare()
        shared.scores()
        shared.evaluate_teacher()
        aligned, entries = shared.aligned.last_stage(), []
        for student in students:
            _run_student(shared, student, aligned)
            entry = {"name": student.name, "label": student.label, "dir": student.name}
            entry |= {"selection": student.plan.selection, "k": student.plan.k}
            entries.append(entry | {"data": "probe questions mixed in" if student.probe_like else ""})
        record = {"students": entries, "n_pairs": base.evaluation.stated_pairs or base.scoring.n_pairs}
        on_main_process(lambda: (write_json(base.out / "compare.json", record), write_report(base.out)))
    return report


def _run_student(shared: Run, student: Variant, aligned: Path) -> None:
    base = shared.config
    plan = restored_plan(shared, student.plan.k) if student.plan.selection == "restoration" else student.plan
    sources = (*base.data.sources, *([PROBE_LIKE] if student.probe_like else []))
    config = variant_config(base, student.name, base.out / student.name, plan)
    started, data = replace(base.student, aligned=aligned), replace(base.data, sources=sources)
    config = replace(config, student=started, stages=("distill",), data=data)
    with alone_in(config.out):
        run, trained, kept = run_beside(shared, config)
        if config.export and student.name == EXPORTED:
            run.export(trained, kept)
