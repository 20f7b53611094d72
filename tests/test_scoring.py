"""Ranking heads: the planted circuit is the ground truth."""

import json
import math

import pytest
import torch
from planted import AGGREGATE, KEYS, N_HEADS, N_KV_HEADS, N_LAYERS, PLANTED, planted_teacher, word_tokenizer

from hybrid_distill.plan import HeadId, HeadPlan
from hybrid_distill.probes.answering import answer_choices, answer_generation
from hybrid_distill.probes.kv_retrieval import KVRetrieval
from hybrid_distill.scoring import HeadScores, exact, score_heads
from hybrid_distill.scoring.artefact import DROPS, ERRORS
from hybrid_distill.teacher import ablate_heads, fingerprint

PROBE = KVRetrieval(8, keys=KEYS)
TEXTS = [f"{KEYS[i]} : {i} \n {KEYS[i + 1]} {KEYS[i]} : {i + 2}" for i in range(4)]


@pytest.fixture(scope="module")
def teacher():
    return planted_teacher()


@pytest.fixture(scope="module")
def scores(teacher) -> HeadScores:
    return score_heads(*teacher, PROBE, n_examples=32, batch_size=20, control_texts=TEXTS, progress=False)


def some_scores(accuracy: list[list[float]], logprob: list[list[float]]) -> HeadScores:
    accuracy_LH, logprob_LH = (torch.tensor(t, dtype=torch.float64) for t in (accuracy, logprob))
    nothing = torch.zeros_like(accuracy_LH)
    return HeadScores(
        n_kv_heads=1,
        accuracy_drop_LH=accuracy_LH,
        logprob_drop_LH=logprob_LH,
        control_drop_LH=None,
        accuracy_se_LH=nothing,
        logprob_se_LH=nothing,
        control_se_LH=None,
    )


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_exactly_the_planted_heads_come_first(seed: int) -> None:
    """However the noise of the other heads is drawn: the circuit's three heads, and no other."""
    model, tokenizer = planted_teacher(seed=seed)
    probe = KVRetrieval(12, seed=seed, keys=KEYS)
    scores = score_heads(model, tokenizer, probe, n_examples=24, progress=False)
    assert scores.baseline["accuracy"] > 0.9
    assert set(scores.ranking()[:3]) == PLANTED
    drops = scores.accuracy_drop_LH
    for head in scores.ranking():
        assert (drops[head] > 0.7) if head in PLANTED else (drops[head] < 0.2)
    assert set(HeadPlan.top_k(scores, 3).kept) == PLANTED
    assert HeadPlan.top_k(scores, 3).teacher == fingerprint(model)


def test_scores_are_those_of_ablating_each_head_by_hand(teacher, scores) -> None:
    model, tokenizer = teacher
    examples = PROBE.examples(32)
    whole = answer_choices(model, tokenizer, examples)
    for head in [AGGREGATE, HeadId(0, 0), HeadId(1, 0), HeadId(3, 3)]:
        with ablate_heads(model, [head]):
            without = answer_choices(model, tokenizer, examples)
        drop_E = whole.correct_E.double() - without.correct_E.double()
        assert scores.accuracy_drop_LH[head] == pytest.approx(drop_E.mean().item())
        assert scores.accuracy_se_LH[head] == pytest.approx((drop_E.std() / math.sqrt(32)).item())
        drop_E = whole.answer_logprob_E - without.answer_logprob_E
        assert scores.logprob_drop_LH[head] == pytest.approx(drop_E.mean().item(), abs=1e-3)
        assert scores.logprob_se_LH[head] == pytest.approx((drop_E.std() / math.sqrt(32)).item(), abs=1e-3)


@torch.no_grad()
def test_control_is_the_loss_of_each_text(teacher, scores) -> None:
    model, tokenizer = teacher

    def losses() -> torch.Tensor:
        rows = [torch.tensor([tokenizer(text)["input_ids"]]) for text in TEXTS]
        return torch.stack([model(row, labels=row).loss.double() for row in rows])

    whole = losses()
    assert scores.baseline["control_loss"] == pytest.approx(whole.mean().item(), rel=1e-5)
    with ablate_heads(model, [AGGREGATE]):
        rise = losses() - whole
    assert scores.control_drop_LH[AGGREGATE] == pytest.approx(rise.mean().item(), rel=1e-4)
    assert scores.control_se_LH[AGGREGATE] == pytest.approx((rise.std() / 2).item(), rel=1e-4)


def test_the_shortcut_is_exact(teacher, scores, monkeypatch) -> None:
    """Starting at the ablated head's layer gives what full forwards give, to the last bit."""
    monkeypatch.setattr(exact._Shortcut, "changes_nothing", lambda self, baseline: False)
    full = score_heads(*teacher, PROBE, n_examples=32, batch_size=20, control_texts=TEXTS, progress=False)
    for name in (*DROPS, *ERRORS):
        assert torch.equal(getattr(full, name), getattr(scores, name)), name


def test_digits_are_scored_too(teacher) -> None:
    """Choices of several tokens extend a cache, so every forward is run in full."""
    tokenizer = word_tokenizer([" ".join(KEYS), *TEXTS], r"\n|:|'|\p{N}")
    probe = KVRetrieval(4, keys=KEYS)
    model = planted_teacher()[0]
    scores = score_heads(model, tokenizer, probe, n_examples=4, min_accuracy=0.0, progress=False)
    with ablate_heads(model, [HeadId(2, 1)]):
        without = answer_choices(model, tokenizer, probe.examples(4)).answer_logprob_E.mean()
    whole = answer_choices(model, tokenizer, probe.examples(4)).answer_logprob_E.mean()
    assert scores.logprob_drop_LH[2, 1] == pytest.approx((whole - without).item(), abs=1e-5)


