"""Grafted heads are the donor's, whichever of its heads a student replaces."""

from __future__ import annotations

import pytest
import torch
from conftest import make_family_model

from hybrid_distill.model.field_rules import RECURRENCES
from hybrid_distill.model.modeling_hybrid import HybridForCausalLM
from hybrid_distill.plan import HeadId, HeadPlan
from hybrid_distill.scoring.restoration import restore_heads
from hybrid_distill.student.build import build_student
from hybrid_distill.student.grafting import graft_recurrent_heads

IDS = torch.arange(2, 40).view(2, 19)
KEPT = [HeadId(0, 3), HeadId(0, 6), HeadId(2, 5)]


@pytest.fixture(scope="module")
def teacher():
    return make_family_model("llama")


def student_of(teacher, kept: list[HeadId], **options) -> HybridForCausalLM:
    plan = HeadPlan.from_pairs(teacher, kept)
    student, _ = build_student(teacher, plan, **{"d_state": 4, "init": "random", **options})
    return student.eval()


@pytest.mark.parametrize("recurrence", RECURRENCES)
@torch.no_grad()
def test_grafted_heads_are_the_donors(teacher, recurrence: str) -> None:
    """The student computes what the donor does with the student's kept heads restored."""
    donor = student_of(teacher, [], recurrence=recurrence)
    # Every parameter is unlike any other.
    generator = torch.Generator().manual_seed(0)
    for mixer in donor.mixers():
        for parameter in mixer.ssm.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    student = student_of(teacher, KEPT, recurrence=recurrence)

    graft_recurrent_heads(student, donor)
    with restore_heads(donor, teacher, KEPT):
        expected = donor(IDS, use_cache=False).logits
    grafted = student(IDS, use_cache=False).logits
    assert torch.allclose(grafted, expected, atol=1e-4)


@pytest.mark.parametrize("other", [{"d_state": 8}, {"conv_width": 3}, {"recurrence": "gdn"}])
def test_a_donor_of_another_form_is_refused(teacher, other: dict) -> None:
    student = student_of(teacher, KEPT)
    donor = student_of(teacher, [], **other)
    with pytest.raises(ValueError, match="donor"):
        graft_recurrent_heads(student, donor)
