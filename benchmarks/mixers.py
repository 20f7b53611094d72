"""Does the recurrence matter once the retrieval heads are kept? Students with each, by heads kept, at equal steps.

    python benchmarks/mixers.py --out runs/mixers    # resumes; writes benchmarks/results/mixers.json and a figure
    python benchmarks/mixers.py --out runs/mixers --only-report

One sweep for each recurrence: 0, 2, 4 and 8 heads of the embedded teacher, state 16, three seeds, 300 shared steps of
alignment and 100 of distillation. Seeds decide prompts, the start, and the order of the text; students of a seed keep
the same heads. About two hours of one core.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from records import RESULTS, ROOT, about, parser_of, write
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
    """Train what is missing, then write the record and the figure, and print the tables."""
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/mixers"), help="folder with a sweep for each recurrence")
    parser.add_argument("--only-report", action="store_true", help="train nothing, read the students that are there")
    options = parser.parse_args()
    if not options.only_report:
        for recurrence in RECURRENCES:
            train(recurrence, options.out / recurrence)
    rows = results(options.out)
    students = rows[(rows.state == "done") & (rows.selection != "teacher")].astype({"heads": int})
    means = students.groupby(["recurrence", "heads"])[list(FIGURES)].agg(["mean", "std", "count"])
    by_student = {}
    for (name, heads), row in means.iterrows():
        by_student[f"{name}, {heads} heads"] = plain(row)
    record = {
        "students": by_student,
        "less discrete, same seed": differences(students, "recurrence", "discrete", "heads"),
        "teacher": rows[rows.selection == "teacher"][list(FIGURES)].mean().to_dict(),
        **about("recurrences by heads kept"),
    }
    write(RESULTS / "mixers.json", record)
    draw(students)
    print(means.round(3).to_string(), pd.DataFrame(record["less discrete, same seed"]).T.to_string(), sep="\n\n")


def train(recurrence: str, out: Path) -> None:
    recipe = str(ROOT / "recipes" / "sweep_tiny.py")
    grid = ["--heads", "0,2,4,8", "--d-state", "16", "--seeds", "3", "--selection", "top"]
    fields = ["--set", f"student.recurrence={recurrence}", *SETTINGS]
    command(["sweep", recipe, "--out", str(out), *grid, *fields])


def results(out: Path) -> pd.DataFrame:
    """Return the rows of the sweeps that are there."""
    tables = []
    for name in RECURRENCES:
        path = out / name / "results.csv"
        if path.exists():
            tables.append(pd.read_csv(path).assign(recurrence=name))
    if not tables:
        raise SystemExit(f"{out} has no sweep; run this without --only-report.")
    return pd.concat(tables)


def draw(students: pd.DataFrame) -> None:
    """Draw retrieval by heads kept, a line for each recurrence."""
    answers = students.melt(["recurrence", "heads"], RETRIEVAL)
    by_point = answers.groupby(["variable", "recurrence", "heads"], sort=False).value
    points = (100 * by_point.agg(["mean", "std"])).reset_index().replace({"variable": FIGURES})
    points = points.set_axis(["panel", "line", "x", "y", "error"], axis=1)
    row = Row(points, "answered by generation", percent=True)
    draw_lines(ROOT / "docs" / "mixers.png", "", [row], dict(zip(RECURRENCES, LOOKS)), "heads kept")


def differences(students: pd.DataFrame, by: str, standard: str, *fixed: str) -> dict[str, dict[str, str]]:
    """Return mean differences to the ``standard`` student of the same seed, with 95 % intervals (Student's t).

    There is a row for every other value of column ``by`` and every value of the ``fixed`` columns.
    """
    by_setting = students.set_index([by, *fixed, "seed"])[list(FIGURES)]
    rows = {}
    for name in sorted({*students[by]} - {standard}):
        less = (by_setting.loc[name] - by_setting.loc[standard]).dropna()
        groups = less.groupby(list(fixed)) if fixed else [((), less)]
        for values, seeds in groups:
            label = ", ".join([name, *(f"{value} {column}" for value, column in zip(values, fixed))])
            rows[label] = {figure: with_interval(seeds[figure]) for figure in FIGURES}
    return rows


def with_interval(differences: pd.Series) -> str:
    low, high = ttest_1samp(differences, 0).confidence_interval()
    return f"{differences.mean():+.4f} ({low:+.4f} to {high:+.4f})"


def plain(row: pd.Series) -> dict[str, float]:
    return {" ".join(name): round(value, 4) for name, value in row.items()}


if __name__ == "__main__":
    main()
