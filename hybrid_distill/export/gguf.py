"""Export of a student as a GGUF file: its `FalconH1ForCausalLM` with llama.cpp's names and shapes.

llama.cpp supports less than transformers: no ``in_proj`` bias (the biases of x, B, C and the step
have tensors of their own, the gate's has none), no biases of output projections, and only default
RoPE. `obstacles` lists which of these a student needs. Every layer has as many attention heads as
the largest one, as in falcon_h1.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..chat_template import has_chat_template
from ..io import Record
from ..model import HybridForCausalLM
from . import falcon_h1
from .falcon_h1 import FalconH1, to_falcon_h1
from .obstacles import rope_kinds

if TYPE_CHECKING:
    from gguf import GGUFWriter

FILE = "model.gguf"
ARCHITECTURE = "falcon-h1"
MATRIX_TYPES = {
    torch.float32: ("F32", "ALL_F32"),
    torch.bfloat16: ("BF16", "MOSTLY_BF16"),
    torch.float16: ("F16", "MOSTLY_F16"),
}
"""gguf's names of the type of matrices and of the file, by the student's dtype."""
TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.final_layernorm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER_NAMES = {
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
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.v_proj.bias": "attn_v.bias",
    "feed_forward.gate_proj.weight": "ffn_gate.weight",
    "feed_forward.gate_proj.bias": "ffn_gate.bias",
    "feed_forward.up_proj.weight": "ffn_up.weight",
    "feed_forward.up_proj.bias": "ffn_up.bias",
    "feed_forward.down_proj.weight": "ffn_down.weight",
    "feed_forward.down_proj.bias": "ffn_down.bias",
}
UNREAD = ("mamba.in_proj.bias", "mamba.out_proj.bias", "self_attn.o_proj.bias")
"""Biases that llama.cpp ignores or refuses; `obstacles` lets only zeros through."""

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PRE_TOKENIZERS = {
    ("ByteLevel",): "gpt-2",
    ("Digits", "ByteLevel"): "smollm",
    (CONTRACTIONS + r"|\p{N}{1,3}" + REST,): "llama-bpe",
    (CONTRACTIONS + r"|\p{N}" + REST,): "qwen2",
    # The embedded teacher's pattern, which llama.cpp lacks. No token crosses its splits, so a
    # coarser pattern gives the same tokens; bloom's never splits a word, while others split at
    # contractions.
    (r" ?\p{L}+|\p{N}+|[^\S\n]|\n|[^\s\p{L}\p{N}]",): "bloom",
}
"""llama.cpp's name of a pre-tokenizer, by its steps: the pattern of a split, the type of any other."""


def obstacles(student: HybridForCausalLM) -> list[str]:
    """List the reasons why llama.cpp's Falcon-H1 cannot express a student."""
    reasons = falcon_h1.obstacles(student)
    mixers = student.mixers()
    if any(_has_bias(heads.z_proj) for heads in student.recurrent_heads()):
        reasons.append(
            "the gate of its recurrent heads has a bias: train one with --student.recurrence mamba2-stock"
        )
    if any(_has_bias(mixer.o_proj) for mixer in mixers):
        reasons.append("its output projections have a bias")
    kinds = rope_kinds(student)
    if kinds != {"default"}:
        reasons.append(
            f"its RoPE is {', '.join(sorted(kinds))}, and llama.cpp's Falcon-H1 has the plain one only"
        )
    return reasons


def _has_bias(projection: Any) -> bool:
    return projection.bias is not None and bool(projection.bias.any())


