"""Racing: the same first heads as exhaustive scoring, with the stated confidence, for less."""

import pytest
import torch
from planted import KEYS, PLANTED, planted_teacher
from torch import Tensor

from hybrid_distill.probes.kv_retrieval import KVRetrieval
from hybrid_distill.scoring import score_heads
from hybrid_distill.scoring.racing import Race


def run(race: Race, right_HE: Tensor) -> tuple[set[int], int]:
    """Race over a table; return the heads that reach the end and the number of answers read."""
    order = race.order()
    right_HE = right_HE[:, order]
    racing = list(range(len(right_HE)))
    n_answers = 0
    n_seen = 0
    for n_after in race.rounds:
        n_answers += len(racing) * (n_after - n_seen)
        if n_after < race.n_examples:
            stays = race.stay(right_HE[racing, :n_after])
            racing = [head for head, stay in zip(racing, stays) if stay]
        n_seen = n_after
    return set(racing), n_answers


def table(
    chances: list[float],
    n_examples: int,
    baseline: float,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """Draw (right_E, right_HE): without a head, its share of the right answers is lost."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(chances), n_examples)
    right_E = (torch.rand(n_examples, generator=generator) < baseline).double()
    lost_HE = torch.rand(shape, generator=generator) < torch.tensor(chances)[:, None]
    flip_HE = torch.rand(shape, generator=generator) < 0.02
    without_HE = torch.where(lost_HE, 0.0, right_E)
    return right_E, torch.where(flip_HE, 1 - right_E, without_HE).double()


def first(right_HE: Tensor, k: int) -> set[int]:
    """Return the heads that are among the first k by answers lost, or tied with the k-th."""
    n_right_H = right_HE.sum(1)
    at_cut = n_right_H.sort().values[k - 1]
    return set((n_right_H <= at_cut).nonzero().flatten().tolist())


@pytest.mark.parametrize("n_queries", [1, 3])
@pytest.mark.parametrize(("baseline", "share"), [(1.0, 0.25), (0.7, 0.6)])
def test_the_first_k_always_reach_the_end_and_most_others_do_not(
    baseline: float, share: float, n_queries: int
) -> None:
    chances = [0.95, 0.9, 0.85, *[0.0] * 61]
    for seed in range(50):
        right_E = torch.zeros(256, dtype=torch.double)
        right_HE = torch.zeros(64, 256, dtype=torch.double)
        for query in range(n_queries):
            of_query_E, of_query_HE = table(chances, 256, baseline, 100 * seed + query)
            right_E += of_query_E / n_queries
            right_HE += of_query_HE / n_queries
        race = Race(3, 256, seed=seed, n_queries=n_queries)
        survivors, n_answers = run(race, right_HE)
        assert first(right_HE, 3) <= survivors
        assert len(survivors) < 10
        assert n_answers < share * 64 * 256


@pytest.mark.parametrize("n_queries", [1, 8])
def test_the_first_k_stay_with_the_stated_confidence_where_heads_lie_close(n_queries: int) -> None:
    """The k-th head loses 12 points, the next 11; still, heads that do nothing drop out."""
    chances = torch.cat([torch.linspace(0.3, 0.12, 14), torch.linspace(0.11, 0, 46)]).tolist()
    n_examples = 256 // n_queries
    n_lost = 0
    n_survivors = 0
    for seed in range(10):
        asked = [
            table(chances, n_examples, 0.7, 10 * seed + query)[1] for query in range(n_queries)
        ]
        right_HE = torch.stack(asked).mean(0)
        # In the same examples: their order is the only thing that is random.
        for order in range(20):
            race = Race(14, n_examples, seed=order, n_queries=n_queries)
            survivors, _ = run(race, right_HE)
            n_lost += not first(right_HE, 14) <= survivors
            n_survivors += len(survivors)
    assert n_lost <= 0.01 * 200
    assert n_survivors < 0.75 * 60 * 200


def test_few_examples_that_agree_are_no_proof() -> None:
    race = Race(1, 64)
    right_HE = torch.tensor([[0.0], [1.0], [1.0]]).expand(3, 4).double()
    assert race.stay(right_HE) == [True, True, True]
    assert race.stay(right_HE[:, :1].expand(3, 32)) == [True, False, False]


def test_rounds_end_with_all_examples() -> None:
    assert Race(3, 256).rounds == [32, 64, 128, 192, 224, 256]
    assert Race(3, 1).rounds == [1]
    assert sorted(Race(3, 77).order()) == list(range(77))
    with pytest.raises(ValueError, match="race_k is 0"):
        Race(0, 8)


def test_a_race_gives_the_first_heads_of_exhaustive_scoring() -> None:
    model, tokenizer = planted_teacher(0.008)
    probe = KVRetrieval(8, keys=KEYS)
    texts = [f"{KEYS[1]} : 5"]
    full = score_heads(model, tokenizer, probe, n_examples=64, progress=False)
    race = score_heads(
        model,
        tokenizer,
        probe,
        n_examples=64,
        race_k=3,
        control_texts=texts,
        progress=False,
    )
    assert race.ranking()[:3] == full.ranking()[:3]
    assert set(race.ranking()[:3]) == PLANTED
    for head in full.ranking():
        n_tried = int(race.n_examples_LH[head])
        assert (n_tried == 64) == (head in PLANTED)
        # The control loss is measured only for heads that reach the end.
        assert race.control_drop_LH[head].isnan() == (n_tried < 64)
        if n_tried == 64:
            logprob = full.logprob_drop_LH[head].item()
            error = full.accuracy_se_LH[head].item()
            assert race.accuracy_drop_LH[head] == full.accuracy_drop_LH[head]
            assert race.logprob_drop_LH[head] == pytest.approx(logprob, abs=1e-4)
            assert race.accuracy_se_LH[head] == pytest.approx(error)
    assert race.provenance["race"]["confidence"] == 0.99
    assert full.provenance["race"] is None
