"""Share the teacher's weights with a student that does not train them."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from transformers import PreTrainedModel

from ..model import HybridForCausalLM
from .copying import mixer_names, teacher_names


def share_frozen_weights(student: HybridForCausalLM, teacher: PreTrainedModel) -> None:
    """Make the student share the teacher's parameters outside its mixers, to save a second copy in memory.

    Training a shared parameter would train the teacher: call `unshare_weights` first.
    """
    named = teacher_names(teacher)
    _replace_outside_mixers(student, lambda name, parameter: teacher.get_parameter(named(name)))


def unshare_weights(student: HybridForCausalLM) -> None:
    """Give the student its own copy of every parameter outside its mixers; tied parameters stay tied."""
    copies: dict[int, nn.Parameter] = {}

    def own(name: str, parameter: nn.Parameter) -> nn.Parameter:
        if id(parameter) not in copies:
            copied = parameter.detach().clone()
            copies[id(parameter)] = nn.Parameter(copied, requires_grad=parameter.requires_grad)
        return copies[id(parameter)]

    _replace_outside_mixers(student, own)


def _replace_outside_mixers(
    student: HybridForCausalLM, replacement: Callable[[str, nn.Parameter], nn.Parameter]
) -> None:
    inside = tuple(f"{name}." for name in mixer_names(student))
    # By all of its names: a tied parameter must be replaced in every place.
    for name, parameter in list(student.named_parameters(remove_duplicate=False)):
        if not name.startswith(inside):
            module_name, _, attribute = name.rpartition(".")
            setattr(student.get_submodule(module_name), attribute, replacement(name, parameter))