def write(
    student: HybridForCausalLM,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    max_shard_size: int | str,
) -> None:
    """Write ``model.gguf``: matrices in the student's dtype, the rest in float32, as llama.cpp does.

    It is always one file. Raises ValueError for a tokenizer that llama.cpp does not support.
    """
    import gguf

    tokenizer_json = _tokenizer_json(tokenizer)
    pre_tokenizer = _pre_tokenizer(tokenizer_json)
    assert tokenizer is not None, "it has a tokenizer.json"
    falcon = to_falcon_h1(student)
    writer = gguf.GGUFWriter(folder / FILE, ARCHITECTURE)
    _add_sizes(writer, falcon.config)
    # llama.cpp's name for every byte-level BPE.
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    _add_vocabulary(writer, tokenizer, falcon.config["vocab_size"])
    _add_merges(writer, tokenizer_json)
    _add_special_tokens(writer, tokenizer)
    _add_bos_and_eos_rules(writer, tokenizer)
    _add_chat_template(writer, tokenizer)
    _add_tensors(writer, tensors(falcon), student.dtype)
    # In this order: the file begins with its header, and tensors come last.
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tensors(writer: GGUFWriter, state: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Add tensors, and the type of the file: that of most of its matrices."""
    import gguf

    # A student in float64 is stored in float32.
    matrix_name, file_name = MATRIX_TYPES.get(dtype, MATRIX_TYPES[torch.float32])
    matrix_type = gguf.GGMLQuantizationType[matrix_name]
    writer.add_file_type(gguf.LlamaFileType[file_name])
    for name, tensor in state.items():
        is_matrix = name.endswith(".weight") and tensor.ndim == 2 and "ssm_conv1d" not in name
        tensor_type = matrix_type if is_matrix else gguf.GGMLQuantizationType.F32
        # numpy has no bfloat16.
        values = tensor.detach().float().cpu().contiguous().numpy()
        array = gguf.quants.quantize(values, tensor_type)
        writer.add_tensor(name, array, raw_dtype=tensor_type)


def tensors(falcon: FalconH1) -> dict[str, Tensor]:
    """Rename a Falcon-H1's tensors, and give them llama.cpp's shapes.

    llama.cpp stores A instead of log A, A and D as columns, and weights of convolutions as
    matrices.
    """
    renamed = {}
    for name, tensor in falcon.state.items():
        if name in TOP_NAMES:
            # Without an output.weight, llama.cpp ties it to the embedding.
            is_tied = name == "lm_head.weight" and falcon.config["tie_word_embeddings"]
            if not is_tied:
                renamed[TOP_NAMES[name]] = tensor
            continue
        _, _, layer, part = name.split(".", 3)  # model.layers.LAYER.PART
        if part in UNREAD:
            continue
        if part == "mamba.A_log":
            tensor = -torch.exp(tensor)
        if part in ("mamba.A_log", "mamba.D"):
            tensor = tensor.unsqueeze(1)
        if part == "mamba.conv1d.weight":
            tensor = tensor.squeeze(1)
        renamed[f"blk.{layer}.{LAYER_NAMES[part]}"] = tensor
    return renamed


def _add_sizes(writer: GGUFWriter, config: Record) -> None:
    rope = config.get("rope_parameters") or {}
    # In either spelling of transformers; 10,000 is its default.
    rope_theta = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(float(rope_theta))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_inner_size(config["mamba_d_ssm"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_time_step_rank(config["mamba_n_heads"])
    writer.add_ssm_group_count(config["mamba_n_groups"])


def _add_vocabulary(
    writer: GGUFWriter, tokenizer: PreTrainedTokenizerBase, n_embeddings: int
) -> None:
    """Add the text and type of each token, padded to the embedding's rows."""
    from gguf import TokenType

    text_of = {token: text for text, token in tokenizer.get_vocab().items()}
    added = tokenizer.added_tokens_decoder
    texts = []
    types = []
    for token in range(n_embeddings):
        if token not in added:
            token_type = TokenType.NORMAL if token in text_of else TokenType.UNUSED
        elif added[token].special:
            token_type = TokenType.CONTROL
        else:
            token_type = TokenType.USER_DEFINED
        # An embedding may have more rows than the tokenizer has tokens; llama.cpp's own converter
        # fills up in this way.
        texts.append(text_of.get(token, f"[PAD{token}]"))
        types.append(token_type)
    writer.add_token_list(texts)
    writer.add_token_types(types)


def _add_merges(writer: GGUFWriter, tokenizer_json: Record) -> None:
    """Add the merges of the BPE, each as two tokens with a space between them."""
    merges = []
    for merge in tokenizer_json["model"]["merges"]:
        # Older files of tokenizers have strings, newer ones pairs.
        merges.append(merge if isinstance(merge, str) else " ".join(merge))
    writer.add_token_merges(merges)


def _add_special_tokens(writer: GGUFWriter, tokenizer: PreTrainedTokenizerBase) -> None:
    """Add the ids of the special tokens that the tokenizer has."""
    special_tokens: dict[Callable[[int], None], Any] = {
        writer.add_bos_token_id: tokenizer.bos_token_id,
        writer.add_eos_token_id: tokenizer.eos_token_id,
        writer.add_pad_token_id: tokenizer.pad_token_id,
        writer.add_unk_token_id: tokenizer.unk_token_id,
    }
    for add, token in special_tokens.items():
        if token is not None:
            add(token)


def _add_bos_and_eos_rules(writer: GGUFWriter, tokenizer: PreTrainedTokenizerBase) -> None:
    """Add whether a text begins with BOS, and whether it ends with EOS."""
    # From an encoded text: the tokenizer's post-processor decides whether they are added.
    ids = tokenizer("a").input_ids
    writer.add_add_bos_token(ids[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(ids[-1] == tokenizer.eos_token_id)


def _add_chat_template(writer: GGUFWriter, tokenizer: PreTrainedTokenizerBase) -> None:
    """Add the chat template, if there is one."""
    if has_chat_template(tokenizer):
        # If there are several, the default one: llama.cpp reads others only where it is asked for tools.
        writer.add_chat_template(tokenizer.get_chat_template())


def _tokenizer_json(tokenizer: PreTrainedTokenizerBase | None) -> Record:
    """Return the contents of a fast tokenizer's tokenizer.json. Raises ValueError for any other."""
    if tokenizer is None or not tokenizer.is_fast:
        found = "none" if tokenizer is None else f"a slow one ({type(tokenizer).__name__})"
        raise ValueError(
            f"the tokenizer is {found}, and gguf needs a fast one, which has a tokenizer.json; pass a fast tokenizer, "
            "or export as remote-code."
        )
    backend: Any = tokenizer.backend_tokenizer
    return json.loads(backend.to_str())


def _pre_tokenizer(tokenizer_json: Record) -> str:
    """Return llama.cpp's name for the pre-tokenizer. Raises ValueError if it has none."""
    pre_tokenizer = tokenizer_json.get("pre_tokenizer") or {"pretokenizers": []}
    steps = []
    # A sequence lists its steps; a single one stands for itself.
    for step in pre_tokenizer.get("pretokenizers", [pre_tokenizer]):
        if step["type"] == "Split":
            steps.append(step["pattern"].get("Regex"))
        elif step["type"] != "ByteLevel" or step["use_regex"]:
            # Without its pattern, ByteLevel splits nothing: it only spells bytes.
            steps.append(step["type"])
    name = PRE_TOKENIZERS.get(tuple(steps))
    kind = tokenizer_json["model"]["type"]
    normalizes_otherwise = tokenizer_json.get("normalizer") not in (None, {"type": "NFC"})
    if kind != "BPE" or normalizes_otherwise or name is None:
        raise ValueError(
            f"the tokenizer is {kind} after {steps or 'no pre-tokenizer'}, and this export supports only the "
            "byte-level BPE of GPT-2, SmolLM, Llama 3, Qwen2 and the embedded teacher; export as remote-code."
        )
    return name
