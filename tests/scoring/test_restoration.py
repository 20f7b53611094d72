"""A restored head is the teacher's; all of them make the student the teacher."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_family_model
from planted import AGGREGATE, KEYS, PLANTED, planted_teacher, probe_texts, word_tokenizer
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_distill.model.modeling_hybrid import HybridForCausalLM
from hybrid_distill.plan import HeadId, HeadPlan
from hybrid_distill.probes.answering import answer_choices
from hybrid_distill.probes.kv_retrieval import KVRetrieval
from hybrid_distill.scoring import restoration
from hybrid_distill.scoring.restoration import (
    greedy_restoration,
    restore_heads,
    score_restoration,
)
from hybrid_distill.student.build import build_student
from hybrid_distill.student.grafting import graft_recurrent_heads

IDS = torch.arange(2, 40).view(2, 19)
EVERY_HEAD = [HeadId(*pair) for pair in itertools.product(range(3), range(8))]
PROBE = KVRetrieval(4, seed=3, keys=KEYS)


def student_that_keeps(teacher: PreTrainedModel, plan: HeadPlan) -> HybridForCausalLM:
    student, _ = build_student(teacher, plan, d_state=4)
    return student.eval()


def recurrent_student(teacher: PreTrainedModel) -> HybridForCausalLM:
    return student_that_keeps(teacher, HeadPlan.none(teacher))


def logits_of(student: HybridForCausalLM) -> Tensor:
    """Return logits without a cache, which restored heads do not have."""
    return student(IDS, use_cache=False).logits


@torch.no_grad()
def test_with_every_head_restored_the_student_is_the_teacher(family: str) -> None:
    teacher = make_family_model(family)
    student = recurrent_student(teacher)
    expected = teacher(IDS).logits
    before = logits_of(student)
    with restore_heads(student, teacher, EVERY_HEAD):
        restored = logits_of(student)
    after = logits_of(student)
    assert torch.allclose(restored, expected, atol=1e-5)
    assert not torch.allclose(before, expected, atol=1e-2)
    assert torch.equal(before, after), "restored heads were not taken out again"


@torch.no_grad()
def test_a_restored_head_is_a_kept_head() -> None:
    teacher = make_family_model("llama")
    heads = [HeadId(0, 3), HeadId(2, 5)]
    keeps_none = recurrent_student(teacher)
    keeps_heads = student_that_keeps(teacher, HeadPlan.from_pairs(teacher, heads))
    graft_recurrent_heads(keeps_heads, keeps_none)
    expected = logits_of(keeps_heads)
    with restore_heads(keeps_none, teacher, heads):
        assert torch.allclose(logits_of(keeps_none), expected, atol=1e-5)


@pytest.mark.parametrize("missing", sorted(PLANTED))
def test_the_missing_head_of_the_planted_circuit_comes_first(missing: HeadId) -> None:
    teacher, tokenizer = planted_teacher()
    others = sorted(PLANTED - {missing})
    scores = score_restoration(
        recurrent_student(teacher),
        teacher,
        tokenizer,
        PROBE,
        restored=others,
        n_examples=12,
        progress=False,
    )
    assert scores.ranking()[0] == missing
    for head in others:
        assert scores.accuracy_drop_LH[head] == 0


def test_choices_of_several_tokens_are_answered_by_a_student_with_restored_heads() -> None:
    """Numbers are one token a digit, as in most tokenizers; a cache would answer their second
    digits."""
    tokenizer = word_tokenizer(probe_texts(), r"\n|:|'|\p{N}", "isolated")
    teacher = make_family_model("llama", vocab_size=len(tokenizer))
    student = recurrent_student(teacher)
    examples = PROBE.examples(6)
    with restore_heads(student, teacher, EVERY_HEAD):
        restored = answer_choices(student, tokenizer, examples)
    expected = answer_choices(teacher, tokenizer, examples)
    torch.testing.assert_close(
        restored.answer_logprob_E, expected.answer_logprob_E, rtol=1e-4, atol=1e-4
    )


def test_greedy_restoration_takes_each_head_once_and_finds_the_aggregate_head() -> None:
    teacher, tokenizer = planted_teacher()
    student = recurrent_student(teacher)
    n_heads = 3
    chosen = greedy_restoration(
        student, teacher, tokenizer, PROBE, n_heads, n_examples=6, progress=False
    )
    assert len(set(chosen)) == n_heads
    assert AGGREGATE in chosen


def test_a_stopped_choice_of_heads_resumes(tmp_path: Path, monkeypatch) -> None:
    teacher, tokenizer = planted_teacher()
    student = recurrent_student(teacher)
    original = score_restoration
    rounds: list[list[HeadId]] = []

    def stopped_in_the_third(*args: Any, restored: list[HeadId], **options: Any) -> Any:
        if len(rounds) == 2:
            raise InterruptedError
        rounds.append(list(restored))
        return original(*args, restored=restored, **options)

    def choose(path: Path | None) -> list[HeadId]:
        return greedy_restoration(
            student, teacher, tokenizer, PROBE, 3, n_examples=2, progress=False, resume_path=path
        )

    expected = choose(None)
    path = tmp_path / "partial.json"
    monkeypatch.setattr(restoration, "score_restoration", stopped_in_the_third)
    with pytest.raises(InterruptedError):
        choose(path)
    rounds.clear()
    assert choose(path) == expected
    assert rounds == [expected[:2]]

    # An aligned student of other weights starts over.
    rounds.clear()
    with torch.no_grad():
        student.lm_head.weight.mul_(0.5)
    with pytest.raises(InterruptedError):
        choose(path)
    assert rounds[0] == []


def test_what_cannot_be_restored_is_named() -> None:
    teacher = make_family_model("llama")
    student = recurrent_student(teacher)
    with pytest.raises(ValueError, match="L9H0"):
        with restore_heads(student, teacher, [HeadId(9, 0)]):
            pass


def test_a_cache_beside_restored_heads_is_refused() -> None:
    teacher = make_family_model("llama")
    student = recurrent_student(teacher)
    with pytest.raises(ValueError, match="cache"):
        with restore_heads(student, teacher, [HeadId(0, 0)]):
            student(IDS, use_cache=True)
