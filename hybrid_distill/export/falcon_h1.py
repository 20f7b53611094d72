"""Conversion of a student to a `FalconH1ForCausalLM`, which needs no remote code anywhere.

Like a student's, every Falcon-H1 layer has attention heads and Mamba-2 heads side by side. All
layers have the same number of heads: missing ones are zero rows and columns, and zeros in the
cache. Each KV head serves the same number of query heads: if a student shares KV heads unevenly, a
KV head is stored more than once. The student's output projection is split between attention and
Mamba-2. `obstacles` lists what cannot be expressed.

Shapes: D model width, R rows of a projection, K conv width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..io import Record, write_json
from ..model import HybridForCausalLM
from ..model.mixer import HybridMixer
from .head_blocks import gather_blocks, heads_at, padded
from .obstacles import MAMBA2, backbone_obstacles, unsupported_recurrence
from .weights import tied_weights, write_weights

ROPE_FIELDS = ("rope_parameters", "rope_theta", "rope_scaling")
SAME_AS_BACKBONE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "initializer_range",
    "tie_word_embeddings",
)
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
MULTIPLIERS = (
    "embedding",
    "lm_head",
    "key",
    "attention_in",
    "attention_out",
    "ssm_in",
    "ssm_out",
)
ATTENTION_BIASES = ("q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias")


@dataclass(frozen=True)
class FalconH1:
    """Configuration and tensors of a `FalconH1ForCausalLM` that computes a student's function."""

    config: Record
    state: dict[str, Tensor]

    def parameters(self) -> int:
        """Count the stored parameters; a tied output embedding counts once."""
        n_parameters = sum(tensor.numel() for tensor in self.state.values())
        if self.config["tie_word_embeddings"]:
            n_parameters -= self.state["lm_head.weight"].numel()
        return n_parameters


@dataclass(frozen=True)
class _Layout:
    """Sizes shared by all layers."""

    n_kv_heads: int
    group_size: int
    """Query heads of each KV head."""
    n_ssm_heads: int
    head_dim: int


def obstacles(student: HybridForCausalLM) -> list[str]:
    """List the reasons why Falcon-H1 cannot express a student."""
    reasons = []
    unsupported = unsupported_recurrence(student, MAMBA2)
    if unsupported is not None:
        reasons.append(
            f"its recurrent heads are {unsupported}: Falcon-H1's states only add, and scale their input by the step "
            "from which the decay is computed (train one with --student.recurrence mamba2)"
        )
    return reasons + backbone_obstacles(student)


def tensors(student: HybridForCausalLM) -> dict[str, Tensor]:
    """Return the stored tensors by name, including tied ones."""
    return to_falcon_h1(student).state


def write(
    student: HybridForCausalLM,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    max_shard_size: int | str,
) -> None:
    """Write weights and configuration."""
    falcon = to_falcon_h1(student)
    write_weights(falcon.state, folder, tied_weights(student), max_shard_size)
    write_json(folder / "config.json", falcon.config)


def configuration(student: HybridForCausalLM) -> Record:
    """Build config.json."""
    layout = _layout(student)
    backbone = student.config.backbone
    has_attention_bias = any(name.endswith(ATTENTION_BIASES) for name in student.state_dict())
    return {
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        **{name: getattr(student.model.config, name) for name in SAME_AS_BACKBONE},
        **{name: getattr(student.config, name, None) for name in SPECIAL_TOKENS},
        # In transformers' spelling and the older one, which other programs read.
        **{name: backbone[name] for name in ROPE_FIELDS if name in backbone},
        "dtype": str(student.dtype).removeprefix("torch."),
        "num_attention_heads": layout.n_kv_heads * layout.group_size,
        "num_key_value_heads": layout.n_kv_heads,
        "head_dim": layout.head_dim,
        "attention_bias": has_attention_bias,
        "mlp_bias": bool(getattr(student.model.config, "mlp_bias", False)),
        "mamba_d_ssm": layout.n_ssm_heads * layout.head_dim,
        "mamba_n_heads": layout.n_ssm_heads,
        "mamba_d_head": layout.head_dim,
        # Every head has a B and C of its own.
        "mamba_n_groups": layout.n_ssm_heads,
        "mamba_d_state": student.config.d_state,
        "mamba_d_conv": student.config.conv_width,
        "mamba_conv_bias": True,
        "mamba_proj_bias": True,
        # Students gate without the norm that Mamba-2 has there.
        "mamba_rms_norm": False,
        "projectors_bias": True,
        # All 1, transformers' defaults; mlx-lm and llama.cpp's converter need them spelled out.
        **{f"{name}_multiplier": 1.0 for name in MULTIPLIERS},
        "mlp_multipliers": [1.0] * 2,
        "ssm_multipliers": [1.0] * 5,
    }


