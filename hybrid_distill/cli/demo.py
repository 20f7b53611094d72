"""`hybrid-distill demo`: students that differ in their kept heads, side by side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..config import config_of
from ..distributed import is_launched_main
from ..lab.sweep import compare as comparison
from ..limits import CountOrZero
from ..progress import finish
from .recipes import load_recipe


def command(
    recipe: Path = Path("recipes/hybrid_tiny.py"),
    out: Path = Path("runs/demo"),
    k: CountOrZero | None = None,
    random_seeds: tuple[CountOrZero, ...] = (0,),
    restoration: bool = False,
    probe_like: bool = False,
) -> None:
    """Show the central result in one table: teacher, 0 heads, k random heads, top k heads; writes OUT/report.md.

    Args:
        recipe: The recipe that everything but the kept heads is taken from.
        out: The folder of the students and the report; a demo that was stopped resumes there.
        k: Attention heads kept; by default as many as the recipe keeps.
        random_seeds: Seeds of the random selections, one student each.
        restoration: Add a student whose heads are chosen by what they restore instead of what they cost.
        probe_like: Distill each student once more with the probe's own questions mixed in, for comparison.
    """
    base = replace(config_of(load_recipe(recipe)), out=out)
    students = comparison.variants(
        base.plan.k if k is None else k, random_seeds=random_seeds, restoration=restoration, probe_like=probe_like
    )
    folder = comparison.compare(base, students)
    if is_launched_main():
        finish(f"report: {folder / 'report.md'}", report=str(folder / "report.md"))
