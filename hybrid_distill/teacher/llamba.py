"""Load published Llamba checkpoints (arXiv 2502.14458) as a `HybridForCausalLM` without kept heads.

A Llamba layer is a Llama layer with discrete Mamba-2 heads instead of attention, like a student
without kept heads; only the bias after the convolution is specific to Llamba. docs/heads.md
documents the format, mapping and sources.

Shapes: H heads, G groups of heads that share B and C, P head dim, N state size, D model width.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig

from ..io import Record, read_json
from ..model import HybridConfig, HybridForCausalLM

MODEL_TYPE = "llamba"
LAYER_EPS = 1e-5
"""Epsilon of every layer's norms: the authors' code has it there and ignores the config."""
NO_LIMIT = 2**20
"""Longest context in tokens: without position embeddings there is no real limit."""
# Defaults of the authors' code for fields that config.json leaves out.
DEFAULTS = {
    "tie_embeddings": False,
    "pad_vocab_size_multiple": 8,
    "lm_head_bias": False,
    "norm_epsilon": LAYER_EPS,
}
SSM_DEFAULTS = {
    "d_conv": 4,
    "expand": 1,
    "bias": False,
    "conv_bias": True,
    "activation": "identity",
}
MLP_DEFAULTS = {"bias": False, "act_fn": "silu"}
COUNTS = ("vocab_size", "pad_vocab_size_multiple", "d_model", "n_layer")
SSM_COUNTS = ("d_state", "n_v_heads", "n_qk_heads", "d_conv", "expand")
RENAMED = {
    "backbone.embedding.weight": "model.embed_tokens.weight",
    "backbone.final_layernorm.weight": "model.norm.weight",
}


def is_llamba(folder: str | Path) -> bool:
    """Return True if a folder's config.json has the model type of a published Llamba."""
    try:
        config = read_json(Path(folder).expanduser() / "config.json")
    except (OSError, ValueError):
        return False
    return config.get("model_type") == MODEL_TYPE


def load_llamba(folder: str | Path, dtype: torch.dtype = torch.float32) -> HybridForCausalLM:
    """Load the model in eval mode.

    Raises ValueError for a config that is not from a Llamba or that this package would compute
    differently, and for missing, unknown or wrongly shaped tensors, with their names.
    """
    published = _published(folder)
    config = llamba_config(folder)
    state: dict[str, Tensor] = {}
    for name, tensor in _read_weights(Path(folder).expanduser()).items():
        own_name = RENAMED.get(name, name.replace("backbone.layers.", "model.layers."))
        layer, is_mixer, part = own_name.partition(".mixer.")
        if is_mixer:
            for own_part, own_tensor in _mixer_tensors(part, tensor.to(dtype), published).items():
                state[f"{layer}.self_attn.{own_part}"] = own_tensor
        else:
            state[own_name] = tensor.to(dtype)
    if not published["ssm_cfg"]["bias"]:
        for layer in range(config.num_hidden_layers):
            for part, n_rows in _biased_rows(config).items():
                bias = torch.zeros(n_rows, dtype=dtype)
                # Where the published layer has no bias, a student's is zero.
                state[f"model.layers.{layer}.self_attn.ssm.{part}_proj.bias"] = bias
    if published["tie_embeddings"]:
        # A tied checkpoint may store the output embedding all the same.
        state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    model = HybridForCausalLM.from_pretrained(None, config=config, state_dict=state, dtype=dtype)
    return model.eval()


def _biased_rows(config: HybridConfig) -> dict[str, int]:
    """Return the rows of the projections whose bias a student has and a Llamba lacks."""
    n_heads = config.num_attention_heads
    states = n_heads * config.d_state
    return {"x": n_heads * config.head_dim, "b": states, "c": states, "a": n_heads}


def llamba_config(folder: str | Path) -> HybridConfig:
    """Make the config of `load_llamba`'s model without loading weights.

    Raises ValueError for the same configs.
    """
    published = _published(folder)
    ssm = published["ssm_cfg"]
    mlp = published["mlp_cfg"]
    # The published embedding is padded to a multiple.
    multiple = published["pad_vocab_size_multiple"]
    vocab_size = -(-published["vocab_size"] // multiple) * multiple
    backbone = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=published["d_model"],
        intermediate_size=mlp["intermediate_size"],
        num_hidden_layers=published["n_layer"],
        num_attention_heads=ssm["n_v_heads"],
        num_key_value_heads=ssm["n_v_heads"],
        head_dim=ssm["expand"] * published["d_model"] // ssm["n_v_heads"],
        hidden_act=mlp["act_fn"],
        rms_norm_eps=LAYER_EPS,
        attention_bias=ssm["bias"],
        mlp_bias=mlp["bias"],
        tie_word_embeddings=published["tie_embeddings"],
        max_position_embeddings=NO_LIMIT,
        # Llama's defaults, 1 and 2, are ordinary tokens here: only the tokenizer knows better.
        bos_token_id=None,
        eos_token_id=None,
    )
    return HybridConfig(
        backbone.to_dict(),
        kept=[[] for _ in range(published["n_layer"])],
        d_state=ssm["d_state"],
        conv_width=ssm["d_conv"],
        conv_bias=ssm["conv_bias"],
    )


