r"""Rank KV groups by their best head, or by ablating the whole group: which plan makes the better student?

    python benchmarks/group_ranking.py                                            # the embedded teacher
    python benchmarks/group_ranking.py --teacher smollm2 --dtype bfloat16 --pairs 8 --window 44 \
        --scores hybrid_distill/assets/atlas/smollm2-135m-instruct.json --groups 4 8 12 16

"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import torch
from records import RESULTS, about, parser_of, read, write
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hybrid_distill.plan import HeadId, HeadPlan
from hybrid_distill.probes import Example
from hybrid_distill.probes.answering import answer_choices
from hybrid_distill.probes.kv_retrieval import KVRetrieval
from hybrid_distill.scoring import HeadScores
from hybrid_distill.student.build import build_student
from hybrid_distill.teacher import TINY, ablate_heads, load_teacher

SINKS = 4
Group = tuple[int, int]
"""Layer and KV head."""


def main() -> None:
    """Rank groups both ways, measure the students, and write the record."""
    parser = parser_of(__doc__, RESULTS / "group_ranking.json")
    parser.add_argument("--teacher", default=TINY)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--scores", type=Path, help="scores of single heads; by default they are ablated here"
    )
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument(
        "--examples", type=int, default=64, help="prompts that rank, and prompts that measure"
    )
    parser.add_argument("--window", type=int, default=16)
    parser.add_argument("--groups", type=int, nargs="+", default=[2, 4, 6, 8])
    options = parser.parse_args()
    torch.set_num_threads(1)
    teacher, tokenizer = load_teacher(options.teacher, dtype=options.dtype)
    plan = HeadPlan.none(teacher)
    examples = KVRetrieval(options.pairs, seed=0).examples(options.examples)
    held_out = KVRetrieval(options.pairs, seed=1).examples(options.examples)
    if options.scores is None:
        by_head = accuracy_without_heads(teacher, tokenizer, examples, plan)
    else:
        ranking = HeadScores.load(options.scores).ranking()
        by_head = {head: float(place) for place, head in enumerate(ranking)}

    rankings = {
        "best head": rank_by_best_head(by_head, plan),
        "whole group": rank_by_ablation(teacher, tokenizer, examples, plan),
    }
    rows: list[dict[str, Any]] = []
    for name, ranked in rankings.items():
        for n_groups in options.groups:
            first = ranked[:n_groups]
            student = student_of(teacher, first, plan, options.window)
            row = {
                "ranking": name,
                "groups": n_groups,
                "accuracy": accuracy(student, tokenizer, held_out),
                "first": [f"L{layer}G{number}" for layer, number in first],
            }
            rows.append(row)
            print(row, flush=True)

    record = read(options.out)
    record[Path(options.teacher).name] = {
        "rows": rows,
        "window": options.window,
        "pairs": options.pairs,
        "examples": options.examples,
        **about("rankings of KV groups", threads=1),
    }
    write(options.out, record)


def rank_by_best_head(by_head: dict[HeadId, float], plan: HeadPlan) -> list[Group]:
    """Rank groups by the head of least value: its place in a ranking, or the accuracy without it."""

    def least(group: Group) -> float:
        return min(by_head[head] for head in heads_of(group, plan))

    return sorted(groups_of(plan), key=least)


def rank_by_ablation(
    teacher: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: list[Example],
    plan: HeadPlan,
) -> list[Group]:
    """Rank groups by the accuracy without all of their heads."""
    accuracy_without: dict[Group, float] = {}
    for group in groups_of(plan):
        with ablate_heads(teacher, heads_of(group, plan)):
            accuracy_without[group] = accuracy(teacher, tokenizer, examples)
    return sorted(accuracy_without, key=accuracy_without.__getitem__)


def student_of(
    teacher: PreTrainedModel, groups: list[Group], plan: HeadPlan, window: int
) -> PreTrainedModel:
    """Build a student of windows alone that keeps these groups."""
    kept: list[HeadId] = []
    for group in groups:
        kept += heads_of(group, plan)
    student, _ = build_student(
        teacher,
        HeadPlan.from_pairs(teacher, kept),
        d_state=0,
        window=window,
        sinks=SINKS,
    )
    return student.eval()


def groups_of(plan: HeadPlan) -> list[Group]:
    return list(product(range(plan.n_layers), range(plan.n_kv_heads)))


def heads_of(group: Group, plan: HeadPlan) -> list[HeadId]:
    size = plan.n_heads // plan.n_kv_heads
    layer, number = group
    return [HeadId(layer, head) for head in range(number * size, (number + 1) * size)]


def accuracy_without_heads(
    teacher: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: list[Example],
    plan: HeadPlan,
) -> dict[HeadId, float]:
    """Return the accuracy without each head."""
    accuracies = {}
    for group in groups_of(plan):
        for head in heads_of(group, plan):
            with ablate_heads(teacher, [head]):
                accuracies[head] = accuracy(teacher, tokenizer, examples)
    return accuracies


def accuracy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, examples: list[Example]
) -> float:
    return answer_choices(model, tokenizer, examples, batch_size=32).accuracy


if __name__ == "__main__":
    main()
