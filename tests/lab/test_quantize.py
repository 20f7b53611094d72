"""A student in 8 bits is nearly the student, and an export like any other; its decays and norms are untouched."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from students import byte_tokenizer, tiny_student

from hybrid_distill.export import ExportError, export_checkpoint, verify_export
from hybrid_distill.guard import load_student
from hybrid_distill.lab.publish import publish
from hybrid_distill.lab.quantize import IN_FULL, quantize
from hybrid_distill.teacher import fingerprint

UNTOUCHED = ("D", "conv_weight", "bias", "norm.weight", "layernorm.weight", *(f"{name}.weight" for name in IN_FULL))


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    torch.set_num_threads(1)
    student, plan = tiny_student("llama")
    with torch.no_grad():
        for parameter in student.parameters():  # a gate's weights begin as zeros, which have no scale
            parameter.add_(0.01 * torch.randn_like(parameter))
    path = tmp_path_factory.mktemp("quantize") / "export"
    export_checkpoint(student, byte_tokenizer(), path, plan=plan, gate=False)
    return path


@pytest.fixture(scope="module")
def copies(exported, tmp_path_factory) -> dict[str, Path]:
    pytest.importorskip("torchao")
    out = tmp_path_factory.mktemp("copies")
    for to in ("int8", "fp8"):
        assert "reloaded = exported model, logits" in quantize(exported, out / to, to)
    return {to: out / to for to in ("int8", "fp8")}


def test_without_torchao_it_says_what_to_install(exported, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install torchao"):
        quantize(exported, tmp_path / "out")


@pytest.mark.launched
@pytest.mark.parametrize("to", ["int8", "fp8"])
def test_only_linear_projections_are_in_eight_bits(exported, copies, to) -> None:
    small, tokenizer = load_student(copies[to])
    student, _ = load_student(exported)
    assert tokenizer is not None and fingerprint(small) != fingerprint(student)
    plain = student.state_dict()
    for name, tensor in small.named_parameters():
        if name.endswith(UNTOUCHED) or "embed_tokens" in name:
            assert type(tensor.data) is torch.Tensor and torch.equal(tensor, plain[name]), name
        else:
            assert name.endswith("_proj.weight") and type(tensor.data) is not torch.Tensor, name
    with pytest.raises(ValueError, match="exists; pass a new folder"):
        quantize(exported, copies[to], to)


@pytest.mark.launched
def test_a_copy_in_eight_bits_can_be_published_until_it_is_no_copy_any_more(copies, tmp_path) -> None:
    assert "and `torchao`" in (copies["int8"] / "README.md").read_text()
    assert "would go to us/student" in publish(copies["int8"], "us/student", dry_run=True)

    shutil.copytree(copies["int8"], tmp_path / "int8")
    weights = tmp_path / "int8/model.safetensors"
    with safe_open(weights, framework="pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    tensors[next(name for name in tensors if name.endswith("_weight_scale"))] *= 2
    save_file(tensors, weights, metadata=metadata)
    failed = [check.name for check in verify_export(tmp_path / "int8").checks if not check.ok]
    assert failed[:2] == [f"{len(tensors)} tensors on disk: wrong", "reloaded = exported model, logits"]


@pytest.mark.launched
def test_what_is_too_far_from_the_student_is_not_left_behind(exported, tmp_path) -> None:
    pytest.importorskip("torchao")
    with pytest.raises(ExportError, match=r"FAILED +reloaded = exported model, logits"):
        quantize(exported, tmp_path / "fp8", "fp8", tolerance=1e-6)
    assert not (tmp_path / "fp8").exists()
    with pytest.raises(ValueError, match="--tolerance is 5"):
        quantize(exported, tmp_path / "fp8", "fp8", tolerance=5)
