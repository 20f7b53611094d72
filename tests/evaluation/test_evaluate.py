"""Evaluation: retrieval, knowledge, text, agreement with the teacher, memory."""

import dataclasses
import itertools
import json
import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
from conftest import make_family_model
from messages import naming
from planted import KEYS, planted_teacher, word_tokenizer
from transformers import DynamicCache

from hybrid_distill.cache_size import cache_bytes
from hybrid_distill.evaluation import EvalResult, evaluate, speed
from hybrid_distill.evaluation.evaluate import MOST_FAR
from hybrid_distill.evaluation.measure import agreement, compare_on_text, text_figures
from hybrid_distill.evaluation.result import binomial_error, relative_score
from hybrid_distill.evaluation.speed import Speed, measure_speed
from hybrid_distill.model import layer_windows
from hybrid_distill.plan import HeadId, HeadPlan
from hybrid_distill.probes.answering import answer_choices
from hybrid_distill.probes.knowledge import Knowledge
from hybrid_distill.probes.kv_retrieval import KVRetrieval
from hybrid_distill.probes.plain_text import text_batches
from hybrid_distill.student.build import build_student
from hybrid_distill.teacher import ablate_heads, attention_sites, load_teacher

# Families, and settings that bound what their caches hold: in all layers, in some, in chunks.
WINDOWS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "qwen2": {"use_sliding_window": False, "sliding_window": 6},
    "mistral": {"sliding_window": 6},
    "gemma2": {"sliding_window": 6},
    "gemma3": {"sliding_window": 6, "sliding_window_pattern": 3},
    "llama4": {"attention_chunk_size": 6},
}


@pytest.fixture(scope="module")
def planted():
    return planted_teacher()


# Memory of caches


def megabytes(plan: HeadPlan, d_state: int) -> list[float]:
    """Return the cache of a 1B model at 128, 2,048 and 4,096 tokens."""
    sizes = []
    for length in (128, 2048, 4096):
        size = cache_bytes(plan, length=length, head_dim=64, d_state=d_state, state_bytes=2)
        sizes.append(round(size.total / 1e6, 1))
    return sizes


def test_the_published_table_of_cache_memory() -> None:
    """Llama-3.2-1B, and Hybrid-Llamba with twenty kept heads, each of a KV group of its own."""
    nothing = HeadPlan(n_layers=16, n_heads=32, n_kv_heads=8, kept=())
    a_head_of_each_group = itertools.product(range(5), (0, 8, 16, 24))
    twenty = HeadPlan.from_pairs(nothing, list(a_head_of_each_group))
    assert megabytes(HeadPlan.all(nothing), d_state=0) == [4.2, 67.1, 134.2]
    assert megabytes(twenty, d_state=8) == [1.2, 11.0, 21.5]


@torch.no_grad()
@pytest.mark.parametrize("family", WINDOWS)
@pytest.mark.parametrize("length", [1, 6, 40])
def test_cache_bytes_are_those_of_a_real_teachers_cache(family: str, length: int) -> None:
    """At once and token by token, shorter and longer than the window of layers that have one."""
    model = make_family_model(family, **WINDOWS[family])
    size = cache_bytes(
        HeadPlan.all(model),
        length=length,
        head_dim=attention_sites(model)[0].head_dim,
        d_state=8,
        bytes_per_element=4,
        batch=2,
        layer_windows=layer_windows(model.config),
    )
    ids = torch.randint(3, 100, (2, length))
    at_once = [length]
    token_by_token = [1] * length
    for lengths in (at_once, token_by_token):
        cache = DynamicCache(config=model.config)
        for piece in ids.split(lengths, dim=1):
            model(piece, cache=cache, use_cache=True)
        n_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        assert dataclasses.asdict(size) == {"kv": n_bytes, "window": 0, "ssm": 0, "conv": 0}


@torch.no_grad()
@pytest.mark.parametrize("kept", [[], [(0, 0), (0, 1), (0, 6), (2, 3)], "all"])
@pytest.mark.parametrize(
    ("length", "family"),
    [(40, "llama"), (40, "mistral"), (40, "gemma3"), (5, "gemma3")],
)
@pytest.mark.parametrize("head_window", [0, 4, 9])
def test_cache_bytes_are_those_of_a_real_students_cache(
    kept: Any, family: str, length: int, head_window: int
) -> None:
    teacher = make_family_model(family, **WINDOWS[family])
    plan = HeadPlan.all(teacher) if kept == "all" else HeadPlan.from_pairs(teacher, kept)
    sizes = {
        "d_state": 12,
        "conv_width": 3,
        "window": head_window,
        "sinks": head_window // 2,
    }
    student, _ = build_student(teacher, plan, **sizes)
    student.eval()
    layer_window = WINDOWS[family].get("sliding_window")
    # A window of 1: transformers' own caches fail with it.
    layers_windows = [layer_window] if head_window else [layer_window, 1]
    for window in layers_windows:
        student.model.config.sliding_window = window
        cache = student.new_cache()
        for n_tokens in (length - 1, 1):
            student(torch.randint(3, 100, (2, n_tokens)), cache=cache, use_cache=True)
        size = cache_bytes(
            plan,
            length=length,
            head_dim=attention_sites(teacher)[0].head_dim,
            bytes_per_element=4,
            batch=2,
            layer_windows=layer_windows(student.model.config),
            **sizes,
        )
        assert dataclasses.asdict(size) == cache.nbytes()


