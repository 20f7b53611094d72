"""Conversion of a student to a `FalconH1ForCausalLM`, which transformers and servers load without remote code.

Like a student's, every Falcon-H1 layer has attention heads and Mamba-2 heads side by side. All layers have the same
number of heads: missing ones get zero rows and columns, and zeros in the cache. Each KV head serves the same number of
query heads: if a student shares KV heads unevenly, a KV head is stored more than once. The student's output projection
is split between attention and Mamba-2. `obstacles` lists what cannot be expressed.

Shapes: P head dim, D model width, R rows of a projection, K conv width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..io import Record
from ..model import HybridForCausalLM
from ..model.configuration_hybrid import rope_settings
from ..model.mixer import HybridMixer

MODEL_TYPE = "falcon_h1"
BACKBONES = ("llama", "mistral", "qwen2")
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_SAME = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "hidden_act", "rms_norm_eps",
         "max_position_embeddings", "initializer_range", "tie_word_embeddings")  # fmt: skip
_MULTIPLIERS = ("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")

_BIASES = [[f"{part}_proj", "bias"] for part in "qkvo"]


@dataclass(frozen=True)
class Container:
    """Configuration and tensors of a `FalconH1ForCausalLM` that computes the same as a student."""

    config: Record
    state: dict[str, Tensor]

    def parameters(self) -> int:
        """Count the stored parameters; a tied output embedding counts once."""
        tied = {"lm_head.weight"} if self.config["tie_word_embeddings"] else set()
        return sum(tensor.numel() for name, tensor in self.state.items() if name not in tied)


@dataclass(frozen=True)
class _Layout:
    """Sizes shared by all layers."""

    n_kv_heads: int
    per_kv_head: int
    n_ssm_heads: int
    head_dim: int


def obstacles(student: HybridForCausalLM) -> list[str]:
    """List the reasons why Falcon-H1 cannot express a student."""
    found = []
    recurrence = student.config.recurrence
    if not recurrence.startswith("mamba2") and any(mixer.ssm for mixer in student.mixers()):
        found.append(
            f"its recurrent heads are {recurrence}: Falcon-H1's states only add, and scale what they add "
            "by the step of which the decay is made (train one with --student.recurrence mamba2)"
        )
    return found + backbone_obstacles(student)


def backbone_obstacles(student: HybridForCausalLM, backbones: Sequence[str] = BACKBONES) -> list[str]:
    """List what Llama-like forms cannot express of a student, apart from its recurrent heads."""
    backbone, found = student.model.config, []
    if backbone.model_type not in backbones:  # others may lack the fields below
        return [f"its backbone is {backbone.model_type}, not one of {', '.join(backbones)}"]
    if backbone.hidden_act != "silu":
        found.append(f"its MLPs use {backbone.hidden_act}, not silu")
    cache = student.new_cache()
    if any(mixer.kept and cache.layer(mixer.layer).sliding_window is not None for mixer in student.mixers()):
        found.append("some of its kept heads use sliding-window attention, which this form lacks")
    return found


def rope_kinds(student: HybridForCausalLM) -> set[str]:
    """Return the RoPE types of a student's layers."""
    return {rope.get("rope_type") or rope.get("type") or "default" for rope in rope_settings(student.model.config)}


