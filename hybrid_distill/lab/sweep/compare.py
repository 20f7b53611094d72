"""Students that differ in the heads they keep, side by side: the method's claim in one table.

A sweep over one axis: heads are scored once and recurrent heads are aligned once, so that every student starts from the
same recurrent heads and differs in its plan alone::

    scores.json  teacher/  aligned/  <student>/...  compare.json  report.md
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...config import PlanConfig, RunConfig
from ...data.documents import PROBE_LIKE
from ...distributed import alone_in, on_main_process
from ...io import write_json
from ...pipeline import Run, run_beside
from ..reporting.run import write_report
from .cells import restored_plan, variant_config

EXPORTED = "top"
"""The student that a comparison exports."""


@dataclass(frozen=True)
class Variant:
    """One student of a comparison; ``probe_like`` distills on the probe's own questions too, which is a control."""

    name: str
    label: str
    plan: PlanConfig
    probe_like: bool = False


def variants(
    k: int, *, random_seeds: Sequence[int] = (0,), restoration: bool = False, probe_like: bool = False
) -> list[Variant]:
    """Return no head, k random heads for each seed, the top k by ablation and, if asked for, by restoration.

    With ``probe_like`` each of them once more, on other data.
    """
    plain = [Variant("none", "0 heads", PlanConfig("none", k=0))]
    for seed in random_seeds:
        plan = PlanConfig("random", k=k, seed=seed)
        plain.append(Variant(f"random-{seed}", f"{k} random heads (seed {seed})", plan))
    plain.append(Variant("top", f"top {k} by ablation", PlanConfig("top", k=k)))
    if restoration:
        plain.append(Variant("restoration", f"top {k} by restoration", PlanConfig("restoration", k=k)))
    mixed = [replace(variant, name=f"{variant.name}-probe", probe_like=True) for variant in plain]
    return plain + mixed if probe_like else plain


def compare(base: RunConfig, students: Sequence[Variant]) -> Path:
    """Run every student in its own folder below ``base.out`` and write the report; finished work is kept.

    Raises what `pipeline.run` raises.
    """
    shared = Run(base)
    with alone_in(shared.out):
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
        on_main_process(lambda: (write_json(shared.out / "compare.json", record), write_report(shared.out)))
    return shared.out


def _run_student(shared: Run, student: Variant, aligned: Path) -> None:
    base = shared.config
    plan = restored_plan(shared, student.plan.k) if student.plan.selection == "restoration" else student.plan
    sources = (*base.data.sources, *([PROBE_LIKE] if student.probe_like else []))
    config = variant_config(base, student.name, shared.out / student.name, plan)
    started, data = replace(base.student, aligned=aligned), replace(base.data, sources=sources)
    config = replace(config, student=started, stages=("distill",), data=data)
    with alone_in(config.out):
        run, trained, kept = run_beside(shared, config)
        if config.export and student.name == EXPORTED:
            run.export(trained, kept)
