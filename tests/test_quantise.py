"""A student in 8 bits is nearly the student; its decays, its convolutions and its norms are untouched."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from check_export_elsewhere import byte_tokenizer, tiny_student

from hybrid_distill.export import export_checkpoint
from hybrid_distill.export.quantise import IN_FULL, quantise
from hybrid_distill.guard import load_student

UNTOUCHED = ("D", "conv_weight", "bias", "norm.weight", "layernorm.weight", *(f"{name}.weight" for name in IN_FULL))


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    torch.set_num_threads(1)
    student, plan = tiny_student("llama")
    with torch.no_grad():
        for parameter in student.parameters():  # a gate's weights begin as zeros, which have no scale
            parameter.add_(0.01 * torch.randn_like(parameter))
    path = tmp_path_factory.mktemp("quantise") / "export"
    export_checkpoint(student, byte_tokenizer(), path, plan=plan, gate=False)
    return path


def test_without_torchao_it_says_what_to_install(exported, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install torchao"):
        quantise(exported, tmp_path / "out")


@pytest.mark.parametrize("to", ["int8", "fp8"])
def test_only_linear_projections_are_in_eight_bits(exported, tmp_path, to) -> None:
    pytest.importorskip("torchao")
    said = quantise(exported, tmp_path / "out", to)
    assert "logits differ by" in said
    small, tokenizer = load_student(tmp_path / "out")
    student, _ = load_student(exported)
    assert tokenizer is not None
    plain = student.state_dict()
    for name, tensor in small.named_parameters():
        if name.endswith(UNTOUCHED) or "embed_tokens" in name:
            assert type(tensor.data) is torch.Tensor and torch.equal(tensor, plain[name]), name
        else:
            assert name.endswith("_proj.weight") and type(tensor.data) is not torch.Tensor, name
    with pytest.raises(ValueError, match="exists; pass a new folder"):
        quantise(exported, tmp_path / "out", to)