def configuration(student: HybridForCausalLM) -> Record:
    """Build config.json, with RoPE settings spelled for both transformers 4 and 5."""
    layout = _layout(student)
    backbone = student.config.backbone
    rope = {name: backbone[name] for name in ("rope_parameters", "rope_theta", "rope_scaling") if name in backbone}
    return {
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": MODEL_TYPE,
        **{name: getattr(student.model.config, name) for name in _SAME},
        **{name: getattr(student.config, name, None) for name in _TOKENS},
        **rope,
        "dtype": str(student.dtype).removeprefix("torch."),
        "num_attention_heads": layout.n_kv_heads * layout.per_kv_head,
        "num_key_value_heads": layout.n_kv_heads,
        "head_dim": layout.head_dim,
        "attention_bias": any(name.split(".")[-2:] in _BIASES for name in student.state_dict()),
        "mlp_bias": bool(getattr(student.model.config, "mlp_bias", False)),
        "mamba_d_ssm": layout.n_ssm_heads * layout.head_dim,
        "mamba_n_heads": layout.n_ssm_heads,
        "mamba_d_head": layout.head_dim,
        "mamba_n_groups": layout.n_ssm_heads,
        "mamba_d_state": student.config.d_state,
        "mamba_d_conv": student.config.conv_width,
        "mamba_conv_bias": True,
        "mamba_proj_bias": True,
        "mamba_rms_norm": False,
        "projectors_bias": True,
        # All 1, transformers' defaults; mlx-lm and llama.cpp's converter need them spelled out.
        **dict.fromkeys([f"{name}_multiplier" for name in _MULTIPLIERS], 1.0),
        "mlp_multipliers": [1.0] * 2,
        "ssm_multipliers": [1.0] * 5,
    }


@torch.no_grad()
def container(student: HybridForCausalLM) -> Container:
    """Convert a student without `obstacles` to a Falcon-H1."""
    config, layout = configuration(student), _layout(student)
    source = student.state_dict()
    state = {
        "model.embed_tokens.weight": source["model.embed_tokens.weight"],
        "model.final_layernorm.weight": source["model.norm.weight"],
        "lm_head.weight": source["lm_head.weight"],
    }
    for number, mixer in enumerate(student.mixers()):
        tensors = {
            "input_layernorm.weight": source[f"model.layers.{number}.input_layernorm.weight"],
            "pre_ff_layernorm.weight": source[f"model.layers.{number}.post_attention_layernorm.weight"],
            **_attention(mixer, layout, config["attention_bias"]),
            **_mamba(mixer, layout, student.config.d_state, student.config.conv_width),
        }
        mlp = f"model.layers.{number}.mlp."
        tensors |= {"feed_forward." + n.removeprefix(mlp): t for n, t in source.items() if n.startswith(mlp)}
        state |= {f"model.layers.{number}.{name}": tensor for name, tensor in tensors.items()}
    return Container(config, state)


