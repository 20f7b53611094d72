"""The best plan under a budget: every plan there is, tried, is the ground truth."""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from hybrid_distill.plan import HeadId, HeadPlan, cache_bytes

SIZES = {"head_dim": 4, "d_state": 8}


@dataclass
class Scores:
    """Accuracy drops in eighths, as of eight examples, so that many are equal or below zero."""

    n_layers: int
    n_heads: int
    n_kv_heads: int
    seed: int = 0
    fingerprint: str = "abc"
    logprob_drop_LH: Any = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.n_layers, self.n_heads)
        self.accuracy_LH = torch.randint(-2, 6, shape, generator=generator).double() / 8
        self.logprob_drop_LH = torch.randn(shape, generator=generator, dtype=torch.float64)

    def value_LH(self, by: str = "retrieval") -> Any:
        return self.accuracy_LH if by == "retrieval" else self.logprob_drop_LH

    def worth(self, plan: HeadPlan, by: str = "retrieval") -> float:
        value_LH = self.value_LH(by) + 1e-6 * self.logprob_drop_LH
        return sum(value_LH[head].item() for head in plan.kept)


SHAPES = [Scores(2, 4, 2), Scores(2, 4, 1, seed=1), Scores(4, 2, 2, seed=2), Scores(1, 8, 4, seed=3), Scores(2, 4, 4)]


def every_plan(scores: Scores) -> list[HeadPlan]:
    heads = HeadPlan.all(scores).kept
    sizes = range(len(heads) + 1)
    return [HeadPlan.from_pairs(scores, kept) for size in sizes for kept in itertools.combinations(heads, size)]


def kv_counts(plan: HeadPlan) -> list[int]:
    return [len(plan.kv_groups_in(layer)) for layer in range(plan.n_layers)]


LAYER_RULES: dict[str | None, Callable[[HeadPlan], bool]] = {
    None: lambda plan: True,
    "uniform": lambda plan: len(set(kv_counts(plan))) == 1,
    "power_of_two": lambda plan: set(kv_counts(plan)) <= {0, 1, 2, 4, 8},
}


def size(plan: HeadPlan, context: int, windows: Any = None) -> int:
    return cache_bytes(plan, length=context, windows=windows, **SIZES).total


@pytest.mark.parametrize("per_layer", LAYER_RULES)
@pytest.mark.parametrize("scores", SHAPES, ids=lambda s: f"{s.n_layers}x{s.n_heads}/{s.n_kv_heads}")
def test_no_plan_under_the_budget_is_worth_more(scores: Scores, per_layer: Any) -> None:
    plans = [plan for plan in every_plan(scores) if LAYER_RULES[per_layer](plan)]

    def check(found: HeadPlan, cost: Callable[[HeadPlan], int], budget: int) -> None:
        assert cost(found) <= budget
        assert LAYER_RULES[per_layer](found)
        best = max(scores.worth(plan) for plan in plans if cost(plan) <= budget)
        assert scores.worth(found) == pytest.approx(best, abs=1e-9)

    for budget in range(9):
        found = HeadPlan.under_budget(scores, heads=budget, per_layer=per_layer)
        check(found, lambda plan: plan.k, budget)
        found = HeadPlan.under_budget(scores, kv_heads=budget, per_layer=per_layer)
        check(found, lambda plan: sum(kv_counts(plan)), budget)
    # Short of context a KV head is smaller than the states of its group, in the middle two heads outweigh it.
    mixed = [(None, 5, 40, 1)[layer % 4] for layer in range(scores.n_layers)]
    for context, windows in ((3, None), (9, None), (100, None), (100, mixed)):
        sizes = sorted({size(plan, context, windows) for plan in plans})
        for budget in random.Random(context).sample(sizes, min(len(sizes), 8)):
            options = {"context": context, "windows": windows, "per_layer": per_layer, **SIZES}
            found = HeadPlan.under_budget(scores, cache_bytes=budget, **options)
            check(found, lambda plan, context=context, windows=windows: size(plan, context, windows), budget)


