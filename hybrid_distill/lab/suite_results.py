"""Results of lm-eval tasks: the papers' metrics, coverage of a teacher, tables on disk."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from ..io import Record, write_json, write_text
from ..probes.ruler import TASKS as RULER_TASKS
from .reporting import markdown_table, percent_change, with_error
from .suite_job import RESULTS, SUITES

HEADLINES = {
    "arc_challenge": "acc_norm,none",
    "hellaswag": "acc_norm,none",
    "openbookqa": "acc_norm,none",
    "lambada_openai": "acc,none",
    "gsm8k": "exact_match,strict-match",
    "text": "byte_perplexity,none",
}
"""Metric and filter that the papers report, for tasks whose first metric is another."""


def headline(task: str, metrics: Iterable[str]) -> str:
    """Return the ``METRIC,FILTER`` to report for a task: that of the papers, or the first."""
    if task in HEADLINES:
        return HEADLINES[task]
    return next(key for key in metrics if "," in key and "_stderr," not in key)


def summary(results: Record, teacher: Record | None = None) -> pd.DataFrame:
    """Tabulate the headline of each reported task, and its ratio to the teacher's.

    There is no ratio if lower is better or the teacher scores 0.
    """
    rows: list[Record] = []
    for task in results["asked"]:
        figures = results["results"][task]
        key = headline(task, figures)
        metric, _, kind = key.partition(",")
        row: Record = {"task": task, "metric": metric, "value": figures[key]}
        row["stderr"] = _error(figures, metric, kind)
        if teacher is not None:
            teacher_figures = teacher["results"][task]
            row["teacher"] = teacher_figures[key]
            row["teacher_stderr"] = _error(teacher_figures, metric, kind)
            row["ratio"] = None
            if results["higher_is_better"][task].get(metric, True) and row["teacher"] > 0:
                row["ratio"] = row["value"] / row["teacher"]
        rows.append(row)
    return pd.DataFrame(rows)


def _error(figures: Record, metric: str, kind: str) -> float | None:
    error = figures.get(f"{metric}_stderr,{kind}")
    return None if error == "N/A" else error


def coverage(table: pd.DataFrame) -> dict[str, float]:
    """Return the mean ratio over those tasks of each half of the paper's suite that have one."""
    shares: dict[str, float] = {}
    for suite in ("paper-knowledge", "paper-retrieval"):
        ratios = table[table.task.isin(SUITES[suite])].ratio.dropna()
        if len(ratios):
            shares[suite] = float(ratios.mean())
    return shares


def write_results(folder: Path, results: Record, teacher: Record | None = None) -> None:
    """Write results.json, results.md with lm-eval's own tables, and the teacher's in a folder."""
    from lm_eval.utils import make_table

    if teacher is not None:
        write_results(folder / "teacher", teacher)
        table = summary(results, teacher)
        rows = json.loads(str(table.to_json(orient="records")))
        results["comparison"] = {"tasks": rows, "coverage": coverage(table)}
    tables = [render(results, teacher), make_table(results)]
    if "groups" in results:
        tables.append(make_table(results, "groups"))
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "results.md", "\n\n".join(tables) + "\n")
    write_json(folder / RESULTS, results)


def render(results: Record, teacher: Record | None = None) -> str:
    """Render Markdown: a row per task, coverage of the teacher, truncated prompts."""
    table = summary(results, teacher)
    rows: list[dict[str, str]] = []
    for row in table.to_dict("records"):
        cells = {"task": row["task"], "metric": row["metric"]}
        cells["value"] = with_error(row["value"], row["stderr"], 3)
        if teacher is not None:
            cells["teacher"] = with_error(row["teacher"], row["teacher_stderr"], 3)
            cells["change"] = percent_change(row["ratio"])
        rows.append(cells)
    blocks = [markdown_table(pd.DataFrame(rows), text_columns=2)]
    if teacher is not None:
        for suite, share in coverage(table).items():
            blocks.append(f"Coverage of the teacher, {suite}: {share:.1%}")
    ruler = ruler_by_length(results, teacher)
    if not ruler.empty:
        blocks += ["RULER by length in tokens:", markdown_table(ruler, text_columns=2)]
    for task, n_prompts in results["truncated"].items():
        blocks.append(f"{task}: {n_prompts} prompts truncated on the left")
    return "\n\n".join(blocks)


def ruler_by_length(results: Record, teacher: Record | None = None) -> pd.DataFrame:
    """Tabulate RULER's tasks, a column per prompt length; empty without one of them."""
    models = {"model": results}
    if teacher is not None:
        models["teacher"] = teacher
    rows: dict[tuple[str, str], dict[int, str]] = {}
    for task in RULER_TASKS:
        for name, measured in models.items():
            cells = {}
            for part, figures in measured["results"].items():
                base, _, length = part.rpartition("_")
                if base == task:
                    error = _error(figures, "acc", "none")
                    cells[int(length)] = with_error(figures["acc,none"], error, 3)
            if cells:
                rows[task, name] = cells
    table = pd.DataFrame.from_dict(rows, orient="index").sort_index(axis="columns")
    table = table.rename(columns=lambda length: f"{length:,}").fillna("")
    names = pd.DataFrame(list(rows), columns=["task", ""], index=table.index)
    return pd.concat([names, table], axis="columns")
