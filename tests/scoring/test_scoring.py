"""Ranking heads: the planted circuit is the ground truth."""

import logging
import math
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from conftest import make_family_model
from head_tables import some_scores
from planted import AGGREGATE, KEYS, N_HEADS, N_KV_HEADS, N_LAYERS, PLANTED, planted_teacher, word_tokenizer

from hybrid_distill.plan import HeadId, HeadPlan
from hybrid_distill.probes import Example
from hybrid_distill.probes.answering import answer_choices
from hybrid_distill.probes.encoding import encode_example
from hybrid_distill.probes.knowledge import Knowledge
from hybrid_distill.probes.kv_retrieval import KVRetrieval
from hybrid_distill.scoring import HeadScores, exact, score_heads
from hybrid_distill.scoring.batch_sizer import BatchSizer
from hybrid_distill.scoring.forwards import Forwards, FromLayer
from hybrid_distill.scoring.head_scores import DROPS, ERRORS, INTERVALS
from hybrid_distill.scoring.probe_batch import batches_of
from hybrid_distill.scoring.probe_rows import QuestionRow
from hybrid_distill.student.build import build_student
from hybrid_distill.teacher import ablate_heads, fingerprint, head_sites

score = partial(score_heads, progress=False)
PROBE = KVRetrieval(8, keys=KEYS)
TEXTS = [f"{KEYS[i]} : {i} \n {KEYS[i + 1]} {KEYS[i]} : {i + 2}" for i in range(4)]
QUIET = 0.008  # noise at which every planted teacher answers nearly all questions


@pytest.fixture(scope="module")
def teacher():
    return planted_teacher()


@pytest.fixture(scope="module")
def scores(teacher) -> HeadScores:
    return score(*teacher, PROBE, n_examples=32, batch_size=20, control_texts=TEXTS)


@pytest.mark.parametrize("seed", range(5))
def test_exactly_the_planted_heads_come_first(seed: int) -> None:
    """However the noise of the other heads is drawn: the circuit's three heads, and no other."""
    model, tokenizer = planted_teacher(QUIET, seed)
    scores = score(model, tokenizer, KVRetrieval(8, seed, keys=KEYS), n_examples=16)
    assert scores.baseline["accuracy"] > 0.9 and scores.baseline["control_loss"] is scores.control_drop_LH is None
    assert set(scores.ranking()[:3]) == PLANTED
    for head in scores.ranking():
        assert (scores.accuracy_drop_LH[head] > 0.5) if head in PLANTED else (scores.accuracy_drop_LH[head] < 0.15)
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


