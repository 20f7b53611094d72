"""Shares of what windows lose: they add up to the loss, and go to the heads that read far."""

import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_family_model
from messages import naming
from planted import AGGREGATE, GATHER_ASKED_KEY, KEYS, PLANTED, planted_teacher
from torch import nn

from hybrid_distill.lab.reporting.heads import score_map, score_table
from hybrid_distill.plan import HeadId, HeadPlan
from hybrid_distill.probes.answering import answer_choices
from hybrid_distill.probes.checks import CannotAnswer
from hybrid_distill.probes.kv_retrieval import KVRetrieval
from hybrid_distill.scoring import HeadScores, attribute_heads, attribution, score_heads
from hybrid_distill.student.build import build_student
from hybrid_distill.student.confined import confined

WINDOW = 6
# The window covers the question and its newline, four tokens a pair are beyond it.
PROBE = KVRetrieval(8, seed=3, keys=KEYS)
IDS = torch.arange(2, 40).view(2, 19)


attribute = partial(attribute_heads, progress=False)


def attributed(n_examples: int = 12, **options: Any) -> HeadScores:
    """Attribute what a window loses of the planted circuit."""
    teacher, tokenizer = planted_teacher()
    student = confined(teacher, WINDOW, 0)
    return attribute(student, teacher, tokenizer, PROBE, n_examples=n_examples, **options)


def test_the_head_that_reads_far_gets_the_loss_and_those_that_read_near_nothing() -> None:
    scores = attributed()
    assert scores.ranking()[0] == AGGREGATE
    assert scores.logprob_drop_LH[AGGREGATE] > 0.95 * scores.baseline["attributed"] > 1
    for head in PLANTED - {AGGREGATE}:
        assert scores.logprob_drop_LH[head].abs() < 0.02
    # Ablation cannot tell: all three are needed.
    ablated = score_heads(*planted_teacher(), PROBE, n_examples=12, progress=False)
    assert set(ablated.ranking()[:3]) == PLANTED


def test_shares_add_up_to_the_gain() -> None:
    scores = attributed(n_examples=3, n_steps=300)
    total = scores.logprob_drop_LH.sum().item()
    assert total == pytest.approx(scores.baseline["attributed"])
    assert total == pytest.approx(scores.baseline["gain"], rel=0.01)


def test_the_gain_is_from_the_student_to_the_teacher() -> None:
    teacher, tokenizer = planted_teacher()
    student = confined(teacher, WINDOW, 0)
    examples = PROBE.examples(12)
    of_teacher_E = answer_choices(teacher, tokenizer, examples).answer_logprob_E
    of_student_E = answer_choices(student, tokenizer, examples).answer_logprob_E
    gain = (of_teacher_E - of_student_E).mean().item()
    assert attributed().baseline["gain"] == pytest.approx(gain, abs=1e-4)


@torch.no_grad()
def test_gates_lead_from_the_student_to_the_teacher(family: str) -> None:
    teacher = make_family_model(family)
    student = confined(teacher, 4, 1)
    with attribution._gated(student, teacher) as gates:
        gates.value_BLH = gates.constant(2, 0)
        closed = student(IDS, use_cache=False).logits
        gates.value_BLH = gates.constant(2, 1)
        opened = student(IDS, use_cache=False).logits
    of_student = student(IDS, use_cache=False).logits
    assert torch.allclose(closed, of_student, atol=1e-5)
    assert torch.allclose(opened, teacher(IDS).logits, atol=1e-5)
    assert not torch.allclose(closed, opened, atol=1e-3)


def test_rows_of_a_batch_are_attributed_apart() -> None:
    probe = KVRetrieval((6, 9), seed=3, keys=KEYS)
    teacher, tokenizer = planted_teacher()
    student = confined(teacher, WINDOW, 0)

    options = {"n_examples": 5}
    alone = attribute(student, teacher, tokenizer, probe, batch_size=1, **options)
    together = attribute(student, teacher, tokenizer, probe, batch_size=3, **options)
    assert torch.allclose(alone.logprob_drop_LH, together.logprob_drop_LH, atol=1e-5)
    assert torch.allclose(alone.logprob_se_LH, together.logprob_se_LH, atol=1e-5)


def test_weights_get_no_gradient_and_are_trained_as_before() -> None:
    teacher, tokenizer = planted_teacher()
    student = confined(teacher, WINDOW, 0)
    teacher.lm_head.requires_grad_(False)
    are_trained = [parameter.requires_grad for parameter in teacher.parameters()]
    attribute(student, teacher, tokenizer, PROBE, n_examples=2)
    assert [parameter.requires_grad for parameter in teacher.parameters()] == are_trained
    assert not all(are_trained)
    for parameter in (*teacher.parameters(), *student.parameters()):
        assert parameter.grad is None


