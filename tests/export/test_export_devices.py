"""A student that ran on kernels, or on another device, passes the gate of its export, and a wrong
one does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import make_family_model
from students import byte_tokenizer, gate_in_this_process, tiny_student
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hybrid_distill.export import export_checkpoint
from hybrid_distill.export import gate as export_gate
from hybrid_distill.export.check import (
    MARGIN,
    TOLERANCE,
    arithmetic,
    check_outputs,
    elsewhere,
    is_same_arithmetic,
    limits_of,
    load_prompts,
    read_record,
    run_checks,
    table,
)
from hybrid_distill.model import HybridForCausalLM
from hybrid_distill.plan import HeadPlan
from hybrid_distill.student.build import build_student
from hybrid_distill.student.dtypes import settle

SMOLLM2 = {
    "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
    "intermediate_size": 1536,
    "num_hidden_layers": 2, "vocab_size": 300, "tie_word_embeddings": True, "rope_theta": 100000.0,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 8192,
}  # fmt: skip
"""The shape of SmolLM2-135M with two of its 30 layers and a small vocabulary."""


@pytest.fixture(scope="module")
def smollm2() -> tuple[HybridForCausalLM, HeadPlan]:
    teacher = make_family_model("llama", **SMOLLM2)
    plan = HeadPlan.from_pairs(teacher, [(0, 4), (1, 0), (1, 8)])
    student, _ = build_student(teacher, plan, d_state=16)
    with torch.no_grad():
        for heads in student.recurrent_heads():
            for parameter in heads.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
    return student.eval(), plan


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_gate, "NEW_TOKENS", 3)
    monkeypatch.setattr(export_gate, "PROMPT_LENGTHS", (1, 24))


def test_a_student_on_kernels_is_exported_as_what_the_export_computes(
    smollm2, tmp_path: Path, monkeypatch
) -> None:
    """The gate's process has no kernels: a record of what they compute would be off by more than it
    allows."""
    pytest.importorskip("triton", reason="triton is not installed")
    from hybrid_kernels import common

    if not common.INTERPRETED:
        pytest.skip("needs TRITON_INTERPRET=1")
    student, plan = smollm2
    gate_in_this_process(monkeypatch, tmp_path / "modules")
    student.set_ssm_implementation("triton")
    try:
        report = export_checkpoint(student, byte_tokenizer(), tmp_path / "export", plan=plan)
        assert student.ssm_implementation == "triton", "the caller's student stays as it was"
    finally:
        student.set_ssm_implementation("auto")
    same = {check.name: check for check in report.checks}["reloaded = exported model, logits"]
    assert report.ok and same.limit == TOLERANCE[torch.float32]["forward"]
    prompts = load_prompts(tmp_path / "export" / "gate", "cpu")
    for ids, logits in zip(prompts.ids, prompts.logits, strict=True):
        on_torch = student(input_ids=ids[None], use_cache=False).logits[0]
        assert torch.equal(logits, on_torch.detach()), (
            "the record is what torch computes, not what the kernels do"
        )
    kernels = json.loads((tmp_path / "export/gate/reference.json").read_text())["kernels"]
    assert kernels["implementation"] == "triton"
    assert 0 < kernels["difference"] < TOLERANCE[torch.float32]["order"]
    assert f"{kernels['difference']:.1e}" in (tmp_path / "export/README.md").read_text()


def test_a_student_on_torch_has_no_kernels_to_report(smollm2, tmp_path: Path) -> None:
    student, plan = smollm2
    export_checkpoint(student, None, tmp_path / "export", plan=plan, gate=False)
    assert read_record(tmp_path / "export" / "gate")["kernels"] is None


def attend_wrongly(
    module, query: Tensor, key: Tensor, value: Tensor, *_, **__
) -> tuple[Tensor, None]:
    return torch.zeros_like(query).transpose(1, 2), None


def test_the_record_is_made_with_the_attention_that_the_export_names(
    tmp_path: Path, monkeypatch
) -> None:
    """One that needs a GPU is not what the gate's process will run on a CPU."""
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "of_a_gpu", attend_wrongly)
    gate_in_this_process(monkeypatch, tmp_path / "modules")
    student, plan = tiny_student("llama")
    student.model.config._attn_implementation = "of_a_gpu"
    report = export_checkpoint(student, None, tmp_path / "export", plan=plan)
    assert report.ok and student.model.config._attn_implementation == "of_a_gpu"
    assert read_record(tmp_path / "export" / "gate")["kernels"]["difference"] > 1e-3


