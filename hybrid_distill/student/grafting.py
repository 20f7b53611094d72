"""Move recurrent heads from one student to another of the same teacher."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..model import HybridForCausalLM
from ..model.recurrent_heads import SSMHeads
from .copying import mixer_names

_ALIGN_A_DONOR = (
    "align a student that keeps no head, with the same d_state, conv_width and recurrence."
)


def recurrent_tensors(student: HybridForCausalLM) -> dict[str, Tensor]:
    """Return the tensors of a student's recurrent heads by name: all that it does not copy from its teacher."""
    prefixes = tuple(f"{name}.ssm." for name in mixer_names(student))
    tensors = student.state_dict()
    return {name: tensor for name, tensor in tensors.items() if name.startswith(prefixes)}


def load_recurrent_heads(
    student: HybridForCausalLM, tensors: Mapping[str, Tensor], source: str
) -> None:
    """Set a student's recurrent heads, and nothing else, so that `graft_recurrent_heads` can copy them.

    Raises ValueError, naming the ``source``, for the tensors of another student.
    """
    recurrent = {}
    for name, current in recurrent_tensors(student).items():
        expected_shape = tuple(current.shape)
        shape = None
        if name in tensors:
            shape = tuple(tensors[name].shape)
        if shape != expected_shape:
            raise ValueError(
                f"{source} holds another student: {name} has shape {shape} there and {expected_shape} here; "
                f"{_ALIGN_A_DONOR}"
            )
        recurrent[name] = tensors[name]
    student.load_state_dict(recurrent, strict=False, assign=True)


def graft_recurrent_heads(student: HybridForCausalLM, donor: HybridForCausalLM) -> None:
    """Copy the donor's recurrent heads into the student's, each from the same layer and head.

    Use a donor without kept heads that was aligned head by head, so that students that differ only in their plan share
    one alignment. Raises ValueError for a donor of another shape, or one that keeps a head that the student replaces.
    """
    for mixer, donor_mixer in zip(student.mixers(), donor.mixers(), strict=True):
        target = mixer.ssm
        source = donor_mixer.ssm
        if target is None:
            continue
        missing = sorted(set(mixer.replaced) - set(donor_mixer.replaced))
        if missing or source is None or not _have_one_form(target, source):
            raise ValueError(
                f"layer {mixer.layer} of the donor has no recurrent heads {missing or 'of this form'}; "
                f"{_ALIGN_A_DONOR}"
            )
        places = [donor_mixer.replaced.index(head) for head in mixer.replaced]
        _copy_heads(target, source, places)


def _have_one_form(first: SSMHeads, second: SSMHeads) -> bool:
    if first.recurrence != second.recurrence:
        return False
    return first.d_state == second.d_state and first.conv_width == second.conv_width


@torch.no_grad()
def _copy_heads(target: SSMHeads, source: SSMHeads, places: list[int]) -> None:
    """Copy the heads at ``places`` of ``source``, in this order, to all heads of ``target``."""
    target_tensors = dict(target.named_parameters())
    for name, tensor in source.named_parameters():
        parts = [tensor]
        if name in ("conv_weight", "conv_bias"):
            # Channels of x of all heads, then of B, then of C: the rows of a head are not contiguous.
            parts = list(tensor.split(source.sizes))
        picked = []
        for part in parts:
            by_head = part.unflatten(0, (source.n_heads, -1))
            picked.append(by_head[places].flatten(0, 1))
        target_tensors[name].copy_(torch.cat(picked))
