"""Rank heads by what they bring back: one attention head at a time, put into a student that has none.

Single ablation asks what the teacher loses without a head, and so overlooks heads that stand in for one another, and
overrates those that a recurrent head imitates well. Restoration asks what an aligned, fully recurrent student gains
with the head: the head-level form of replacing one layer of an aligned SSM (arXiv 2504.18574). Heads that work in
pairs show only together, so `greedy_restoration` goes on from the best head found so far.

Shapes: L layer, H query head, E example.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .model.modeling_hybrid import HybridForCausalLM
from .plan import HeadId
from .teacher import AttentionSite, attention_sites


@contextmanager
def restore_heads(
    student: HybridForCausalLM, teacher: PreTrainedModel, heads: Iterable[HeadId]
) -> Iterator[None]:
    """While active, these heads of the student do what the teacher's heads do with the student's own inputs.

    For forwards without a cache. Raises ValueError for a head that does not exist.
    """
    by_layer: dict[int, list[int]] = {}
    ours, theirs = attention_sites(student), attention_sites(teacher)
    for layer, head in heads:
        if not (0 <= layer < len(ours) and 0 <= head < ours[layer].n_heads):
            raise ValueError(
                f"head {HeadId(layer, head)} does not exist: layers 0..{len(ours) - 1}, "
                f"heads 0..{ours[0].n_heads - 1}."
            )
        by_layer.setdefault(layer, []).append(head)
    with ExitStack() as hooks:
        for layer, restored in by_layer.items():
            for handle in _install(ours[layer], theirs[layer], restored):
                hooks.callback(handle.remove)
        yield


def _install(student: AttentionSite, teacher: AttentionSite, heads: list[int]) -> list[Any]:
    """Hooks that run the teacher's attention before the student's mixer and swap heads in before its o_proj."""
    found: list[Tensor] = []

    def run_teacher(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        def note(o_proj: nn.Module, o_args: tuple[Tensor, ...]) -> None:
            found[:] = [o_args[0].unflatten(-1, (teacher.n_heads, teacher.head_dim))]

        ours_only = ("token_mask", "seq_idx")
        passed = {name: value for name, value in kwargs.items() if name not in ours_only}
        handle = teacher.o_proj.register_forward_pre_hook(note)
        try:
            teacher.module(*args, **passed)
        finally:
            handle.remove()

    def swap(o_proj: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        y_BLHP = args[0].unflatten(-1, (student.n_heads, student.head_dim)).clone()
        y_BLHP[:, :, heads] = found[0][:, :, heads]
        return (y_BLHP.flatten(-2), *args[1:])

    return [
        student.module.register_forward_pre_hook(run_teacher, with_kwargs=True),
        student.o_proj.register_forward_pre_hook(swap),
    ]
