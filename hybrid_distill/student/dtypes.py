"""Dtypes of a student: the rule, in one place.

A student is built in its teacher's dtype. While a stage trains, the parameters that it trains are float32
(`make_master_weights`), because an update is often smaller than the rounding of a bfloat16 weight; autocast computes
in another dtype around them. They stay float32 from stage to stage and in every file below stages/.

Outside training nothing autocasts, and a matrix product takes one dtype. So a student that is evaluated, queried or
exported has the teacher's dtype throughout (`settle`), whichever of its parts was trained. The exported student is then
the one that was measured, at the teacher's size, and `trained_student` returns the same from the files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ..model import HybridForCausalLM


def make_master_weights(parameters: Iterable[nn.Parameter]) -> None:
    """Make parameters float32 and trainable."""
    for parameter in parameters:
        parameter.requires_grad_(True)
        parameter.data = parameter.data.float()


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make new tensors in a dtype, whatever the caller's default is."""
    callers_dtype = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(callers_dtype)


def cast_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast a model's parameters, as `from_pretrained` does: ``.to(dtype)`` would also round RoPE's frequencies."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def settle(student: HybridForCausalLM, dtype: torch.dtype | None = None) -> HybridForCausalLM:
    """Cast all parameters of a student to one dtype and return it; the default is the teacher's.

    Buffers keep theirs: RoPE's frequencies are float32 in any model. Tied parameters stay tied.
    """
    target = dtype or student.config.dtype
    assert isinstance(target, torch.dtype)
    cast_weights(student, target)
    return student


def check_one_dtype(student: nn.Module) -> None:
    """Raise ValueError for a student whose parameters have several dtypes, as between two stages."""
    dtypes = {str(parameter.dtype) for parameter in student.parameters()}
    if len(dtypes) > 1:
        names = sorted(name.removeprefix("torch.") for name in dtypes)
        raise ValueError(
            f"the student's parameters are {' and '.join(names)}, as while a stage trains them; a "
            "student has one dtype outside training: pass it through "
            "hybrid_distill.student.dtypes.settle first."
        )