def _layout(student: HybridForCausalLM) -> _Layout:
    """Find the layout with the fewest KV heads that holds every layer's kept heads; at least one head of each kind."""
    groups = [kept_by_group(mixer) for mixer in student.mixers()]
    sizes = {len(heads) for layer in groups for heads in layer} | {1}
    needed = {size: max(sum(-(-len(heads) // size) for heads in layer) for layer in groups) for size in sizes}
    per_kv_head = min(sizes, key=lambda size: (needed[size], size))
    n_ssm_heads = max(len(mixer.recurrent) for mixer in student.mixers())
    return _Layout(max(needed[per_kv_head], 1), per_kv_head, max(n_ssm_heads, 1), student.config.head_dim)


def kept_by_group(mixer: HybridMixer) -> list[list[int]]:
    """List, for each KV head that the student stores, the positions of its query heads in ``mixer.kept``."""
    return [
        [place for place, head in enumerate(mixer.kept) if head // mixer.group_size == group]
        for group in mixer.kv_groups
    ]


def _attention(mixer: HybridMixer, layout: _Layout, has_bias: bool) -> dict[str, Tensor]:
    """Build ``self_attn``: blocks of ``per_kv_head`` kept heads that share a KV head, filled up with zeros."""
    per_kv_head, head_dim = layout.per_kv_head, layout.head_dim
    q_places: list[int | None] = []
    kv_places: list[int | None] = []
    for stored, places in enumerate(kept_by_group(mixer)):
        for start in range(0, len(places), per_kv_head):
            shared = places[start : start + per_kv_head]
            q_places += [*shared, *[None] * (per_kv_head - len(shared))]
            kv_places.append(stored)
    kv_places += [None] * (layout.n_kv_heads - len(kv_places))
    q_places += [None] * (layout.n_kv_heads * per_kv_head - len(q_places))

    out = mixer.o_proj.weight
    tensors = {}
    for part, places in (("q", q_places), ("k", kv_places), ("v", kv_places)):
        projection = None if mixer.attention is None else getattr(mixer.attention, f"{part}_proj")
        weight = out.new_zeros(0, out.shape[0]) if projection is None else projection.weight
        tensors[f"self_attn.{part}_proj.weight"] = placed(weight, places, head_dim)
        if has_bias:
            bias = weight.new_zeros(len(weight)) if projection is None or projection.bias is None else projection.bias
            tensors[f"self_attn.{part}_proj.bias"] = placed(bias, places, head_dim)
    heads = [None if place is None else mixer.kept[place] for place in q_places]
    tensors["self_attn.o_proj.weight"] = placed(out.T, heads, head_dim).T
    if has_bias:
        bias = mixer.o_proj.bias
        tensors["self_attn.o_proj.bias"] = out.new_zeros(len(out)) if bias is None else bias
    return tensors


def _mamba(mixer: HybridMixer, layout: _Layout, d_state: int, conv_width: int) -> dict[str, Tensor]:
    """Build ``mamba``: the rows of ``in_proj`` are gate, x, B, C and step; x, B and C go through the convolution."""
    out = mixer.o_proj.weight
    n_heads, head_dim = layout.n_ssm_heads, layout.head_dim
    places = [place if place < len(mixer.recurrent) else None for place in range(n_heads)]
    widths = {"z": head_dim, "x": head_dim, "b": d_state, "c": d_state, "a": 1}
    weights, biases = {}, {}
    for part, width in widths.items():
        projection = None if mixer.ssm is None else getattr(mixer.ssm, f"{part}_proj")
        weight = out.new_zeros(0, out.shape[0]) if projection is None else projection.weight
        weights[part] = placed(weight, places, width)
        bias = getattr(projection, "bias", None)
        biases[part] = placed(weight.new_zeros(len(weight)) if bias is None else bias, places, width)
    taps = {part: out.new_zeros(0, conv_width) for part in "xbc"}
    if mixer.ssm is not None:
        assert mixer.ssm.conv_bias is not None  # `obstacles` allows mamba2 alone
        taps = dict(zip("xbc", mixer.ssm.conv_weight.split(mixer.ssm.sizes), strict=True))
        for part, bias in zip("xbc", mixer.ssm.conv_bias.split(mixer.ssm.sizes), strict=True):
            biases[part] = placed(bias, places, widths[part])
    conv_RK = torch.cat([placed(taps[part], places, widths[part]) for part in "xbc"])
    without_gate = torch.zeros_like(torch.cat([biases[part] for part in "xbca"]))
    skip = out.new_zeros(0) if mixer.ssm is None else mixer.ssm.D
    heads = [None if place is None else mixer.recurrent[place] for place in places]
    return {
        "mamba.in_proj.weight": torch.cat([weights[part] for part in widths]),
        "mamba.in_proj.bias": torch.cat([biases["z"], without_gate]),
        "mamba.conv1d.weight": conv_RK.unsqueeze(1),
        "mamba.conv1d.bias": torch.cat([biases[part] for part in "xbc"]),
        "mamba.dt_bias": biases["a"],
        "mamba.A_log": torch.zeros_like(biases["a"]),
        "mamba.D": placed(skip, places, 1),
        "mamba.out_proj.weight": placed(out.T, heads, head_dim).T,
        "mamba.out_proj.bias": out.new_zeros(len(out)),  # vLLM has one switch for this bias and in_proj's
    }


def placed(rows: Tensor, places: Sequence[int | None], width: int) -> Tensor:
    """Gather blocks of ``width`` rows in the order of ``places``; None becomes zeros."""
    blocks = rows.reshape(len(rows) // width, width, *rows.shape[1:])
    blocks = torch.cat([blocks, blocks.new_zeros(1, *blocks.shape[1:])])
    return blocks[[len(blocks) - 1 if place is None else place for place in places]].flatten(0, 1)
