"""Evaluation: retrieval, knowledge, text, agreement with the teacher, memory."""

import dataclasses
import json

import pytest
import torch
from planted import KEYS, planted_teacher, word_tokenizer
from transformers import DynamicCache

from hybrid_distill.evaluation.evaluate import EvalResult, agreement, compare_on_text, evaluate
from hybrid_distill.model import layer_windows
from hybrid_distill.plan import HeadId, HeadPlan, cache_bytes
from hybrid_distill.probes.knowledge import Knowledge
from hybrid_distill.probes.plain_text import text_batches
from hybrid_distill.student.build import build_student
from hybrid_distill.teacher import ablate_heads, attention_sites

WORDS = "one two three four five six seven eight nine ten".split()
TEXTS = [" ".join(WORDS), "ten nine eight", "one", "four four five five six"]
LLAMA_1B = {"n_layers": 16, "n_heads": 32, "n_kv_heads": 8}
LENGTHS = (128, 2048, 4096)
# Families, and settings that make what their caches hold end with a window: in all layers, in some, in chunks.
WINDOWS = {
    "llama": {},
    "qwen3": {},
    "qwen2": {"use_sliding_window": False, "sliding_window": 6},
    "mistral": {"sliding_window": 6},
    "gemma2": {"sliding_window": 6},
    "gemma3": {"sliding_window": 6, "sliding_window_pattern": 3},
    "llama4": {"attention_chunk_size": 6},
}


@pytest.fixture
def model(family_model):
    return family_model("llama", vocab_size=len(WORDS) + 1, num_hidden_layers=2)


@pytest.fixture
def tokenizer():
    return word_tokenizer([" ".join(WORDS)])


def megabytes(plan: HeadPlan, d_state: int) -> list[float]:
    sizes = [cache_bytes(plan, length=n, head_dim=64, d_state=d_state, state_bytes=2).total for n in LENGTHS]
    return [round(size / 1e6, 1) for size in sizes]


def test_the_published_table_of_cache_memory() -> None:
    nothing = HeadPlan(**LLAMA_1B, kept=())
    assert megabytes(HeadPlan.all(nothing), d_state=0) == [4.2, 67.1, 134.2], "Llama-3.2-1B"
    # Twenty kept heads, each of a KV group of its own.
    pairs = [(layer, 4 * group) for layer in range(5) for group in (0, 2, 4, 6)]
    assert megabytes(HeadPlan.from_pairs(nothing, pairs), d_state=8) == [1.2, 11.0, 21.5], "Hybrid-Llamba"


@torch.no_grad()
@pytest.mark.parametrize("family", WINDOWS)
@pytest.mark.parametrize("length", [1, 6, 40])
def test_cache_bytes_are_those_a_real_teachers_cache_holds(family_model, family, length: int) -> None:
    """At once and token by token, shorter and longer than the window of layers that have one."""
    model = family_model(family, **WINDOWS[family])
    plan, head_dim = HeadPlan.all(model), attention_sites(model)[0].head_dim
    windows = layer_windows(model.config)
    size = cache_bytes(plan, length=length, head_dim=head_dim, d_state=8, bytes_per_element=4, batch=2, windows=windows)
    for n_steps in (0, length - 1):
        cache, ids = DynamicCache(config=model.config), torch.randint(3, 100, (2, length))
        for piece in ids.split([length - n_steps, *[1] * n_steps], dim=1):
            model(piece, cache=cache, use_cache=True)
        held = sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values))
        assert (size.kv, size.ssm, size.conv) == (held, 0, 0)


@torch.no_grad()
@pytest.mark.parametrize("kept", [[], [(0, 0), (0, 1), (0, 6), (2, 3)], "all"])
@pytest.mark.parametrize(("length", "family"), [(40, "llama"), (40, "mistral"), (40, "gemma3"), (5, "gemma3")])
def test_cache_bytes_are_those_a_real_students_cache_holds(family_model, kept, family, length: int) -> None:
    teacher = family_model(family, **WINDOWS[family])
    plan = HeadPlan.all(teacher) if kept == "all" else HeadPlan.from_pairs(teacher, kept)
    student, _ = build_student(teacher, plan, d_state=12, conv_width=3)
    sizes = {"head_dim": attention_sites(teacher)[0].head_dim, "d_state": 12, "bytes_per_element": 4, "batch": 2}
    for window in (WINDOWS[family].get("sliding_window"), 1):
        student.model.config.sliding_window = window  # 1: transformers' own caches do not get along with that
        cache = student.eval().new_cache()
        for n_tokens in (length - 1, 1):
            student(torch.randint(3, 100, (2, n_tokens)), cache=cache, use_cache=True)
        windows = layer_windows(student.model.config)
        size = cache_bytes(plan, length=length, conv_width=3, windows=windows, **sizes)
        assert dataclasses.asdict(size) == cache.nbytes()


@torch.no_grad()
def test_perplexity_and_agreement_by_hand(model, family_model, tokenizer) -> None:
    teacher = family_model("llama", vocab_size=len(WORDS) + 1, num_hidden_layers=2, seed=1)
    batches = list(text_batches(model, tokenizer, TEXTS, max_tokens=6, batch_size=2))
    result = compare_on_text(model, teacher, batches)
    losses, same, divergences = [], [], []
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"][:6]
        ours, theirs = (m(torch.tensor([ids])).logits[0].double().log_softmax(-1) for m in (model, teacher))
        for t in range(len(ids) - 1):
            losses.append(-ours[t, ids[t + 1]])
            same.append(ours[t].argmax() == theirs[t].argmax())
            divergences.append(sum(theirs[t].exp() * (theirs[t] - ours[t])))
    assert result["n_text_tokens"] == len(losses) == 5 + 2 + 4
    assert result["perplexity"] == pytest.approx(torch.stack(losses).mean().exp().item(), rel=1e-5)
    assert result["top1_agreement"] == pytest.approx(torch.stack(same).double().mean().item())
    assert result["kl_to_teacher"] == pytest.approx(torch.stack(divergences).mean().item(), rel=1e-4)


