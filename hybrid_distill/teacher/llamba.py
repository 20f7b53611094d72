"""Load published Llamba checkpoints (arXiv 2502.14458) as a `HybridForCausalLM` without kept heads.

A Llamba layer is a Llama layer with discrete Mamba-2 heads instead of attention, like a student without kept heads;
only the bias after the convolution is specific to Llamba. docs/heads.md documents the format, mapping and sources.

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
LAYER_EPS = 1e-5  # the authors' code uses it in the norms of every layer and ignores the config
NO_LIMIT = 2**20  # tokens; without position embeddings there is no real limit
# Defaults of the authors' code for fields that config.json leaves out.
SSM_DEFAULTS = {"d_conv": 4, "expand": 1, "bias": False, "conv_bias": True, "activation": "identity"}
MLP_DEFAULTS = {"bias": False, "act_fn": "silu"}
DEFAULTS = {"tie_embeddings": False, "pad_vocab_size_multiple": 8, "lm_head_bias": False, "norm_epsilon": LAYER_EPS}
RENAMED = {
    "backbone.embedding.weight": "model.embed_tokens.weight",
    "backbone.final_layernorm.weight": "model.norm.weight",
}


def is_llamba(folder: str | Path) -> bool:
    """Return True if a folder's config.json has the model type of a published Llamba."""
    try:
        return read_json(Path(folder).expanduser() / "config.json").get("model_type") == MODEL_TYPE
    except (OSError, ValueError):
        return False


def load_llamba(folder: str | Path, dtype: torch.dtype = torch.float32) -> HybridForCausalLM:
    """Load the model in eval mode.

    Raises ValueError for a config that is not from a Llamba or that this package would compute differently, and for
    missing, unknown or wrongly shaped tensors, with their names.
    """
    published, config = _published(folder), llamba_config(folder)
    state: dict[str, Tensor] = {}
    for name, tensor in _read_weights(Path(folder).expanduser()).items():
        layer, is_mixer, part = name.replace("backbone.layers.", "model.layers.").partition(".mixer.")
        if is_mixer:
            found = _mixer_tensors(part, tensor.to(dtype), published, config)
            state |= {f"{layer}.self_attn.{own}": rows for own, rows in found.items()}
        else:
            state[RENAMED.get(name, layer)] = tensor.to(dtype)
    with torch.device("meta"):
        expected = {name: tuple(tensor.shape) for name, tensor in HybridForCausalLM(config).state_dict().items()}
    biases = [name for name in expected if name.endswith(tuple(f".{part}_proj.bias" for part in "xbca"))]
    if not published["ssm_cfg"]["bias"]:
        state |= {name: torch.zeros(expected[name], dtype=dtype) for name in biases}
    if published["tie_embeddings"]:
        state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    return HybridForCausalLM.from_pretrained(None, config=config, state_dict=state, dtype=dtype).eval()


def llamba_config(folder: str | Path) -> HybridConfig:
    """Make the config of `load_llamba`'s model without loading weights; raises ValueError for the same configs."""
    published = _published(folder)
    ssm, mlp, multiple = published["ssm_cfg"], published["mlp_cfg"], published["pad_vocab_size_multiple"]
    backbone = LlamaConfig(
        vocab_size=-(-published["vocab_size"] // multiple) * multiple,  # rounded up like the embedding
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
        bos_token_id=None,  # only the tokenizer knows it
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
    """Read a config.json and fill in defaults. Raises ValueError for values that no published Llamba has."""
    given = {**DEFAULTS, **read_json(Path(folder).expanduser() / "config.json")}
    ssm = given["ssm_cfg"] = {**SSM_DEFAULTS, **(given.get("ssm_cfg") or {})}
    mlp = given["mlp_cfg"] = {**MLP_DEFAULTS, **(given.get("mlp_cfg") or {})}
    counts = {
        **{name: given.get(name) for name in ("vocab_size", "pad_vocab_size_multiple", "d_model", "n_layer")},
        **{f"ssm_cfg.{name}": ssm.get(name) for name in ("d_state", "n_v_heads", "n_qk_heads", "d_conv", "expand")},
        "mlp_cfg.intermediate_size": mlp.get("intermediate_size"),
    }
    for name, value in counts.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"its config.json has {name} {value!r}; expected a positive whole number")
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
    return given


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of a folder from its safetensors, or from pickles if it has no safetensors."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(path))
    for path in sorted(folder.glob("*.bin")) if not tensors else ():
        tensors.update(torch.load(path, map_location="cpu", weights_only=True))
    return tensors


def _mixer_tensors(part: str, tensor: Tensor, published: Record, config: HybridConfig) -> dict[str, Tensor]:
    """Convert a tensor of a published mixer to tensors of a `HybridMixer`; an unknown tensor keeps its name."""
    ssm, inner = published["ssm_cfg"], config.num_attention_heads * config.head_dim
    shared = ssm["n_qk_heads"] * ssm["d_state"]
    rows = {"x": inner, "b": shared, "c": shared, "z": inner, "a": config.num_attention_heads}
    kind = part.rpartition(".")[2]

    def per_head(names: str) -> list[Tensor]:
        """Split the rows of the named parts; repeat B and C, [G N, ...], for each head of a group, [H N, ...]."""
        sizes = [rows[name] for name in names]
        if len(tensor) != sum(sizes):
            raise ValueError(f"its weights hold {part} {tuple(tensor.shape)}; config.json asks for {sum(sizes)} rows")
        found = dict(zip(names, tensor.split(sizes)))
        for name in "bc":
            groups = found[name].unflatten(0, (ssm["n_qk_heads"], ssm["d_state"]))
            found[name] = groups.repeat_interleave(ssm["n_v_heads"] // ssm["n_qk_heads"], dim=0).flatten(0, 1)
        return list(found.values())

    if part == "in_proj.weight" or (part == "in_proj.bias" and ssm["bias"]):
        return {f"ssm.{name}_proj.{kind}": split for name, split in zip(rows, per_head("xbcza"))}
    if part in ("conv1d.weight", "conv1d.bias"):
        channels = torch.cat(per_head("xbc"))
        return {f"ssm.conv_{kind}": channels.squeeze(1) if kind == "weight" else channels}
    if part == "z_bias" and not ssm["bias"]:
        return {"ssm.z_proj.bias": tensor}
    return {part.replace("out_proj", "o_proj"): tensor} if kind != "D" else {"ssm.D": tensor}
