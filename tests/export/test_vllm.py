"""Format for vLLM: larger heads that compute the same, what vLLM leaves out, and its own tokens.

The last needs vLLM in an environment of its own: with
``VLLM_PYTHON=/venv/bin/python pytest tests/export/test_vllm.py`` it runs there.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_family_model
from students import keep, same_logits
from test_falcon_h1 import stirred
from transformers import AutoModelForCausalLM

from hybrid_distill.export import vllm
from hybrid_distill.export.falcon_h1 import to_falcon_h1
from hybrid_distill.model import HybridForCausalLM
from hybrid_distill.student.build import build_student
from hybrid_distill.teacher import load_teacher

UNEVEN = [(0, 1, 2), (), (0, 1, 2, 3, 4, 6, 7)]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "rope_theta": 1e4,
    "original_max_position_embeddings": 32,
}


def student_of(teacher: Any, *kept: tuple[int, ...], d_state: int = 5) -> HybridForCausalLM:
    plan = keep(teacher, *kept)
    student, _ = build_student(teacher, plan, d_state=d_state, recurrence="mamba2")
    return stirred(student)


@torch.no_grad()
@pytest.mark.parametrize("rope", [{"rope_type": "default"}, LLAMA3], ids=["default", "llama3"])
def test_heads_spread_over_larger_ones_compute_the_same(
    rope: dict[str, Any], tmp_path: Path
) -> None:
    rope_parameters = {"rope_theta": 100.0, **rope}
    teacher = make_family_model("llama", vocab_size=300, rope_parameters=rope_parameters)
    student = student_of(teacher, *UNEVEN)
    assert vllm.obstacles(student) == []

    vllm.write(student, None, tmp_path, "2GB")

    falcon = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    head_dim = student.config.head_dim
    assert falcon.config.head_dim == 32
    assert vllm.spacing(head_dim) * head_dim == 32
    generator = torch.Generator().manual_seed(1)
    ids_BL = torch.randint(5, 300, (2, 150), generator=generator)
    expected = student(ids_BL).logits
    error = (falcon(ids_BL).logits - expected).abs().max()
    assert error <= 1e-5 * expected.abs().max()


def test_heads_of_a_size_that_vllm_takes_stay_as_they_are(tmp_path: Path) -> None:
    student = student_of(make_family_model("llama", head_dim=32, vocab_size=300), *UNEVEN)
    vllm.write(student, None, tmp_path, "2GB")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    for name, tensor in to_falcon_h1(student).state.items():
        assert torch.equal(loaded[name], tensor), name


@torch.no_grad()
def test_what_vllm_would_leave_out_is_refused(tmp_path: Path) -> None:
    biased = student_of(make_family_model("qwen2", vocab_size=300), *UNEVEN)
    (reason,) = vllm.obstacles(biased)
    assert "q_proj, k_proj, v_proj" in reason

    # Zero biases are none.
    for name, parameter in biased.named_parameters():
        if ".attention." in name and name.endswith("_proj.bias"):
            parameter.data.zero_()
    assert vllm.obstacles(biased) == []
    vllm.write(biased, None, tmp_path, "2GB")
    falcon = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids_BL = torch.arange(60).view(2, 30)
    same_logits(falcon(ids_BL).logits, biased(ids_BL).logits)

    yarn = student_of(make_family_model("llama", rope_parameters=YARN), *UNEVEN)
    (reason,) = vllm.obstacles(yarn)
    assert "yarn" in reason

    # Heads of a size that vLLM takes are not spread, and YaRN then turns what it turned.
    wide = student_of(make_family_model("llama", rope_parameters=YARN, head_dim=32), *UNEVEN)
    assert vllm.obstacles(wide) == []


PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams
folder, prompts, options = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
engine = LLM(folder, dtype="float32", mamba_ssm_cache_dtype="float32", max_model_len=512,
             max_num_seqs=16, enforce_eager=True, skip_tokenizer_init=True,
             kv_cache_memory_bytes=64 << 20, **options)
sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
requests = [{"prompt_token_ids": prompt} for prompt in prompts]
answers = engine.generate(requests, sampling, use_tqdm=False)
print("TOKENS", json.dumps([list(answer.outputs[0].token_ids) for answer in answers]))
"""
# vLLM's kernel for CPUs returns the last state of a prompt alone, and its cache of prefixes asks
# for earlier ones.
WHOLE = {"enable_prefix_caching": False, "max_num_batched_tokens": 2048}
IN_PIECES = {"enable_prefix_caching": False, "max_num_batched_tokens": 64}


@pytest.mark.skipif("VLLM_PYTHON" not in os.environ, reason="VLLM_PYTHON names no Python with vLLM")
@pytest.mark.parametrize(
    ("kept", "options"),
    [(UNEVEN, WHOLE), ([(3,)] * 6, IN_PIECES)],
    ids=["uneven", "even"],
)
def test_vllm_generates_the_tokens_of_the_student(
    kept: list[tuple[int, ...]], options: dict[str, Any], tmp_path: Path
) -> None:
    teacher, _ = load_teacher("tiny")
    student: Any = student_of(teacher, *kept, d_state=16)
    vllm.write(student, None, tmp_path, "2GB")
    generator = torch.Generator().manual_seed(0)
    prompts: list[list[int]] = []
    for number in range(64):
        length = 1 + 37 * number % 256
        ids = torch.randint(5, 1900, (length,), generator=generator)
        prompts.append(ids.tolist())
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "PYTHONPATH": "",
    }
    arguments = [str(tmp_path), json.dumps(prompts), json.dumps(options)]

    done = subprocess.run(
        [os.environ["VLLM_PYTHON"], "-c", PROGRAM, *arguments],
        env=environment,
        capture_output=True,
        text=True,
    )

    _, _, answers = done.stdout.partition("TOKENS ")
    assert answers, done.stderr[-4000:]
    for prompt, tokens in zip(prompts, json.loads(answers.splitlines()[0]), strict=True):
        ids = torch.tensor([prompt])
        continued = student.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=8,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert tokens == continued[0, len(prompt) :].tolist(), len(prompt)
