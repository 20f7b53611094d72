"""Export of a student as a GGUF file: its `FalconH1ForCausalLM` with llama.cpp's tensor names and shapes.

llama.cpp supports less than transformers: no ``in_proj`` bias (the biases of x, B, C and the step are stored elsewhere,
the gate's nowhere), no biases of output projections, and only default RoPE. `obstacles` lists which of these a student
needs. Every layer has as many attention heads as the fullest one, as in falcon_h1.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..io import Record
from ..model import HybridForCausalLM
from . import falcon_h1

if TYPE_CHECKING:
    from gguf import GGUFWriter

FILE = "model.gguf"
ARCHITECTURE = "falcon-h1"
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.final_layernorm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "pre_ff_layernorm.weight": "ffn_norm",  # like A and D below, without a suffix
    "mamba.dt_bias": "ssm_dt.bias",
    "mamba.A_log": "ssm_a",
    "mamba.D": "ssm_d",
    "mamba.in_proj.weight": "ssm_in.weight",
    "mamba.conv1d.weight": "ssm_conv1d.weight",
    "mamba.conv1d.bias": "ssm_conv1d.bias",
    "mamba.out_proj.weight": "ssm_out.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    **{
        f"{module}_proj.{kind}": f"{name}.{kind}"
        for module, name in {
            **{f"self_attn.{part}": f"attn_{part}" for part in "qkv"},
            **{f"feed_forward.{part}": f"ffn_{part}" for part in ("gate", "up", "down")},
        }.items()
        for kind in ("weight", "bias")
    },
}
_UNREAD = ("mamba.in_proj.bias", "mamba.out_proj.bias", "self_attn.o_proj.bias")
"""Biases that llama.cpp ignores or refuses; `obstacles` lets only zeros through."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PRE_TOKENIZERS = {
    ("ByteLevel",): "gpt-2",
    ("Digits", "ByteLevel"): "smollm",
    (_CONTRACTIONS + r"|\p{N}{1,3}" + _REST,): "llama-bpe",
    (_CONTRACTIONS + r"|\p{N}" + _REST,): "qwen2",
    # The embedded teacher's pattern, which llama.cpp lacks. No token crosses its splits, so a coarser pattern gives the
    # same tokens; bloom's never splits a word, while others split at contractions.
    (r" ?\p{L}+|\p{N}+|[^\S\n]|\n|[^\s\p{L}\p{N}]",): "bloom",
}
"""llama.cpp's pre-tokenizer names, by steps: the pattern of a split, or the type of another step."""


def obstacles(student: HybridForCausalLM) -> list[str]:
    """List the reasons why llama.cpp's Falcon-H1 cannot express a student."""
    found = falcon_h1.obstacles(student)
    ssm = [mixer.ssm for mixer in student.mixers() if mixer.ssm is not None]
    if any(heads.z_proj.bias is not None and heads.z_proj.bias.any() for heads in ssm):
        found.append("the gate of its recurrent heads has a bias: train one with --student.recurrence mamba2-stock")
    if any(mixer.o_proj.bias is not None and mixer.o_proj.bias.any() for mixer in student.mixers()):
        found.append("its output projections have a bias")
    if (kinds := falcon_h1.rope_kinds(student)) != {"default"}:
        found.append(f"its RoPE is {', '.join(sorted(kinds))}, and llama.cpp's Falcon-H1 has the plain one only")
    return found