class OtherOrder(TorchDispatchMode):
    """Another device: each product of matrices sums its terms in another order, in float32."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            a, b = (t.flip(dim) for t, dim in zip(args, (-1, -2)))
            half = a.shape[-1] // 2
            first = func(a[..., :half].contiguous(), b[..., :half, :].contiguous())
            second = func(a[..., half:].contiguous(), b[..., half:, :].contiguous())
            return first + second
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_export_made_on_one_device_passes_its_check_on_another(
    dtype, tmp_path: Path, monkeypatch
) -> None:
    """Both ways: the record of the other device checked here, and this record checked there."""
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    student, plan = tiny_student("llama")
    student = settle(student, dtype)
    with monkeypatch.context() as elsewhere_now, OtherOrder():
        elsewhere_now.setattr(
            "hybrid_distill.export.check.arithmetic", lambda device: "cuda: a GPU"
        )
        export_checkpoint(student, byte_tokenizer(), tmp_path / "there", plan=plan, gate=False)
    checks = run_checks(tmp_path / "there", tmp_path / "there" / "gate")
    assert all(check.ok for check in checks), table(checks)
    same = {check.name: check for check in checks}["reloaded = exported model, logits"]
    assert same.measured > 0
    assert same.limit == elsewhere(dtype, read_record(tmp_path / "there" / "gate"))

    export_checkpoint(student, byte_tokenizer(), tmp_path / "here", plan=plan, gate=False)
    with monkeypatch.context() as elsewhere_now, OtherOrder():
        elsewhere_now.setattr(
            "hybrid_distill.export.check.arithmetic", lambda device: "cuda: a GPU"
        )
        checks = run_checks(tmp_path / "here", tmp_path / "here" / "gate")
    assert all(check.ok for check in checks), table(checks)


def test_a_mistake_is_no_rounding(smollm2, tmp_path: Path) -> None:
    """A decay off by a thousandth on the other device is refused."""
    student, plan = smollm2
    export_checkpoint(student, None, tmp_path / "export", plan=plan, gate=False)
    gate = tmp_path / "export" / "gate"
    record, prompts = read_record(gate), load_prompts(gate, "cpu")
    limits = limits_of(torch.float32, {**record, "arithmetic": "cuda: a GPU"}, "cpu")
    assert limits["forward"] == max(TOLERANCE[torch.float32]["order"], MARGIN * record["rounding"])
    right = next(iter(check_outputs(student, prompts, limits)))
    heads = student.recurrent_heads()[0]
    with torch.no_grad():
        heads.D.mul_(1.01)
        wrong = next(iter(check_outputs(student, prompts, limits)))
        heads.D.div_(1.01)
    assert right.ok and not wrong.ok


def test_only_a_cpu_with_the_same_instructions_promises_the_same_bits() -> None:
    here = arithmetic("cpu")
    assert is_same_arithmetic(here, "cpu") and torch.__version__ in here
    assert not is_same_arithmetic("cpu: aarch64 DEFAULT, 1 threads, torch 2.9.0", "cpu")
    assert not is_same_arithmetic("cuda: NVIDIA H100, torch 2.9.0", "cuda")


def test_float32_products_of_the_record_are_not_in_tf32() -> None:
    student, _ = tiny_student("llama")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with export_gate.computing_as_exported(student):
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
