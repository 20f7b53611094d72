"""Does the recurrence matter once the retrieval heads are kept? Students with each, by heads kept, at equal steps.

    python benchmarks/mixers.py    # resumes; writes benchmarks/results/mixers.json and docs/mixers.png

One sweep for each recurrence: 0, 2, 4 and 8 heads of the embedded teacher, state 16, three seeds, 300 shared steps of
alignment and 100 of distillation. Seeds decide prompts, the start, and the order of the text; students of a seed keep
the same heads. About two hours of one core.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pandas as pd
from by_seed import FIGURES, RETRIEVAL, differences, rounded
from records import RESULTS, ROOT, about, parser_of, write

from hybrid_distill.cli import main as command
from hybrid_distill.lab.reporting.figures import LOOKS, PanelRow, draw_lines

RECURRENCES = ("discrete", "mamba2", "gdn")
HEADS = "0,2,4,8"
SETTINGS = ("align.steps=300", "evaluation.n-pairs=8,16,32", "evaluation.n-examples=128")


def main() -> None:
    """Train what is missing, then write the record and the figure, and print the tables."""
    parser = parser_of(__doc__, RESULTS / "mixers.json")
    parser.add_argument(
        "--sweeps", type=Path, default=Path("runs/mixers"), help="folder of the sweeps"
    )
    parser.add_argument("--figure", type=Path, default=ROOT / "docs" / "mixers.png")
    parser.add_argument("--heads", default=HEADS, help="numbers of heads kept")
    parser.add_argument("--seeds", default="3", help="how many")
    # Other words are settings of every student, such as distill.steps=2.
    options, settings = parser.parse_known_args()

    tables: list[pd.DataFrame] = []
    for recurrence in RECURRENCES:
        out = options.sweeps / recurrence
        grid = ["--heads", options.heads, "--seeds", options.seeds]
        train(recurrence, out, grid, [*SETTINGS, *settings])
        table = pd.read_csv(out / "results.csv")
        tables.append(table.assign(recurrence=recurrence))
    rows = pd.concat(tables)
    is_teacher = rows.selection == "teacher"
    is_done = rows.state == "done"
    students = rows[is_done & ~is_teacher].astype({"heads": int})

    record = compared(students)
    record["teacher"] = rows[is_teacher][list(FIGURES)].mean().to_dict()
    write(options.out, record | about("recurrences by heads kept"))
    draw(students, options.figure)


def train(recurrence: str, out: Path, grid: list[str], settings: list[str]) -> None:
    """Run a sweep; students that are finished are skipped."""
    words = ["sweep", str(ROOT / "recipes" / "sweep_tiny.py"), "--out", str(out)]
    words += ["--d-state", "16", "--selection", "top", *grid]
    words += ["--set", *settings, f"student.recurrence={recurrence}"]
    command(words)


def compared(students: pd.DataFrame) -> dict[str, Any]:
    """Return means by recurrence and heads, and differences to ``discrete``; print both."""
    by_setting = students.groupby(["recurrence", "heads"])
    means = by_setting[list(FIGURES)].agg(["mean", "std", "count"])
    by_student: dict[str, dict[str, float]] = {}
    for student, row in means.iterrows():
        recurrence, heads = cast(tuple[str, int], student)
        by_student[f"{recurrence}, {heads} heads"] = rounded(row)

    less_discrete = differences(students, "recurrence", "discrete", ["heads"])
    print(means.round(3).to_string())
    print(pd.DataFrame(less_discrete).T.to_string())
    return {"students": by_student, "less discrete, same seed": less_discrete}


def draw(students: pd.DataFrame, path: Path) -> None:
    """Draw retrieval by heads kept, a line for each recurrence."""
    answers = students.melt(["recurrence", "heads"], list(RETRIEVAL))
    by_point = answers.groupby(["variable", "recurrence", "heads"], sort=False).value
    percent = 100 * by_point.agg(["mean", "std"])
    points = percent.reset_index().replace({"variable": RETRIEVAL})
    points = points.set_axis(["panel", "line", "x", "y", "error"], axis=1)
    row = PanelRow(points, "answered by generation", percent=True)
    draw_lines(path, "", [row], dict(zip(RECURRENCES, LOOKS)), "heads kept")


if __name__ == "__main__":
    main()