@torch.no_grad()
def to_falcon_h1(student: HybridForCausalLM) -> FalconH1:
    """Convert a student without `obstacles` to a Falcon-H1."""
    config = configuration(student)
    layout = _layout(student)
    source = student.state_dict()
    state = {
        "model.embed_tokens.weight": source["model.embed_tokens.weight"],
        "model.final_layernorm.weight": source["model.norm.weight"],
        "lm_head.weight": source["lm_head.weight"],
    }
    for number, mixer in enumerate(student.mixers()):
        layer = f"model.layers.{number}."
        norms = {
            "input_layernorm.weight": source[f"{layer}input_layernorm.weight"],
            "pre_ff_layernorm.weight": source[f"{layer}post_attention_layernorm.weight"],
        }
        attention = _attention(mixer, layout, config["attention_bias"])
        mamba = _mamba(mixer, layout, student.config.d_state, student.config.conv_width)
        for name, tensor in {**norms, **attention, **mamba}.items():
            state[layer + name] = tensor
        for name, tensor in source.items():
            if name.startswith(f"{layer}mlp."):
                state[name.replace(".mlp.", ".feed_forward.")] = tensor
    return FalconH1(config, state)


def _layout(student: HybridForCausalLM) -> _Layout:
    """Find the layout with the fewest KV heads that holds every layer's kept heads.

    It has at least one head of each kind.
    """
    mixers = student.mixers()
    # By layer: how many kept heads share each stored KV head.
    group_sizes_by_layer = []
    candidates = {1}
    n_ssm_heads = 1
    for mixer in mixers:
        group_sizes = [len(heads) for heads in kept_by_group(mixer)]
        group_sizes_by_layer.append(group_sizes)
        candidates.update(group_sizes)
        n_ssm_heads = max(n_ssm_heads, len(mixer.replaced))
    n_stored = {size: _most_kv_heads(group_sizes_by_layer, size) for size in candidates}
    # The fewest KV heads; if several layouts have as few, the fewest query heads.
    group_size = min(candidates, key=lambda size: (n_stored[size], size))
    return _Layout(
        n_kv_heads=max(n_stored[group_size], 1),
        group_size=group_size,
        n_ssm_heads=n_ssm_heads,
        head_dim=student.config.head_dim,
    )


def _most_kv_heads(group_sizes_by_layer: list[list[int]], limit: int) -> int:
    """Count the KV heads of the largest layer if each serves at most ``limit`` query heads.

    A KV head that more query heads share is stored more than once.
    """
    most = 0
    for group_sizes in group_sizes_by_layer:
        n_stored = sum(math.ceil(size / limit) for size in group_sizes)
        most = max(most, n_stored)
    return most


