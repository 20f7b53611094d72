"""Head scores: their file, intervals and agreement, ties, ways to rank."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from head_tables import some_scores, whole_scores
from messages import naming
from torch import Tensor

from hybrid_distill.plan import MOST_NAMED, HeadId, HeadPlan, Tie
from hybrid_distill.scoring import HeadScores
from hybrid_distill.scoring.head_scores import TABLES
from hybrid_distill.scoring.uncertainty import bootstrap_interval, split_half

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/scores.schema.json").read_text())
NAN = math.nan


def table(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def test_a_file_gives_back_every_bit(tmp_path: Path) -> None:
    scores = whole_scores()
    scores.save(tmp_path / "scores.json")
    loaded = HeadScores.load(tmp_path / "scores.json")
    for name in TABLES:
        before = getattr(scores, name)
        after = getattr(loaded, name)
        assert before.dtype == after.dtype, name
        # A NaN is not equal to itself.
        assert torch.equal(before.isnan(), after.isnan()), name
        assert torch.equal(before.nan_to_num(123), after.nan_to_num(123)), name
    for name in ("agreement", "baseline", "provenance", "n_kv_heads"):
        assert getattr(loaded, name) == getattr(scores, name), name


@pytest.mark.parametrize(
    "scores", [whole_scores(), some_scores([[0.5, 0.0]])], ids=["whole", "least"]
)
def test_every_entry_of_a_file_is_in_the_schema(scores: HeadScores, tmp_path: Path) -> None:
    scores.save(tmp_path / "scores.json")
    record = json.loads((tmp_path / "scores.json").read_text())
    assert set(record) == set(SCHEMA["properties"])
    assert set(SCHEMA["required"]) <= set(record)
    assert record["format"] == SCHEMA["$id"]
    if scores.agreement is not None:
        agreement = SCHEMA["properties"]["agreement"]["anyOf"][1]
        assert set(record["agreement"]) == set(agreement["properties"])
        assert record["accuracy_drop_LH"][1] == [None] * 4
        assert record["accuracy_interval_LH2"][1] == [[None, None]] * 4


@pytest.mark.parametrize(
    "change",
    [
        {"format": "other/1"},
        {"n_layers": 5},
        {"accuracy_drop_LH": "x"},
        {"logprob_interval_LH2": [[0.0] * 4] * 3},
        {"baseline": ...},
        {"provenance": 1},
    ],
)
def test_a_file_that_is_not_scores_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "scores.json"
    whole_scores().save(path)
    changed = json.loads(path.read_text()) | change
    record = {name: value for name, value in changed.items() if value is not ...}
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"scores\.json"):
        HeadScores.load(path)


def test_intervals_follow_from_the_seed_and_are_paired() -> None:
    generator = torch.Generator().manual_seed(2)
    difference_HE = torch.randn(700, 20, generator=generator, dtype=torch.float64)
    difference_HE[650] = difference_HE[3] + 5
    interval_H2 = bootstrap_interval(difference_HE)
    assert torch.equal(interval_H2, bootstrap_interval(difference_HE))
    assert not torch.equal(interval_H2, bootstrap_interval(difference_HE, seed=1))
    torch.testing.assert_close(interval_H2[650], interval_H2[3] + 5)
    torch.testing.assert_close(interval_H2[600:], bootstrap_interval(difference_HE[600:]))


def test_an_interval_is_that_of_the_examples_a_head_was_tried_on() -> None:
    generator = torch.Generator().manual_seed(3)
    difference_HE = torch.randn(3, 400, generator=generator, dtype=torch.float64)
    difference_HE[1, 100:] = NAN
    difference_HE[2] = NAN
    interval_H2 = bootstrap_interval(difference_HE)
    width_H = interval_H2[:, 1] - interval_H2[:, 0]
    assert interval_H2[2].isnan().all()
    assert interval_H2[1, 0] < difference_HE[1, :100].mean() < interval_H2[1, 1]
    # A quarter of the examples, twice the width.
    assert width_H[1] / width_H[0] == pytest.approx(2, rel=0.2)
    of_one_example = bootstrap_interval(torch.zeros(2, 1))
    assert of_one_example.tolist() == [[0, 0], [0, 0]]


def test_halves_agree_as_much_as_the_noise_allows() -> None:
    """A head's own spread is 1, the noise of 100 examples too: means of halves correlate by 1 / 2.

    Their ranks then correlate by 6 / pi asin(1 / 4).
    """
    generator = torch.Generator().manual_seed(4)
    head_H1 = torch.randn(1000, 1, generator=generator, dtype=torch.float64)
    noise_HE = 10 * torch.randn(1000, 200, generator=generator, dtype=torch.float64)
    nothing_HE = torch.zeros(1000, 200)
    agreement = split_half(head_H1 + noise_HE, nothing_HE, [50], n_splits=5)
    expected = 6 / math.pi * math.asin(0.25)
    assert agreement["spearman"] == pytest.approx(expected, abs=0.05)
    assert agreement["n_splits"] == 5
    assert agreement["examples_per_half"] == 100
    assert agreement["seed"] == 0

    of_noise = split_half(noise_HE, nothing_HE, [50], n_splits=5)
    assert of_noise["spearman"] == pytest.approx(0, abs=0.05), "shared examples would agree"
    by_chance = 50 / 1000
    assert of_noise["overlap"]["50"] == pytest.approx(by_chance, abs=0.05)
    assert of_noise == split_half(noise_HE, nothing_HE, [50], n_splits=5)


def test_halves_agree_wholly_without_noise() -> None:
    """Log-probability orders heads of equal accuracy; k has to be below their number."""
    accuracy_HE = table([1.0], [0.0], [0.0], [0.0]).expand(-1, 7)
    logprob_HE = table([0.0], [0.1], [0.3], [0.2]).expand(-1, 7)
    agreement = split_half(accuracy_HE, logprob_HE, [1, 2, 3, 4, 100])
    assert agreement["overlap"] == {"1": 1.0, "2": 1.0, "3": 1.0}
    assert agreement["overlap_by_logprob"] == agreement["overlap"]
    assert agreement["spearman"] == pytest.approx(1)
    assert agreement["examples_per_half"] == 3


def test_heads_that_were_dropped_early_rank_last() -> None:
    """Tried on the first ten examples only; a head that does not exist takes no part."""
    accuracy_HE = table([0.5], [0.2], [0.1], [NAN]).repeat(1, 40)
    accuracy_HE[2, 10:] = NAN
    agreement = split_half(accuracy_HE, accuracy_HE, [1, 2, 3])
    assert agreement["overlap"] == {"1": 1.0, "2": 1.0}
    assert agreement["spearman"] == pytest.approx(1)


def tied_scores(**fields: Any) -> HeadScores:
    """Make five heads: one better by accuracy, three 0.1 nats apart by log-probability, one far
    off."""
    accuracy_LH = table([0.5, 0.25, 0.25, 0.25, 0.25])
    logprob_LH = table([0.0, 1.0, 0.9, 0.8, -3.0])
    return some_scores(accuracy_LH, logprob_LH, **fields)


def with_intervals(half_width: float) -> HeadScores:
    center_LH = tied_scores().logprob_drop_LH
    low_LH = center_LH - half_width
    high_LH = center_LH + half_width
    interval_LH2 = torch.stack([low_LH, high_LH], dim=-1)
    return tied_scores(logprob_interval_LH2=interval_LH2)


def in_layer_0(*heads: int) -> tuple[HeadId, ...]:
    return tuple(HeadId(0, head) for head in heads)


def test_a_cut_between_heads_whose_intervals_overlap() -> None:
    scores = with_intervals(0.06)
    # After the first head, which accuracy tells apart; before the last, which is far off; nowhere.
    for k in (0, 1, 4, 5, 9):
        assert scores.tie(k) is None
    assert scores.tie(2) == Tie(2, in_layer_0(1), in_layer_0(2))
    assert scores.tie(3) == Tie(3, in_layer_0(2), in_layer_0(3)), "L0H1 and L0H3 are apart"
    wider = with_intervals(0.2)
    assert wider.tie(2) == Tie(2, in_layer_0(1), in_layer_0(2, 3))


@pytest.mark.parametrize(("error", "is_tie"), [(0.0, False), (0.02, False), (0.03, True)])
def test_without_intervals_standard_errors_tell_heads_apart(error: float, is_tie: bool) -> None:
    """2 x 1.96 x 0.03 reaches across 0.1 nats, 2 x 1.96 x 0.02 does not."""
    errors_LH = torch.full((1, 5), error, dtype=torch.float64)
    tie = tied_scores(logprob_se_LH=errors_LH).tie(2)
    assert (tie is not None) == is_tie


def test_a_cut_through_a_tie_is_logged_and_few_heads_are_named(caplog) -> None:
    scores = some_scores(table([0.0] * 30))
    tie = scores.tie(10)
    assert tie == Tie(10, in_layer_0(*range(10)), in_layer_0(*range(10, 30)))
    plan = HeadPlan.top_k(scores, 10)
    assert plan.kept_in(0) == tuple(range(10))
    (record,) = caplog.records
    assert record.args == (tie,)
    n_named = str(tie).count("L0H")
    assert n_named == 2 * MOST_NAMED


def test_heads_that_matter_for_everything_can_be_put_back() -> None:
    """L0H0 breaks all text, L0H1 retrieval alone and as much, L0H2 retrieval alone and less."""
    scores = some_scores(
        table([0.9, 0.8, 0.3, 0.0]),
        logprob=table([4.0, 4.0, 1.0, 0.1]),
        control=table([3.5, 0.5, -0.02, 0.001]),
    )

    def ranked(by: str) -> list[int]:
        return [head.head for head in scores.ranking(by)]

    assert ranked("retrieval") == ranked("logprob") == [0, 1, 2, 3]
    assert ranked("retrieval_minus_control") == [1, 2, 0, 3]
    assert ranked("ratio") == [2, 3, 1, 0]
    margin_LH = scores.value_LH("retrieval_minus_control")
    assert margin_LH.tolist() == [pytest.approx([0.5, 3.5, 1.02, 0.099])]
    # A control drop below 0.01 counts as 0.01.
    ratio_LH = scores.value_LH("ratio")
    assert ratio_LH.tolist() == [pytest.approx([4 / 3.5, 8, 100, 10])]
    assert HeadPlan.top_k(scores, 1, by="retrieval_minus_control").kept == (HeadId(0, 1),)


def test_a_ranking_that_cannot_be_made_is_refused() -> None:
    with pytest.raises(ValueError, match="'luck'"):
        some_scores(table([0.5])).ranking("luck")
    with pytest.raises(ValueError, match="'ratio'"):
        HeadPlan.top_k(some_scores(table([0.5])), 1, by="ratio")


def test_heads_that_do_not_exist_are_not_ranked() -> None:
    scores = whole_scores()
    assert {head.layer for head in scores.ranking()} == {0, 2}
    assert len(scores.ranking()) == len(scores.ranking("ratio")) == 8
    with pytest.raises(ValueError, match=naming("k", 9, 8)):
        HeadPlan.top_k(scores, 9)