def test_vocabularies_padded_differently_are_compared_on_what_they_share() -> None:
    ours = torch.randn(2, 3, 10)
    padding = torch.full((2, 3, 6), 50.0)
    for longer, shorter in ((torch.cat([ours, padding], -1), ours), (ours, torch.cat([ours, padding], -1))):
        same_BT, kl_BT = agreement(longer, shorter)
        assert same_BT.all()
        torch.testing.assert_close(kl_BT, torch.zeros(2, 3))


@pytest.fixture(scope="module")
def planted():
    return planted_teacher()


def test_teacher_and_student_are_measured_alike(planted, tmp_path) -> None:
    """With every head kept the student is the teacher, in every column of the table."""
    teacher, tokenizer = planted
    student, _ = build_student(teacher, HeadPlan.all(teacher), d_state=8)
    question = {"prompt": f"{KEYS[0]} :", "answer": " 7", "choices": [" 7", " 8"]}
    (tmp_path / "facts.jsonl").write_text(json.dumps(question) + "\n")
    options = {
        "n_pairs": (2, 6),
        "n_examples": 8,
        "keys": KEYS,
        "held_out_texts": [" ".join(KEYS[:6])],
        "batch_size": 5,
    }
    options |= {"teacher": teacher, "knowledge": Knowledge(tmp_path / "facts.jsonl")}
    student.train()
    theirs, ours = (evaluate(model, tokenizer, **options) for model in (teacher, student))
    assert student.training
    assert dataclasses.replace(ours, provenance={}) == dataclasses.replace(theirs, provenance={})
    assert ours.top1_agreement == 1 and ours.kl_to_teacher == 0 and ours.recurrent_heads_zeroed is None
    assert set(ours.kv_choice) == set(ours.kv_generation) == {2, 6} and ours.kv_choice[6] > 0.8
    assert (ours.n_examples, ours.n_knowledge, ours.knowledge_chance) == (8, 1, 0.5)
    ours.save(tmp_path / "evaluation.json")
    assert EvalResult.load(tmp_path / "evaluation.json") == ours


def test_losing_the_circuit_shows_in_retrieval_and_in_memory(planted) -> None:
    teacher, tokenizer = planted
    student, _ = build_student(teacher, HeadPlan.none(teacher), d_state=8, init="random")
    lost, whole = (evaluate(m, tokenizer, n_pairs=(8,), n_examples=16, keys=KEYS) for m in (student, teacher))
    assert lost.kv_choice[8] < 0.5 < 0.9 < whole.kv_choice[8]
    assert lost.kv_generation[8] < 0.5 < 0.9 < whole.kv_generation[8]
    assert lost.knowledge is lost.perplexity is lost.top1_agreement is lost.kl_to_teacher is None, "not measured"
    expected = cache_bytes(HeadPlan.none(teacher), length=128, head_dim=128, d_state=8)
    assert lost.cache_bytes[128] == lost.cache_bytes[4096] == expected.total
    assert lost.conv_state_bytes == expected.conv


def test_a_record_that_is_not_an_evaluation_is_refused(planted, tmp_path) -> None:
    teacher, tokenizer = planted
    record = evaluate(teacher, tokenizer, n_pairs=(), held_out_texts=["apple anchor arrow"]).to_dict()
    assert EvalResult.from_dict(record).to_dict() == record
    for change in ({"format": "other"}, {"kv_choice": {"many": 1.0}}, {"unknown": 1}):
        with pytest.raises(ValueError, match="not an evaluation"):
            EvalResult.from_dict({**record, **change})
    (tmp_path / "torn.json").write_text(json.dumps(record)[:-5])
    with pytest.raises(ValueError, match="cannot be read as an evaluation"):
        EvalResult.load(tmp_path / "torn.json")


def test_what_is_left_without_the_recurrence_is_measured(planted, tmp_path) -> None:
    """A student with the circuit in recurrent heads loses it with them; one whose recurrent heads write nothing is
    flagged."""
    teacher, tokenizer = planted
    options = {"n_pairs": (8,), "n_examples": 4, "keys": KEYS, "held_out_texts": [" ".join(KEYS[:6])]}
    kept = [HeadId(layer, head) for layer, head in HeadPlan.all(teacher).kept if layer]
    student, _ = build_student(teacher, HeadPlan.from_pairs(teacher, kept), d_state=8)
    found = evaluate(student, tokenizer, teacher=teacher, **options)
    zeroed = found.recurrent_heads_zeroed
    assert zeroed is not None and zeroed["n_examples"] == 4
    assert list(zeroed["figures"]) == ["kv_choice_8", "kv_generation_8", "perplexity", "top1_agreement"]
    assert zeroed["figures"]["perplexity"]["whole"] == pytest.approx(found.perplexity, rel=1e-6)
    with ablate_heads(student, [HeadId(0, head) for head in range(attention_sites(student)[0].n_heads)]):
        alone = evaluate(student, tokenizer, teacher=teacher, **options)
    assert zeroed["figures"]["perplexity"]["zeroed"] == pytest.approx(alone.perplexity, rel=1e-6)
    assert set(zeroed) == {"n_examples", "figures", "unused"}, "layer by layer is an experiment of analyze"
    assert not zeroed["unused"] and alone.recurrent_heads_zeroed["unused"]
    found.save(tmp_path / "evaluation.json")
    assert EvalResult.load(tmp_path / "evaluation.json") == found
