"""A GGUF file becomes a plain folder that computes the same, and bad files end in one line."""

import hashlib
from pathlib import Path

import pytest
import torch
from conftest import make_family_model
from students import only_error
from torch.testing import assert_close
from training import SMALL

from hybrid_distill.cli import import_gguf as command
from hybrid_distill.cli.app import main
from hybrid_distill.export import license_and_name
from hybrid_distill.teacher import imported_from, load_teacher

gguf = pytest.importorskip("gguf", reason="pip install gguf")
WORDS = ["<unk>", "<eos>", "w", "0", "1", "2", "3", "w0", "w1", "w2", "w3", "Ġ", "Ġw", "Ġw0"]
CHAT = "{% for m in messages %}{{ m.content }}{% endfor %}"
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
"""Tensors of a file, by those of transformers; those of layers are added below."""
IN_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
}
for _name, _in_file in IN_LAYER.items():
    for _layer in range(2):
        NAMES[f"model.layers.{_layer}.{_name}.weight"] = f"blk.{_layer}.{_in_file}.weight"


def write_gguf(path: Path, arch: str = "qwen2") -> torch.nn.Module:
    """Write a small random Qwen2, which GGUF files store without permuted heads; return it."""
    model = make_family_model("qwen2", **SMALL, vocab_size=len(WORDS), tie_word_embeddings=False)
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_merges(["w 0", "w 1", "w 2", "w 3", "Ġ w", "Ġw 0"])
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(0)
    writer.add_chat_template(CHAT)
    writer.add_license("mit")
    for name, tensor in model.state_dict().items():
        # Biases are named after their weights.
        base, _, kind = name.rpartition(".")
        name_in_file = NAMES[f"{base}.weight"].replace("weight", kind)
        writer.add_tensor(name_in_file, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@torch.no_grad()
def test_a_folder_computes_what_the_file_holds(tmp_path, capsys):
    file = tmp_path / "small.gguf"
    out = tmp_path / "folder"
    model = write_gguf(file)

    main(["import-gguf", str(file), str(out)])

    assert "qwen2" in capsys.readouterr().out
    imported, tokenizer = load_teacher(out)
    ids = torch.arange(14)[None]
    expected = model.eval()(ids).logits
    assert_close(imported(ids).logits, expected)
    assert tokenizer.chat_template == CHAT
    assert tokenizer.eos_token == "<eos>"
    assert imported.dtype == torch.float32
    assert not hasattr(imported.config, "quantization_config")
    assert hashlib.sha256(file.read_bytes()).hexdigest() in str(imported_from(out))
    assert license_and_name(str(out)) == ("mit", "folder")
    names = {path.name for path in out.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors"} <= names


def refused(capsys: pytest.CaptureFixture[str], file: Path, out: Path) -> str:
    with pytest.raises(SystemExit, match="2"):
        main(["import-gguf", str(file), str(out)])
    return only_error(capsys.readouterr().err)


def test_bad_input_ends_in_one_line(tmp_path, capsys, monkeypatch):
    out = tmp_path / "folder"
    file = tmp_path / "small.gguf"
    write_gguf(file)
    whole = file.read_bytes()
    short = tmp_path / "short.gguf"
    for size in (len(whole) - 5000, 200, 10):
        short.write_bytes(whole[:size])
        assert str(short) in refused(capsys, short, out)

    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK" + whole)
    assert str(other) in refused(capsys, other, out)
    strange = tmp_path / "strange.gguf"
    write_gguf(strange, "wkv9")
    assert str(strange) in refused(capsys, strange, out)
    missing = tmp_path / "nothing.gguf"
    assert str(missing) in refused(capsys, missing, out)
    assert not out.exists()
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes").touch()
    assert str(mine) in refused(capsys, file, mine)
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert "pip install gguf" in refused(capsys, file, out)