def test_two_heads_of_a_group_cost_one_kv_head() -> None:
    scores = Scores(1, 4, 2)
    scores.accuracy_LH = torch.tensor([[0.4, 0.4, 0.5, -0.1]], dtype=torch.float64)
    assert HeadPlan.under_budget(scores, heads=1).kept == (HeadId(0, 2),)
    assert HeadPlan.under_budget(scores, kv_heads=1).kept == (HeadId(0, 0), HeadId(0, 1))
    assert HeadPlan.under_budget(scores, kv_heads=2).kept == (HeadId(0, 0), HeadId(0, 1), HeadId(0, 2))
    assert HeadPlan.under_budget(scores, kv_heads=1).teacher == "abc"


def test_log_probability_decides_between_heads_of_equal_accuracy() -> None:
    scores = Scores(1, 4, 4)
    scores.accuracy_LH = torch.tensor([[0.25, 0.0, 0.0, 0.0]], dtype=torch.float64)
    scores.logprob_drop_LH = torch.tensor([[-5.0, -1.0, 2.0, 1.0]], dtype=torch.float64)
    assert HeadPlan.under_budget(scores, heads=2).kept == (HeadId(0, 0), HeadId(0, 2))
    assert HeadPlan.under_budget(scores, heads=4).kept == (HeadId(0, 0), HeadId(0, 2), HeadId(0, 3))
    assert HeadPlan.under_budget(scores, heads=1, by="ratio").kept == (HeadId(0, 2),)


@pytest.mark.parametrize("per_layer", LAYER_RULES)
def test_layers_without_heads_keep_none(per_layer: Any) -> None:
    scores = Scores(3, 4, 2)
    scores.accuracy_LH = torch.tensor([[0.5] * 4, [torch.nan] * 4, [0.5] * 4], dtype=torch.float64)
    plan = HeadPlan.under_budget(scores, kv_heads=4, per_layer=per_layer)
    assert kv_counts(plan) == [2, 0, 2]


def test_a_model_of_a_thousand_heads() -> None:
    """Against the simple rule that is right for this budget: the groups of greatest total, their negative heads left
    out."""
    scores = Scores(32, 32, 8)
    worth_LG = (scores.accuracy_LH + 1e-6 * scores.logprob_drop_LH).clamp(min=0).reshape(32, 8, 4).sum(-1)
    plan = HeadPlan.under_budget(scores, kv_heads=40)
    assert scores.worth(plan) == pytest.approx(worth_LG.flatten().sort(descending=True).values[:40].sum().item())
    budget = size(HeadPlan.all(scores), 4096) // 4
    plan = HeadPlan.under_budget(scores, cache_bytes=budget, context=4096, **SIZES)
    assert 0.98 * budget < size(plan, 4096) <= budget


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "budgets given: none; give one of heads, kv_heads, cache_bytes"),
        ({"heads": 1, "kv_heads": 1}, "budgets given: heads, kv_heads; give one"),
        ({"heads": -1}, "heads is -1; a budget is a whole number"),
        ({"kv_heads": 2.5}, "kv_heads is 2.5; a budget is a whole number"),
        ({"cache_bytes": 100}, "needs context, head_dim and d_state"),
        ({"cache_bytes": 100, "context": 8, "d_state": 8}, "needs context, head_dim and d_state"),
        # 8 recurrent heads x 4 x 8 x 4 bytes; with 3 tokens of context 4 KV heads x 2 x 4 x 3 x 2 bytes would do
        ({"cache_bytes": 1023, "context": 100, **SIZES}, "no plan fits into 1,023: the smallest needs 1,024"),
        ({"cache_bytes": 100, "context": 3, **SIZES}, "no plan fits into 100: the smallest needs 192"),
        ({"heads": 1, "per_layer": "even"}, "per_layer is 'even'; layers are 'uniform'"),
    ],
)
def test_a_budget_that_makes_no_sense(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HeadPlan.under_budget(Scores(2, 4, 2), **arguments)
