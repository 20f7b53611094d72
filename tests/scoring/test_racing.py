"""Racing: the same first heads as exhaustive scoring, with the stated confidence, for less."""

import math

import pytest
import torch
from planted import KEYS, PLANTED, planted_teacher

from hybrid_distill.plan import HeadId
from hybrid_distill.probes.kv_retrieval import KVRetrieval
from hybrid_distill.scoring import score_heads
from hybrid_distill.scoring.racing import Race, _count_bounds


@pytest.mark.parametrize("alpha", [0.05, 0.001])
@pytest.mark.parametrize(("population", "n_drawn"), [(12, 5), (40, 30), (7, 7), (9, 0)])
def test_each_bound_fails_no_more_often_than_it_says(population: int, n_drawn: int, alpha: float) -> None:
    """Summed over all that can be drawn, for every possible truth; and the bounds are not idle."""
    for n_such in range(population + 1):
        too_low = too_high = 0.0
        for found in range(max(0, n_drawn - (population - n_such)), min(n_such, n_drawn) + 1):
            chance = math.comb(n_such, found) * math.comb(population - n_such, n_drawn - found)
            chance /= math.comb(population, n_drawn)
            low, high = _count_bounds(population, n_drawn, found, alpha)
            too_low += chance * (high < n_such)
            too_high += chance * (low > n_such)
            assert found <= low <= high <= population - (n_drawn - found) or low == high == n_such
        assert too_low <= alpha + 1e-12 and too_high <= alpha + 1e-12
    if n_drawn == population:
        assert _count_bounds(population, n_drawn, 3, alpha) == (3, 3), "nothing is left to guess"


def run(race: Race, right_E: torch.Tensor, right_HE: torch.Tensor) -> tuple[set[int], int]:
    """(heads that reach the end, answers that were asked for) of a race over a known table."""
    order = race.order()
    right_E, right_HE = right_E[order], right_HE[:, order]
    racing, asked, seen = list(range(len(right_HE))), 0, 0
    for end in race.rounds:
        asked += len(racing) * (end - seen)
        if end < race.n_examples:
            stays = race.stay(right_E, right_HE[racing, :end])
            racing = [head for head, stay in zip(racing, stays) if stay]
        seen = end
    return set(racing), asked


def table(chances: list[float], n_examples: int, baseline: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(right_E, right_HE): the baseline is right this often; without a head its share of answers is lost."""
    generator = torch.Generator().manual_seed(seed)
    right_E = (torch.rand(n_examples, generator=generator) < baseline).double()
    lost_HE = torch.rand(len(chances), n_examples, generator=generator) < torch.tensor(chances)[:, None]
    flip_HE = torch.rand(len(chances), n_examples, generator=generator) < 0.02
    return right_E, torch.where(flip_HE, 1 - right_E, torch.where(lost_HE, 0.0, right_E)).double()


def first(right_HE: torch.Tensor, k: int) -> set[int]:
    """Heads that are among the first k by answers lost, or tied with the k-th."""
    kept = right_HE.sum(1).tolist()
    at_cut = sorted(kept)[k - 1]
    return {h for h, n in enumerate(kept) if n <= at_cut}


@pytest.mark.parametrize("n_queries", [1, 3])
@pytest.mark.parametrize("baseline", [1.0, 0.7])
def test_the_first_k_always_reach_the_end_and_most_others_do_not(baseline: float, n_queries: int) -> None:
    chances = [0.95, 0.9, 0.85, *[0.0] * 61]
    for seed in range(50):
        tables = [table(chances, 256, baseline, 100 * seed + query) for query in range(n_queries)]
        right_E, right_HE = (sum(each) / n_queries for each in zip(*tables))
        survivors, asked = run(Race(3, 64, 256, seed=seed, n_queries=n_queries), right_E, right_HE)
        assert first(right_HE, 3) <= survivors
        assert len(survivors) < 10
        assert asked < 64 * 256 * (0.25 if baseline == 1 else 0.6)


def test_rounds_double_and_end_with_all_examples() -> None:
    assert Race(3, 10, 256).rounds == [32, 64, 128, 256]
    assert Race(3, 10, 1).rounds == [1]
    assert sorted(Race(3, 10, 77).order()) == list(range(77))
    with pytest.raises(ValueError, match="race_k is 0"):
        Race(0, 8, 8)


def test_a_race_gives_the_first_heads_of_exhaustive_scoring() -> None:
    model, tokenizer = planted_teacher(0.008)
    probe = KVRetrieval(8, keys=KEYS)
    options = {"n_examples": 64, "progress": False}
    full = score_heads(model, tokenizer, probe, **options)
    race = score_heads(model, tokenizer, probe, race_k=3, control_texts=[f"{KEYS[1]} : 5"], **options)
    assert race.ranking()[:3] == full.ranking()[:3] and set(race.ranking()[:3]) == PLANTED
    tried = race.n_examples_LH
    for head in (HeadId(layer, head) for layer in range(4) for head in range(4)):
        assert (tried[head] == 64) if head in PLANTED else (tried[head] < 64)
        if tried[head] == 64:
            assert race.accuracy_drop_LH[head] == full.accuracy_drop_LH[head]
            assert race.logprob_drop_LH[head] == pytest.approx(full.logprob_drop_LH[head].item(), abs=1e-4)
            assert race.accuracy_se_LH[head] == pytest.approx(full.accuracy_se_LH[head].item())
        assert race.control_drop_LH[head].isnan() == (tried[head] < 64), "only of those that reached the end"
    assert race.provenance["race"]["confidence"] == 0.99
    assert full.provenance["race"] is None
