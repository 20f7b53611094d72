"""Racing: the same first heads as exhaustive scoring, with the stated confidence, for less."""

import math

import pytest
import torch
from planted import KEYS, PLANTED, planted_teacher
from torch import Tensor

from hybrid_distill.probes.kv_retrieval import KVRetrieval
from hybrid_distill.scoring import score_heads
from hybrid_distill.scoring.racing import Race, _count_bounds


@pytest.mark.parametrize("alpha", [0.05, 0.001])
@pytest.mark.parametrize(("population", "n_drawn"), [(12, 5), (40, 30), (7, 7), (9, 0)])
def test_each_bound_fails_no_more_often_than_it_says(
    population: int, n_drawn: int, alpha: float
) -> None:
    """Summed over all that can be drawn, for every possible truth; and the bounds are not idle."""
    for n_such in range(population + 1):
        n_others = population - n_such
        too_low = 0.0
        too_high = 0.0
        for n_found in range(max(0, n_drawn - n_others), min(n_such, n_drawn) + 1):
            ways = math.comb(n_such, n_found) * math.comb(n_others, n_drawn - n_found)
            chance = ways / math.comb(population, n_drawn)
            low, high = _count_bounds(population, n_drawn, n_found, alpha)
            too_low += chance * (high < n_such)
            too_high += chance * (low > n_such)
            most = population - (n_drawn - n_found)
            assert n_found <= low <= high <= most or low == high == n_such
        assert too_low <= alpha + 1e-12
        assert too_high <= alpha + 1e-12
    if n_drawn == population:
        assert _count_bounds(population, n_drawn, 3, alpha) == (3, 3), "nothing is left to guess"


def run(race: Race, right_E: Tensor, right_HE: Tensor) -> tuple[set[int], int]:
    """Race over a table; return the heads that reach the end and the number of answers read."""
    order = race.order()
    right_E = right_E[order]
    right_HE = right_HE[:, order]
    racing = list(range(len(right_HE)))
    n_answers = 0
    n_seen = 0
    for n_after in race.rounds:
        n_answers += len(racing) * (n_after - n_seen)
        if n_after < race.n_examples:
            stays = race.stay(right_E, right_HE[racing, :n_after])
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
        race = Race(3, 64, 256, seed=seed, n_queries=n_queries)
        survivors, n_answers = run(race, right_E, right_HE)
        assert first(right_HE, 3) <= survivors
        assert len(survivors) < 10
        assert n_answers < share * 64 * 256


def test_rounds_double_and_end_with_all_examples() -> None:
    assert Race(3, 10, 256).rounds == [32, 64, 128, 256]
    assert Race(3, 10, 1).rounds == [1]
    assert sorted(Race(3, 10, 77).order()) == list(range(77))
    with pytest.raises(ValueError, match="race_k is 0"):
        Race(0, 8, 8)


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