# Text


@torch.no_grad()
def test_perplexity_and_agreement_by_hand() -> None:
    words = "one two three four five six seven eight nine ten"
    texts = [words, "ten nine eight", "one", "four four five five six"]
    tokenizer = word_tokenizer([words])
    sizes = {"vocab_size": len(tokenizer), "num_hidden_layers": 2}
    model = make_family_model("llama", **sizes)
    teacher = make_family_model("llama", seed=1, **sizes)
    max_tokens = 6
    batches = list(text_batches(model, tokenizer, texts, max_tokens=max_tokens, batch_size=2))

    losses = []
    same = []
    divergences = []
    for text in texts:
        ids = torch.tensor(tokenizer(text)["input_ids"][:max_tokens])
        ours_TV = model(ids[None]).logits[0].double().log_softmax(-1)
        theirs_TV = teacher(ids[None]).logits[0].double().log_softmax(-1)
        # The last token predicts none.
        for ours_V, theirs_V, following in zip(ours_TV, theirs_TV, ids[1:]):
            losses.append(-ours_V[following])
            same.append(ours_V.argmax() == theirs_V.argmax())
            divergences.append((theirs_V.exp() * (theirs_V - ours_V)).sum())
    perplexity = torch.stack(losses).mean().exp().item()
    agreed = torch.stack(same).double().mean().item()
    kl = torch.stack(divergences).mean().item()

    result = text_figures(compare_on_text(model, teacher, batches))
    assert result["n_text_tokens"] == len(losses) == 5 + 2 + 4
    assert result["perplexity"] == pytest.approx(perplexity, rel=1e-5)
    assert result["top1_agreement"] == pytest.approx(agreed)
    assert result["kl_to_teacher"] == pytest.approx(kl, rel=1e-4)


def test_a_student_that_diverged_has_an_infinite_perplexity() -> None:
    words = "one two three four five"
    tokenizer = word_tokenizer([words])
    model = make_family_model("llama", vocab_size=len(tokenizer))
    with torch.no_grad():
        model.lm_head.weight *= 1e6
    batches = list(text_batches(model, tokenizer, [words], max_tokens=6, batch_size=2))
    assert text_figures(compare_on_text(model, None, batches))["perplexity"] == math.inf


def test_texts_end_with_the_context_of_the_model() -> None:
    words = " ".join("one two three".split() * 10)
    tokenizer = word_tokenizer([words])
    model = make_family_model("llama", vocab_size=len(tokenizer), max_position_embeddings=8)
    (batch,) = text_batches(model, tokenizer, [words], max_tokens=512, batch_size=2)
    assert batch.input_ids_BL.shape == (1, 8)


def test_the_time_of_a_longer_context_is_bounded_by_the_growth_of_a_token(monkeypatch) -> None:
    model = make_family_model("llama")
    timed = []

    def measured(_model: Any, length: int, _n_new: int) -> Speed:
        timed.append(length)
        # 1 s; four times as long a context may take sixteen.
        return Speed(length, length, 1.0, None)

    monkeypatch.setattr(speed, "_time_length", measured)
    for limit, expected in ((15.0, [50]), (17.0, [50, 200])):
        timed.clear()
        monkeypatch.setattr(speed, "MAX_SECONDS", limit)
        list(measure_speed(model, [50, 200], n_new=1))
        assert timed == expected


def test_speed_of_a_model_with_a_very_short_context() -> None:
    model = make_family_model("llama", max_position_embeddings=20)
    (figures,) = measure_speed(model)
    assert figures.length == 10


def test_a_teacher_reads_the_texts_once_and_agrees_with_itself() -> None:
    words = "one two three four five"
    tokenizer = word_tokenizer([words])
    teacher = make_family_model("llama", vocab_size=len(tokenizer))
    batches = list(text_batches(teacher, tokenizer, [words], max_tokens=6, batch_size=2))
    with patch.object(teacher, "forward", wraps=teacher.forward) as forward:
        itself = text_figures(compare_on_text(teacher, teacher, batches))
    alone = text_figures(compare_on_text(teacher, None, batches))
    assert forward.call_count == len(batches)
    assert itself == {**alone, "top1_agreement": 1.0, "kl_to_teacher": 0.0}


