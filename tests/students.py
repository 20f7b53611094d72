"""Small random students, and what is asked of them in more than one test file."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_distill.build import build_student
from hybrid_distill.model import HybridForCausalLM
from hybrid_distill.plan import HeadPlan

TOLERANCE = {"fp32": {"rtol": 1e-5, "atol": 2e-6}}
# Norm of the error over the norm of the logits: 0.018 to 0.027 measured over families and seeds (attention alone 0.01).
BF16_RELATIVE_ERROR = 0.04
# Of 8 heads in 4 KV groups: three of groups 0, 0, 1; all but one.
THREE, ALL_BUT_ONE = (0, 1, 2), (0, 1, 2, 3, 4, 6, 7)


def keep(teacher: PreTrainedModel, *per_layer: tuple[int, ...]) -> HeadPlan:
    return HeadPlan.from_pairs(teacher, [(layer, head) for layer, heads in enumerate(per_layer) for head in heads])


def student_of(teacher: PreTrainedModel, plan: HeadPlan, d_state: int = 5) -> HybridForCausalLM:
    """A student whose recurrent heads use all they have: conv taps, gate, data-dependent decay, D."""
    student, _ = build_student(teacher, plan, d_state=d_state)
    with torch.no_grad():
        for name, parameter in student.named_parameters():
            if ".ssm." in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return student


def mixed_student(teacher: PreTrainedModel) -> HybridForCausalLM:
    """Layers that keep three heads (which share KV heads unevenly), none, and all but one."""
    return student_of(teacher, keep(teacher, THREE, (), ALL_BUT_ONE))


def tokens(*shape: int) -> Tensor:
    return torch.randint(3, 101, shape)


def left_padded(prompts: list[Tensor]) -> tuple[Tensor, Tensor]:
    length = max(len(prompt) for prompt in prompts)
    ids = torch.stack([torch.cat([tokens(length - len(p)), p]) for p in prompts])  # the pads are no zeros
    mask = torch.stack([torch.cat([torch.zeros(length - len(p)), torch.ones(len(p))]) for p in prompts])
    return ids, mask.long()


def close(actual: Tensor, expected: Tensor, precision: str = "fp32") -> None:
    torch.testing.assert_close(actual, expected, **TOLERANCE[precision])


@torch.no_grad()
def logits(model: PreTrainedModel, ids: Tensor, **kwargs: Any) -> Tensor:
    return model(ids, **kwargs).logits
