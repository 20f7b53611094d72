"""An MLX folder holds a student and its model file, and mlx-lm computes what the student does."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from students import byte_tokenizer
from test_falcon_h1 import KEPT, student_keeping

from hybrid_distill.export.falcon_h1 import to_falcon_h1
from hybrid_distill.export.mlx import write
from hybrid_distill.io import save_tensors, write_json
from hybrid_distill.model import HybridForCausalLM

TOLERANCE = 1e-5  # relative to the largest logit
NEW_TOKENS = 8
LENGTHS = (3, 71, 150)
"""Tokens of the prompts: below, above and far above a piece of the prefill."""
PREFILL_PIECE = 32


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    drawn: list[list[int]] = []
    for length in LENGTHS:
        ids = torch.randint(5, 300, (length,), generator=generator)
        drawn.append(ids.tolist())
    return drawn


def continued_by(student: HybridForCausalLM, ids: list[int]) -> list[int]:
    """Return the student's own greedy tokens."""
    continued = student.generate(
        torch.tensor([ids]),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
    )
    return continued[0, len(ids) :].tolist()


@torch.no_grad()
def check_same(folder: Path, student: HybridForCausalLM) -> None:
    """Compare logits, and greedy tokens of mlx-lm's programs: single prompts and a batch of all."""
    mx = pytest.importorskip("mlx.core", reason="pip install mlx[cpu]")
    utils = pytest.importorskip("mlx_lm.utils", reason="pip install mlx-lm")
    generate = pytest.importorskip("mlx_lm.generate")
    model, _ = utils.load_model(folder, trust_remote_code=True)
    expected = [continued_by(student, ids) for ids in prompts()]

    for ids, new_tokens in zip(prompts(), expected, strict=True):
        own = student(torch.tensor([ids])).logits.numpy()
        logits = np.array(model(mx.array([ids])))
        error = np.abs(logits - own).max()
        assert error <= TOLERANCE * np.abs(own).max()
        steps = generate.generate_step(
            mx.array(ids),
            model,
            max_tokens=NEW_TOKENS,
            prefill_step_size=PREFILL_PIECE,
        )
        assert [int(token) for token, _ in steps] == new_tokens

    engine = generate.BatchGenerator(model, max_tokens=NEW_TOKENS)
    places = engine.insert(prompts())
    tokens: dict[int, list[int]] = {place: [] for place in places}
    while responses := engine.next_generated():
        for response in responses:
            tokens[response.uid].append(int(response.token))
    assert [tokens[place] for place in places] == expected


@pytest.mark.parametrize("kept", ["uneven", "a whole layer"])
@pytest.mark.parametrize(
    ("family", "recurrence"),
    [
        ("llama", "discrete"),
        ("qwen2", "mamba2"),
        ("mistral", "mamba2-stock"),
    ],
)
def test_mlx_computes_what_a_student_computes(
    tmp_path: Path, family: str, recurrence: str, kept: str
) -> None:
    pytest.importorskip("mlx_lm", reason="pip install mlx[cpu] mlx-lm")
    student = student_keeping(family, KEPT[kept], recurrence=recurrence)
    write(student, byte_tokenizer(), tmp_path, "2GB")
    check_same(tmp_path, student)


def test_mlx_computes_what_the_falcon_h1_format_computes(tmp_path: Path) -> None:
    """With mlx-lm's own model, whose multipliers are not 1 unless the configuration has them."""
    pytest.importorskip("mlx_lm", reason="pip install mlx[cpu] mlx-lm")
    student = student_keeping("qwen2", KEPT["uneven"])
    falcon = to_falcon_h1(student)
    write_json(tmp_path / "config.json", falcon.config)
    del falcon.state["lm_head.weight"]  # tied
    state = {name: tensor.contiguous() for name, tensor in falcon.state.items()}
    save_tensors(tmp_path / "model.safetensors", state)
    check_same(tmp_path, student)


def test_the_folder_has_all_that_mlx_lm_reads(tmp_path: Path) -> None:
    student = student_keeping("qwen2", KEPT["uneven"], recurrence="discrete")

    write(student, byte_tokenizer(), tmp_path, "2GB")

    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_file"] == "mlx_model.py"
    assert config["backbone"]["rope_theta"] > 0
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"config.json", "mlx_model.py", "model.safetensors"}
    # It needs MLX to be imported, not to be parsed.
    compile((tmp_path / "mlx_model.py").read_text(), "mlx_model.py", "exec")