def test_vocabularies_padded_differently_are_compared_on_what_they_share() -> None:
    short = torch.randn(2, 3, 10)
    # Logits that would win.
    padding = torch.full((2, 3, 6), 50.0)
    padded = torch.cat([short, padding], dim=-1)
    for ours, theirs in ((padded, short), (short, padded)):
        same_BT, kl_BT = agreement(ours, theirs)
        assert same_BT.all()
        torch.testing.assert_close(kl_BT, torch.zeros(2, 3))


# Whole evaluations


def test_teacher_and_student_are_measured_alike(planted, tmp_path) -> None:
    """With every head kept the student is the teacher, in every column of the table."""
    teacher, tokenizer = planted
    student, _ = build_student(teacher, HeadPlan.all(teacher), d_state=8)
    student.train()
    question = {"prompt": f"{KEYS[0]} :", "answer": " 7", "choices": [" 7", " 8"]}
    facts = tmp_path / "facts.jsonl"
    facts.write_text(json.dumps(question) + "\n")

    def measured(model: Any) -> EvalResult:
        return evaluate(
            model,
            tokenizer,
            teacher=teacher,
            n_pairs=(2, 6),
            n_examples=8,
            keys=KEYS,
            held_out_texts=[" ".join(KEYS[:6])],
            knowledge=Knowledge(facts),
            batch_size=5,
        )

    result = measured(student)
    of_teacher = measured(teacher)
    assert student.training
    assert dataclasses.replace(result, provenance=of_teacher.provenance) == of_teacher
    assert result.top1_agreement == 1
    assert result.kl_to_teacher == 0
    assert result.recurrent_heads_zeroed is None
    assert set(result.kv_choice) == set(result.kv_generation) == {2, 6}
    assert result.kv_choice[6] > 0.8
    assert result.n_examples == 8
    assert result.n_knowledge == 1
    assert result.knowledge_chance == 0.5
    result.save(tmp_path / "evaluation.json")
    assert EvalResult.load(tmp_path / "evaluation.json") == result


def test_losing_the_circuit_shows_in_retrieval_and_in_memory(planted) -> None:
    teacher, tokenizer = planted
    student, _ = build_student(teacher, HeadPlan.none(teacher), d_state=8, init="random")
    whole = evaluate(teacher, tokenizer, n_pairs=(8,), n_examples=16, keys=KEYS)
    lost = evaluate(student, tokenizer, n_pairs=(8,), n_examples=16, keys=KEYS)
    assert lost.kv_choice[8] < 0.5 < 0.9 < whole.kv_choice[8]
    assert lost.kv_generation[8] < 0.5 < 0.9 < whole.kv_generation[8]
    for name in ("knowledge", "perplexity", "top1_agreement", "kl_to_teacher"):
        assert getattr(lost, name) is None
    size = cache_bytes(HeadPlan.none(teacher), length=128, head_dim=128, d_state=8)
    assert lost.cache_bytes[128] == lost.cache_bytes[4096] == size.total
    assert lost.conv_state_bytes == size.conv


def test_dictionaries_far_from_their_question_are_measured_once_more() -> None:
    teacher, tokenizer = load_teacher("tiny")
    probe = KVRetrieval(4, seed=3, distance=20)
    expected = answer_choices(teacher, tokenizer, probe.examples(MOST_FAR))

    result = evaluate(teacher, tokenizer, n_pairs=(4, 8), n_examples=30, distance=20, seed=3)

    assert result.far_choice == {4: expected.accuracy}
    assert result.n_far == MOST_FAR
    assert result.distance == 20
    assert result.chances()["far_choice_4"] == 1 / 4
    error = binomial_error(expected.accuracy, MOST_FAR)
    assert result.standard_errors()["far_choice_4"] == error
    near = evaluate(teacher, tokenizer, n_pairs=(4, 8), n_examples=30, seed=3)
    assert near.far_choice == {}
    assert near.kv_choice == result.kv_choice


def test_texts_without_a_next_token_are_left_out(planted) -> None:
    """However many come first: a student is measured without its parts on the first texts alone."""
    model, tokenizer = planted
    student, _ = build_student(model, HeadPlan.none(model), d_state=4)
    texts = [""] * 30 + [" ".join(KEYS[:6])]
    result = evaluate(student, tokenizer, n_pairs=(), held_out_texts=texts)
    assert result.n_texts == 1
    with pytest.raises(ValueError, match=naming("30", "two tokens")):
        evaluate(student, tokenizer, n_pairs=(), held_out_texts=texts[:30])


