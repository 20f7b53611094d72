"""Does the recurrence matter once the retrieval heads are kept? Students with each, by heads kept, at equal steps.

    python benchmarks/mixers.py --out runs/mixers    # resumes; writes benchmarks/results/mixers.json and a figure
    python benchmarks/mixers.py --out runs/mixers --only-report

One sweep for each recurrence: 0, 2, 4 and 8 heads of the embedded teacher, state 16, three seeds, 300 shared steps of
alignment and 100 of distillation. Seeds decide prompts, the start, and the order of the text; students of a seed keep
the same heads. About two hours of one core.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd
from provenance import ROOT, about, write
from scipy.stats import ttest_1samp

from hybrid_distill.cli import main as command
from hybrid_distill.lab.reporting.figures import LOOKS, Row, draw_lines

RECURRENCES = ("discrete", "mamba2", "gdn")
SETTINGS = ("align.steps=300", "evaluation.n-pairs=8,16,32", "evaluation.n-examples=128")
FIGURES = {
    "kv_generation_8": "8 pairs", "kv_generation_16": "16 pairs", "kv_generation_32": "32 pairs",
    "knowledge": "knowledge", "perplexity": "perplexity", "kl_to_teacher": "KL to the teacher",
}  # fmt: skip
RETRIEVAL = list(FIGURES)[:3]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/mixers"), help="folder with a sweep for each recurrence")
    parser.add_argument("--only-report", action="store_true", help="train nothing, read the students that are there")
    options = parser.parse_args()
    for recurrence in () if options.only_report else RECURRENCES:
        grid = ["--heads", "0,2,4,8", "--d-state", "16", "--seeds", "3", "--selection", "top"]
        fields = ["--set", f"student.recurrence={recurrence}", *SETTINGS]
        recipe = str(ROOT / "recipes" / "sweep_tiny.py")
        command(["sweep", recipe, "--out", str(options.out / recurrence), *grid, *fields])
    tables = {name: options.out / name / "results.csv" for name in RECURRENCES}
    found = pd.concat([pd.read_csv(path).assign(recurrence=name) for name, path in tables.items() if path.exists()])
    students = found[(found.state == "done") & (found.selection != "teacher")].astype({"heads": int})
    means = students.groupby(["recurrence", "heads"])[list(FIGURES)].agg(["mean", "std", "count"])
    record = {
        "students": {f"{name}, {heads} heads": _plain(row) for (name, heads), row in means.iterrows()},
        "less discrete, same seed": differences(students, "recurrence", "discrete", "heads"),
        "teacher": found[found.selection == "teacher"][list(FIGURES)].mean().to_dict(),
        **about("recurrences by heads kept"),
    }
    write(ROOT / "benchmarks" / "results" / "mixers.json", record)
    points = students.melt(["recurrence", "heads"], RETRIEVAL).groupby(["variable", "recurrence", "heads"], sort=False)
    points = (100 * points.value.agg(["mean", "std"])).reset_index().replace({"variable": FIGURES})
    points = points.set_axis(["panel", "line", "x", "y", "error"], axis=1)
    draw_lines(
        ROOT / "docs" / "mixers.png", "", [Row(points, "answered by generation", percent=True)],
        dict(zip(RECURRENCES, LOOKS)), "heads kept",
    )  # fmt: skip
    print(means.round(3).to_string(), pd.DataFrame(record["less discrete, same seed"]).T.to_string(), sep="\n\n")


def differences(students: pd.DataFrame, by: str, standard: str, *fixed: str) -> dict[str, dict[str, str]]:
    """Mean difference to the ``standard`` student of the same seed, with its 95 % interval (Student's t), for every
    other value of column ``by`` and every value of the ``fixed`` columns."""
    by_setting = students.set_index([by, *fixed, "seed"])[list(FIGURES)]
    found = {}
    for name in sorted({*students[by]} - {standard}):
        less = (by_setting.loc[name] - by_setting.loc[standard]).dropna()
        for group, rows in less.groupby(list(fixed)) if fixed else [((), less)]:
            tests = {figure: ttest_1samp(rows[figure], 0).confidence_interval() for figure in FIGURES}
            label = ", ".join([name, *(f"{value} {column}" for value, column in zip(group, fixed))])
            found[label] = {
                figure: f"{rows[figure].mean():+.4f} ({low:+.4f} to {high:+.4f})"
                for figure, (low, high) in tests.items()
            }
    return found


def _plain(row: pd.Series) -> dict[str, float]:
    return {" ".join(name): round(value, 4) for name, value in row.items()}


if __name__ == "__main__":
    main()
