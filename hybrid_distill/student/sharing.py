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
    teacher_name = teacher_names(teacher)

    def of_teacher(name: str, parameter: nn.Parameter) -> nn.Parameter:
        return teacher.get_parameter(teacher_name(name))

    _replace_outside_mixers(student, of_teacher)


def unshare_weights(student: HybridForCausalLM) -> None:
    """Give the student its own copy of every parameter outside its mixers; tied parameters stay tied."""
    # By identity, so that the names of a tied parameter get one copy.
    copies: dict[nn.Parameter, nn.Parameter] = {}

    def own_copy(name: str, parameter: nn.Parameter) -> nn.Parameter:
        if parameter not in copies:
            values = parameter.detach().clone()
            copies[parameter] = nn.Parameter(values, requires_grad=parameter.requires_grad)
        return copies[parameter]

    _replace_outside_mixers(student, own_copy)


def _replace_outside_mixers(
    student: HybridForCausalLM, replacement: Callable[[str, nn.Parameter], nn.Parameter]
) -> None:
    in_mixers = tuple(f"{name}." for name in mixer_names(student))
    # By all of its names: a tied parameter must be replaced in every place.
    for name, parameter in list(student.named_parameters(remove_duplicate=False)):
        if not name.startswith(in_mixers):
            module_name, _, attribute = name.rpartition(".")
            module = student.get_submodule(module_name)
            setattr(module, attribute, replacement(name, parameter))