def kept_by_group(mixer: HybridMixer) -> list[list[int]]:
    """List, for each stored KV head, the positions of its query heads in ``mixer.kept``."""
    positions: dict[int, list[int]] = {group: [] for group in mixer.kv_groups}
    for position, head in enumerate(mixer.kept):
        positions[head // mixer.group_size].append(position)
    return list(positions.values())


def _attention(mixer: HybridMixer, layout: _Layout, has_bias: bool) -> dict[str, Tensor]:
    """Build the tensors of ``self_attn``.

    Kept heads that share a KV head form blocks of `_Layout.group_size`, padded with zeros.
    """
    group_size = layout.group_size
    q_positions: list[int | None] = []
    kv_positions: list[int | None] = []
    for kv_position, positions in enumerate(kept_by_group(mixer)):
        for start in range(0, len(positions), group_size):
            block = positions[start : start + group_size]
            q_positions += padded(block, group_size)
            kv_positions.append(kv_position)
    kv_positions = padded(kv_positions, layout.n_kv_heads)
    q_positions = padded(q_positions, layout.n_kv_heads * group_size)

    head_dim = layout.head_dim
    out_DR = mixer.o_proj.weight
    positions_of = {"q_proj": q_positions, "k_proj": kv_positions, "v_proj": kv_positions}
    tensors = {}
    for part, order in positions_of.items():
        if mixer.attention is None:
            weight = out_DR.new_zeros(0, len(out_DR))
            bias = None
        else:
            projection = getattr(mixer.attention, part)
            weight = projection.weight
            bias = projection.bias
        tensors[f"self_attn.{part}.weight"] = gather_blocks(weight, order, head_dim)
        if has_bias:
            tensors[f"self_attn.{part}.bias"] = gather_blocks(
                _or_zeros(bias, weight), order, head_dim
            )
    heads = heads_at(q_positions, mixer.kept)
    tensors["self_attn.o_proj.weight"] = gather_blocks(out_DR.T, heads, head_dim).T
    if has_bias:
        tensors["self_attn.o_proj.bias"] = _or_zeros(mixer.o_proj.bias, out_DR)
    return tensors


def _or_zeros(bias: Tensor | None, weight: Tensor) -> Tensor:
    """Return the bias of a projection, zeros if it has none."""
    if bias is None:
        return weight.new_zeros(len(weight))
    return bias


def _mamba(mixer: HybridMixer, layout: _Layout, d_state: int, conv_width: int) -> dict[str, Tensor]:
    """Build the tensors of ``mamba``.

    The rows of ``in_proj`` are gate, x, B, C and step; x, B and C go through the convolution.
    """
    ssm = mixer.ssm
    out_DR = mixer.o_proj.weight
    head_dim = layout.head_dim
    positions = padded(range(len(mixer.replaced)), layout.n_ssm_heads)
    widths = {"z": head_dim, "x": head_dim, "b": d_state, "c": d_state, "a": 1}
    weights = {}
    biases = {}
    for part, width in widths.items():
        projection = getattr(ssm, f"{part}_proj", None)
        weight = out_DR.new_zeros(0, len(out_DR)) if projection is None else projection.weight
        bias = getattr(projection, "bias", None)
        weights[part] = gather_blocks(weight, positions, width)
        biases[part] = gather_blocks(_or_zeros(bias, weight), positions, width)

    if ssm is None:
        taps = [out_DR.new_zeros(0, conv_width)] * 3
        skip = out_DR.new_zeros(0)
    else:
        assert ssm.conv_bias is not None, "`obstacles` allows mamba2 alone"
        taps = ssm.conv_weight.split(ssm.sizes)
        skip = ssm.D
        # Mamba-2 adds the bias of x, B and C behind the convolution, not in front of it.
        for part, bias in zip("xbc", ssm.conv_bias.split(ssm.sizes)):
            biases[part] = gather_blocks(bias, positions, widths[part])
    gathered_taps = []
    for part, rows in zip("xbc", taps):
        gathered_taps.append(gather_blocks(rows, positions, widths[part]))
    conv_RK = torch.cat(gathered_taps)
    conv_bias_R = torch.cat([biases["x"], biases["b"], biases["c"]])

    # In in_proj, only the gate has a bias: x, B and C have it behind the convolution, the step in dt_bias.
    no_bias = torch.zeros_like(torch.cat([conv_bias_R, biases["a"]]))
    heads = heads_at(positions, mixer.replaced)
    return {
        "mamba.in_proj.weight": torch.cat(list(weights.values())),
        "mamba.in_proj.bias": torch.cat([biases["z"], no_bias]),
        "mamba.conv1d.weight": conv_RK.unsqueeze(1),
        "mamba.conv1d.bias": conv_bias_R,
        "mamba.dt_bias": biases["a"],
        # A = -1: a student's step alone makes its decay.
        "mamba.A_log": torch.zeros_like(biases["a"]),
        "mamba.D": gather_blocks(skip, positions, 1),
        "mamba.out_proj.weight": gather_blocks(out_DR.T, heads, head_dim).T,
        # vLLM has one switch for this bias and in_proj's.
        "mamba.out_proj.bias": out_DR.new_zeros(len(out_DR)),
    }
