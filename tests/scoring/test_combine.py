"""Combined scores: small tables, combined by hand."""

import dataclasses

import pytest
import torch

from hybrid_distill.plan import HeadId, HeadPlan
from hybrid_distill.scoring import HeadScores
from hybrid_distill.scoring.combine import How, combine_scores

Rows = list[list[float]]


def some_scores(
    accuracy: Rows, logprob: Rows | None = None, control: Rows | None = None, se: float = 0.1, **provenance: object
) -> HeadScores:
    accuracy_LH = torch.tensor(accuracy, dtype=torch.float64)
    control_LH = None if control is None else torch.tensor(control, dtype=torch.float64)
    return HeadScores(
        n_kv_heads=1,
        accuracy_drop_LH=accuracy_LH,
        logprob_drop_LH=torch.zeros_like(accuracy_LH) if logprob is None else torch.tensor(logprob).double(),
        control_drop_LH=control_LH,
        accuracy_se_LH=torch.full_like(accuracy_LH, se),
        logprob_se_LH=torch.full_like(accuracy_LH, 2 * se),
        control_se_LH=None if control_LH is None else torch.full_like(control_LH, se),
        baseline={"accuracy": 0.9},
        provenance={"fingerprint": "abc", "model": "m", **provenance},
    )


# Head (0, 0) matters for one probe, (1, 1) for the other, (0, 1) a little for both, (1, 0) for neither.
ONE = some_scores([[0.90, 0.3], [0.02, 0.01]], [[5.0, 1.0], [0.2, 0.1]], probe={"name": "kv_retrieval"})
OTHER = some_scores([[0.0, 0.3], [0.02, 0.40]], [[0.0, 1.5], [0.4, 2.0]], se=0.2, probe={"name": "copying"})
A, B, C, D = HeadId(0, 0), HeadId(0, 1), HeadId(1, 0), HeadId(1, 1)


@pytest.mark.parametrize(
    ("how", "weights", "ranking"),
    [
        ("mean_rank", None, [B, A, D, C]),  # places 1 1, 0 3, 3 0, 2 2: A before D by nats
        ("max_drop", None, [A, D, B, C]),
        ("weighted", (1, 1), [A, B, D, C]),
        ("weighted", (0, 3), [D, B, C, A]),
    ],
)
def test_the_ranking_is_the_combined_one(how: How, weights: tuple[float, ...] | None, ranking: list[HeadId]) -> None:
    combined = combine_scores([ONE, OTHER], how, weights)
    assert combined.ranking() == ranking
    assert HeadPlan.top_k(combined, 2).kept == tuple(sorted(ranking[:2]))
    assert HeadPlan.top_k(combined, 2).teacher == "abc"


def test_the_order_of_the_parts_does_not_matter() -> None:
    for how in ("mean_rank", "max_drop"):
        assert combine_scores([ONE, OTHER], how).ranking() == combine_scores([OTHER, ONE], how).ranking()


def test_mean_rank_is_a_height_between_last_and_first() -> None:
    combined = combine_scores([ONE, OTHER])
    # Mean places 1.5, 1, 2 and 1.5 of 0..3.
    torch.testing.assert_close(combined.accuracy_drop_LH, torch.tensor([[1.5, 2.0], [1.0, 1.5]]).double() / 3)
    # A is at places 0 and 3: heights 1 and 0, standard deviation 0.5 sqrt(2), over sqrt(2) parts.
    torch.testing.assert_close(combined.accuracy_se_LH, torch.tensor([[0.5, 0.0], [0.0, 0.5]]).double())
    torch.testing.assert_close(combined.logprob_drop_LH, torch.tensor([[2.5, 1.25], [0.3, 1.05]]).double())
    assert combine_scores([ONE, ONE]).accuracy_drop_LH.flatten().tolist() == pytest.approx([1, 2 / 3, 1 / 3, 0])


def test_what_the_combined_numbers_are_is_read_from_them() -> None:
    ranks = combine_scores([ONE, OTHER])
    assert ranks.reading.label == "mean rank over kv_retrieval, copying" and ranks.reading.is_rank
    shown = [ranks.reading(drop) for drop in ranks.accuracy_drop_LH.flatten().tolist()]
    assert shown == pytest.approx([2.5, 2.0, 3.0, 2.5])  # mean places from 1 on
    largest = combine_scores([ONE, OTHER], "max_drop").reading
    assert largest.label == "largest accuracy loss over kv_retrieval, copying" and largest(0.9) == pytest.approx(90)
    assert ONE.reading(0.3) == pytest.approx(30) and ONE.reading.unit == "points of accuracy"


def test_heads_of_the_same_mean_place_are_exactly_equal() -> None:
    """Thirds do not add up in floating point; a tie must go to the log-probability, not to rounding."""
    drops = [[0.3, 0.2, 0.1, 0.9], [0.2, 0.1, 0.3, 0.9], [0.1, 0.3, 0.2, 0.9]]
    parts = [some_scores([row], [[0.1, 0.3, 0.2, 0.0]]) for row in drops]
    combined = combine_scores(parts)
    assert len(set(combined.accuracy_drop_LH[0, :3].tolist())) == 1
    assert combined.ranking() == [HeadId(0, 3), HeadId(0, 1), HeadId(0, 2), HeadId(0, 0)]


def test_max_drop_keeps_the_error_of_the_part_it_comes_from() -> None:
    combined = combine_scores([ONE, OTHER], "max_drop")
    torch.testing.assert_close(combined.accuracy_drop_LH, torch.tensor([[0.9, 0.3], [0.02, 0.4]]).double())
    assert combined.accuracy_se_LH[A] == 0.1 and combined.accuracy_se_LH[D] == 0.2
    torch.testing.assert_close(combined.logprob_drop_LH, torch.tensor([[5.0, 1.5], [0.4, 2.0]]).double())
    assert combined.logprob_se_LH[A] == 0.2 and combined.logprob_se_LH[B] == 0.4


