"""A student in 8 bits is nearly the student, and an export like any other; its decays and norms are untouched."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from students import byte_tokenizer, tiny_student

from hybrid_distill.cli.quantize import IN_FULL
from hybrid_distill.cli.quantize import command as quantize
from hybrid_distill.export import ExportError, export_checkpoint
from hybrid_distill.export.check import read_record, run_checks
from hybrid_distill.guard import load_student
from hybrid_distill.lab.publish import publish
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
def copy(exported, tmp_path_factory) -> Path:
    pytest.importorskip("torchao")
    out = tmp_path_factory.mktemp("copy") / "int8"
    quantize(exported, out)
    return out


def test_what_cannot_be_done_is_refused(exported, tmp_path, monkeypatch) -> None:
    with pytest.raises(ValueError, match="--tolerance is 5"):
        quantize(exported, tmp_path / "out", tolerance=5)
    with pytest.raises(ValueError, match="exists; pass a new folder"):
        quantize(exported, tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install torchao"):
        quantize(exported, tmp_path / "out")


@pytest.mark.launched
def test_only_linear_projections_are_in_eight_bits(exported, copy) -> None:
    small, tokenizer = load_student(copy)
    student, _ = load_student(exported)
    assert tokenizer is not None and fingerprint(small) != fingerprint(student)
    plain = student.state_dict()
    for name, tensor in small.named_parameters():
        if name.endswith(UNTOUCHED) or "embed_tokens" in name:
            assert type(tensor.data) is torch.Tensor and torch.equal(tensor, plain[name]), name
        else:
            assert name.endswith("_proj.weight") and type(tensor.data) is not torch.Tensor, name


@pytest.mark.launched
def test_a_quantized_copy_can_be_published_until_it_is_changed(copy, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    assert "and `torchao`" in (copy / "README.md").read_text()
    assert "would upload to us/student" in publish(copy, "us/student", dry_run=True)
    with pytest.raises(ValueError, match="is quantized; pass the unquantized export"):
        quantize(copy, tmp_path / "again")

    shutil.copytree(copy, tmp_path / "int8")
    assert read_record(tmp_path / "int8/gate")["quantized"]["limit"] == 0.05
    weights = tmp_path / "int8/model.safetensors"
    with safe_open(weights, framework="pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    tensors[next(name for name in tensors if name.endswith("_weight_scale"))] *= 2
    save_file(tensors, weights, metadata=metadata)
    failed = [check.name for check in run_checks(tmp_path / "int8", tmp_path / "int8/gate") if not check.ok]
    assert failed[:2] == [f"{len(tensors)} tensors on disk: wrong", "reloaded = exported model, logits"]


@pytest.mark.launched
def test_fp8_too_far_from_the_student_is_not_left_behind(exported, tmp_path) -> None:
    pytest.importorskip("torchao")
    with pytest.raises(ExportError, match=r"FAILED +reloaded = exported model, logits") as failure:
        quantize(exported, tmp_path / "fp8", "fp8", tolerance=1e-6)
    for held in ("tensors on disk: wrong", "tensors after loading: wrong", "cached decode = full forward"):
        assert re.search(rf"\nok .* {held}|\nok +{held}", str(failure.value)), held
    assert not (tmp_path / "fp8").exists()
