"""Compare students of several seeds: means, deviations, and differences between students of the same seed."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from scipy.stats import ttest_1samp

__all__ = ["FIGURES", "RETRIEVAL", "differences", "rounded"]

RETRIEVAL = {
    "kv_generation_8": "8 pairs",
    "kv_generation_16": "16 pairs",
    "kv_generation_32": "32 pairs",
}
FIGURES = (*RETRIEVAL, "knowledge", "perplexity", "kl_to_teacher")
"""Columns that students are compared by."""


def differences(
    students: pd.DataFrame,
    by: str,
    standard: str,
    fixed: Sequence[str] = (),
    figures: Sequence[str] = FIGURES,
) -> dict[str, dict[str, str]]:
    """Return mean differences to the ``standard`` student of the same seed, with 95 % intervals (Student's t).

    There is a row for every other value of column ``by`` and every value of the ``fixed`` columns. A seed counts
    if both students have it; an interval needs two.
    """
    by_setting = students.set_index([by, *fixed, "seed"])[list(figures)]
    names = set(students[by]) - {standard}
    rows: dict[str, dict[str, str]] = {}
    for name in sorted(names):
        less_standard = by_setting.loc[name] - by_setting.loc[standard]
        of_both = less_standard.dropna()
        groups = of_both.groupby(list(fixed)) if fixed else [((), of_both)]
        for values, of_group in groups:
            words = [name]
            for value, column in zip(values, fixed):
                words.append(f"{value} {column}")
            intervals = {figure: with_interval(of_group[figure]) for figure in figures}
            rows[", ".join(words)] = intervals
    return rows


def with_interval(values: pd.Series) -> str:
    low, high = ttest_1samp(values, 0).confidence_interval()
    return f"{values.mean():+.4f} ({low:+.4f} to {high:+.4f})"


def rounded(row: pd.Series) -> dict[str, float]:
    """Return a row whose columns have two levels, such as a figure and its mean."""
    return {" ".join(name): round(value, 4) for name, value in row.to_dict().items()}
