"""Llamba checkpoints as their authors publish them (arXiv 2502.14458), as a `HybridForCausalLM` that keeps no head.

A Llamba layer is a Llama layer with discrete Mamba-2 heads in place of attention, which is what a student without
kept heads is; only the bias behind the convolution is Llamba's own. docs/heads.md: the format, the mapping, and where
both are known from.

Shapes: H heads, G groups of heads that share B and C, P head dim, N state size, D model width.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig

from ..model import HybridConfig, HybridForCausalLM

MODEL_TYPE = "llamba"
LAYER_EPS = 1e-5  # what the authors' code norms with in every layer, whatever the config says
NO_LIMIT = 2**20  # tokens; there are no positions that could end
# What the authors' code takes for a field that config.json leaves out.
SSM_DEFAULTS = {"d_conv": 4, "expand": 1, "bias": False, "conv_bias": True, "activation": "identity"}
MLP_DEFAULTS = {"bias": False, "act_fn": "silu"}
DEFAULTS = {"tie_embeddings": False, "pad_vocab_size_multiple": 8, "lm_head_bias": False, "norm_epsilon": LAYER_EPS}
SAME_PARTS = ("input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


class _Sizes(NamedTuple):
    """What a published config.json says."""

    vocab: int  # rounded up as the embedding is
    width: int
    n_layers: int
    n_heads: int
    n_groups: int
    head_dim: int
    d_state: int
    conv_width: int
    mlp_width: int
    activation: str
    bias: bool
    conv_bias: bool
    mlp_bias: bool
    tied: bool

    def rows(self) -> dict[str, int]:
        """Rows of ``in_proj`` in their order; the first three pass the convolution."""
        inner, shared = self.n_heads * self.head_dim, self.n_groups * self.d_state
        return {"x": inner, "b": shared, "c": shared, "z": inner, "a": self.n_heads}

    def n_channels(self) -> int:
        """Of the convolution."""
        return sum(self.rows()[part] for part in "xbc")


def is_llamba(folder: str | Path) -> bool:
    """Whether a folder's config.json is one of a published Llamba."""
    try:
        return _read_config(Path(folder).expanduser()).get("model_type") == MODEL_TYPE
    except (OSError, ValueError, AttributeError):
        return False


def load_llamba(folder: str | Path, dtype: torch.dtype = torch.float32) -> HybridForCausalLM:
    """The model, in eval mode. Raises ValueError for a config that is no Llamba's, or one whose model would compute
    something else here; and for missing, unknown or wrongly shaped tensors, with their names.
    """
    folder = Path(folder).expanduser()
    sizes = _sizes(_read_config(folder))
    config = _hybrid_config(sizes)
    tensors = {name: tensor.to(dtype) for name, tensor in _read_weights(folder).items()}
    _check(tensors, _expected(sizes))
    state = dict(_converted(tensors, sizes))
    model: Any = HybridForCausalLM.from_pretrained(None, config=config, state_dict=state, dtype=dtype)
    return model.eval()


def llamba_config(folder: str | Path) -> HybridConfig:
    """What `load_llamba` would build, without the weights. Raises ValueError as it does."""
    return _hybrid_config(_sizes(_read_config(Path(folder).expanduser())))


