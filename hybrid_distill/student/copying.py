"""Tensors that a student takes from its teacher: attention sliced to the kept heads, everything else whole."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from transformers import PreTrainedModel

from ..model import HybridForCausalLM, HybridMixer
from ..model.layout import HEAD_NORMS, decoder_of
from ..teacher import AttentionSite

Action = Literal["copied", "sliced", "initialized", "dropped"]
_REFUSED = "Its heads can be scored and ablated, but not replaced: take a teacher of another family (docs/heads.md)."


@dataclass(frozen=True)
class TensorRecord:
    """Origin of a student tensor (copied, sliced, initialized), or a teacher tensor that was dropped.

    ``source`` names the teacher tensors that it was made from.
    """

    name: str
    action: Action
    shape: tuple[int, ...]
    source: tuple[str, ...] = ()


Made = tuple[TensorRecord, Tensor]


def check_attention(site: AttentionSite, n_kv_heads: int) -> None:
    """Raise ValueError for parts that a student would lose or slice wrongly: odd projections, unknown tensors."""
    _check_projections(site, n_kv_heads)
    _check_tensors(site, n_kv_heads)


def _check_projections(site: AttentionSite, n_kv_heads: int) -> None:
    assert site.layout is not None
    for name in site.layout.inputs:
        rows = site.linear(name).out_features
        all_heads = range(site.n_heads), range(n_kv_heads)
        n_blocks = len(site.layout.blocks(name, *all_heads, site.n_heads, n_kv_heads))
        if rows != n_blocks * site.head_dim:
            raise ValueError(
                f"{site.name}.{name} has {rows} rows; expected {n_blocks} heads x {site.head_dim} = "
                f"{n_blocks * site.head_dim}. {_REFUSED}"
            )


def _check_tensors(site: AttentionSite, n_kv_heads: int) -> None:
    assert site.layout is not None
    linears = (*site.layout.inputs, site.layout.output)
    known = {f"{name}.{part}" for name in linears for part in ("weight", "bias")}
    norms = _norm_sizes(site, n_kv_heads)
    for name, tensor in site.module.state_dict().items():
        is_norm = tensor.dim() == 1 and len(tensor) in norms.get(name, ())
        if name not in known and not is_norm:
            raise ValueError(
                f"{site.name} ({type(site.module).__name__}) holds {name} {list(tensor.shape)}; expected "
                f"{', '.join(linears)}, and at most q_norm and k_norm over one head's {site.head_dim} channels or "
                f"over all heads. {_REFUSED}"
            )


def _norm_sizes(site: AttentionSite, n_kv_heads: int) -> dict[str, set[int]]:
    """Return the sizes that a student can copy, by the name of a norm's tensor."""
    assert site.layout is not None
    sizes = {"query": {site.head_dim}, "key": {site.head_dim}}
    # A norm covers one head, or all heads if queries, keys and values have separate linears.
    if len(site.layout.inputs) > 1:
        sizes["query"].add(site.n_heads * site.head_dim)
        sizes["key"].add(n_kv_heads * site.head_dim)
    norms = {}
    for part, names in HEAD_NORMS.items():
        for name in names:
            norms[f"{name}.weight"] = sizes[part]
            norms[f"{name}.bias"] = sizes[part]
    return norms


def copied_tensors(
    student: HybridForCausalLM, teacher: PreTrainedModel, sites: Sequence[AttentionSite]
) -> Iterator[Made]:
    """Yield every tensor that the student takes from the teacher, with its record."""
    source = teacher.state_dict()

    def copied(name: str, action: Action, tensor: Tensor, original: str) -> Made:
        return TensorRecord(name, action, tuple(tensor.shape), (original,)), tensor

    own_names = mixer_names(student)
    for site, own, mixer in zip(sites, own_names, student.mixers(), strict=True):
        assert site.layout is not None
        for name, tensor in _kept_tensors(site, mixer).items():
            original = f"{site.name}.{name}"
            action = "copied" if tensor.shape == source[original].shape else "sliced"
            yield copied(f"{own}.attention.{name}", action, tensor, original)
        for name, tensor in site.o_proj.state_dict().items():
            original = f"{site.name}.{site.layout.output}.{name}"
            yield copied(f"{own}.o_proj.{name}", "copied", tensor, original)
    named = teacher_names(teacher)
    inside = tuple(f"{name}." for name in own_names)
    for name in student.state_dict():
        if not name.startswith(inside):
            yield copied(name, "copied", source[named(name)], named(name))


def _kept_tensors(site: AttentionSite, mixer: HybridMixer) -> dict[str, Tensor]:
    """Slice the teacher's attention tensors to the kept heads where the student's shape differs; norms stay whole."""
    if mixer.attention is None:
        return {}
    assert site.layout is not None
    own = mixer.attention.state_dict()
    cut = {}
    for name, tensor in site.module.state_dict().items():
        module = name.partition(".")[0]
        if name in own and own[name].shape != tensor.shape:
            kept = site.layout.blocks(
                module, mixer.kept, mixer.kv_groups, site.n_heads, site.n_kv_heads
            )
            tensor = tensor.unflatten(0, (-1, site.head_dim))[kept].flatten(0, 1)
        if module != site.layout.output:
            cut[name] = tensor
    return cut


def copy_buffers(student: HybridForCausalLM, teacher: PreTrainedModel) -> None:
    """Copy the teacher's rotary frequencies and other buffers that no state dict contains.

    Modules without parameters are copied whole: dynamic RoPE also stores frequencies for the longest row so far.
    """
    named = teacher_names(teacher)
    mixers = mixer_names(student)
    empty = {name.rpartition(".")[0] for name, buffer in student.named_buffers() if buffer.is_meta}
    for module_name in empty:
        their_name = named(module_name)
        # Nemotron's attention had a rotary embedding of its own, until transformers 5.14.
        for mixer in mixers:
            if module_name.startswith(f"{mixer}.attention."):
                their_name = named(module_name.replace(f"{mixer}.attention.", f"{mixer}.", 1))
        theirs = teacher.get_submodule(their_name)
        if next(theirs.parameters(), None) is None:
            parent, _, attribute = module_name.rpartition(".")
            setattr(student.get_submodule(parent), attribute, copy.deepcopy(theirs))
        else:
            own = student.get_submodule(module_name)
            for attribute, buffer in list(own.named_buffers(recurse=False)):
                if buffer.is_meta:
                    setattr(own, attribute, theirs.get_buffer(attribute).clone())


def mixer_names(student: HybridForCausalLM) -> list[str]:
    """Return the names of the student's mixers, layer by layer."""
    return [name for name, module in student.named_modules() if isinstance(module, HybridMixer)]


def teacher_names(teacher: PreTrainedModel) -> Callable[[str], str]:
    """Return a function that maps a student's tensor name, outside its mixers, to the teacher's name."""
    names = {module: name for name, module in teacher.named_modules()}
    decoder_name = names[decoder_of(teacher)]
    output_name = names[teacher.get_output_embeddings()]

    def named(name: str) -> str:
        root, _, rest = name.partition(".")
        if root == "model":
            return f"{decoder_name}.{rest}"
        return f"{output_name}.{rest}"

    return named
