"""Which score finds the heads that a student needs? Distils students by each of them, on the embedded teacher.

    python benchmarks/which_score.py                    # all seeds; goes on where it stopped
    python benchmarks/which_score.py --seeds 1          # one of them, for example beside another process
    python benchmarks/which_score.py --report           # the tables from what is there

For each seed every score ranks the 48 heads; students keep the first 1, 2, 4 and 8, start from the same aligned
recurrent heads, and are distilled alike on text without the probe's question. What is compared is KV retrieval by
generation. A seed decides the probe's prompts, the recurrent heads' start, and the order of the text. Two scores that
name the same heads share a student. Writes benchmarks/results/which_score.json.

One seed takes about half an hour on one core.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pandas as pd
from records import about, write

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

RESULTS = Path(__file__).parent / "results" / "which_score.json"
KEPT = (1, 2, 4, 8)
PAIRS = 8
EXAMPLES = 128
SEARCH_EXAMPLES = 32
"""Prompts for each head and round of the greedy searches, which look at log-probabilities."""


def config(out: Path, seed: int) -> RunConfig:
    """As recipes/hybrid_tiny.py, but for shorter distillation and evaluation: it is done some eighty times."""
    return RunConfig(
        name="which-score",
        out=out,
        seed=seed,
        student=StudentConfig(d_state=16),
        data=DataConfig(sources=("tiny",), seq_len=256),
        stages=(
            Align(steps=250, batch_size=8, learning_rate=3e-3, decay=0.5, target="head"),
            Distill(steps=100, batch_size=8, learning_rate=5e-4, decay=0.5),
        ),
        evaluation=EvaluationConfig(n_pairs=(PAIRS, 16), n_texts=16),
        export=False,
    )


def rankings(run: RunInputs) -> dict[str, list[HeadId]]:
    """The heads in each score's order; greedy searches name as many as are kept at most."""
    path = run.paths.out / "rankings.json"
    pairs = json.loads(path.read_text()) if path.exists() else {}
    for name, rank in _scores(run).items():
        if name not in pairs:
            pairs[name] = rank()
            path.write_text(json.dumps(pairs) + "\n")
    ranked = {}
    for name, heads in pairs.items():
        ranked[name] = [HeadId(*pair) for pair in heads]
    return ranked


def _scores(run: RunInputs) -> dict[str, Callable[[], list[HeadId]]]:
    probe = run.scoring_probe()
    teacher = (run.teacher, run.tokenizer, probe)
    count: dict[str, Any] = {"n_examples": EXAMPLES}
    few: dict[str, Any] = {"n_examples": SEARCH_EXAMPLES}

    def fully_recurrent() -> HybridForCausalLM:
        return trained_student(align_all_heads(run))[0].eval()

    return {
        "ablation": lambda: score_heads(*teacher, **count).ranking(),
        "joint ablation": lambda: joint_ablation(teacher, **few),
        "restoration": lambda: score_restoration(fully_recurrent(), *teacher, **count).ranking(),
        "greedy restoration": lambda: greedy_restoration(fully_recurrent(), *teacher, max(KEPT), **few),
        "random": lambda: random.Random(run.config.seed).sample(sorted(HeadPlan.all(run.teacher).kept), max(KEPT)),
    }


def joint_ablation(teacher: tuple[Any, ...], **options: Any) -> list[HeadId]:
    """Choose heads, each the one that is missed most once all before it are off."""
    chosen: list[HeadId] = []
    while len(chosen) < max(KEPT):
        chosen += score_heads(*teacher, removed=chosen, **options).ranking()[:1]
        options["min_accuracy"] = 0.0
    return chosen


def student(shared: RunInputs, heads: Iterable[HeadId]) -> EvalResult:
    """The student that keeps these heads, from the shared aligned start; measured once."""
    plan = HeadPlan.from_pairs(shared.teacher, heads)
    out = student_folder(shared, plan)
    if (out / "evaluation.json").exists():
        return EvalResult.load(out / "evaluation.json")
    made = replace(
        shared.config,
        out=out,
        plan=PlanConfig("pairs", pairs=tuple((h.layer, h.head) for h in plan.kept)),
        student=replace(shared.config.student, aligned=last_stage(align_all_heads(shared).paths)),
        stages=shared.config.student_stages,
    )
    run = RunInputs(made, shared.teacher_and_tokenizer)
    prepare(run)
    return evaluate_run(run, train(run, choose_heads(run)))