def one_by_one(model: Any, tokenizer: Any, probe: Any, n: int, kind: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(answers lost, logprob_drop_LH) in the slow way: each head switched off, every forward in full."""
    examples, sites = probe.examples(n), head_sites(model, kind)
    whole = answer_choices(model, tokenizer, examples)
    lost = torch.zeros(max(site.layer for site in sites) + 1, max(site.n_heads for site in sites))
    lost, logprob = lost.long(), lost.double()
    for head in (HeadId(site.layer, head) for site in sites for head in range(site.n_heads)):
        with ablate_heads(model, [head], kind=kind):
            without = answer_choices(model, tokenizer, examples)
        lost[head] = whole.correct_E.sum() - without.correct_E.sum()
        logprob[head] = (whole.answer_logprob_E - without.answer_logprob_E).mean()
    return lost, logprob


def assert_same(scores: HeadScores, lost: torch.Tensor, logprob: torch.Tensor) -> None:
    n = scores.provenance["n_examples"] * scores.provenance["probe"].get("n_queries", 1)
    assert torch.equal((n * scores.accuracy_drop_LH).round().long(), lost)
    torch.testing.assert_close(scores.logprob_drop_LH, logprob, rtol=1e-4, atol=2e-5)
    assert logprob.abs().median() > 1e-3, "heads have to matter, or nothing is compared"


PROMPT = KVRetrieval(3, keys=KEYS[:16]).examples(1)[0].prompt
# Some keys have several tokens, so that lengths differ; numbers have one, or a tree of digits.
WORDS = word_tokenizer([" ".join(KEYS[:16]), " ".join(map(str, range(100))), PROMPT], r"\n|:|'|\p{N}+|e")
DIGITS = word_tokenizer([" ".join(KEYS[:16]), " ".join("0123456789"), PROMPT], r"\n|:|'|\p{N}|e")
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, eager": {"attn_implementation": "eager"},
    "llama, one layer": {"num_hidden_layers": 1},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 16},
    "olmo2": {"num_key_value_heads": 4},
    "phi3": {},
    "gpt_neox": {"num_key_value_heads": None},
    "gemma2": {"sliding_window": 16, "attn_implementation": "eager"},
}


def random_model(family: str, vocab_size: int = 160, **more: Any) -> Any:
    """Larger weights than at initialization, so that every head matters."""
    small = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    return make_family_model(family.split(",")[0], **{"vocab_size": vocab_size, **small, **FAMILIES[family], **more})


@pytest.mark.parametrize("tokenizer", [WORDS, DIGITS], ids=["words", "digits"])
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_full_forwards_head_by_head(family: str, tokenizer: Any, caplog: Any) -> None:
    """Whatever the batch holds: lengths differ, choices have one token or form a tree, windows slide."""
    model = random_model(family)
    probe = KVRetrieval(6, keys=KEYS[:16])
    with caplog.at_level(logging.DEBUG, logger="hybrid_distill"):
        scores = score(model, tokenizer, probe, n_examples=7, min_accuracy=0.0)
    assert_same(scores, *one_by_one(model, tokenizer, probe, 7))
    windowed = "sliding_window" in FAMILIES[family] and tokenizer is DIGITS
    assert ("run in full" in caplog.text) == windowed, "a mask of one's own knows no window"


@pytest.mark.parametrize("tokenizer", [WORDS, DIGITS], ids=["words", "digits"])
@pytest.mark.parametrize(
    "probe", [KVRetrieval(n_pairs, keys=KEYS[:16], n_queries=n) for n_pairs, n in ((6, 3), (3, 2))], ids=str
)
def test_questions_about_one_prompt_share_its_tokens(probe: Any, tokenizer: Any, caplog: Any) -> None:
    """The scores are those of asking each question by itself; a prompt is one sample of them."""
    model, seen = random_model("llama"), []
    model.register_forward_pre_hook(lambda module, args, given: seen.append(given["input_ids"]), with_kwargs=True)
    scores = score(model, tokenizer, probe, n_examples=3, min_accuracy=0.0, batch_size=1)
    longest = max(ids.shape[1] for ids in seen)
    assert_same(scores, *one_by_one(model, tokenizer, probe, 3 * probe.n_queries))
    assert scores.provenance["n_examples"] == 3 and "run in full" not in caplog.text
    assert longest < 1.7 * max(ids.shape[1] for ids in seen[-20:]), "less than two prompts"


def test_equal_drops_are_ordered_by_logprob_then_by_position() -> None:
    scores = some_scores([[0.5, 0.0, 0.5], [0.9, 0.0, 0.0]], [[1.0, -1.0, 2.0], [0.0, 3.0, -1.0]])
    expected = [(1, 0), (0, 2), (0, 0), (1, 1), (0, 1), (1, 2)]
    assert scores.ranking() == [HeadId(*pair) for pair in expected]


def test_a_teacher_that_fails_the_probe_is_refused(teacher) -> None:
    model, tokenizer = teacher
    refusal = r"n_pairs 8.* guessing gives 12\.5%, scoring requires 56\.2%.* lower --min-accuracy"
    with ablate_heads(model, [AGGREGATE]), pytest.raises(ValueError, match=refusal):
        score(model, tokenizer, PROBE, n_examples=16)


def test_scores_record_what_they_were_made_of(scores, teacher) -> None:
    assert (scores.n_layers, scores.n_heads, scores.n_kv_heads) == (N_LAYERS, N_HEADS, N_KV_HEADS)
    made = scores.provenance
    assert made["fingerprint"] == fingerprint(teacher[0]) == scores.fingerprint
    assert made["probe"] == PROBE.describe()
    assert (made["n_examples"], made["dtype"], made["device"]) == (32, "float32", "cpu")
    assert made["control"]["texts"] == 4
    assert made["versions"]["torch"] == torch.__version__ and made["date"]


def test_choices_of_many_tokens_and_of_different_numbers() -> None:
    """A tree holds choices that begin one another, and examples with few and with many of them."""
    probe = Knowledge()
    tokenizer = word_tokenizer([e.prompt + c for e in probe.examples(12) for c in e.choices], r"\n|:|'|\p{L}")
    model = random_model("llama", len(tokenizer))
    scores = score(model, tokenizer, probe, n_examples=12, min_accuracy=0.0)
    assert_same(scores, *one_by_one(model, tokenizer, probe, 12))


def random_student() -> Any:
    teacher = random_model("llama")
    return build_student(teacher, HeadPlan.random(teacher.config, 5, seed=1), d_state=4)[0].eval()


def random_mamba() -> Any:
    config = transformers.Mamba2Config(
        vocab_size=160, hidden_size=32, num_hidden_layers=2, num_heads=8, head_dim=8, state_size=8, n_groups=1,
        chunk_size=16,
    )  # fmt: skip
    return transformers.Mamba2ForCausalLM(config).eval()


@pytest.mark.parametrize(("make", "tokenizer"), [(random_student, DIGITS), (random_mamba, WORDS)])
def test_recurrent_heads_are_scored_in_full_forwards(make: Any, tokenizer: Any, caplog: Any) -> None:
    """Their states go from token to token: no tree, no start in the middle of a row."""
    model, probe = make(), KVRetrieval(3, keys=KEYS[:16])
    scores = score(model, tokenizer, probe, n_examples=3, min_accuracy=0.0)
    assert make is random_mamba or "run in full" in caplog.text
    assert_same(scores, *one_by_one(model, tokenizer, probe, 3))


def test_nothing_is_computed_that_is_not_needed(teacher, monkeypatch) -> None:
    """Tokens that pass each layer's MLP: none below the ablated layer, never pads."""
    (model, tokenizer), counted = teacher, Counter()

    def count(mlp: torch.nn.Module, args: tuple[torch.Tensor]) -> None:
        counted[mlp] += args[0].shape[:-1].numel()

    mlps = [block.mlp for block in model.model.layers]
    hooks = [mlp.register_forward_pre_hook(count) for mlp in mlps]
    (batch,) = batches_of(questions(tokenizer, PROBE.examples(6)))
    forwards = FromLayer(model, head_sites(model), BatchSizer(model, 8))
    forwards.begin([batch])
    for layer in range(N_LAYERS):
        counted.clear()
        forwards.without(batch, layer, range(N_HEADS))
        all_tokens = 6 * N_HEADS * batch.length
        expected = [0] * layer + [all_tokens] * (N_LAYERS - layer)
        expected[layer] += 6 * batch.length  # once for all heads: what the layers above begin with
        assert [counted[mlp] for mlp in mlps] == expected
    for hook in hooks:
        hook.remove()


def questions(tokenizer: Any, examples: list[Example]) -> list[QuestionRow]:
    encoded = [encode_example(tokenizer, example) for example in examples]
    return [QuestionRow(n, [a], [b], torch.device("cpu")) for n, (a, b) in enumerate(zip(examples, encoded))]


def test_out_of_memory_halves_the_batch_and_goes_on(teacher, monkeypatch, caplog) -> None:
    model, tokenizer = teacher
    options = {"n_examples": 5, "batch_size": 20, "control_texts": TEXTS}
    scores = score(model, tokenizer, PROBE, **options)
    original, sizes = model.forward, []

    def small_memory(*args, **kwargs):
        sizes.append(len(kwargs["input_ids"]))
        if sizes[-1] > 5:
            raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return original(*args, **kwargs)

    monkeypatch.setattr(model, "forward", small_memory)
    again = score(model, tokenizer, PROBE, **options)
    assert "out of memory with 20 rows" in caplog.text and "continuing with 5" in caplog.text
    fits = [size <= 5 for size in sizes]
    assert max(sizes[len(fits) - fits[::-1].index(False) :]) == 5, "nothing larger is tried again"
    assert torch.equal(again.accuracy_drop_LH, scores.accuracy_drop_LH)
    torch.testing.assert_close(again.logprob_drop_LH, scores.logprob_drop_LH, rtol=1e-4, atol=1e-4)

    monkeypatch.setattr(model, "forward", lambda **_: small_memory(input_ids=range(9)))
    with pytest.raises(MemoryError, match="tokens does not fit into the memory"):
        score(model, tokenizer, PROBE, n_examples=2)


def test_removed_heads_are_off_in_the_baseline_too(teacher) -> None:
    model, tokenizer = teacher
    examples, off, head = PROBE.examples(9), HeadId(1, 1), HeadId(1, 2)
    scores = score(model, tokenizer, PROBE, n_examples=9, removed=[off], min_accuracy=0.0)
    assert off not in scores.ranking() and scores.n_examples_LH[off] == 0
    with ablate_heads(model, [off]):
        whole = answer_choices(model, tokenizer, examples)
    with ablate_heads(model, [off, head]):
        without = answer_choices(model, tokenizer, examples)
    assert scores.baseline["accuracy"] == whole.accuracy
    drop = (whole.answer_logprob_E - without.answer_logprob_E).mean()
    assert scores.logprob_drop_LH[head] == pytest.approx(drop.item(), abs=2e-4)


def test_scoring_can_be_limited_to_some_heads(teacher, scores) -> None:
    heads = {AGGREGATE, HeadId(0, 2)}
    some = score(*teacher, PROBE, n_examples=32, batch_size=20, heads=heads)
    assert some.ranking()[0] == AGGREGATE and set(some.ranking()) == heads
    for head in heads:
        assert some.logprob_drop_LH[head] == pytest.approx(scores.logprob_drop_LH[head].item(), abs=1e-4)
    with pytest.raises(ValueError, match="L9H0 does not exist"):
        score(*teacher, PROBE, heads=[HeadId(9, 0)])
    with pytest.raises(ValueError, match="no head is left"):
        score(*teacher, PROBE, heads=heads, removed=heads)


class Interrupted(KeyboardInterrupt):
    pass


def watch(monkeypatch, interrupt_at: int | None = None) -> list[HeadId]:
    """The heads that are ablated from now on; may raise when those of one layer are to be."""
    ablated: list[HeadId] = []
    original = Forwards.without

    def watching(self, batch, layer, heads):
        if layer == interrupt_at:
            raise Interrupted
        ablated.extend(HeadId(layer, head) for head in heads)
        return original(self, batch, layer, heads)

    tried = exact.fastest_exact

    def then_watching(*args):
        found = tried(*args)
        monkeypatch.setattr(Forwards, "without", watching)
        return found

    monkeypatch.setattr(exact, "fastest_exact", then_watching)
    return ablated


@pytest.mark.parametrize("race", [{}, {"race_k": 3}], ids=["exhaustive", "race"])
def test_an_interrupted_scoring_goes_on_where_it_stopped(teacher, tmp_path, monkeypatch, caplog, race) -> None:
    options = {"n_examples": 16, "batch_size": 20, "control_texts": TEXTS, **race}
    path = tmp_path / "partial.json"
    uninterrupted = score(*teacher, PROBE, **options)
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        watch(patch, interrupt_at=2)
        score(*teacher, PROBE, resume_path=path, **options)
    assert f"stopped after 2 layers; the same call continues from {path}" in caplog.text
    with monkeypatch.context() as patch:
        ablated = watch(patch)
        resumed = score(*teacher, PROBE, resume_path=path, **options)
    if not race:
        assert set(ablated) == {HeadId(layer, head) for layer in (2, 3) for head in range(N_HEADS)}
    for name in (*DROPS, *ERRORS, *INTERVALS, "n_examples_LH"):
        assert torch.equal(getattr(resumed, name).nan_to_num(), getattr(uninterrupted, name).nan_to_num()), name
    assert resumed.agreement == uninterrupted.agreement
    assert [file.name for file in tmp_path.iterdir()] == ["partial.json"]


@pytest.mark.parametrize("damage", ["other probe", "torn file"])
def test_partial_scores_of_other_things_are_not_used(teacher, tmp_path, monkeypatch, caplog, damage) -> None:
    path = tmp_path / "partial.json"
    probe = KVRetrieval(2, keys=KEYS)
    score(*teacher, probe, n_examples=2, resume_path=path)
    if damage == "torn file":
        path.write_text(path.read_text()[:-20])
    else:
        probe = KVRetrieval(2, seed=1, keys=KEYS)
    ablated = watch(monkeypatch)
    score(*teacher, probe, n_examples=2, resume_path=path)
    assert len(ablated) == N_LAYERS * N_HEADS
    assert "starting over" in caplog.text


def test_logits_that_are_no_numbers_are_named_and_the_rest_is_kept(teacher, tmp_path, monkeypatch) -> None:
    path = tmp_path / "partial.json"
    original = Forwards.without

    def broken(self, batch, layer, heads):
        read_HQ = original(self, batch, layer, heads)
        if layer == 2 and len(heads) == N_HEADS:
            at = [row.number for row in batch.rows].index(5)
            read_HQ[3, at * 8] = math.nan  # 8 choices of one token
        return read_HQ

    options = {"n_examples": 8, "resume_path": path}
    refusal = "without L2H3 the logits of prompt 5 .'Memorize the following.* not finite.* resume_path"
    with monkeypatch.context() as patch, pytest.raises(ValueError, match=refusal):
        patch.setattr(Forwards, "without", broken)
        score(*teacher, PROBE, **options)
    ablated = watch(monkeypatch)
    score(*teacher, PROBE, **options)
    assert {head.layer for head in ablated} == {2, 3}
    model, tokenizer = planted_teacher()
    model.model.layers[1].mlp.down_proj.weight.data.fill_(math.nan)
    with pytest.raises(ValueError, match="with all heads in place the logits of prompt"):
        score(model, tokenizer, PROBE, n_examples=2)
