"""Analyses of students whose replaced heads sum a window and a recurrence."""

from __future__ import annotations

import pytest
import torch
from conftest import make_family_model
from torch.testing import assert_close

from hybrid_distill.lab.analysis.hybrids import _zero_recurrence
from hybrid_distill.lab.analysis.mixing import mask_heads, mix_heads
from hybrid_distill.model import HybridForCausalLM
from hybrid_distill.model.mixer import zero_part
from hybrid_distill.plan import HeadId, HeadPlan
from hybrid_distill.student.build import build_student
from hybrid_distill.teacher import head_sites

IDS = [5, 9, 3, 8, 5, 9, 4, 7, 6, 5, 9]
KEPT = HeadId(0, 1)
REPLACED = HeadId(0, 2)


def student_with(d_state: int) -> HybridForCausalLM:
    teacher = make_family_model("llama")
    plan = HeadPlan.from_pairs(teacher, [KEPT])
    student, _ = build_student(teacher, plan, d_state=d_state, window=4, sinks=1, init="random")
    with torch.no_grad():
        for heads in student.recurrent_heads():
            heads.z_proj.bias.fill_(0.7)
    return student.eval()


@torch.no_grad()
def test_zeroed_recurrence_leaves_the_window() -> None:
    student = student_with(d_state=4)
    ids = torch.tensor([IDS])

    with _zero_recurrence(student, head_sites(student)):
        zeroed = student(ids).logits
    with zero_part(student.mixers(), "recurrence"):
        window_alone = student(ids).logits
    intact = student(ids).logits

    assert torch.equal(window_alone, zeroed)
    assert not torch.allclose(intact, zeroed, atol=1e-3)


def test_maps_of_kept_heads_and_of_windows_alone_compute_their_outputs() -> None:
    student = student_with(d_state=0)
    student.set_attn_implementation("eager")
    mixer = student.mixers()[0]
    inputs: list[torch.Tensor] = []
    hook = mixer.o_proj.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    with torch.no_grad(), hook:
        student(torch.tensor([IDS]), use_cache=False)
    (heads_BLD,) = inputs
    heads_LHP = heads_BLD[0].unflatten(-1, (-1, mixer.head_dim))

    kept, windowed = mix_heads(student, IDS, [KEPT, REPLACED])

    for mix in (kept, windowed):
        assert mix.kind == "attention"
        assert_close(mix.output(), heads_LHP[:, mix.head.head], rtol=0, atol=1e-5)
    # The last 4 tokens and the first one.
    seen_by_the_last = (windowed.matrix_TS[10] > 0).nonzero().flatten()
    assert seen_by_the_last.tolist() == [0, 7, 8, 9, 10]


def test_the_matrix_of_a_sum_is_its_recurrence_and_cannot_be_masked() -> None:
    student = student_with(d_state=4)
    (mix,) = mix_heads(student, IDS, [REPLACED])
    assert mix.kind == "ssm"
    mask = torch.ones(len(IDS), len(IDS), dtype=torch.bool)
    with pytest.raises(ValueError, match="window"), mask_heads(student, {REPLACED: mask}):
        pass
