"""HeadPlan: which heads stay attention."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedModel

from hybrid_distill.plan import HeadId, HeadPlan

LAYERS, HEADS, KV_HEADS = 3, 8, 4
SHAPE = SimpleNamespace(n_layers=LAYERS, n_heads=HEADS, n_kv_heads=KV_HEADS)
RANKING = [HeadId(2, 7), HeadId(0, 1), HeadId(2, 0), HeadId(1, 5)]

HEADER = '{"format": "hybrid-distill/head-plan/1"'


class Scores(SimpleNamespace):
    def ranking(self, by: str = "retrieval") -> list[HeadId]:
        return RANKING if by == "retrieval" else RANKING[::-1]

    def tie_warning(self, k: int, by: str = "retrieval") -> str | None:
        return f"a tie at {k} by {by}" if k == 2 else None


def scores(**more: str) -> Scores:
    return Scores(n_layers=LAYERS, n_heads=HEADS, n_kv_heads=KV_HEADS, **more)


def test_top_k_takes_the_head_of_the_ranking() -> None:
    plan = HeadPlan.top_k(scores(), 3)
    assert set(plan.kept) == set(RANKING[:3])
    assert plan.k == 3
    assert plan.kept == tuple(sorted(plan.kept))


def test_top_k_by_another_score() -> None:
    assert set(HeadPlan.top_k(scores(), 3, by="ratio").kept) == set(RANKING[1:])


def test_a_cut_inside_a_tie_is_logged(caplog) -> None:
    HeadPlan.top_k(scores(), 3)
    assert not caplog.records
    HeadPlan.top_k(scores(), 2, by="ratio")
    assert caplog.messages == ["a tie at 2 by ratio"]


def test_heads_that_are_not_scored_cannot_be_chosen() -> None:
    """Four of the 24 heads are ranked, as in a hybrid teacher whose other layers have no attention."""
    assert HeadPlan.top_k(scores(), 4).k == 4
    with pytest.raises(ValueError, match="k is 5, but only 4 heads"):
        HeadPlan.top_k(scores(), 5)


def test_top_0_keeps_nothing() -> None:
    assert HeadPlan.top_k(scores(), 0) == HeadPlan.none(SHAPE)


def test_a_plan_remembers_the_teacher_it_was_made_for() -> None:
    assert HeadPlan.top_k(scores(fingerprint="abc"), 1).teacher == "abc"
    assert HeadPlan.random(HeadPlan.top_k(scores(fingerprint="abc"), 1), 2, seed=0).teacher == "abc"
    assert HeadPlan.all(SHAPE).teacher == ""


def test_random_follows_from_its_seed() -> None:
    plans = [HeadPlan.random(SHAPE, 5, seed) for seed in range(20)]
    assert plans == [HeadPlan.random(SHAPE, 5, seed) for seed in range(20)]
    assert len({plan.kept for plan in plans}) == 20
    assert all(plan.k == 5 for plan in plans)
    drawn = {head_id for plan in plans for head_id in plan.kept}
    assert len(drawn) > 0.9 * LAYERS * HEADS, "20 draws of 5 from 24 heads reach nearly all of them"


def test_random_draws_the_same_heads_on_every_python() -> None:
    assert list(HeadPlan.random(SHAPE, 3, seed=0).kept) == [(0, 6), (1, 7), (2, 4)]


def test_whole_layers_all_and_none() -> None:
    one = HeadPlan.layers(SHAPE, [1])
    assert [one.kept_in(layer) for layer in range(LAYERS)] == [(), tuple(range(HEADS)), ()]
    assert HeadPlan.all(SHAPE).k == LAYERS * HEADS
    assert HeadPlan.all(SHAPE) == HeadPlan.layers(SHAPE, range(LAYERS))
    assert HeadPlan.none(SHAPE).kept == ()


def test_kept_and_recurrent_heads_partition_a_layer() -> None:
    plan = HeadPlan.from_pairs(SHAPE, [(1, 5), (1, 0), (2, 7)])
    assert plan.kept_in(1) == (0, 5)
    assert plan.recurrent_in(1) == (1, 2, 3, 4, 6, 7)
    for layer in range(LAYERS):
        assert sorted(plan.kept_in(layer) + plan.recurrent_in(layer)) == list(range(HEADS))


def test_kept_heads_of_one_group_need_one_kv_head() -> None:
    plan = HeadPlan.from_pairs(SHAPE, [(0, 6), (0, 7), (0, 2)])
    assert plan.kv_groups_in(0) == (1, 3), "two query heads share a KV head: 2 // 2 = 1, 6 // 2 = 7 // 2 = 3"
    assert plan.kv_groups_in(1) == ()


def test_json_round_trip(tmp_path: Path) -> None:
    plan = HeadPlan.top_k(scores(fingerprint="abc"), 4)
    plan.save(tmp_path / "plan.json")
    assert HeadPlan.load(tmp_path / "plan.json") == plan
    first = (tmp_path / "plan.json").read_bytes()
    plan.save(tmp_path / "plan.json")
    assert (tmp_path / "plan.json").read_bytes() == first


def test_shape_is_read_from_a_model_and_from_its_config(
    family: str, family_model: Callable[..., PreTrainedModel]
) -> None:
    model = family_model(family)
    plan = HeadPlan.none(model)
    assert plan == HeadPlan.none(model.config)
    n_kv_heads = HEADS if family == "gpt_neox" else KV_HEADS
    assert (plan.n_layers, plan.n_heads, plan.n_kv_heads) == (LAYERS, HEADS, n_kv_heads)
    plan.check_fits(model)


def test_a_config_without_kv_heads_has_one_for_each_query_head() -> None:
    config = SimpleNamespace(num_hidden_layers=2, num_attention_heads=6)
    assert HeadPlan.none(config).n_kv_heads == 6


def test_a_plan_for_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="another teacher: it expects 3 layers, 8 heads, 4 KV heads"):
        HeadPlan.none(SHAPE).check_fits(SimpleNamespace(n_layers=3, n_heads=8, n_kv_heads=8))


def test_something_without_heads_is_refused() -> None:
    with pytest.raises(ValueError, match="int has no head counts"):
        HeadPlan.none(7)


@pytest.mark.parametrize("pair", [(3, 0), (0, 8), (-1, 0), (0, -1)])
def test_a_head_that_does_not_exist(pair: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=rf"L{pair[0]}H{pair[1]} does not exist.*0\.\.2 with heads 0\.\.7"):
        HeadPlan.from_pairs(SHAPE, [pair])


def test_a_layer_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="L3H0 does not exist"):
        HeadPlan.layers(SHAPE, [0, 3])


def test_a_head_named_twice() -> None:
    with pytest.raises(ValueError, match="named twice: L0H1; name each head once"):
        HeadPlan.from_pairs(SHAPE, [(0, 1), (2, 2), (0, 1)])


@pytest.mark.parametrize("k", [-1, 25, 2.0, "3"])
def test_k_outside_the_heads(k: Any) -> None:
    with pytest.raises(ValueError, match="whole number from 0 to 24"):
        HeadPlan.top_k(scores(), k)
    with pytest.raises(ValueError, match="whole number from 0 to 24"):
        HeadPlan.random(SHAPE, k, seed=0)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"n_layers": 0}, "n_layers is 0; a plan needs a whole number"),
        ({"n_heads": 1.5}, "n_heads is 1.5; a plan needs a whole number"),
        ({"n_kv_heads": "4"}, "n_kv_heads is '4'; a plan needs a whole number"),
        ({"n_kv_heads": 3}, "8 query heads cannot share 3 KV heads evenly"),
    ],
)
def test_an_impossible_shape(change: dict[str, Any], rule: str) -> None:
    shape: dict[str, Any] = {"n_layers": LAYERS, "n_heads": HEADS, "n_kv_heads": KV_HEADS, **change}
    with pytest.raises(ValueError, match=rule):
        HeadPlan(**shape, kept=())


def test_a_plan_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        HeadPlan.none(SHAPE).kept = ()  # type: ignore[misc]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"format": "hybrid-distill/head-scores/1"}',
        HEADER + "}",
        HEADER + ', "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "kept": [[0]]}',
        HEADER + ', "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "kept": 5}',
        "\x00\xff",
    ],
)
def test_a_file_that_is_no_plan(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"plan\.json is not a head plan"):
        HeadPlan.load(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent\.json is not a head plan .*No such file"):
        HeadPlan.load(tmp_path / "absent.json")


def test_a_file_that_names_a_head_the_teacher_does_not_have(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    HeadPlan.from_pairs(SHAPE, [(0, 1)]).save(path)
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "kept": [[0, 9]]}))
    with pytest.raises(ValueError, match="L0H9 does not exist"):
        HeadPlan.load(path)