def test_weights_are_shares_of_their_sum() -> None:
    combined = combine_scores([ONE, OTHER], "weighted", [3, 1])
    assert combined.accuracy_drop_LH[A] == pytest.approx(0.75 * 0.9)
    assert combined.logprob_drop_LH[D] == pytest.approx(0.75 * 0.1 + 0.25 * 2.0)
    assert combined.accuracy_se_LH[A] == pytest.approx(((0.75 * 0.1) ** 2 + (0.25 * 0.2) ** 2) ** 0.5)
    again = combine_scores([ONE, OTHER], "weighted", [30, 10])
    torch.testing.assert_close(again.logprob_drop_LH, combined.logprob_drop_LH)


@pytest.mark.parametrize("how", ["mean_rank", "max_drop", "weighted"])
def test_one_part_keeps_its_ranking(how: How) -> None:
    for part in (ONE, OTHER, some_scores([[0.5, 0.5, 0.1]], [[0.1, 0.2, 0.9]])):
        assert combine_scores([part], how, [7] if how == "weighted" else None).ranking() == part.ranking()


@pytest.mark.parametrize("how", ["mean_rank", "max_drop", "weighted"])
def test_a_head_that_is_not_there_stays_away(how: How) -> None:
    """Hybrid teachers: NaN marks the places of layers with fewer heads."""
    nan = float("nan")
    parts = [some_scores([[0.1, nan, 0.9]]), some_scores([[0.2, nan, 0.8]])]
    combined = combine_scores(parts, how, [1, 1] if how == "weighted" else None)
    assert combined.ranking() == [HeadId(0, 2), HeadId(0, 0)]
    assert combined.accuracy_drop_LH[0, 1].isnan()
    if how == "mean_rank":
        assert combined.accuracy_drop_LH[0, [0, 2]].tolist() == [0, 1]


def with_control(loss: float, texts: str | None) -> HeadScores:
    part = some_scores([[0.1, 0.2]], control=[[loss, loss]])
    return dataclasses.replace(part, provenance={**part.provenance, "control": texts and {"sha256": texts}})


@pytest.mark.parametrize(
    ("parts", "drop", "se"),
    [
        ([some_scores([[0.1, 0.2]])], None, None),
        ([with_control(0.2, "1"), some_scores([[0.1, 0.2]])], 0.2, 0.1),
        ([with_control(0.2, "1"), with_control(0.2, "1"), with_control(0.2, "1")], 0.2, 0.1),
        ([with_control(0.2, "1"), with_control(0.2, "1"), with_control(0.5, "2")], 0.35, 0.1 / 2**0.5),
        ([with_control(0.2, None), with_control(0.5, None)], 0.35, 0.1 / 2**0.5),
    ],
)
def test_the_same_control_texts_count_once(parts: list[HeadScores], drop: float | None, se: float | None) -> None:
    combined = combine_scores(parts)
    for table, expected in ((combined.control_drop_LH, drop), (combined.control_se_LH, se)):
        if expected is None:
            assert table is None
        else:
            assert table is not None and table.flatten().tolist() == pytest.approx([expected] * 2)


def test_the_parts_are_named_and_survive_a_file(tmp_path) -> None:
    combined = combine_scores([ONE, OTHER], "weighted", (2, 1))
    assert combined.provenance["method"] == "combined by weighted"
    assert combined.provenance["weights"] == [2, 1]
    assert [part["probe"]["name"] for part in combined.provenance["parts"]] == ["kv_retrieval", "copying"]
    assert combined.provenance["model"] == "m" and combined.fingerprint == "abc"
    assert combined.baseline["parts"] == [{"accuracy": 0.9}] * 2
    combined.save(tmp_path / "scores.json")
    again = HeadScores.load(tmp_path / "scores.json")
    assert again.provenance == combined.provenance and again.ranking() == combined.ranking()
    # Combined scores are scores: they can be a part themselves.
    assert combine_scores([again, again], "max_drop").ranking() == again.ranking()


@pytest.mark.parametrize(
    ("parts", "how", "weights", "message"),
    [
        ([], "mean_rank", None, "no scores to combine"),
        ([ONE, some_scores([[0.1, 0.2]])], "mean_rank", None, r"\(2, 2, 1\) and \(1, 2, 1\) layers"),
        ([ONE, dataclasses.replace(OTHER, n_kv_heads=2)], "mean_rank", None, "KV heads"),
        ([ONE, dataclasses.replace(OTHER, provenance={"fingerprint": "x"})], "max_drop", None, "teachers abc and x"),
        ([dataclasses.replace(ONE, provenance={})] * 2, "max_drop", None, "unknown and unknown"),
        ([ONE, OTHER], "median", None, "how is 'median'"),
        ([ONE, OTHER], "weighted", None, "give weights with 'weighted'"),
        ([ONE, OTHER], "max_drop", (1, 1), "give weights with 'weighted'"),
        ([ONE, OTHER], "weighted", (1,), "for 2 scores"),
        ([ONE, OTHER], "weighted", (1, -1), "at least 0"),
        ([ONE, OTHER], "weighted", (0, 0), "one of them more"),
        ([ONE, OTHER], "weighted", (float("nan"), 1), "at least 0"),
    ],
)
def test_what_cannot_be_combined_is_refused(parts, how, weights, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        combine_scores(parts, how, weights)
