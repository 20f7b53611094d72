"""Which score finds the heads that a student needs? Distils students by each of them, on the embedded teacher.

    python benchmarks/which_score.py                    # all seeds; resumes; writes benchmarks/results/which_score.json
    python benchmarks/which_score.py --seeds 1          # that one alone, for example beside another process

For each seed every score ranks the 48 heads; students keep the first 1, 2, 4 and 8, start from the same aligned
recurrent heads, and are distilled alike on text without the probe's question. What is compared is KV retrieval by
generation. A seed decides the probe's prompts, the recurrent heads' start, and the order of the text. Two scores that
name the same heads share a student.

One seed takes about half an hour on one core.
"""

from __future__ import annotations

import hashlib
import math
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pandas as pd
from records import RESULTS, about, parser_of, read, write

from hybrid_distill.config import EvaluationConfig, PlanConfig, RunConfig, StudentConfig
from hybrid_distill.data import DataConfig
from hybrid_distill.evaluation.evaluate import EvalResult
from hybrid_distill.lab.analysis.rankings import Ranking, compare_rankings
from hybrid_distill.lab.reporting import ABSENT, text_table
from hybrid_distill.model import HybridForCausalLM
from hybrid_distill.pipeline import RunInputs, last_stage, trained_student
from hybrid_distill.pipeline.run import align_all_heads, choose_heads, evaluate_run, prepare, train
from hybrid_distill.plan import HeadId, HeadPlan
from hybrid_distill.scoring import score_heads
from hybrid_distill.scoring.restoration import greedy_restoration, score_restoration
from hybrid_distill.train.config import Align, Distill

KEPT = (1, 2, 4, 8)
PAIRS = 8
COMPARED = 4
"""Heads at the top of two rankings whose overlap is shown."""


@dataclass(frozen=True)
class Size:
    """How much is measured and trained."""

    examples: int = 128
    """Prompts of a score that ranks all heads."""
    search_examples: int = 32
    """Prompts for each head and round of the greedy searches, which look at log-probabilities."""
    align_steps: int = 250
    distill_steps: int = 100
    texts: int = 16


SMALL = Size(examples=8, search_examples=2, align_steps=2, distill_steps=2, texts=2)


def config(out: Path, seed: int, size: Size) -> RunConfig:
    """As recipes/hybrid_tiny.py, but for shorter distillation and evaluation: it is done some eighty times."""
    align = Align(
        steps=size.align_steps,
        batch_size=8,
        learning_rate=3e-3,
        decay=0.5,
        target="head",
    )
    distill = Distill(steps=size.distill_steps, batch_size=8, learning_rate=5e-4, decay=0.5)
    return RunConfig(
        name="which-score",
        out=out,
        seed=seed,
        student=StudentConfig(d_state=16),
        data=DataConfig(sources=("tiny",), seq_len=256),
        stages=(align, distill),
        evaluation=EvaluationConfig(n_pairs=(PAIRS, 16), n_texts=size.texts),
        export=False,
    )


class Seed:
    """The run whose aligned heads all students of a seed start from, in a folder of its own."""

    def __init__(self, out: Path, seed: int, size: Size) -> None:
        self.seed = seed
        self.size = size
        self.shared = RunInputs(config(out / f"seed-{seed}", seed, size))
        prepare(self.shared)

    def rankings(self) -> dict[str, list[HeadId]]:
        """Return the heads in each score's order; greedy searches name as many as are kept at most."""
        path = self.shared.paths.out / "rankings.json"
        ranked = read(path)
        for name, rank in self.scores().items():
            if name not in ranked:
                ranked[name] = rank()
                write(path, ranked)
        rankings = {}
        for name, pairs in ranked.items():
            rankings[name] = [HeadId(*pair) for pair in pairs]
        return rankings

    def scores(self) -> dict[str, Callable[[], list[HeadId]]]:
        """Return what ranks the heads, by name."""
        run = self.shared
        teacher = (run.teacher, run.tokenizer, run.scoring_probe())
        n_examples = self.size.examples
        n_searched = self.size.search_examples
        most = max(KEPT)

        def recurrent() -> HybridForCausalLM:
            student, _ = trained_student(align_all_heads(run))
            return student.eval()

        def by_ablation() -> list[HeadId]:
            return score_heads(*teacher, n_examples=n_examples).ranking()

        def by_joint_ablation() -> list[HeadId]:
            return joint_ablation(teacher, most, n_searched)

        def by_restoration() -> list[HeadId]:
            return score_restoration(recurrent(), *teacher, n_examples=n_examples).ranking()

        def by_greedy_restoration() -> list[HeadId]:
            return greedy_restoration(recurrent(), *teacher, most, n_examples=n_searched)

        def by_chance() -> list[HeadId]:
            heads = sorted(HeadPlan.all(run.teacher).kept)
            return random.Random(self.seed).sample(heads, most)

        return {
            "ablation": by_ablation,
            "joint ablation": by_joint_ablation,
            "restoration": by_restoration,
            "greedy restoration": by_greedy_restoration,
            "random": by_chance,
        }

    def retrieval(self, heads: Iterable[HeadId]) -> float:
        """Return the KV retrieval, by generation, of the student that keeps these heads; trained once."""
        run = self.shared
        plan = HeadPlan.from_pairs(run.teacher, heads)
        # Scores that name the same heads meet in this folder.
        name = hashlib.sha256(str(plan.kept).encode()).hexdigest()[:12]
        out = run.paths.out / "students" / name
        evaluation = out / "evaluation.json"
        if evaluation.exists():
            return EvalResult.load(evaluation).kv_generation[PAIRS]

        pairs = tuple((head.layer, head.head) for head in plan.kept)
        aligned = last_stage(align_all_heads(run).paths)
        student_config = replace(
            run.config,
            out=out,
            plan=PlanConfig("pairs", pairs=pairs),
            student=replace(run.config.student, aligned=aligned),
            stages=run.config.student_stages,
        )
        student_run = RunInputs(student_config, run.teacher_and_tokenizer)
        prepare(student_run)
        student = train(student_run, choose_heads(student_run))
        return evaluate_run(student_run, student).kv_generation[PAIRS]


