"""Racing: the same first heads as exhaustive scoring, with the stated confidence, for less."""

import pytest
import torch
from messages import naming
from planted import KEYS, PLANTED, planted_teacher
from torch import Tensor

from hybrid_distill.probes.kv_retrieval import KVRetrieval
from hybrid_distill.scoring import score_heads
from hybrid_distill.scoring.racing import Race


def run(race: Race, accuracy_HM: Tensor) -> tuple[set[int], int]:
    """Race over a table; return the heads that reach the end and the number of answers read."""
    order = race.order()
    accuracy_HM = accuracy_HM[:, order]
    racing = list(range(len(accuracy_HM)))
    n_answers = 0
    n_seen = 0
    for n_after in race.rounds:
        n_answers += len(racing) * (n_after - n_seen)
        if n_after < race.n_prompts:
            stays = race.stay(accuracy_HM[racing, :n_after])
            racing = [head for head, stay in zip(racing, stays) if stay]
        n_seen = n_after
    return set(racing), n_answers


def answers_without(
    shares: list[float], n_prompts: int, baseline: float, n_questions: int, seed: int
) -> Tensor:
    """Draw accuracy_HM: without a head, its share of the right answers is lost.

    A prompt with several questions counts as their mean."""
    by_question = []
    for question in range(n_questions):
        generator = torch.Generator().manual_seed(seed + question)
        shape = (len(shares), n_prompts)
        right_M = (torch.rand(n_prompts, generator=generator) < baseline).double()
        lost_HM = torch.rand(shape, generator=generator) < torch.tensor(shares)[:, None]
        # Whatever the head, some answers change.
        flip_HM = torch.rand(shape, generator=generator) < 0.02
        without_HM = torch.where(lost_HM, 0.0, right_M)
        by_question.append(torch.where(flip_HM, 1 - right_M, without_HM).double())
    return torch.stack(by_question).mean(0)


def first(accuracy_HM: Tensor, k: int) -> set[int]:
    """Return the heads that are among the first k by answers lost, or tied with the k-th."""
    n_right_H = accuracy_HM.sum(1)
    at_cut = n_right_H.sort().values[k - 1]
    is_first_H = n_right_H <= at_cut
    return set(is_first_H.nonzero().flatten().tolist())


@pytest.mark.parametrize("n_questions", [1, 3])
@pytest.mark.parametrize(("baseline", "most_answers"), [(1.0, 0.25), (0.7, 0.6)])
def test_the_first_k_always_reach_the_end_and_most_others_do_not(
    baseline: float, most_answers: float, n_questions: int
) -> None:
    k = 3
    shares = [0.95, 0.9, 0.85, *[0.0] * 61]
    n_prompts = 256
    n_answers_of_all = len(shares) * n_prompts
    for seed in range(50):
        accuracy_HM = answers_without(shares, n_prompts, baseline, n_questions, 100 * seed)
        race = Race(k, n_prompts, seed=seed, n_questions=n_questions)
        survivors, n_answers = run(race, accuracy_HM)
        assert first(accuracy_HM, k) <= survivors
        assert len(survivors) < 10
        assert n_answers < most_answers * n_answers_of_all


@pytest.mark.parametrize("n_questions", [1, 8])
def test_the_first_k_stay_with_the_stated_confidence_where_heads_lie_close(
    n_questions: int,
) -> None:
    """The k-th head loses 12 points, the next 11; still, heads that do nothing drop out."""
    k = 14
    of_first = torch.linspace(0.3, 0.12, k).tolist()
    of_others = torch.linspace(0.11, 0, 46).tolist()
    shares = of_first + of_others
    n_prompts = 256 // n_questions
    n_races = 0
    n_lost = 0
    n_survivors = 0
    for seed in range(10):
        accuracy_HM = answers_without(shares, n_prompts, 0.7, n_questions, 10 * seed)
        # In the same prompts: their order is the only thing that is random.
        for order in range(20):
            race = Race(k, n_prompts, seed=order, n_questions=n_questions)
            survivors, _ = run(race, accuracy_HM)
            n_races += 1
            n_survivors += len(survivors)
            if not first(accuracy_HM, k) <= survivors:
                n_lost += 1
    assert n_races == 200
    assert n_lost <= 0.01 * n_races
    assert n_survivors < 0.75 * len(shares) * n_races


def test_few_prompts_that_agree_are_no_proof() -> None:
    race = Race(1, 64)
    accuracy_H1 = torch.tensor([[0.0], [1.0], [1.0]]).double()
    assert race.stay(accuracy_H1.expand(3, 4)) == [True, True, True]
    assert race.stay(accuracy_H1.expand(3, 32)) == [True, False, False]


def test_rounds_end_with_all_prompts() -> None:
    assert Race(3, 256).rounds == [32, 64, 128, 192, 224, 256]
    assert Race(3, 1).rounds == [1]
    assert sorted(Race(3, 77).order()) == list(range(77))
    with pytest.raises(ValueError, match=naming("race_k", 0)):
        Race(0, 8)


def test_a_race_gives_the_first_heads_of_exhaustive_scoring() -> None:
    model, tokenizer = planted_teacher(0.008)
    probe = KVRetrieval(8, keys=KEYS)
    texts = [f"{KEYS[1]} : 5"]
    options = {"n_examples": 64, "progress": False}
    full = score_heads(model, tokenizer, probe, **options)
    race = score_heads(model, tokenizer, probe, race_k=3, control_texts=texts, **options)
    assert race.ranking()[:3] == full.ranking()[:3]
    assert set(race.ranking()[:3]) == PLANTED
    for head in full.ranking():
        reached_the_end = int(race.n_examples_LH[head]) == 64
        assert reached_the_end == (head in PLANTED)
        # The control loss is measured only for heads that reach the end.
        assert race.control_drop_LH[head].isnan() == (not reached_the_end)
        if reached_the_end:
            logprob_drop = full.logprob_drop_LH[head].item()
            error = full.accuracy_se_LH[head].item()
            assert race.accuracy_drop_LH[head] == full.accuracy_drop_LH[head]
            assert race.logprob_drop_LH[head] == pytest.approx(logprob_drop, abs=1e-4)
            assert race.accuracy_se_LH[head] == pytest.approx(error)
    assert race.provenance["race"]["confidence"] == 0.99
    assert full.provenance["race"] is None
