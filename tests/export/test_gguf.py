"""A GGUF file holds a student as llama.cpp's Falcon-H1 reads it, and llama.cpp computes what the student does."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_family_model
from students import byte_tokenizer
from tokenizers import Regex, Tokenizer, pre_tokenizers
from transformers import PreTrainedTokenizerBase

from hybrid_distill.export.gguf import FILE, obstacles, write
from hybrid_distill.model import HybridForCausalLM
from hybrid_distill.plan import HeadPlan
from hybrid_distill.student.build import build_student
from hybrid_distill.teacher import load_teacher

gguf = pytest.importorskip("gguf", reason="pip install gguf")
KEPT = [(0, 1), (1, 2), (1, 3), (2, 6), (2, 0), (2, 1), (5, 5)]  # of 6 layers of 8 heads
TEXTS = ["The cat", "Hello, it's 1234 times.\n\n  Don't (panic)! x='sun' é你好\tend", "a b c d e f g " * 40]
TOLERANCE = 1e-4  # relative to the largest logit; measured: 1e-6 to 3e-5, the more the longer the prompt


def student_of(recurrence: str) -> tuple[HybridForCausalLM, PreTrainedTokenizerBase]:
    teacher, tokenizer = load_teacher("tiny")
    plan = HeadPlan.from_pairs(teacher, KEPT)
    student, _ = build_student(teacher, plan, d_state=16, recurrence=recurrence)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in student.named_parameters():
            size = 0.05 if ".ssm." in name else 0.01
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))
    return student.eval(), tokenizer


def test_names_shapes_and_sizes_are_those_of_the_loader(tmp_path: Path) -> None:
    student, tokenizer = student_of("mamba2-stock")
    write(student, tokenizer, tmp_path)
    reader = gguf.GGUFReader(tmp_path / FILE)
    config = student.config
    width, n_heads, n_state, head_dim = config.hidden_size, 8, config.d_state, config.head_dim
    n_channels = n_heads * (head_dim + 2 * n_state)
    shapes = {tensor.name: tensor.shape.tolist() for tensor in reader.tensors}  # as llama.cpp counts: columns first
    expected = {
        "ssm_in.weight": [width, n_heads * (head_dim + 1) + n_channels],
        "ssm_conv1d.weight": [4, n_channels],
        "ssm_conv1d.bias": [n_channels],
        "ssm_dt.bias": [n_heads],
        "ssm_a": [1, n_heads],
        "ssm_d": [1, n_heads],
        "ssm_out.weight": [n_heads * head_dim, width],
        "attn_q.weight": [width, 4 * head_dim],  # of layer 2: one head and two that share a KV head
        "attn_k.weight": [width, 2 * head_dim],
        "attn_output.weight": [4 * head_dim, width],
        "attn_norm.weight": [width],
        "ffn_norm": [width],
    }
    for layer in range(config.num_hidden_layers):
        assert {name: shapes[f"blk.{layer}.{name}"] for name in expected} == expected
    assert shapes["token_embd.weight"] == [width, config.vocab_size]
    assert not any("in_proj" in name or name.endswith("ssm_in.bias") for name in shapes)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "falcon-h1"
    assert (fields["falcon-h1.attention.head_count"], fields["falcon-h1.attention.head_count_kv"]) == (4, 2)
    assert fields["falcon-h1.ssm.time_step_rank"] == fields["falcon-h1.ssm.group_count"] == n_heads
    assert fields["tokenizer.ggml.tokens"][:3] == ["<pad>", "<bos>", "<eos>"]
    assert fields["tokenizer.ggml.token_type"][:4] == [3, 3, 3, 1] and fields["tokenizer.ggml.add_bos_token"]
    (decay,) = (tensor.data for tensor in reader.tensors if tensor.name == "blk.0.ssm_a")
    assert (np.asarray(decay) == -1).all()


def test_students_that_llama_cpp_cannot_run_are_refused(tmp_path: Path) -> None:
    student, tokenizer = student_of("mamba2")
    assert ["the gate" in reason and "mamba2-stock" in reason for reason in obstacles(student)] == [True]
    with pytest.raises(ValueError, match="cannot run this student: the gate"):
        write(student, tokenizer, tmp_path)
    other = byte_tokenizer()
    other.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(ValueError, match="the tokenizer is BPE behind"):
        write(student_of("mamba2-stock")[0], other, tmp_path)
    assert not list(tmp_path.iterdir())
    scaling = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    stretched = make_family_model("llama", vocab_size=300, rope_parameters=scaling)
    student, _ = build_student(stretched, HeadPlan.none(stretched), d_state=4, recurrence="mamba2-stock")
    assert ["RoPE is linear" in reason for reason in obstacles(student)] == [True]


def test_the_embedded_tokenizer_gives_the_same_tokens_behind_the_coarser_cuts_of_bloom() -> None:
    _, tokenizer = load_teacher("tiny")
    coarse = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    cuts = pre_tokenizers.Split(Regex(r" ?[^(\s|.,!?…。，、।۔،)]+"), "isolated")
    coarse.pre_tokenizer = pre_tokenizers.Sequence(
        [cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    draw = random.Random(0)
    mixed = "".join(
        draw.choice(["a", "the ", " of", "'s", "12", " ", "\n", "(", ".", "é", "你", "?!"]) for _ in range(5000)
    )
    for text in (*TEXTS, mixed):
        assert coarse.encode(text).ids == tokenizer(text).input_ids


class Engine:
    """llama.cpp through its C functions, as llama-cpp-python binds them."""

    def __init__(self, file: Path, n_sequences: int = 1, n_context: int = 512) -> None:
        self.lib: Any = pytest.importorskip("llama_cpp", reason="pip install llama-cpp-python")
        self.lib.llama_backend_init()
        self.model = self.lib.llama_model_load_from_file(str(file).encode(), self.lib.llama_model_default_params())
        assert self.model, f"llama.cpp does not load {file}"
        self.vocab = self.lib.llama_model_get_vocab(self.model)
        options = self.lib.llama_context_default_params()
        options.n_ctx, options.n_seq_max, options.n_batch = n_context * n_sequences, n_sequences, 2048
        options.n_threads = options.n_threads_batch = 1
        options.type_k = options.type_v = options.flash_attn_type = 0  # fp32, which is not the default
        self.context = self.lib.llama_init_from_model(self.model, options)

    def tokenize(self, text: str) -> list[int]:
        data = text.encode()
        ids = (self.lib.llama_token * (len(data) + 8))()
        return ids[: self.lib.llama_tokenize(self.vocab, data, len(data), ids, len(ids), True, True)]

    def logits(self, rows: list[list[int]], starts: list[int]) -> list[np.ndarray]:
        """Run one batch of sequences, each from its place on; return logits [L, V] of each."""
        n_tokens, n_vocab = sum(map(len, rows)), self.lib.llama_vocab_n_tokens(self.vocab)
        batch = self.lib.llama_batch_init(n_tokens, 0, 1)
        places = [(row, token, at + start) for row, (ids, start) in enumerate(zip(rows, starts, strict=True))
                  for at, token in enumerate(ids)]  # fmt: skip
        batch.n_tokens = n_tokens
        for index, (row, token, place) in enumerate(places):
            batch.token[index], batch.pos[index], batch.n_seq_id[index] = token, place, 1
            batch.seq_id[index][0], batch.logits[index] = row, 1
        assert self.lib.llama_decode(self.context, batch) == 0
        read = [self.lib.llama_get_logits_ith(self.context, index) for index in range(n_tokens)]
        found = np.stack([np.ctypeslib.as_array(row, (n_vocab,)) for row in read])
        self.lib.llama_batch_free(batch)
        return np.split(found, np.cumsum([len(ids) for ids in rows])[:-1])

    def greedy(self, prompts: list[list[int]], n_new: int) -> list[list[int]]:
        """Decode greedily, all prompts in one batch."""
        rows, starts = prompts, [0] * len(prompts)
        made: list[list[int]] = [[] for _ in prompts]
        for _ in range(n_new):
            found = self.logits(rows, starts)
            starts = [start + len(ids) for start, ids in zip(starts, rows, strict=True)]
            rows = [[int(logits[-1].argmax())] for logits in found]
            for new, ids in zip(made, rows, strict=True):
                new += ids
        return made


@torch.no_grad()
def test_llama_cpp_computes_what_the_student_computes(tmp_path: Path) -> None:
    """Tokens, logits, and greedy decoding alone and in one batch of prompts of different lengths."""
    student, tokenizer = student_of("mamba2-stock")
    write(student, tokenizer, tmp_path)
    prompts = [tokenizer(text).input_ids for text in TEXTS]
    expected = []
    for text, ids in zip(TEXTS, prompts, strict=True):
        engine = Engine(tmp_path / FILE)
        assert engine.tokenize(text) == ids
        (logits,) = engine.logits([ids], [0])
        own = student(torch.tensor([ids])).logits[0].numpy()
        assert np.abs(logits - own).max() <= TOLERANCE * np.abs(own).max()
        made = student.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False, eos_token_id=None)
        expected.append(made[0, len(ids) :].tolist())
        assert Engine(tmp_path / FILE).greedy([ids], 16) == [expected[-1]]
    assert Engine(tmp_path / FILE, len(prompts)).greedy(prompts, 16) == expected
