"""Is a state worth its bytes beside a window? Students of the embedded teacher at equal constant bytes and tokens.

    python benchmarks/window_or_state.py    # resumes; writes benchmarks/results/window_or_state.json

Six heads stay attention, ranked once for each seed. What the other heads hold has about 43 kB in every student: a
state of 16 (the recipe's gated delta rule), the last 32 tokens and the first 4, or half of each. Three seeds, which
decide prompts, the start and the order of the text; 0.6 million tokens, of which alignment gets two thirds without
windows (docs/training.md) and a tenth beside them. About an hour of one core.
"""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
from by_seed import FIGURES, differences, rounded
from records import RESULTS, about, parser_of, write

from hybrid_distill.cli import main as command
from hybrid_distill.evaluation.result import EvalResult

STANDARD = "window 32 + 4"


def sizes(*, d_state: int, window: int = 0, sinks: int = 0) -> list[str]:
    """Return the flags of what the replaced heads hold."""
    flags = ["--student.d-state", str(d_state)]
    if window:
        flags += ["--student.window", str(window), "--student.sinks", str(sinks)]
    return flags


STUDENTS = {
    "state 16": [*sizes(d_state=16), "--align-share", "0.67"],
    STANDARD: [*sizes(d_state=0, window=32, sinks=4), "--stages", "distill"],
    "window 14 + 4, state 8": sizes(d_state=8, window=14, sinks=4),
}
EVALUATION = ["--evaluation.n-pairs", "8", "16", "32", "--evaluation.n-examples", "128"]


def main() -> None:
    """Train what is missing, then write the record and print the tables."""
    parser = parser_of(__doc__, RESULTS / "window_or_state.json")
    parser.add_argument("--runs", type=Path, default=Path("runs/window_or_state"))
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--tokens", default="0.6M")
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    for seed in range(options.seeds):
        # The first student of a seed ranks the heads for the others.
        scores = None
        for name, flags in STUDENTS.items():
            words = name.replace(",", "").split()
            folder = options.runs / f"{'-'.join(words)}-s{seed}"
            if not (folder / "evaluation.json").exists():
                train(folder, seed, scores, [*flags, "--tokens", options.tokens])
            scores = scores or folder / "scores.json"
            rows.append({"student": name, "seed": seed, **figures_of(folder)})
    students = pd.DataFrame(rows)

    names = [*FIGURES, "cache_bytes_4096"]
    # A single seed has neither a deviation nor an interval.
    statistics = ["mean"] if options.seeds == 1 else ["mean", "std"]
    means = students.groupby("student", sort=False)[names].agg(statistics)
    print(means.T.round(4).to_string())
    record: dict[str, object] = {
        "students": {name: rounded(row) for name, row in means.iterrows()},
        "seeds": options.seeds,
        "tokens": options.tokens,
    }
    if options.seeds > 1:
        less = differences(students, "student", STANDARD)
        print(pd.DataFrame(less).T.to_string())
        record[f"less {STANDARD}, same seed"] = less
    write(options.out, record | about("a window, a state, or half of each"))


def train(folder: Path, seed: int, scores: Path | None, flags: list[str]) -> None:
    """Run the tiny recipe; students of a seed keep the same heads."""
    words = ["--seed", str(seed), "--data.seed", str(seed), "--out", str(folder), "--no-export"]
    if scores is not None:
        words += ["--scoring.file", str(scores)]
    command(["run", "tiny", *words, *EVALUATION, *flags])


def figures_of(folder: Path) -> dict[str, float]:
    record = json.loads((folder / "evaluation.json").read_text())
    return EvalResult.from_dict(record).figures()


if __name__ == "__main__":
    main()
