"""A GGUF file holds a student as llama.cpp's Falcon-H1, which computes what the student does."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_family_model
from messages import has_facts
from students import byte_tokenizer, recurrent_parameters
from tokenizers import Regex, Tokenizer, pre_tokenizers
from transformers import PreTrainedTokenizerBase

from hybrid_distill.export.gguf import FILE, obstacles, write
from hybrid_distill.export.programs import LlamaCpp
from hybrid_distill.model import HybridForCausalLM
from hybrid_distill.plan import HeadPlan
from hybrid_distill.student.build import build_student
from hybrid_distill.teacher import load_teacher

gguf = pytest.importorskip("gguf", reason="pip install gguf")
# Of 6 layers of 8 heads. Layer 2 decides the sizes of all: one head, and two that share a KV head.
KEPT = [(0, 1), (1, 2), (1, 3), (2, 6), (2, 0), (2, 1), (5, 5)]
TEXTS = [
    "The cat",
    "Hello, it's 1234 times.\n\n  Don't (panic)! x='sun' é你好\tend",
    "a b c d e f g " * 40,
]
TOLERANCE = 1e-4  # relative to the largest logit; measured: 1e-6 to 3e-5, growing with the length


def student_of(recurrence: str) -> tuple[HybridForCausalLM, PreTrainedTokenizerBase]:
    teacher, tokenizer = load_teacher("tiny")
    plan = HeadPlan.from_pairs(teacher, KEPT)
    student, _ = build_student(teacher, plan, d_state=16, recurrence=recurrence)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        recurrent = {id(parameter) for parameter in recurrent_parameters(student)}
        for parameter in student.parameters():
            size = 0.05 if id(parameter) in recurrent else 0.01
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))
    return student.eval(), tokenizer


def test_names_shapes_and_sizes_are_those_of_the_loader(tmp_path: Path) -> None:
    student, tokenizer = student_of("mamba2-stock")
    write(student, tokenizer, tmp_path, "2GB")
    reader = gguf.GGUFReader(tmp_path / FILE)
    config = student.config
    width = config.hidden_size
    head_dim = config.head_dim
    n_heads = 8
    n_channels = n_heads * (head_dim + 2 * config.d_state)
    # As llama.cpp counts: columns first.
    shapes = {tensor.name: tensor.shape.tolist() for tensor in reader.tensors}

    expected = {
        "ssm_in.weight": [width, n_heads * (head_dim + 1) + n_channels],
        "ssm_conv1d.weight": [4, n_channels],
        "ssm_conv1d.bias": [n_channels],
        "ssm_dt.bias": [n_heads],
        "ssm_a": [1, n_heads],
        "ssm_d": [1, n_heads],
        "ssm_out.weight": [n_heads * head_dim, width],
        "attn_q.weight": [width, 4 * head_dim],
        "attn_k.weight": [width, 2 * head_dim],
        "attn_output.weight": [4 * head_dim, width],
        "attn_norm.weight": [width],
        "ffn_norm": [width],
    }
    for layer in range(config.num_hidden_layers):
        for name, shape in expected.items():
            assert shapes[f"blk.{layer}.{name}"] == shape
    assert shapes["token_embd.weight"] == [width, config.vocab_size]
    assert not any(name.endswith("ssm_in.bias") for name in shapes)

    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "falcon-h1"
    assert fields["falcon-h1.attention.head_count"] == 4
    assert fields["falcon-h1.attention.head_count_kv"] == 2
    assert fields["falcon-h1.ssm.time_step_rank"] == n_heads
    assert fields["falcon-h1.ssm.group_count"] == n_heads
    assert fields["tokenizer.ggml.tokens"][:3] == ["<pad>", "<bos>", "<eos>"]
    control = 3
    normal = 1
    assert fields["tokenizer.ggml.token_type"][:4] == [control, control, control, normal]
    assert fields["tokenizer.ggml.add_bos_token"]

    (decay,) = [tensor.data for tensor in reader.tensors if tensor.name == "blk.0.ssm_a"]
    assert (np.asarray(decay) == -1).all()


def test_of_several_chat_templates_the_default_one_is_written(tmp_path: Path) -> None:
    """transformers has them as a dictionary (Command R's: default, tool_use, rag)."""
    student, tokenizer = student_of("mamba2-stock")
    default = "{{ messages[0].content }}"
    tokenizer.chat_template = {"default": default, "tool_use": "tools"}  # type: ignore[assignment]
    write(student, tokenizer, tmp_path, "2GB")
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    assert fields["tokenizer.chat_template"].contents() == default


def test_a_gate_with_a_bias_and_stretched_rope_are_obstacles() -> None:
    student, _ = student_of("mamba2")
    (reason,) = obstacles(student)
    assert "mamba2-stock" in reason

    scaling = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    stretched = make_family_model("llama", vocab_size=300, rope_parameters=scaling)
    plan = HeadPlan.none(stretched)
    student, _ = build_student(stretched, plan, d_state=4, recurrence="mamba2-stock")
    (reason,) = obstacles(student)
    assert has_facts(reason, "linear")


def test_a_tokenizer_that_llama_cpp_lacks_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    student, _ = student_of("mamba2-stock")
    other = byte_tokenizer()
    other.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    for tokenizer, kind in ((other, "Whitespace"), (None, "gguf")):
        with pytest.raises(ValueError, match=kind):
            write(student, tokenizer, tmp_path, "2GB")
    assert not list(tmp_path.iterdir())


def test_the_embedded_tokenizer_gives_the_same_tokens_behind_the_coarser_cuts_of_bloom() -> None:
    _, tokenizer = load_teacher("tiny")
    coarse = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    cuts = pre_tokenizers.Split(Regex(r" ?[^(\s|.,!?…。，、।۔،)]+"), "isolated")
    spelling = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    coarse.pre_tokenizer = pre_tokenizers.Sequence([cuts, spelling])
    pieces = ["a", "the ", " of", "'s", "12", " ", "\n", "(", ".", "é", "你", "?!"]
    mixed = "".join(random.Random(0).choices(pieces, k=5000))
    for text in (*TEXTS, mixed):
        assert coarse.encode(text).ids == tokenizer(text).input_ids


def tokenize(engine: LlamaCpp, text: str) -> list[int]:
    """Return the tokens of llama.cpp's own tokenizer, special ones included."""
    data = text.encode()
    # No more tokens than bytes, and a few special ones.
    ids = (engine.lib.llama_token * (len(data) + 8))()
    add_special = True
    parse_special = True
    n_tokens = engine.lib.llama_tokenize(
        engine.vocab,
        data,
        len(data),
        ids,
        len(ids),
        add_special,
        parse_special,
    )
    return ids[:n_tokens]


@torch.no_grad()
def test_llama_cpp_computes_what_the_student_computes(tmp_path: Path) -> None:
    """Tokens, logits, and greedy decoding alone and in one batch of prompts of several lengths."""
    pytest.importorskip("llama_cpp", reason="pip install llama-cpp-python")
    student, tokenizer = student_of("mamba2-stock")
    write(student, tokenizer, tmp_path, "2GB")
    engine = LlamaCpp(tmp_path, longest=512, threads=1)
    prompts = [tokenizer(text).input_ids for text in TEXTS]
    n_new = 16

    expected: list[list[int]] = []
    for text, ids in zip(TEXTS, prompts, strict=True):
        ids_BL = torch.tensor([ids])
        own = student(ids_BL).logits[0].numpy()
        continued = student.generate(
            ids_BL,
            max_new_tokens=n_new,
            do_sample=False,
            eos_token_id=None,
        )
        new_tokens = continued[0, len(ids) :].tolist()
        expected.append(new_tokens)

        assert tokenize(engine, text) == ids
        error = np.abs(engine.logits(ids) - own).max()
        assert error <= TOLERANCE * np.abs(own).max()
        assert engine.generate([ids], n_new) == [new_tokens]

    assert engine.generate(prompts, n_new) == expected
