"""First figure of a run's report: the student against its teacher at a glance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...evaluation.result import size_shown
from .document import Figure, sizes, task_name
from .figures import (
    BLUE,
    GREY,
    as_block,
    figure,
    has_matplotlib,
    look,
    name_points,
    percent_axis,
)
from .record import GUESSING, STUDENT, TEACHER, RunRecord

SIZE = (10.0, 3.8)
MOST_SHOWN = 1.3
"""Relative scores beyond this share end at the edge: few questions make them uncertain."""
READINGS = {"kv_generation": "by generation", "kv_choice": "by choice"}
"""Ways to answer a dictionary, the one that is shown first."""


def draw_glance(record: RunRecord, path: Path) -> list[Figure]:
    """Draw retrieval over cache, and by task the student's accuracy relative to its teacher's.

    Returns the figure, or nothing without both evaluations, without dictionaries or without matplotlib.
    """
    lengths = sizes(record.models, "cache_bytes")
    kept = {task: score for task, score in record.kept.items() if score is not None}
    if not (kept and lengths and has_matplotlib()):
        return []
    reading, n_pairs = reading_shown(record)
    if f"{reading}_{n_pairs}" not in record.models:
        return []
    with figure(path, 1, 2, size=SIZE) as grid:
        _draw_cache(grid[0, 0], record, f"{reading}_{n_pairs}", lengths[-1])
        grid[0, 0].set_title(f"retrieval {READINGS[reading]}, {n_pairs} pairs")
        _draw_kept(grid[0, 1], kept)
    caption = (
        f"Left: dictionaries of {n_pairs} pairs answered {READINGS[reading]}, over the cache of one sequence of "
        f"{lengths[-1]:,} tokens. Right: what the student keeps of its teacher beyond guessing. "
        "Bars: one standard error."
    )
    return [as_block(path, caption, grid)]


def reading_shown(record: RunRecord) -> tuple[str, int]:
    """Choose (reading, pairs) at which the teacher itself is above guessing: at others no loss could be seen.

    A small chat model may answer by choice and generate something else.
    """
    models = record.models
    tasks = [task for task, score in record.kept.items() if score is not None]
    answered = models.loc[:, models.columns.intersection(tasks)]
    for reading in READINGS:
        measured = sizes(answered, reading)
        if measured:
            return reading, size_shown(measured)
    return "kv_generation", size_shown(sizes(models, "kv_generation"))


def _draw_cache(axes: Any, record: RunRecord, name: str, length: int) -> None:
    for model in (TEACHER, STUDENT):
        size = record.models.loc[model, f"cache_bytes_{length}"] / 1e6
        accuracy = 100 * record.models.loc[model, name]
        error = 100 * record.errors.loc[model, name]
        style = look(model)
        drawn = axes.errorbar(size, accuracy, yerr=error, color=style.color, marker=style.marker)
        name_points(drawn[0], [f"{model}: {accuracy:.1f} ± {error:.1f} %, {size:.3g} MB"])
        axes.annotate(
            model, (size, accuracy), (8, -12), textcoords="offset points", color=style.color
        )
    chance = 100 * record.models.loc[GUESSING, name]
    axes.axhline(chance, color=GREY, linestyle="dotted", linewidth=0.9)
    axes.annotate(
        GUESSING, (1, chance), (-4, 3), ("axes fraction", "data"), "offset points",
        ha="right", color=GREY, fontsize=8,
    )  # fmt: skip
    # From zero, so that lengths show the saving; beyond the teacher, for its name.
    axes.set_xlim(0, 1.25 * axes.get_xlim()[1])
    axes.set_xlabel(f"cache at {length:,} tokens, MB", fontsize=9)
    percent_axis(axes)


def _draw_kept(axes: Any, kept: dict[str, tuple[float, float]]) -> None:
    names = [task_name(task) for task in kept]
    scores = [100 * score for score, _ in kept.values()]
    errors = [100 * error for _, error in kept.values()]
    places = range(len(kept))
    drawn = axes.errorbar(scores, places, xerr=errors, color=BLUE, marker="o", linestyle="none")
    titles = []
    for name, score, error in zip(names, scores, errors):
        titles.append(f"{name}: {score:.1f} ± {error:.1f} %")
    name_points(drawn[0], titles)
    axes.axvline(100, color=look(TEACHER).color, linewidth=0.9)
    axes.set_yticks(places, names, fontsize=9)
    axes.invert_yaxis()
    axes.grid(axis="x")
    farthest = min(max(scores) + max(errors), 100 * MOST_SHOWN)
    axes.set_xlim(0, max(110, farthest))
    axes.set_xticks(range(0, 101, 25), [f"{value} %" for value in range(0, 101, 25)])
    axes.set_title("kept of the teacher")