def write(student: HybridForCausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write ``model.gguf``: matrices in the student's dtype, all else in float32, as in llama.cpp's own files.

    Raises ValueError for a tokenizer that llama.cpp does not support.
    """
    import gguf

    pre_tokenizer = _pre_tokenizer(tokenizer)
    stock = falcon_h1.container(student)
    writer = gguf.GGUFWriter(folder / FILE, ARCHITECTURE)
    _add_sizes(writer, stock.config)
    _add_tokenizer(writer, tokenizer, pre_tokenizer, stock.config)
    types = gguf.GGMLQuantizationType
    matrices = {torch.bfloat16: types.BF16, torch.float16: types.F16}.get(student.dtype, types.F32)
    writer.add_file_type(gguf.LlamaFileType[f"{'ALL' if matrices is types.F32 else 'MOSTLY'}_{matrices.name}"])
    for name, tensor in tensors(stock).items():
        is_matrix = name.endswith(".weight") and tensor.ndim == 2 and "ssm_conv1d" not in name
        kind = matrices if is_matrix else types.F32
        array = gguf.quants.quantize(tensor.detach().float().cpu().contiguous().numpy(), kind)
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors(stock: falcon_h1.Container) -> dict[str, Tensor]:
    """Rename a Falcon-H1's tensors; store A instead of log A, A and D as columns, conv weights as a matrix."""
    found = {}
    for name, tensor in stock.state.items():
        if name in _TOP:
            if name != "lm_head.weight" or not stock.config["tie_word_embeddings"]:
                found[_TOP[name]] = tensor
            continue
        _, _, layer, part = name.split(".", 3)
        if part in _UNREAD:
            continue
        if part == "mamba.A_log":
            tensor = -torch.exp(tensor)
        if part in ("mamba.A_log", "mamba.D"):
            tensor = tensor.unsqueeze(1)
        found[f"blk.{layer}.{_LAYER[part]}"] = tensor.squeeze(1) if part == "mamba.conv1d.weight" else tensor
    return found


def _add_sizes(writer: GGUFWriter, config: Record) -> None:
    rope = config.get("rope_parameters") or {}
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_inner_size(config["mamba_d_ssm"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_time_step_rank(config["mamba_n_heads"])
    writer.add_ssm_group_count(config["mamba_n_groups"])


def _add_tokenizer(writer: GGUFWriter, tokenizer: PreTrainedTokenizerBase, pre_tokenizer: str, config: Record) -> None:
    """Add the vocabulary (padded to the embedding's rows), merges, special tokens and the chat template."""
    from gguf import TokenType

    rows = {token: name for name, token in tokenizer.get_vocab().items()}
    added = tokenizer.added_tokens_decoder
    names, kinds = [], []
    for token in range(config["vocab_size"]):
        names.append(rows.get(token, f"[PAD{token}]"))
        kind = TokenType.NORMAL if token in rows else TokenType.UNUSED
        if token in added:
            kind = TokenType.CONTROL if added[token].special else TokenType.USER_DEFINED
        kinds.append(kind)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(names)
    writer.add_token_types(kinds)
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in _parts(tokenizer)["model"]["merges"]]
    )
    for role in ("bos", "eos", "pad", "unk"):
        if (token := getattr(tokenizer, f"{role}_token_id")) is not None:
            getattr(writer, f"add_{role}_token_id")(token)
    ids = tokenizer("a").input_ids
    writer.add_add_bos_token(ids[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(ids[-1] == tokenizer.eos_token_id)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def _parts(tokenizer: PreTrainedTokenizerBase | None) -> Record:
    """Return the tokenizer.json of a fast tokenizer, or a placeholder that `_pre_tokenizer` rejects."""
    backend: Any = tokenizer.backend_tokenizer if tokenizer is not None and tokenizer.is_fast else None
    return {"model": {"type": "missing or slow"}} if backend is None else json.loads(backend.to_str())


def _pre_tokenizer(tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Return llama.cpp's name for the pre-tokenizer. Raises ValueError if it has none."""
    parts = _parts(tokenizer)
    step = parts.get("pre_tokenizer") or {}
    steps = [
        one["pattern"].get("Regex") if one["type"] == "Split" else one["type"]
        for one in step.get("pretokenizers", [step] if step else [])
        if one["type"] != "ByteLevel" or one["use_regex"]
    ]
    known = _PRE_TOKENIZERS.get(tuple(steps))
    if parts["model"]["type"] != "BPE" or parts.get("normalizer") not in (None, {"type": "NFC"}) or known is None:
        raise ValueError(
            f"the tokenizer is {parts['model']['type']} behind {steps or 'no pre-tokenizer'}; llama.cpp's files here "
            "take byte-level BPE as GPT-2, SmolLM, Llama 3, Qwen2 or the embedded teacher have it."
        )
    return known
