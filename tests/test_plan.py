"""HeadPlan: which heads stay attention, and the best ones under a budget, against every plan there is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from head_tables import some_scores
from transformers import PreTrainedModel

from hybrid_distill.plan import HeadId, HeadPlan
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


GROUPED = some_scores([[0.1, 0.6, 0.2, 0.3], [0.5, 0.4, 0.0, 0.0]], n_kv_heads=2)
"""Two layers of four heads, two to a KV head; best first: L0H1, L1H0, L1H1, L0H3, L0H2, L0H0."""


@pytest.mark.parametrize(
    ("unit", "k", "kept"),
    [
        ("head", 3, [(0, 1), (1, 0), (1, 1)]),
        ("kv-group", 1, [(0, 0), (0, 1)]),
        ("kv-group", 2, [(0, 0), (0, 1), (1, 0), (1, 1)]),
        ("kv-group", 3, [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]),
        ("layer", 1, [(0, 0), (0, 1), (0, 2), (0, 3)]),
        ("container", 1, [(0, 0), (0, 1), (1, 0), (1, 1)]),
        ("container", 0, []),
    ],
)
def test_the_best_units_are_kept_whole(unit: Any, k: int, kept: list[tuple[int, int]]) -> None:
    assert HeadPlan.top_k(GROUPED, k, unit=unit).kept == tuple(HeadId(*head) for head in kept)


def test_the_other_heads_of_a_stored_kv_head_are_free() -> None:
    some, whole = (HeadPlan.top_k(GROUPED, 2, unit=unit) for unit in ("head", "kv-group"))
    assert whole.k > some.k
    assert whole.n_stored_kv_heads == some.n_stored_kv_heads


@pytest.mark.parametrize(("unit", "most"), [("head", 8), ("kv-group", 4), ("layer", 2), ("container", 2)])
def test_more_units_than_the_teacher_has_are_refused(unit: Any, most: int) -> None:
    HeadPlan.check_k(GROUPED, most, unit=unit)
    with pytest.raises(ValueError, match=str(most)):
        HeadPlan.top_k(GROUPED, most + 1, unit=unit)


def test_an_unknown_unit_is_refused() -> None:
    with pytest.raises(ValueError, match="pair"):
        HeadPlan.top_k(GROUPED, 1, unit="pair")
