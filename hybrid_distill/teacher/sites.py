"""Find the heads of an unmodified Hugging Face decoder, and the mixer of each layer.

docs/heads.md defines a head for each family.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from torch import nn

from ..model.layout import (
    ATTENTION_NAMES,
    AttentionLayout,
    attention_name,
    find_layout,
    text_config,
)
from ..plan import HeadId

SUPPORTED = "Llama, Qwen2, Qwen3, Mistral, OLMo-2, OLMo-3, Phi, Phi-3 or GPT-NeoX"
# Names of the attention and the recurrent mixer in a decoder layer (Zamba2 wraps both).
ATTENTION_PATHS = (*ATTENTION_NAMES, "shared_transformer.self_attn")
RECURRENT_PATHS = ("mixer", "mamba", "mamba_decoder.mamba")

HeadKind = Literal["attention", "ssm", "channel"]


@dataclass(frozen=True)
class HeadSite:
    """Heads of one decoder layer: the linear ``o_proj`` reads their outputs, concatenated in order.

    ``module`` is the mixer. ``layout`` names its linears if it is attention. ``shared`` is True if
    several layers run it. ``kind`` is "attention", "ssm" (Mamba-2), "channel" (Mamba-1: heads of
    size 1), or "hybrid" (a student's mixer, see `kind_of`).
    """

    layer: int
    name: str
    module: nn.Module
    block: nn.Module
    o_proj: nn.Linear
    n_heads: int
    n_kv_heads: int
    head_dim: int
    kind: HeadKind | Literal["hybrid"] = "attention"
    layout: AttentionLayout | None = None
    shared: bool = False

    def kind_of(self, head: int) -> HeadKind:
        """Return the kind of one head.

        In a student's mixer, kept heads are "attention", and so are heads with a window alone; all others are "ssm".
        """
        if self.kind != "hybrid":
            return self.kind
        mixer: Any = self.module
        return "attention" if head in mixer.kept or mixer.ssm is None else "ssm"

    def linear(self, name: str) -> nn.Linear:
        """Return the mixer's linear called ``name``."""
        return _linear(self.module, name)


def decoder_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """List (name, module) of every decoder layer, first to last.

    Raises ValueError if the model has no layer list.
    """
    n_layers = text_config(model).num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == n_layers:
            return [(f"{name}.{index}", block) for index, block in enumerate(module)]
    raise ValueError(
        f"{type(model).__name__} holds no list of {n_layers} decoder layers (num_hidden_layers of "
        f"its config); expected a decoder such as {SUPPORTED}."
    )


def attention_sites(model: nn.Module) -> list[HeadSite]:
    """Find the attention of every layer of a possible teacher, or the mixers of a student.

    Raises ValueError, naming the module and what was expected, if a layer's attention fits none of
    the layouts in `model.layout`, or if the layer also contains another mixer.
    """
    sites = []
    for layer, (name, block) in enumerate(decoder_blocks(model)):
        children = dict(block.named_children())
        child = attention_name(block)
        if not child:
            raise ValueError(
                f"{name} ({type(block).__name__}) holds no attention module: its parts are "
                f"{_names(children)}; expected one named self_attn, as in {SUPPORTED}."
            )
        for other in RECURRENT_PATHS:
            if other in children:
                raise ValueError(
                    f"{name} ({type(block).__name__}) mixes tokens in {child} and in {other}; "
                    f"expected attention alone, as in {SUPPORTED}."
                )
        sites.append(_attention_site(model, layer, block, f"{name}.{child}", children[child]))
    return sites


def head_sites(model: nn.Module, kind: HeadKind | None = None) -> list[HeadSite]:
    """Find the heads of every layer that has any, first to last, in any decoder of docs/heads.md.

    ``kind`` defaults to both kinds for a student, attention heads for other models with attention,
    and recurrent heads for models without. Raises ValueError for an unsupported layer, and for a
    model without heads of that kind.
    """
    every_site = list(_every_site(model))
    kinds = [site.kind for site in every_site]
    wanted = kind or _default_kind(kinds)
    # Counted by projection: Zamba2's layers share its weights, and may share the module itself.
    n_layers_of = Counter(id(site.o_proj) for site in every_site)
    sites = []
    for site in every_site:
        if site.kind == wanted:
            sites.append(replace(site, shared=n_layers_of[id(site.o_proj)] > 1))
    if not sites:
        raise ValueError(
            f"{type(model).__name__} has no heads of kind {kind!r}; "
            f"its heads are of kind {', '.join(sorted(set(kinds)))}."
        )
    return sites


def _default_kind(kinds: list[str]) -> str:
    for preferred in ("hybrid", "attention"):
        if preferred in kinds:
            return preferred
    return kinds[0]


def as_head_kind(kind: str) -> HeadKind | None:
    """Convert a `HeadSite.kind` to the ``kind`` argument of `head_sites`; None for "hybrid"."""
    for head_kind in get_args(HeadKind):
        if head_kind == kind:
            return head_kind
    return None


def head_kinds(model: nn.Module) -> list[str]:
    """List the values of `HeadSite.kind` in a decoder, sorted; Zamba2 and Falcon-H1 have two."""
    return sorted({site.kind for site in _every_site(model)})


def _every_site(model: nn.Module) -> Iterator[HeadSite]:
    """Yield the sites of all kinds, first layer to last."""
    for layer, (name, block) in enumerate(decoder_blocks(model)):
        parts = dict(block.named_modules())
        attention = _first_in(parts, ATTENTION_PATHS)
        recurrent = _first_in(parts, RECURRENT_PATHS)
        if attention is None and recurrent is None:
            raise ValueError(
                f"{name} ({type(block).__name__}) has no supported mixer: its parts are "
                f"{_names(dict(block.named_children()))}; expected attention named self_attn or "
                "attention, or a Mamba mixer named mixer or mamba (docs/heads.md)."
            )
        # A layer of Falcon-H1 or Zamba2 has both.
        if attention is not None:
            path = f"{name}.{attention}"
            yield _attention_site(model, layer, block, path, parts[attention])
        if recurrent is not None:
            yield _recurrent_site(layer, block, f"{name}.{recurrent}", parts[recurrent])


def _first_in(parts: dict[str, nn.Module], paths: tuple[str, ...]) -> str | None:
    for path in paths:
        if path in parts:
            return path
    return None


def _names(children: dict[str, nn.Module]) -> str:
    return ", ".join(children) or "none"


def _attention_site(
    model: nn.Module, layer: int, block: nn.Module, name: str, module: nn.Module
) -> HeadSite:
    config = text_config(model)
    # Compared by name: the class in an exported checkpoint is not the class in this package.
    is_hybrid = type(module).__name__ == "HybridMixer"
    layout = None if is_hybrid else find_layout(module, name)
    output_name = "o_proj" if layout is None else layout.output
    o_proj = _linear(module, output_name)
    n_heads = config.num_attention_heads
    # The module's own: a config may lack head_dim. GPT-NeoX's module says head_size instead.
    head_dim = getattr(module, "head_dim", None) or o_proj.in_features // n_heads
    if o_proj.in_features != n_heads * head_dim:
        raise ValueError(
            f"{name}.{output_name} reads {o_proj.in_features} channels; "
            f"expected {n_heads} heads x {head_dim} = {n_heads * head_dim}."
        )
    if layout is None:
        n_kv_heads = config.num_key_value_heads
    else:
        n_kv_heads = layout.count_kv_heads(module, n_heads, head_dim)
    return HeadSite(
        layer=layer,
        name=name,
        module=module,
        block=block,
        o_proj=o_proj,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        kind="hybrid" if is_hybrid else "attention",
        layout=layout,
    )


def _recurrent_site(layer: int, block: nn.Module, name: str, mixer: nn.Module) -> HeadSite:
    """Describe a Mamba mixer: Mamba-2 has one decay per head, Mamba-1 one per channel and state."""
    decay = getattr(mixer, "A_log", None)
    out_proj = getattr(mixer, "out_proj", None)
    if decay is None or not isinstance(out_proj, nn.Linear):
        raise ValueError(
            f"{name} ({type(mixer).__name__}) has no A_log or no linear out_proj; expected a "
            "Mamba-1 or Mamba-2 mixer, as in Falcon-Mamba, Mamba-2, Zamba2 or Falcon-H1."
        )
    n_heads = len(decay)
    return HeadSite(
        layer=layer,
        name=name,
        module=mixer,
        block=block,
        o_proj=out_proj,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_dim=out_proj.in_features // n_heads,
        kind="ssm" if decay.dim() == 1 else "channel",
    )


def _linear(module: nn.Module, name: str) -> nn.Linear:
    linear = module.get_submodule(name)
    assert isinstance(linear, nn.Linear)
    return linear


def check_exists(model: nn.Module, sites: list[HeadSite], head_id: HeadId) -> None:
    """Raise ValueError unless one of ``sites`` contains this head."""
    n_heads_of = {site.layer: site.n_heads for site in sites}
    if 0 <= head_id.head < n_heads_of.get(head_id.layer, 0):
        return
    n_layers = len(decoder_blocks(model))
    some_layers = ""
    if len(sites) < n_layers:
        layers = ", ".join(map(str, n_heads_of))
        some_layers = f", of which {layers} have {sites[0].kind} heads,"
    raise ValueError(
        f"head {head_id} does not exist: this model has layers 0..{n_layers - 1}{some_layers} "
        f"with heads 0..{sites[0].n_heads - 1}."
    )