def _read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def _sizes(published: Mapping[str, Any]) -> _Sizes:
    """Raises ValueError for a field that is missing or out of range, and for what no published Llamba has."""
    given = {**DEFAULTS, **published}
    ssm = {**SSM_DEFAULTS, **(given.get("ssm_cfg") or {})}
    mlp = {**MLP_DEFAULTS, **(given.get("mlp_cfg") or {})}
    counts = {
        **{name: given.get(name) for name in ("vocab_size", "pad_vocab_size_multiple", "d_model", "n_layer")},
        **{f"ssm_cfg.{name}": ssm.get(name) for name in ("d_state", "n_v_heads", "n_qk_heads", "d_conv", "expand")},
        "mlp_cfg.intermediate_size": mlp.get("intermediate_size"),
    }
    for name, value in counts.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"its config.json has {name} {value!r}; a Llamba has a whole number from 1 on there")
    known = {"ssm_cfg.activation": (ssm["activation"], "identity"), "lm_head_bias": (given["lm_head_bias"], False)}
    for name, (value, only) in (known | {"norm_epsilon": (given["norm_epsilon"], LAYER_EPS)}).items():
        if value != only:
            raise ValueError(f"its config.json has {name} {value!r}; only {only!r} is supported, as published")
    n_heads, n_groups, inner = ssm["n_v_heads"], ssm["n_qk_heads"], ssm["expand"] * given["d_model"]
    if inner % n_heads or n_heads % n_groups:
        raise ValueError(
            f"its config.json has {inner} channels (expand x d_model) in {n_heads} heads (n_v_heads) in {n_groups} "
            "groups (n_qk_heads); each must divide the one before"
        )
    multiple = given["pad_vocab_size_multiple"]
    return _Sizes(
        vocab=-(-given["vocab_size"] // multiple) * multiple,
        width=given["d_model"],
        n_layers=given["n_layer"],
        n_heads=n_heads,
        n_groups=n_groups,
        head_dim=inner // n_heads,
        d_state=ssm["d_state"],
        conv_width=ssm["d_conv"],
        mlp_width=mlp["intermediate_size"],
        activation=mlp["act_fn"],
        bias=ssm["bias"],
        conv_bias=ssm["conv_bias"],
        mlp_bias=mlp["bias"],
        tied=given["tie_embeddings"],
    )


def _hybrid_config(sizes: _Sizes) -> HybridConfig:
    backbone = LlamaConfig(
        vocab_size=sizes.vocab,
        hidden_size=sizes.width,
        intermediate_size=sizes.mlp_width,
        num_hidden_layers=sizes.n_layers,
        num_attention_heads=sizes.n_heads,
        num_key_value_heads=sizes.n_heads,
        head_dim=sizes.head_dim,
        hidden_act=sizes.activation,
        rms_norm_eps=LAYER_EPS,
        attention_bias=sizes.bias,
        mlp_bias=sizes.mlp_bias,
        tie_word_embeddings=sizes.tied,
        max_position_embeddings=NO_LIMIT,
        bos_token_id=None,  # the tokenizer's business: a published config does not say
        eos_token_id=None,
    )
    return HybridConfig(
        backbone.to_dict(),
        kept=[[] for _ in range(sizes.n_layers)],
        d_state=sizes.d_state,
        conv_width=sizes.conv_width,
        conv_bias=sizes.conv_bias,
    )


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder; safetensors before pickled ones."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(path))
    for path in sorted(folder.glob("*.bin")) if not tensors else ():
        tensors.update(torch.load(path, map_location="cpu", weights_only=True))
    return tensors


def _expected(sizes: _Sizes) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a published checkpoint."""
    width, inner, mlp = sizes.width, sizes.n_heads * sizes.head_dim, sizes.mlp_width
    shapes: dict[str, tuple[int, ...]] = {
        "backbone.embedding.weight": (sizes.vocab, width),
        "backbone.final_layernorm.weight": (width,),
    }
    if not sizes.tied:
        shapes["lm_head.weight"] = (sizes.vocab, width)
    linears = {
        "mixer.in_proj": (sum(sizes.rows().values()), width, sizes.bias),
        "mixer.out_proj": (width, inner, sizes.bias),
        "mlp.gate_proj": (mlp, width, sizes.mlp_bias),
        "mlp.up_proj": (mlp, width, sizes.mlp_bias),
        "mlp.down_proj": (width, mlp, sizes.mlp_bias),
    }
    for layer in (f"backbone.layers.{index}." for index in range(sizes.n_layers)):
        shapes |= {f"{layer}{norm}.weight": (width,) for norm in ("input_layernorm", "post_attention_layernorm")}
        for name, (n_out, n_in, has_bias) in linears.items():
            shapes[f"{layer}{name}.weight"] = (n_out, n_in)
            if has_bias:
                shapes[f"{layer}{name}.bias"] = (n_out,)
        shapes[f"{layer}mixer.conv1d.weight"] = (sizes.n_channels(), 1, sizes.conv_width)
        if sizes.conv_bias:
            shapes[f"{layer}mixer.conv1d.bias"] = (sizes.n_channels(),)
        shapes[f"{layer}mixer.D"] = (sizes.n_heads,)
        if not sizes.bias:
            shapes[f"{layer}mixer.z_bias"] = (inner,)
    return shapes


def _check(tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    missing = [name for name in expected if name not in tensors]
    unknown = [name for name in tensors if name not in expected]
    wrong = [
        f"{name} {tuple(tensors[name].shape)} instead of {shape}"
        for name, shape in expected.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    found = {"lack": missing, "hold the unknown": unknown, "hold, in another shape,": wrong}
    faults = [f"{verb} {', '.join(names[:3])}{' ...' if names[3:] else ''}" for verb, names in found.items() if names]
    if faults:
        raise ValueError(f"its weights {'; they '.join(faults)} (config.json says which tensors a Llamba has)")


def _converted(tensors: Mapping[str, Tensor], sizes: _Sizes) -> Iterator[tuple[str, Tensor]]:
    """The tensors under the names that they have here, B and C repeated for the heads that share them."""
    embedding = tensors["backbone.embedding.weight"]
    yield "model.embed_tokens.weight", embedding
    yield "model.norm.weight", tensors["backbone.final_layernorm.weight"]
    yield "lm_head.weight", tensors.get("lm_head.weight", embedding)
    for index in range(sizes.n_layers):
        own, here = f"backbone.layers.{index}.", f"model.layers.{index}."
        for name in (f"{part}.{kind}" for part in SAME_PARTS for kind in ("weight", "bias")):
            if own + name in tensors:
                yield here + name, tensors[own + name]
        mixer = {name.removeprefix(f"{own}mixer."): t for name, t in tensors.items() if name.startswith(f"{own}mixer.")}
        for name, tensor in _converted_mixer(mixer, sizes):
            yield f"{here}self_attn.{name}", tensor


def _converted_mixer(mixer: Mapping[str, Tensor], sizes: _Sizes) -> Iterator[tuple[str, Tensor]]:
    rows = sizes.rows()
    weight = mixer["in_proj.weight"]
    bias = mixer.get("in_proj.bias", torch.zeros_like(weight[:, 0]))
    weights, biases = (dict(zip(rows, t.split(list(rows.values())), strict=True)) for t in (weight, bias))
    if "z_bias" in mixer:
        biases["z"] = mixer["z_bias"]
    for part in rows:
        for kind, split in (("weight", weights), ("bias", biases)):
            yield f"ssm.{part}_proj.{kind}", _per_head(part, split[part], sizes)
    in_conv = [rows[part] for part in "xbc"]
    taps = {"conv_weight": mixer["conv1d.weight"].squeeze(1), "conv_bias": mixer.get("conv1d.bias")}
    for name, channels in taps.items():
        if channels is not None:
            split = zip("xbc", channels.split(in_conv), strict=True)
            yield f"ssm.{name}", torch.cat([_per_head(part, tensor, sizes) for part, tensor in split])
    yield "ssm.D", mixer["D"]
    for kind in ("weight", "bias"):
        if f"out_proj.{kind}" in mixer:
            yield f"o_proj.{kind}", cast(Tensor, mixer[f"out_proj.{kind}"])


def _per_head(part: str, rows: Tensor, sizes: _Sizes) -> Tensor:
    """Rows of B and C, [G N, ...], once for every head of a group, [H N, ...]; others as they are."""
    if part not in "bc":
        return rows
    groups = rows.unflatten(0, (sizes.n_groups, sizes.d_state))
    return groups.repeat_interleave(sizes.n_heads // sizes.n_groups, dim=0).flatten(0, 1)
