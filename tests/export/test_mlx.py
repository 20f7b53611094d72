"""An MLX folder holds a student and its model file, and mlx-lm computes what the student does."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from students import byte_tokenizer
from test_falcon_h1 import KEPT, student_keeping

from hybrid_distill.export import falcon_h1
from hybrid_distill.export.mlx import write
from hybrid_distill.io import save_tensors, write_json
from hybrid_distill.model import HybridForCausalLM

TOLERANCE = 1e-5  # relative to the largest logit
LENGTHS = (3, 71, 150)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(5, 300, (length,), generator=generator).tolist() for length in LENGTHS]


@torch.no_grad()
def computes_the_same(folder: Path, student: HybridForCausalLM) -> None:
    """Compare logits, and greedy tokens of mlx-lm's own programs, one prompt and a batch of several lengths."""
    mx = pytest.importorskip("mlx.core", reason="pip install mlx[cpu]")
    utils = pytest.importorskip("mlx_lm.utils", reason="pip install mlx-lm")
    generate = pytest.importorskip("mlx_lm.generate")
    model, _ = utils.load_model(folder, trust_remote_code=True)
    expected = []
    for ids in prompts():
        own = student(torch.tensor([ids])).logits.numpy()
        found = np.array(model(mx.array([ids])))
        assert np.abs(found - own).max() <= TOLERANCE * np.abs(own).max()
        made = student.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False, eos_token_id=None)
        expected.append(made[0, len(ids) :].tolist())
        steps = generate.generate_step(mx.array(ids), model, max_tokens=8, prefill_step_size=32)
        assert [int(token) for token, _ in steps] == expected[-1]
    engine = generate.BatchGenerator(model, max_tokens=8, prefill_step_size=32)
    places = engine.insert(prompts())
    made = {place: [] for place in places}
    while responses := engine.next_generated():
        for response in responses:
            made[response.uid].append(int(response.token))
    assert [made[place] for place in places] == expected


@pytest.mark.parametrize("kept", ["uneven", "a whole layer"])
@pytest.mark.parametrize(
    ("family", "recurrence"), [("llama", "discrete"), ("qwen2", "mamba2"), ("mistral", "mamba2-stock")]
)
def test_mlx_computes_what_a_student_computes(tmp_path: Path, family: str, recurrence: str, kept: str) -> None:
    student = student_keeping(family, KEPT[kept], recurrence=recurrence)
    write(student, byte_tokenizer(), tmp_path)
    computes_the_same(tmp_path, student)


def test_mlx_computes_what_the_falcon_h1_form_computes(tmp_path: Path) -> None:
    """With mlx-lm's own model, whose multipliers are not 1 unless the configuration states them."""
    student = student_keeping("qwen2", KEPT["uneven"])
    stock = falcon_h1.container(student)
    write_json(tmp_path / "config.json", stock.config)
    state = {name: tensor.contiguous() for name, tensor in stock.state.items() if name != "lm_head.weight"}
    save_tensors(tmp_path / "model.safetensors", state)
    computes_the_same(tmp_path, student)


def test_the_folder_has_all_that_mlx_lm_reads(tmp_path: Path) -> None:
    write(student_keeping("qwen2", KEPT["uneven"], recurrence="discrete"), byte_tokenizer(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_file"] == "mlx_model.py" and config["backbone"]["rope_theta"] > 0
    assert {"config.json", "mlx_model.py", "model.safetensors"} == {path.name for path in tmp_path.iterdir()}
    compile((tmp_path / "mlx_model.py").read_text(), "mlx_model.py", "exec")