def test_units_rank_by_the_sum_of_their_shares() -> None:
    scores = attributed()
    share_LH = torch.zeros_like(scores.logprob_drop_LH)
    # The best head, and the best pair.
    share_LH[0, 0] = 0.5
    share_LH[1, 2:] = 0.3
    scores = replace(scores, logprob_drop_LH=share_LH)
    assert scores.ranking()[0] == HeadId(0, 0)
    assert scores.unit_ranking(2)[:2] == [(1, 1), (0, 0)]
    assert HeadPlan.top_k(scores, 1, unit="kv-group").kept == ((1, 2), (1, 3))
    assert HeadPlan.top_k(scores, 1).kept == ((0, 0),)


def test_the_file_has_no_accuracy_and_gives_back_the_ranking(tmp_path: Path) -> None:
    scores = attributed()
    scores.save(tmp_path / "scores.json")
    loaded = HeadScores.load(tmp_path / "scores.json")
    assert loaded.is_additive
    assert loaded.accuracy_drop_LH is None
    assert loaded.accuracy_se_LH is None
    assert loaded.ranking() == scores.ranking()
    assert loaded.tie(1) is None
    low, high = loaded.logprob_interval_LH2[AGGREGATE].tolist()  # type: ignore[index]
    assert low < loaded.logprob_drop_LH[AGGREGATE] < high
    table = score_table(loaded, top=3)
    assert table["head"].iloc[0] == str(AGGREGATE)
    (figure,) = score_map(loaded, tmp_path / "map.png", kept=[AGGREGATE])
    assert figure is not None


def test_a_stopped_call_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "partial.json"
    whole = attributed(n_examples=12)
    original = attribution._attribute
    n_calls = itertools.count(1)

    def stop_at_tenth(*args: Any) -> Any:
        if next(n_calls) == 10:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(attribution, "_attribute", stop_at_tenth)
    with pytest.raises(KeyboardInterrupt):
        attributed(n_examples=12, resume_path=path)
    # The teacher's own answers are in the file, too: it is not asked again.
    monkeypatch.delattr(attribution, "answer_choices")
    resumed = attributed(n_examples=12, resume_path=path)
    # Eight of twelve examples are read from the file: a round is eight.
    assert next(n_calls) == 10 + 4 + 1
    assert torch.equal(resumed.logprob_drop_LH, whole.logprob_drop_LH)


def test_measurements_of_another_student_are_not_used(tmp_path: Path) -> None:
    """Its window and its heads are the same, its weights are not."""
    path = tmp_path / "partial.json"
    teacher, tokenizer = planted_teacher()
    student = confined(teacher, WINDOW, 0)
    gains = []
    for scale in (1, 0.9):
        student.lm_head.weight = nn.Parameter(scale * teacher.lm_head.weight)
        scores = attribute(student, teacher, tokenizer, PROBE, n_examples=2, resume_path=path)
        gains.append(scores.baseline["gain"])
    assert gains[0] != gains[1]


def test_questions_within_the_window_are_refused() -> None:
    teacher, tokenizer = planted_teacher()
    student = confined(teacher, 200, 0)
    with pytest.raises(ValueError, match=naming(200, "--distance")):
        attribute(student, teacher, tokenizer, PROBE, n_examples=2)


def test_a_student_that_loses_nothing_is_refused() -> None:
    teacher, tokenizer = planted_teacher()
    student, _ = build_student(teacher, HeadPlan.all(teacher), d_state=0, window=WINDOW)
    with pytest.raises(ValueError, match=naming("nats", WINDOW, "--distance")):
        attribute(student, teacher, tokenizer, PROBE, n_examples=2)


def test_a_teacher_that_guesses_is_refused() -> None:
    teacher, tokenizer = planted_teacher()
    student = confined(teacher, WINDOW, 0)
    with torch.no_grad():
        teacher.model.layers[AGGREGATE.layer].self_attn.o_proj.weight.zero_()
    with pytest.raises(CannotAnswer):
        attribute(student, teacher, tokenizer, PROBE, n_examples=8)


def test_gather_heads_matter_for_ablation() -> None:
    """The other half of the first test: what attribution leaves out is needed, but not from afar."""
    teacher, tokenizer = planted_teacher()
    student = confined(teacher, WINDOW, 0)
    plan = HeadPlan.from_pairs(teacher, [AGGREGATE])
    assert GATHER_ASKED_KEY not in plan.kept
    with_aggregate, _ = build_student(teacher, plan, d_state=0, window=WINDOW)
    examples = PROBE.examples(16)
    assert answer_choices(student, tokenizer, examples).accuracy < 0.5
    assert answer_choices(with_aggregate.eval(), tokenizer, examples).accuracy > 0.9