def joint_ablation(teacher: tuple[Any, ...], n_heads: int, n_examples: int) -> list[HeadId]:
    """Choose heads, each the one that is missed most once all before it are off."""
    chosen: list[HeadId] = []
    options: dict[str, Any] = {"n_examples": n_examples}
    while len(chosen) < n_heads:
        chosen += score_heads(*teacher, removed=chosen, **options).ranking()[:1]
        # The whole teacher must know the answers. Without its first heads it no longer does.
        options["min_accuracy"] = 0.0
    return chosen


def measure(out: Path, seeds: Sequence[int], size: Size) -> dict[str, Any]:
    """Rank, distil, evaluate; return each student's retrieval by score, number of heads and seed."""
    retrieval: dict[str, dict[str, dict[str, float]]] = {}
    first_heads: dict[str, dict[str, list[str]]] = {}
    tables = []
    for number in seeds:
        seed = Seed(out, number, size)
        rankings = seed.rankings()
        tables.append(comparison_table(rankings, COMPARED))
        for name, heads in rankings.items():
            first = [str(head) for head in heads[: max(KEPT)]]
            first_heads.setdefault(name, {})[str(number)] = first
            by_kept = retrieval.setdefault(name, {})
            for k in KEPT:
                share = seed.retrieval(heads[:k])
                by_kept.setdefault(str(k), {})[str(number)] = share
                print(f"seed {number}: {name}, {k} heads: {share:.1%}", flush=True)
    return {
        "pairs": PAIRS,
        "retrieval": retrieval,
        "heads": first_heads,
        "rankings": tables[0].splitlines(),
    }


def show(record: dict[str, Any]) -> None:
    """Print retrieval by score, and how the rankings of the first seed compare."""
    rows = []
    for name, by_k in record["retrieval"].items():
        row = {"score": name}
        for k in KEPT:
            row[f"k = {k}"] = percent(list(by_k[str(k)].values()))
        rows.append(row)
    print("retrieval of the student, % (seeds)")
    print(text_table(pd.DataFrame(rows)))
    print("rankings of the first seed:", *record["rankings"], sep="\n")


def percent(shares: list[float]) -> str:
    """Format the mean and deviation over seeds, and their number."""
    spread = f" ± {100 * stdev(shares):.0f}" if len(shares) > 1 else ""
    return f"{100 * fmean(shares):.1f}{spread} ({len(shares)})"


def comparison_table(rankings: Mapping[str, Ranking], k: int) -> str:
    """Compare every ranking with every other: overlap@k above the diagonal, Spearman's correlation below it.

    Plain text. A dash stands where two rankings cannot be compared: too short for k, or no two heads in both.
    """
    corner = f"overlap@{k} \\ Spearman"
    rows: list[dict[str, str]] = []
    for row_number, (name, ranking) in enumerate(rankings.items(), start=1):
        row = {corner: f"({row_number}) {name}"}
        for column_number, other in enumerate(rankings.values(), start=1):
            cell = ""
            if row_number < column_number:
                cell = overlap_text(ranking, other, k)
            elif row_number > column_number:
                cell = correlation_text(ranking, other, k)
            row[f"({column_number})"] = cell
        rows.append(row)
    return text_table(pd.DataFrame(rows))


def overlap_text(ranking: Ranking, other: Ranking, k: int) -> str:
    overlap = compare_rankings(ranking, other, [k]).overlap
    if k not in overlap:
        return ABSENT
    return f"{overlap[k]:.0%}"


def correlation_text(ranking: Ranking, other: Ranking, k: int) -> str:
    spearman = compare_rankings(ranking, other, [k]).spearman
    if math.isnan(spearman):
        return ABSENT
    return f"{spearman:+.2f}"


def main() -> None:
    """Measure what is missing, write the JSON, print the tables."""
    parser = parser_of(__doc__, RESULTS / "which_score.json")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--runs",
        type=Path,
        default=Path("runs/which_score"),
        help="folder of rankings and students",
    )
    parser.add_argument("--small", action="store_true", help="few steps and prompts")
    options = parser.parse_args()
    record = measure(options.runs, options.seeds, SMALL if options.small else Size())
    show(record)
    head = about("retrieval of students by score, heads and seed", threads=os.cpu_count())
    write(options.out, head | record)


if __name__ == "__main__":
    main()