def test_a_file_that_is_not_an_evaluation_is_refused(planted, tmp_path) -> None:
    result = evaluate(*planted, n_pairs=(), held_out_texts=["apple anchor arrow"])
    record = result.to_dict()
    assert EvalResult.from_dict(record).to_dict() == record
    changes: dict[str, dict[str, Any]] = {
        "'other'": {"format": "other"},
        "'many'": {"kv_choice": {"many": 1.0}},
        "'unknown'": {"unknown": 1},
    }
    for fact, change in changes.items():
        with pytest.raises(ValueError, match=naming(fact)):
            EvalResult.from_dict({**record, **change})
    torn = tmp_path / "torn.json"
    torn.write_text(json.dumps(record)[:-5])
    with pytest.raises(ValueError, match=r"torn\.json"):
        EvalResult.load(torn)


def test_a_student_is_measured_without_its_recurrence(planted, tmp_path) -> None:
    """A student whose recurrent heads are zeroed already is flagged: nothing changes."""
    teacher, tokenizer = planted
    above_layer_0 = [head for head in HeadPlan.all(teacher).kept if head.layer > 0]
    student, _ = build_student(teacher, HeadPlan.from_pairs(teacher, above_layer_0), d_state=8)
    n_heads = attention_sites(student)[0].n_heads
    of_layer_0 = [HeadId(0, head) for head in range(n_heads)]

    def measured() -> EvalResult:
        return evaluate(
            student,
            tokenizer,
            teacher=teacher,
            n_pairs=(8,),
            n_examples=4,
            keys=KEYS,
            held_out_texts=[" ".join(KEYS[:6])],
        )

    result = measured()
    with ablate_heads(student, of_layer_0):
        ablated = measured()
    zeroed = result.recurrent_heads_zeroed
    assert zeroed is not None
    assert set(zeroed) == {"n_examples", "figures", "unused"}
    assert zeroed["n_examples"] == 4
    figures = zeroed["figures"]
    assert list(figures) == ["kv_choice_8", "kv_generation_8", "perplexity", "top1_agreement"]
    perplexity = figures["perplexity"]
    assert perplexity["whole"] == pytest.approx(result.perplexity, rel=1e-6)
    assert perplexity["zeroed"] == pytest.approx(ablated.perplexity, rel=1e-6)
    assert not zeroed["unused"]
    assert ablated.recurrent_heads_zeroed is not None
    assert ablated.recurrent_heads_zeroed["unused"]
    result.save(tmp_path / "evaluation.json")
    assert EvalResult.load(tmp_path / "evaluation.json") == result


# Scores relative to the teacher's, and speed


@pytest.mark.parametrize(
    ("student", "share"),
    [(0.9, 1.0), (0.25, 0.0), (0.575, 0.5), (0.1, -3 / 13)],
    ids=["the teacher's", "guessing", "half way", "below guessing"],
)
def test_a_relative_score_is_the_share_above_guessing(student: float, share: float) -> None:
    teacher = 0.9
    chance = 0.25
    relative = relative_score((student, 0.01), (teacher, 0.02), chance)
    assert relative is not None
    value, error = relative
    assert value == pytest.approx(share)
    # As of a quotient of independent numbers.
    expected_error = math.hypot(0.01, 0.02 * share) / (teacher - chance)
    assert error == pytest.approx(expected_error)


def test_nothing_is_relative_to_a_teacher_that_guesses() -> None:
    assert relative_score((0.5, 0.01), (0.28, 0.02), 0.25) is None


@pytest.mark.parametrize(
    "options",
    [None, {"d_state": 4}, {"d_state": 0, "window": 8, "sinks": 2}],
    ids=["teacher", "states", "windows"],
)
def test_speed_is_measured_up_to_the_context_in_one_cache(options, monkeypatch) -> None:
    model = make_family_model("llama")
    if options is not None:
        plan = HeadPlan.from_pairs(model, [(0, 0), (1, 3)])
        model, _ = build_student(model, plan, init="random", **options)
    lengths_read = []
    forward = model.model.forward

    def note_length(*args: Any, **kwargs: Any) -> Any:
        lengths_read.append(kwargs["input_ids"].shape[1])
        return forward(*args, **kwargs)

    monkeypatch.setattr(model.model, "forward", note_length)
    monkeypatch.setattr("hybrid_distill.evaluation.speed.PIECE", 48)
    # The model has 256 positions.
    speeds = list(measure_speed(model, [100, 64, 5000], n_new=3))
    assert [figures.length for figures in speeds] == [64, 100]

    first_calls = [48, 1]
    new_tokens = [1, 1, 1]
    of_64 = [*first_calls, 48, 16, *new_tokens]
    of_100 = [*first_calls, 48, 48, 4, *new_tokens]
    assert lengths_read == of_64 + of_100
    for figures in speeds:
        assert figures.prefill > 0
        assert figures.decode > 0
        assert figures.peak_bytes is None or figures.peak_bytes >= 0
