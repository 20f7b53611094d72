"""Head scores: their file, intervals and agreement, ties, ways to rank, pictures."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from head_tables import some_scores, whole_scores
from torch import Tensor

from hybrid_distill.plan import HeadId, HeadPlan
from hybrid_distill.scoring import HeadScores
from hybrid_distill.scoring.head_scores import DROPS, ERRORS, INTERVALS
from hybrid_distill.scoring.uncertainty import bootstrap_interval, split_half

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/scores.schema.json").read_text())
NAN = math.nan


def table(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def test_a_file_gives_back_every_bit(tmp_path: Path) -> None:
    scores = whole_scores()
    scores.save(tmp_path / "scores.json")
    loaded = HeadScores.load(tmp_path / "scores.json")
    for name in (*DROPS, *ERRORS, *INTERVALS, "n_examples_LH"):
        before, after = getattr(scores, name), getattr(loaded, name)
        assert torch.equal(before.nan_to_num(123), after.nan_to_num(123)), name
        assert torch.equal(before.isnan(), after.isnan()) and before.dtype == after.dtype, name
    for name in ("agreement", "baseline", "provenance", "n_kv_heads"):
        assert getattr(loaded, name) == getattr(scores, name), name
    assert loaded.ranking() == scores.ranking()


@pytest.mark.parametrize("scores", [whole_scores(), some_scores([[0.5, 0.0]])], ids=["whole", "least"])
def test_every_entry_of_a_file_is_in_the_schema(scores: HeadScores, tmp_path: Path) -> None:
    scores.save(tmp_path / "scores.json")
    record = json.loads((tmp_path / "scores.json").read_text())
    assert set(record) == set(SCHEMA["properties"]) and set(SCHEMA["required"]) <= set(record)
    assert record["format"] == SCHEMA["$id"]
    if scores.agreement is not None:
        agreement = SCHEMA["properties"]["agreement"]["anyOf"][1]
        assert set(record["agreement"]) == set(agreement["properties"])
        assert record["accuracy_drop_LH"][1] == [None] * 4 and record["accuracy_interval_LH2"][1] == [[None, None]] * 4


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
    record = {name: value for name, value in (json.loads(path.read_text()) | change).items() if value is not ...}
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match="does not hold head scores"):
        HeadScores.load(path)


def test_intervals_follow_from_the_seed_and_are_paired() -> None:
    difference_HE = torch.randn(700, 20, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    difference_HE[650] = difference_HE[3] + 5
    interval_H2 = bootstrap_interval(difference_HE)
    assert torch.equal(interval_H2, bootstrap_interval(difference_HE))
    assert not torch.equal(interval_H2, bootstrap_interval(difference_HE, seed=1))
    torch.testing.assert_close(interval_H2[650], interval_H2[3] + 5)
    torch.testing.assert_close(interval_H2[600:], bootstrap_interval(difference_HE[600:]))


def test_an_interval_is_that_of_the_examples_a_head_was_tried_on() -> None:
    difference_HE = torch.randn(3, 400, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    difference_HE[1, 100:] = NAN
    difference_HE[2] = NAN
    (low, high), (low_1, high_1), nothing = bootstrap_interval(difference_HE)
    assert nothing.isnan().all()
    assert bootstrap_interval(torch.zeros(2, 1)).tolist() == [[0, 0], [0, 0]], "one example"
    assert low_1 < difference_HE[1, :100].mean() < high_1
    assert (high_1 - low_1) / (high - low) == pytest.approx(2, rel=0.2), "a quarter of the examples, twice the width"


def test_halves_agree_as_much_as_the_noise_allows() -> None:
    """Means of halves: a head's own spread 1, the noise of 100 examples 1, so they correlate by 1 / 2, their ranks by
    6 / pi asin(1 / 4)."""
    generator = torch.Generator().manual_seed(4)
    head_H1 = torch.randn(1000, 1, generator=generator, dtype=torch.float64)
    difference_HE = head_H1 + 10 * torch.randn(1000, 200, generator=generator, dtype=torch.float64)
    found = split_half(difference_HE, torch.zeros(1000, 200), [50], n_splits=5)
    assert found["spearman"] == pytest.approx(6 / math.pi * math.asin(0.25), abs=0.05)
    assert (found["n_splits"], found["examples_per_half"], found["seed"]) == (5, 100, 0)
    noise = split_half(difference_HE - head_H1, torch.zeros(1000, 200), [50], n_splits=5)
    assert noise["spearman"] == pytest.approx(0, abs=0.05), "halves that share examples would agree"
    assert noise["overlap"]["50"] == pytest.approx(0.05, abs=0.05)
    assert noise == split_half(difference_HE - head_H1, torch.zeros(1000, 200), [50], n_splits=5)


def test_halves_agree_wholly_where_there_is_no_noise() -> None:
    """Log-probability orders the heads that accuracy leaves equal; k beyond the heads is left out."""
    accuracy_HE = table([1.0], [0.0], [0.0], [0.0]).expand(-1, 7)
    logprob_HE = table([0.0], [0.1], [0.3], [0.2]).expand(-1, 7)
    found = split_half(accuracy_HE, logprob_HE, [1, 2, 3, 4, 100])
    assert found["overlap"] == found["overlap_by_logprob"] == {"1": 1.0, "2": 1.0, "3": 1.0}
    assert found["spearman"] == pytest.approx(1) and found["examples_per_half"] == 3


def test_heads_that_were_given_up_early_rank_last() -> None:
    """Tried on the first ten examples only; a head that does not exist takes no part."""
    accuracy_HE = table([0.5], [0.2], [0.1], [NAN]).repeat(1, 40)
    accuracy_HE[2, 10:] = NAN
    found = split_half(accuracy_HE, accuracy_HE, [1, 2, 3])
    assert found["overlap"] == {"1": 1.0, "2": 1.0} and found["spearman"] == pytest.approx(1)


def tied_scores(**more: Any) -> HeadScores:
    """Five heads: one better by accuracy, three that log-probability tells apart by 0.1 nats each, one far off."""
    return some_scores(table([0.5, 0.25, 0.25, 0.25, 0.25]), table([0.0, 1.0, 0.9, 0.8, -3.0]), **more)


def test_a_cut_between_heads_whose_intervals_overlap() -> None:
    centre_LH = tied_scores().logprob_drop_LH
    interval_LH2 = torch.stack([centre_LH - 0.06, centre_LH + 0.06], dim=-1)
    scores = tied_scores(logprob_interval_LH2=interval_LH2)
    assert scores.tie_warning(1) is None, "accuracy tells them apart"
    assert "inside a tie: L0H1 is kept, L0H2 is not" in (scores.tie_warning(2) or "")
    assert "L0H2 is kept, L0H3 is not" in (scores.tie_warning(3) or ""), "L0H1 and L0H3 are apart"
    assert scores.tie_warning(4) is None
    assert scores.tie_warning(0) is None and scores.tie_warning(5) is None and scores.tie_warning(9) is None
    wide = tied_scores(logprob_interval_LH2=torch.stack([centre_LH - 0.2, centre_LH + 0.2], dim=-1))
    assert "L0H1 is kept, L0H2, L0H3 are not" in (wide.tie_warning(2) or "")


def test_without_intervals_standard_errors_tell_heads_apart() -> None:
    errors = [torch.full((1, 5), error, dtype=torch.float64) for error in (0.0, 0.02, 0.03)]
    warned = [tied_scores(logprob_se_LH=error).tie_warning(2) is not None for error in errors]
    assert warned == [False, False, True], "2 x 1.96 x 0.03 reaches across 0.1 nats, 2 x 1.96 x 0.02 does not"


def test_a_cut_through_a_tie_is_logged_and_few_heads_are_named(caplog: pytest.LogCaptureFixture) -> None:
    scores = some_scores(table([0.0] * 30))
    assert "L0H6, L0H7 and 2 more are kept, L0H10" in (scores.tie_warning(10) or "")
    assert HeadPlan.top_k(scores, 10).kept == tuple(HeadId(0, head) for head in range(10))
    assert caplog.messages == [scores.tie_warning(10)]


def test_heads_that_matter_for_everything_can_be_put_back() -> None:
    """L0H0 breaks all text, L0H1 retrieval alone and as much, L0H2 retrieval alone and less."""
    scores = some_scores(
        table([0.9, 0.8, 0.3, 0.0]), logprob=table([4.0, 4.0, 1.0, 0.1]), control=table([3.5, 0.5, -0.02, 0.001])
    )
    assert scores.ranking() == scores.ranking("logprob") == [HeadId(0, h) for h in (0, 1, 2, 3)]
    assert scores.ranking("retrieval_minus_control") == [HeadId(0, h) for h in (1, 2, 0, 3)]
    assert scores.value_LH("retrieval_minus_control").tolist() == [[0.5, 3.5, 1.02, pytest.approx(0.099)]]
    assert scores.value_LH("ratio").tolist() == [[pytest.approx(4 / 3.5), 8, 100, 10]], "below 0.01 counts as 0.01"
    assert scores.ranking("ratio") == [HeadId(0, h) for h in (2, 3, 1, 0)]
    assert HeadPlan.top_k(scores, 1, by="retrieval_minus_control").kept == (HeadId(0, 1),)
    with pytest.raises(ValueError, match="by is 'luck'; heads are ranked by 'retrieval', 'logprob'"):
        scores.ranking("luck")
    with pytest.raises(ValueError, match="no control drop; score again with control texts"):
        HeadPlan.top_k(some_scores(table([0.5])), 1, by="ratio")


def test_heads_that_do_not_exist_are_not_ranked() -> None:
    scores = whole_scores()
    assert {head.layer for head in scores.ranking()} == {0, 2} and len(scores.ranking()) == 8
    assert len(scores.ranking("ratio")) == 8
    with pytest.raises(ValueError, match="only 8 heads of this teacher are scored"):
        HeadPlan.top_k(scores, 9)