def student_folder(shared: RunInputs, plan: HeadPlan) -> Path:
    """One for each set of heads."""
    return shared.paths.out / "students" / hashlib.sha256(str(plan.kept).encode()).hexdigest()[:12]


def measure(out: Path, seeds: Iterable[int]) -> None:
    """Rank, distil, evaluate."""
    for seed in seeds:
        shared = RunInputs(config(out / f"seed-{seed}", seed))
        prepare(shared)
        found = rankings(shared)
        for k in KEPT:
            for name, heads in found.items():
                result = student(shared, heads[:k])
                print(f"seed {seed}: {name}, {k} heads: {retrieval(result):.1%}", flush=True)


def retrieval(result: EvalResult) -> float:
    """KV retrieval by generation."""
    return result.kv_generation[PAIRS]


def report(out: Path) -> dict[str, Any]:
    """Each student's retrieval by score, number of heads and seed, of those that are there; prints the table."""
    record: dict[str, Any] = {"pairs": PAIRS, "retrieval": {}, "heads": {}}
    found: dict[str, list[HeadId]] = {}
    for folder in sorted(out.glob("seed-*")):
        shared = RunInputs(config(folder, int(folder.name.removeprefix("seed-"))))
        found = found or rankings(shared)
        for name, heads in rankings(shared).items():
            first = [str(head) for head in heads[: max(KEPT)]]
            record["heads"].setdefault(name, {})[str(shared.config.seed)] = first
            for k in KEPT:
                path = student_folder(shared, HeadPlan.from_pairs(shared.teacher, heads[:k])) / "evaluation.json"
                if path.exists():
                    by_seed = record["retrieval"].setdefault(name, {}).setdefault(str(k), {})
                    by_seed[str(shared.config.seed)] = retrieval(EvalResult.load(path))
    print(f"{'retrieval of the student, % (seeds)':<36}" + "".join(f"{f'k = {k}':>18}" for k in KEPT))
    for name, by_k in record["retrieval"].items():
        print(f"{name:<36}" + "".join(f"{_cell(list(by_k.get(str(k), {}).values())):>18}" for k in KEPT))
    record["rankings"] = comparison_table(found, 4).splitlines()
    print("rankings of the first seed:", *record["rankings"], sep="\n")
    return record


def comparison_table(named: Mapping[str, Ranking], k: int) -> str:
    """Compare every ranking with every other: overlap@k above the diagonal, Spearman's correlation below it.

    Plain text. A dash stands where two rankings cannot be compared: too short for k, or no two heads in both.
    """

    def cell(i: int, a: Ranking, j: int, b: Ranking) -> str:
        compared = compare_rankings(a, b, [k])
        if i < j:
            return f"{compared.overlap[k]:.0%}" if k in compared.overlap else ABSENT
        return ABSENT if math.isnan(compared.spearman) else f"{compared.spearman:+.2f}"

    table = pd.DataFrame({f"overlap@{k} \\ Spearman": [f"({i}) {name}" for i, name in enumerate(named, start=1)]})
    for j, b in enumerate(named.values()):
        table[f"({j + 1})"] = ["" if i == j else cell(i, a, j, b) for i, a in enumerate(named.values())]
    return text_table(table)


def _cell(values: list[float]) -> str:
    if not values:
        return "-"
    spread = f" ± {100 * stdev(values):.0f}" if len(values) > 1 else ""
    return f"{100 * fmean(values):.1f}{spread} ({len(values)})"


def main() -> None:
    """See the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/which_score"), help="rankings and students")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    options = parser.parse_args()
    if not options.report:
        measure(options.out, options.seeds)
    head = about("retrieval of students by score, heads and seed", threads=os.cpu_count())
    write(RESULTS, head | report(options.out))


if __name__ == "__main__":
    main()