def test_accuracy_can_be_read_by_generation(teacher) -> None:
    model, tokenizer = teacher
    probe = KVRetrieval(3, keys=KEYS)
    scores = score_heads(model, tokenizer, probe, n_examples=6, by="generation", progress=False)
    with ablate_heads(model, [AGGREGATE]):
        without = answer_generation(model, tokenizer, probe.examples(6)).double().mean().item()
    assert scores.accuracy_drop_LH[AGGREGATE] == pytest.approx(scores.baseline["accuracy"] - without)
    assert scores.provenance["by"] == "generation"
    with pytest.raises(ValueError, match="by is 'guess'"):
        score_heads(model, tokenizer, probe, by="guess")  # type: ignore[arg-type]


def test_equal_drops_are_ordered_by_logprob_then_by_position() -> None:
    scores = some_scores([[0.5, 0.0, 0.5], [0.9, 0.0, 0.0]], [[1.0, -1.0, 2.0], [0.0, 3.0, -1.0]])
    expected = [(1, 0), (0, 2), (0, 0), (1, 1), (0, 1), (1, 2)]
    assert scores.ranking() == [HeadId(*pair) for pair in expected]


def test_a_teacher_that_fails_the_probe_is_refused(teacher) -> None:
    model, tokenizer = teacher
    with ablate_heads(model, [AGGREGATE]), pytest.raises(ValueError) as error:
        score_heads(model, tokenizer, PROBE, n_examples=16)
    for part in ("n_pairs 8", "guessing gives 12.5%", "asks for 50.0%", "easier", "--min-accuracy"):
        assert part in str(error.value)


def test_artefact_says_what_it_was_made_of(scores, teacher, tmp_path) -> None:
    scores.save(tmp_path / "scores.json")
    loaded = HeadScores.load(tmp_path / "scores.json")
    assert (loaded.n_layers, loaded.n_heads, loaded.n_kv_heads) == (N_LAYERS, N_HEADS, N_KV_HEADS)
    for name in (*DROPS, *ERRORS):
        assert torch.equal(getattr(loaded, name), getattr(scores, name))
    assert loaded.ranking() == scores.ranking()
    assert (loaded.baseline, loaded.provenance) == (scores.baseline, scores.provenance)
    made = loaded.provenance
    assert made["fingerprint"] == fingerprint(teacher[0]) == loaded.fingerprint
    assert made["probe"] == PROBE.describe()
    assert (made["n_examples"], made["dtype"], made["device"]) == (32, "float32", "cpu")
    assert made["control"]["texts"] == 4
    assert made["versions"]["torch"] == torch.__version__ and made["date"]


def test_without_control_texts_there_is_no_control(teacher, tmp_path) -> None:
    scores = score_heads(*teacher, KVRetrieval(2, keys=KEYS), n_examples=2, progress=False)
    assert scores.control_drop_LH is None and scores.baseline["control_loss"] is None
    scores.save(tmp_path / "scores.json")
    assert HeadScores.load(tmp_path / "scores.json").control_se_LH is None


@pytest.mark.parametrize(
    "change", [{"format": "other/1"}, {"n_layers": 5}, {"accuracy_drop_LH": "x"}, {"baseline": None}]
)
def test_a_file_that_is_not_scores_is_refused(scores, tmp_path, change: dict[str, object]) -> None:
    path = tmp_path / "scores.json"
    scores.save(path)
    record = json.loads(path.read_text())
    record.update(change)
    if change == {"baseline": None}:
        del record["baseline"]
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match="holds no head scores"):
        HeadScores.load(path)


class Interrupted(Exception):
    pass


def interrupt_at(monkeypatch, layer: int) -> list[HeadId]:
    """Raise when the first head of a layer is to be ablated; returns the heads that were ablated."""
    ablated: list[HeadId] = []
    original = exact.ablate_heads

    def watching(model, heads):
        if heads[0] == HeadId(layer, 0):
            raise Interrupted
        ablated.extend(heads)
        return original(model, heads)

    monkeypatch.setattr(exact, "ablate_heads", watching)
    return ablated


def test_an_interrupted_scoring_goes_on_where_it_stopped(teacher, scores, tmp_path, monkeypatch) -> None:
    options = {"n_examples": 32, "batch_size": 20, "control_texts": TEXTS, "progress": False}
    path = tmp_path / "partial.json"
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        interrupt_at(patch, layer=2)
        score_heads(*teacher, PROBE, resume_path=path, **options)
    with monkeypatch.context() as patch:
        ablated = interrupt_at(patch, layer=99)
        resumed = score_heads(*teacher, PROBE, resume_path=path, **options)
    assert {head.layer for head in ablated} == {2, 3}
    for name in (*DROPS, *ERRORS):
        assert torch.equal(getattr(resumed, name), getattr(scores, name)), name
    assert [file.name for file in tmp_path.iterdir()] == ["partial.json"]


@pytest.mark.parametrize("damage", ["other probe", "torn file"])
def test_partial_scores_of_other_things_are_not_used(teacher, tmp_path, monkeypatch, caplog, damage) -> None:
    path = tmp_path / "partial.json"
    probe = KVRetrieval(2, keys=KEYS)
    score_heads(*teacher, probe, n_examples=2, resume_path=path, progress=False)
    if damage == "torn file":
        path.write_text(path.read_text()[:-20])
    else:
        probe = KVRetrieval(2, seed=1, keys=KEYS)
    ablated = interrupt_at(monkeypatch, layer=99)
    score_heads(*teacher, probe, n_examples=2, resume_path=path, progress=False)
    assert len(ablated) == N_LAYERS * N_HEADS
    assert "scoring starts again" in caplog.text