def _published(folder: str | Path) -> Record:
    """Read a config.json and fill in defaults.

    Raises ValueError for values that no published Llamba has.
    """
    config = DEFAULTS | read_json(Path(folder).expanduser() / "config.json")
    ssm = SSM_DEFAULTS | (config.get("ssm_cfg") or {})
    mlp = MLP_DEFAULTS | (config.get("mlp_cfg") or {})
    for name in COUNTS:
        _check_count(name, config.get(name))
    for name in SSM_COUNTS:
        _check_count(f"ssm_cfg.{name}", ssm.get(name))
    _check_count("mlp_cfg.intermediate_size", mlp.get("intermediate_size"))
    _check_only("ssm_cfg.activation", ssm["activation"], "identity")
    _check_only("lm_head_bias", config["lm_head_bias"], False)
    _check_only("norm_epsilon", config["norm_epsilon"], LAYER_EPS)
    inner = ssm["expand"] * config["d_model"]
    n_heads = ssm["n_v_heads"]
    n_groups = ssm["n_qk_heads"]
    if inner % n_heads or n_heads % n_groups:
        raise ValueError(
            f"its config.json has {inner} channels (expand x d_model) in {n_heads} heads "
            f"(n_v_heads) in {n_groups} groups (n_qk_heads); each must divide the one before"
        )
    return {**config, "ssm_cfg": ssm, "mlp_cfg": mlp}


def _check_count(name: str, value: object) -> None:
    # By type: True is an int.
    if type(value) is not int or value < 1:
        raise ValueError(f"its config.json has {name} {value!r}; expected a positive whole number")


def _check_only(name: str, value: object, supported: object) -> None:
    if value != supported:
        raise ValueError(
            f"its config.json has {name} {value!r}; only {supported!r} is supported, as published"
        )


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of a folder from its safetensors, or from pickles if it has none."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(path))
    if tensors:
        return tensors
    for path in sorted(folder.glob("*.bin")):
        tensors.update(torch.load(path, map_location="cpu", weights_only=True))
    return tensors


def _mixer_tensors(part: str, tensor: Tensor, published: Record) -> dict[str, Tensor]:
    """Convert a tensor of a published mixer to those of a `HybridMixer`.

    An unknown tensor keeps its name, so that loading refuses it.
    """
    has_bias = published["ssm_cfg"]["bias"]
    kind = part.rpartition(".")[2]
    if part == "in_proj.weight" or (part == "in_proj.bias" and has_bias):
        rows_of = _rows_by_part(part, tensor, published, "xbcza")
        return {f"ssm.{name}_proj.{kind}": rows for name, rows in rows_of.items()}
    if part == "conv1d.weight":
        channels = _rows_by_part(part, tensor, published, "xbc")
        # Published as [channels, 1, taps], like nn.Conv1d's.
        return {"ssm.conv_weight": torch.cat(list(channels.values())).squeeze(1)}
    if part == "conv1d.bias":
        channels = _rows_by_part(part, tensor, published, "xbc")
        return {"ssm.conv_bias": torch.cat(list(channels.values()))}
    if part == "z_bias" and not has_bias:
        return {"ssm.z_proj.bias": tensor}
    if part == "D":
        return {"ssm.D": tensor}
    return {part.replace("out_proj", "o_proj"): tensor}


def _rows_by_part(part: str, tensor: Tensor, published: Record, names: str) -> dict[str, Tensor]:
    """Split the rows of a tensor into the parts x, b, c, z and a that ``names`` lists, in order.

    B and C, [G N, ...], are repeated for each head of a group, [H N, ...].
    """
    ssm = published["ssm_cfg"]
    n_heads = ssm["n_v_heads"]
    n_groups = ssm["n_qk_heads"]
    inner = ssm["expand"] * published["d_model"]
    shared = n_groups * ssm["d_state"]
    n_rows = {"x": inner, "b": shared, "c": shared, "z": inner, "a": n_heads}
    sizes = [n_rows[name] for name in names]
    if len(tensor) != sum(sizes):
        raise ValueError(
            f"its weights hold {part} {tuple(tensor.shape)}; config.json asks for {sum(sizes)} rows"
        )
    rows = dict(zip(names, tensor.split(sizes)))
    for name in "bc":
        groups = rows[name].unflatten(0, (n_groups, ssm["d_state"]))
        rows[name] = groups.repeat_interleave(n_heads // n_groups, dim=0).flatten(0, 1)
    return rows
