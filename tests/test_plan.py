"""HeadPlan: which heads stay attention, and the best ones under a budget, against every plan there is."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from head_tables import some_scores
from transformers import PreTrainedModel

from hybrid_distill.cli.plan import PlanJob, make_plan
from hybrid_distill.plan import HeadId, HeadPlan, cache_bytes
from hybrid_distill.scoring import HeadScores

LAYERS, HEADS, KV_HEADS = 3, 8, 4
SHAPE = SimpleNamespace(n_layers=LAYERS, n_heads=HEADS, n_kv_heads=KV_HEADS)
RANKING = [HeadId(2, 7), HeadId(0, 1), HeadId(2, 0), HeadId(1, 5)]
HEADER = '{"format": "hybrid-distill/head-plan/1"'
SIZES = {"head_dim": 4, "d_state": 8}


def ranked() -> HeadScores:
    """Four of the 24 heads are ranked, as in a hybrid teacher whose other layers have no attention."""
    accuracy_LH, logprob_LH = torch.full((2, LAYERS, HEADS), torch.nan)
    for head, accuracy, logprob in zip(RANKING, (0.4, 0.3, 0.2, 0.1), (0.1, 0.2, 0.2, 0.4)):
        accuracy_LH[head], logprob_LH[head] = accuracy, logprob
    return some_scores(accuracy_LH, logprob_LH, n_kv_heads=KV_HEADS)


def test_top_k_takes_the_head_of_the_ranking(caplog) -> None:
    plan = HeadPlan.top_k(ranked(), 3)
    assert plan.kept == tuple(sorted(RANKING[:3])) and plan.k == 3
    assert set(HeadPlan.top_k(ranked(), 3, by="logprob").kept) == set(RANKING[1:])
    assert HeadPlan.top_k(ranked(), 0) == HeadPlan.none(SHAPE)
    assert not caplog.records
    for _ in range(2):
        HeadPlan.top_k(ranked(), 2, by="logprob")
    (warning,) = caplog.messages
    assert "the cut at k = 2 falls inside a tie: L0H1 is kept, L2H0 is not" in warning
    with pytest.raises(ValueError, match="k is 5, but only 4 heads"):
        HeadPlan.top_k(ranked(), 5)


def test_random_follows_from_its_seed_on_every_python() -> None:
    plans = [HeadPlan.random(SHAPE, 5, seed) for seed in range(20)]
    assert plans == [HeadPlan.random(SHAPE, 5, seed) for seed in range(20)]
    assert len({plan.kept for plan in plans}) == 20 and all(plan.k == 5 for plan in plans)
    assert list(HeadPlan.random(SHAPE, 3, seed=0).kept) == [(0, 6), (1, 7), (2, 4)]


def test_whole_layers_all_and_none() -> None:
    one = HeadPlan.layers(SHAPE, [1])
    assert [one.kept_in(layer) for layer in range(LAYERS)] == [(), tuple(range(HEADS)), ()]
    assert HeadPlan.all(SHAPE) == HeadPlan.layers(SHAPE, range(LAYERS)) and HeadPlan.all(SHAPE).keeps_all
    assert HeadPlan.none(SHAPE).kept == () and HeadPlan.none(SHAPE).teacher == ""


def test_kept_and_recurrent_heads_partition_a_layer() -> None:
    plan = HeadPlan.from_pairs(SHAPE, [(1, 5), (1, 0), (2, 7), (0, 6), (0, 7), (0, 2)])
    assert plan.kept_in(1) == (0, 5) and plan.recurrent_in(1) == (1, 2, 3, 4, 6, 7)
    for layer in range(LAYERS):
        assert sorted(plan.kept_in(layer) + plan.recurrent_in(layer)) == list(range(HEADS))
    assert plan.kv_groups_in(0) == (1, 3), "two query heads share a KV head: 2 // 2 = 1, 6 // 2 = 7 // 2 = 3"
    assert plan.n_stored_kv_heads == 2 + 2 + 1


def test_a_plan_and_its_teacher_are_read_back(tmp_path: Path) -> None:
    plan = HeadPlan.random(HeadPlan.top_k(drawn(3, 8, 4), 4), 3, seed=0)
    plan.save(tmp_path / "plan.json")
    assert HeadPlan.load(tmp_path / "plan.json") == plan and plan.teacher == "abc"


def test_shape_is_read_from_a_model_and_from_its_config(
    family: str, family_model: Callable[..., PreTrainedModel]
) -> None:
    model = family_model(family)
    plan = HeadPlan.none(model)
    assert plan == HeadPlan.none(model.config)
    assert (plan.n_layers, plan.n_heads, plan.n_kv_heads) == (LAYERS, HEADS, HEADS if family == "gpt_neox" else 4)
    plan.check_fits(model)
    assert HeadPlan.none(SimpleNamespace(num_hidden_layers=2, num_attention_heads=6)).n_kv_heads == 6


SHAPE_FIELDS: dict[str, Any] = {"n_layers": LAYERS, "n_heads": HEADS, "n_kv_heads": KV_HEADS, "kept": ()}
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "another shape": (
        lambda: HeadPlan.none(SHAPE).check_fits(SimpleNamespace(n_layers=3, n_heads=8, n_kv_heads=8)),
        "another teacher: it expects 3 layers, 8 heads, 4 KV heads",
    ),
    "no heads": (lambda: HeadPlan.none(7), "int has no head counts"),
    "no such head": (lambda: HeadPlan.from_pairs(SHAPE, [(0, 8)]), r"L0H8 does not exist.*0\.\.2 with heads 0\.\.7"),
    "no such layer": (lambda: HeadPlan.layers(SHAPE, [0, 3]), "L3H0 does not exist"),
    "named twice": (lambda: HeadPlan.from_pairs(SHAPE, [(0, 1), (0, 1)]), "named twice: L0H1; name each head once"),
    "k above": (lambda: HeadPlan.top_k(ranked(), 25), "k is 25; it must be a whole number from 0 to 24"),
    "k below": (lambda: HeadPlan.random(SHAPE, -1, seed=0), "whole number from 0 to 24"),
    "heads": (lambda: HeadPlan(**{**SHAPE_FIELDS, "n_heads": 1.5}), "n_heads is 1.5; it must be a whole number"),
    "groups": (lambda: HeadPlan(**{**SHAPE_FIELDS, "n_kv_heads": 3}), "8 query heads cannot share 3 KV heads evenly"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_an_impossible_plan_is_refused(fault: str) -> None:
    make, message = REFUSED[fault]
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "text",
    [
        None, "{", "null", "\x00\xff", '{"format": "hybrid-distill/head-scores/1"}', HEADER + "}",
        HEADER + ', "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "kept": [[0]]}',
    ],
)  # fmt: skip
def test_a_file_that_is_not_a_plan(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"plan\.json is not a head plan"):
        HeadPlan.load(path)


def drawn(n_layers: int, n_heads: int, n_kv_heads: int, seed: int = 0) -> HeadScores:
    """Accuracy drops in eighths, as of eight examples, so that many are equal or below zero."""
    generator = torch.Generator().manual_seed(seed)
    accuracy_LH = torch.randint(-2, 6, (n_layers, n_heads), generator=generator) / 8
    logprob_LH = torch.randn(n_layers, n_heads, generator=generator, dtype=torch.float64)
    return some_scores(accuracy_LH, logprob_LH, n_kv_heads=n_kv_heads, provenance={"fingerprint": "abc"})


def worth(scores: HeadScores, plan: HeadPlan) -> float:
    value_LH = scores.accuracy_drop_LH + 1e-6 * scores.logprob_drop_LH
    return sum(value_LH[head].item() for head in plan.kept)


SMALL = pytest.mark.parametrize(
    "scores", [drawn(2, 4, 2), drawn(4, 2, 2, seed=2), drawn(1, 8, 4, seed=3)], ids=["2x4/2", "4x2/2", "1x8/4"]
)


def every_plan(scores: HeadScores) -> list[HeadPlan]:
    heads = HeadPlan.all(scores).kept
    sizes = range(len(heads) + 1)
    return [HeadPlan.from_pairs(scores, kept) for size in sizes for kept in itertools.combinations(heads, size)]


def kv_counts(plan: HeadPlan) -> list[int]:
    return [len(plan.kv_groups_in(layer)) for layer in range(plan.n_layers)]


def size(plan: HeadPlan, context: int, windows: Any = None) -> int:
    return cache_bytes(plan, length=context, windows=windows, **SIZES).total


@SMALL
def test_no_plan_under_the_budget_is_worth_more(scores: Any) -> None:
    plans = every_plan(scores)

    def check(found: HeadPlan, cost: Callable[[HeadPlan], int], budget: int) -> None:
        assert cost(found) <= budget
        best = max(worth(scores, plan) for plan in plans if cost(plan) <= budget)
        assert worth(scores, found) == pytest.approx(best, abs=1e-9)

    for budget in range(9):
        found = HeadPlan.under_budget(scores, heads=budget)
        check(found, lambda plan: plan.k, budget)
        found = HeadPlan.under_budget(scores, kv_heads=budget)
        check(found, lambda plan: sum(kv_counts(plan)), budget)
    # Short of context a KV head is smaller than the states of its group, in the middle two heads outweigh it.
    mixed = [(None, 5, 40, 1)[layer % 4] for layer in range(scores.n_layers)]
    for context, windows in ((3, None), (9, None), (100, None), (100, mixed)):
        sizes = sorted({size(plan, context, windows) for plan in plans})
        for budget in random.Random(context).sample(sizes, min(len(sizes), 4)):
            options = {"context": context, "windows": windows, **SIZES}
            found = HeadPlan.under_budget(scores, cache_bytes=budget, **options)
            check(found, lambda plan, context=context, windows=windows: size(plan, context, windows), budget)


def test_two_heads_of_a_group_cost_one_kv_head() -> None:
    scores = some_scores([[0.4, 0.4, 0.5, -0.1]], n_kv_heads=2)
    assert HeadPlan.under_budget(scores, heads=1).kept == (HeadId(0, 2),)
    assert HeadPlan.under_budget(scores, kv_heads=1).kept == (HeadId(0, 0), HeadId(0, 1))
    assert HeadPlan.under_budget(scores, kv_heads=2).kept == (HeadId(0, 0), HeadId(0, 1), HeadId(0, 2))
    assert HeadPlan.under_budget(drawn(1, 4, 2), kv_heads=1).teacher == "abc"


def test_log_probability_decides_between_heads_of_equal_accuracy_and_layers_without_heads_keep_none() -> None:
    scores = some_scores([[0.25, 0.0, 0.0, torch.nan]], [[-5.0, -1.0, 2.0, torch.nan]], n_kv_heads=4)
    for budget in (2, 4):
        assert HeadPlan.under_budget(scores, heads=budget).kept == (HeadId(0, 0), HeadId(0, 2))
    assert HeadPlan.under_budget(scores, heads=1, by="logprob").kept == (HeadId(0, 2),)


def test_a_model_of_a_thousand_heads() -> None:
    """Against the simple rule that is right for this budget: the groups of greatest total, without negative heads."""
    scores = drawn(32, 32, 8)
    worth_LG = (scores.accuracy_drop_LH + 1e-6 * scores.logprob_drop_LH).clamp(min=0).reshape(32, 8, 4).sum(-1)
    plan = HeadPlan.under_budget(scores, kv_heads=40)
    assert worth(scores, plan) == pytest.approx(worth_LG.flatten().sort(descending=True).values[:40].sum().item())
    budget = size(HeadPlan.all(scores), 4096) // 4
    plan = HeadPlan.under_budget(scores, cache_bytes=budget, context=4096, **SIZES)
    assert 0.98 * budget < size(plan, 4096) <= budget


@SMALL
def test_a_container_friendly_plan_fills_its_layers_and_no_such_plan_is_worth_more(scores: Any) -> None:
    plans, group_size = every_plan(scores), scores.n_heads // scores.n_kv_heads
    for n in range(1, scores.n_kv_heads + 1):
        found = HeadPlan.container_friendly(scores, n)
        full = [plan for plan in plans if kv_counts(plan) == [n] * scores.n_layers and plan.k == found.k]
        assert found in full and found.k == n * group_size * scores.n_layers and found.teacher == "abc"
        assert worth(scores, found) == pytest.approx(max(worth(scores, plan) for plan in full), abs=1e-9)
    with pytest.raises(ValueError, match="kv_heads is 0"):
        HeadPlan.container_friendly(scores, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "budgets given: none; give one of heads, kv_heads, cache_bytes"),
        ({"heads": 1, "kv_heads": 1}, "budgets given: heads, kv_heads; give one"),
        ({"kv_heads": 2.5}, "kv_heads is 2.5; it must be a whole number"),
        ({"cache_bytes": 100, "context": 8, "d_state": 8}, "needs context, head_dim and d_state"),
        # 8 recurrent heads x 4 x 8 x 4 bytes; with 3 tokens of context 4 KV heads x 2 x 4 x 3 x 2 bytes would do
        ({"cache_bytes": 1023, "context": 100, **SIZES}, "no plan fits into 1,023: the smallest needs 1,024"),
        ({"cache_bytes": 100, "context": 3, **SIZES}, "no plan fits into 100: the smallest needs 192"),
    ],
)
def test_a_budget_that_makes_no_sense(arguments: dict[str, Any], message: str) -> None:
    scores = drawn(2, 4, 2)
    with pytest.raises(ValueError, match=message):
        HeadPlan.under_budget(scores, **arguments)


def test_the_command_writes_the_plan_with_the_smallest_cache_or_the_best_within_a_limit(
    scores: Path, tmp_path: Path
) -> None:
    job = PlanJob(k=6, container_friendly=True, to=tmp_path / "plan.json")
    table = make_plan(scores, replace(job, model="tiny"))
    plan = HeadPlan.load(job.to)
    assert kv_counts(plan) == [1] * 6 and {(2, 6), (0, 1), (5, 5), (1, 2)} <= set(plan.kept)
    # 6 layers: a KV head of 16 channels over 4,096 tokens in 16 bit; 6 heads with a state of 16 x 16 in 32 bit
    assert f"{6 * (2 * 16 * 4096 * 2 + 6 * 1024) / 1e6:.3f}" in table
    make_plan(scores, replace(job, model="tiny", k=13))
    assert kv_counts(HeadPlan.load(job.to)) == [2] * 6
    make_plan(scores, replace(job, model="tiny", max_mb=3.3))
    assert kv_counts(HeadPlan.load(job.to)) == [2] * 6
    with pytest.raises(ValueError, match=r"no plan fits into --max-mb 0\.1: the smallest needs 1\.6"):
        make_plan(scores, replace(job, model="tiny", max_mb=0.1))
