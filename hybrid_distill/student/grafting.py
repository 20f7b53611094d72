"""Recurrent heads that move from one student to another of the same teacher."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..model import HybridForCausalLM
from ..model.recurrent_heads import SSMHeads
from .copying import mixer_names


def recurrent_tensors(student: HybridForCausalLM) -> dict[str, Tensor]:
    """Return the tensors of a student's recurrent heads by name: all that it does not copy from its teacher."""
    inside = tuple(f"{name}.ssm." for name in mixer_names(student))
    return {
        name: tensor for name, tensor in student.state_dict().items() if name.startswith(inside)
    }


def load_recurrent_heads(
    student: HybridForCausalLM, tensors: Mapping[str, Tensor], source: str
) -> None:
    """Set a student's recurrent heads, and nothing else, so that `graft_recurrent_heads` can copy them.

    Raises ValueError, naming the ``source``, for the tensors of another student.
    """
    own = {}
    for name, expected in recurrent_tensors(student).items():
        shape = tuple(tensors[name].shape) if name in tensors else None
        if shape != tuple(expected.shape):
            raise ValueError(
                f"{source} holds another student: {name} has shape {shape} there and {tuple(expected.shape)} here; "
                "align a student that keeps no head, with the same d_state, conv_width and recurrence."
            )
        own[name] = tensors[name]
    student.load_state_dict(own, strict=False, assign=True)


def graft_recurrent_heads(student: HybridForCausalLM, donor: HybridForCausalLM) -> None:
    """Copy the donor's recurrent heads into the student's, each from the same layer and head.

    Use a donor without kept heads that was aligned head by head, so that students that differ only in their plan share
    one alignment. Raises ValueError for a donor of another shape, or one that keeps a head that the student replaces.
    """
    for mixer, source in zip(student.mixers(), donor.mixers(), strict=True):
        ours, theirs = mixer.ssm, source.ssm
        if ours is None:
            continue
        missing = sorted(set(mixer.replaced) - set(source.replaced))
        if missing or theirs is None or not _are_alike(ours, theirs):
            raise ValueError(
                f"layer {mixer.layer} of the donor has no recurrent heads {missing or 'of this form'}; "
                "align a student that keeps no head, with the same d_state, conv_width and recurrence."
            )
        _copy_heads(ours, theirs, [source.replaced.index(head) for head in mixer.replaced])


def _are_alike(ours: SSMHeads, theirs: SSMHeads) -> bool:
    if ours.conv_weight.shape[1:] != theirs.conv_weight.shape[1:]:
        return False
    return ours.d_state == theirs.d_state and ours.recurrence == theirs.recurrence


@torch.no_grad()
def _copy_heads(target: SSMHeads, source: SSMHeads, picked: list[int]) -> None:
    """Copy the picked heads of ``source`` to ``target``; every tensor stores the channels of a head contiguously."""
    own = dict(target.named_parameters())
    # Convolution channels: x of all heads, then B of all heads, then C.
    conv_sizes = [source.n_heads * n for n in (source.head_dim, source.d_state, source.d_state)]
    for name, tensor in source.named_parameters():
        parts = [tensor]
        if name in ("conv_weight", "conv_bias"):
            parts = list(tensor.split(conv_sizes))
        rows = [part.unflatten(0, (source.n_heads, -1))[picked].flatten(0, 1) for part in parts]
        own[name].copy_(torch.cat(rows))
