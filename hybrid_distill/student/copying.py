"""Tensors that a student takes from its teacher: attention sliced to the kept heads, everything else whole."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

from ..model import HybridForCausalLM, HybridMixer
from ..model.layout import HEAD_NORMS, decoder_of
from ..teacher import HeadSite

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


class StudentTensor(NamedTuple):
    """A tensor to load into the student, and its record."""

    record: TensorRecord
    tensor: Tensor


def check_attention(site: HeadSite, n_kv_heads: int) -> None:
    """Raise ValueError for parts that a student would lose or slice wrongly: odd projections, unknown tensors."""
    _check_projections(site, n_kv_heads)
    _check_tensors(site, n_kv_heads)


def _check_projections(site: HeadSite, n_kv_heads: int) -> None:
    assert site.layout is not None
    heads = range(site.n_heads)
    kv_heads = range(n_kv_heads)
    for name in site.layout.inputs:
        n_rows = site.linear(name).out_features
        n_blocks = len(site.layout.blocks(name, heads, kv_heads, site.n_heads, n_kv_heads))
        n_expected = n_blocks * site.head_dim
        if n_rows != n_expected:
            raise ValueError(
                f"{site.name}.{name} has {n_rows} rows; expected {n_blocks} heads x {site.head_dim} = "
                f"{n_expected}. {_REFUSED}"
            )


def _check_tensors(site: HeadSite, n_kv_heads: int) -> None:
    assert site.layout is not None
    linears = (*site.layout.inputs, site.layout.output)
    projections = set()
    for name in linears:
        projections |= {f"{name}.weight", f"{name}.bias"}
    norms = _norm_sizes(site, n_kv_heads)
    for name, tensor in site.module.state_dict().items():
        is_norm = tensor.dim() == 1 and len(tensor) in norms.get(name, ())
        if name not in projections and not is_norm:
            raise ValueError(
                f"{site.name} ({type(site.module).__name__}) holds {name} {list(tensor.shape)}; expected "
                f"{', '.join(linears)}, and at most q_norm and k_norm over one head's {site.head_dim} channels or "
                f"over all heads. {_REFUSED}"
            )


def _norm_sizes(site: HeadSite, n_kv_heads: int) -> dict[str, set[int]]:
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
    student: HybridForCausalLM, teacher: PreTrainedModel, sites: Sequence[HeadSite]
) -> Iterator[StudentTensor]:
    """Yield every tensor that the student takes from the teacher, with its record."""
    mixers = mixer_names(student)
    for site, mixer_name, mixer in zip(sites, mixers, student.mixers(), strict=True):
        yield from _mixer_tensors(site, mixer_name, mixer)
    teacher_tensors = teacher.state_dict()
    teacher_name = teacher_names(teacher)
    in_mixers = tuple(f"{name}." for name in mixers)
    for name in student.state_dict():
        if not name.startswith(in_mixers):
            source = teacher_name(name)
            yield _copied(name, "copied", teacher_tensors[source], source)


def _mixer_tensors(site: HeadSite, mixer_name: str, mixer: HybridMixer) -> Iterator[StudentTensor]:
    """Yield what one mixer takes from the attention that it replaces: its kept heads, the output projection."""
    assert site.layout is not None
    site_tensors = site.module.state_dict()
    for name, tensor in _kept_tensors(site, mixer).items():
        is_whole = tensor.shape == site_tensors[name].shape
        action: Action = "copied" if is_whole else "sliced"
        yield _copied(f"{mixer_name}.attention.{name}", action, tensor, f"{site.name}.{name}")
    for name, tensor in site.o_proj.state_dict().items():
        source = f"{site.name}.{site.layout.output}.{name}"
        yield _copied(f"{mixer_name}.o_proj.{name}", "copied", tensor, source)


def _copied(name: str, action: Action, tensor: Tensor, source: str) -> StudentTensor:
    return StudentTensor(TensorRecord(name, action, tuple(tensor.shape), (source,)), tensor)


def _kept_tensors(site: HeadSite, mixer: HybridMixer) -> dict[str, Tensor]:
    """Slice the teacher's attention tensors to the kept heads where the student's shape differs; norms stay whole."""
    if mixer.attention is None:
        return {}
    layout = site.layout
    assert layout is not None
    student_tensors = mixer.attention.state_dict()
    kept_tensors = {}
    for name, tensor in site.module.state_dict().items():
        module = name.partition(".")[0]
        if module == layout.output:
            # Whole, and a module of the mixer: recurrent heads go through it too.
            continue
        if name in student_tensors and student_tensors[name].shape != tensor.shape:
            # Joined projections stack queries, keys and values: blocks of one head's rows, of each part.
            blocks = layout.blocks(
                module, mixer.kept, mixer.kv_groups, site.n_heads, site.n_kv_heads
            )
            by_block = tensor.unflatten(0, (-1, site.head_dim))
            tensor = by_block[blocks].flatten(0, 1)
        kept_tensors[name] = tensor
    return kept_tensors


def copy_buffers(student: HybridForCausalLM, teacher: PreTrainedModel) -> None:
    """Copy the teacher's rotary frequencies and other buffers that no state dict contains.

    Modules without parameters are copied whole: dynamic RoPE also stores frequencies for the longest row so far.
    """
    teacher_name = teacher_names(teacher)
    mixers = mixer_names(student)
    buffers_on_meta = [name for name, buffer in student.named_buffers() if buffer.is_meta]
    for module_name in {name.rpartition(".")[0] for name in buffers_on_meta}:
        source_name = teacher_name(module_name)
        # Nemotron's attention had a rotary embedding of its own, until transformers 5.14.
        for mixer in mixers:
            if module_name.startswith(f"{mixer}.attention."):
                name_in_site = module_name.replace(f"{mixer}.attention.", f"{mixer}.", 1)
                source_name = teacher_name(name_in_site)
        source = teacher.get_submodule(source_name)
        if next(source.parameters(), None) is None:
            parent, _, attribute = module_name.rpartition(".")
            setattr(student.get_submodule(parent), attribute, copy.deepcopy(source))
        else:
            _copy_own_buffers(student.get_submodule(module_name), source)


def _copy_own_buffers(target: nn.Module, source: nn.Module) -> None:
    # Listed first: setting a buffer changes the dictionary that is walked.
    for name, buffer in list(target.named_buffers(recurse=False)):
        if buffer.is_meta:
            setattr(target, name, source.get_buffer(name).clone())


def mixer_names(student: HybridForCausalLM) -> list[str]:
    """Return the names of the student's mixers, layer by layer."""
    return [name for name, module in student.named_modules() if isinstance(module, HybridMixer)]


def teacher_names(teacher: PreTrainedModel) -> Callable[[str], str]:
    """Return a function that maps a student's tensor name, outside its mixers, to the teacher's name."""
    names = {module: name for name, module in teacher.named_modules()}
    decoder_name = names[decoder_of(teacher)]
    output_name = names[teacher.get_output_embeddings()]

    def teacher_name(name: str) -> str:
        root, _, rest = name.partition(".")
        if root == "model":
            return f"{decoder_name}.{rest}"
        return f"{output_name}.{rest}"

    return teacher_name
