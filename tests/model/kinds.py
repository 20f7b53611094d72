"""A student of every kind: each recurrence, windows with and without it, layers with windows."""

from __future__ import annotations

import torch
from conftest import make_family_model
from students import HARD, keep, mixed_student, recurrent_parameters

from hybrid_distill.model import HybridForCausalLM
from hybrid_distill.model.field_rules import RECURRENCES
from hybrid_distill.student.build import build_student

KINDS = (*RECURRENCES, "windows", "gdn and windows", "windows alone", "sliding")


def student_of_kind(kind: str) -> HybridForCausalLM:
    """Make one of `KINDS`."""
    if kind in RECURRENCES:
        return mixed_student(make_family_model("llama"), kind)
    if kind == "sliding":
        return mixed_student(make_family_model("qwen2", **HARD["qwen2"]))
    if kind == "windows alone":
        return short_windows(d_state=0)
    return short_windows("gdn" if kind.startswith("gdn") else "discrete")


def short_windows(recurrence: str = "discrete", d_state: int = 5) -> HybridForCausalLM:
    """Windows shorter than the prompts; heads kept in some groups, none, and whole groups."""
    teacher = make_family_model("llama")
    plan = keep(teacher, (0, 5), (), (2, 3))
    options = {"window": 4, "sinks": 2, "d_state": d_state, "recurrence": recurrence}
    student, _ = build_student(teacher, plan, init="random", **options)
    # A new student's recurrent heads are silent: give them gates and taps that matter.
    with torch.no_grad():
        for parameter in recurrent_parameters(student):
            parameter.add_(0.1 * torch.randn_like(parameter))
    return student.eval()
