"""A student that ran on kernels or on another device passes the gate; a wrong one does not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from conftest import make_family_model
from students import gate_in_this_process, tiny_student
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hybrid_distill.export import check, export_checkpoint
from hybrid_distill.export import record as export_record
from hybrid_distill.export.check import (
    MARGIN,
    SAME_ARITHMETIC,
    TOLERANCE,
    Check,
    arithmetic,
    check_outputs,
    is_same_arithmetic,
    limits_of,
    load_prompts,
    order_limit,
    read_record,
    run_checks,
    table,
)
from hybrid_distill.model import HybridForCausalLM
from hybrid_distill.model.layer_cache import HybridLayerCache
from hybrid_distill.model.recurrent_heads import SSMHeads
from hybrid_distill.plan import HeadPlan
from hybrid_distill.student.build import build_student
from hybrid_distill.student.dtypes import settle

SMOLLM2 = {
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "intermediate_size": 1536,
    "num_hidden_layers": 2,
    "vocab_size": 300,
    "tie_word_embeddings": True,
    "rope_theta": 100000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
}
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
    """Record short prompts: without a tokenizer, those of its texts are not recorded either."""
    monkeypatch.setattr(export_record, "NEW_TOKENS", 3)
    monkeypatch.setattr(export_record, "PROMPT_LENGTHS", (1, 24))


def test_a_student_on_kernels_is_exported_as_what_the_export_computes(
    smollm2, tmp_path: Path, monkeypatch
) -> None:
    """The gate's process has no kernels: a record of theirs would be off by more than it allows."""
    pytest.importorskip("triton", reason="triton is not installed")
    from hybrid_kernels import common

    if not common.INTERPRETED:
        pytest.skip("needs TRITON_INTERPRET=1")
    student, plan = smollm2
    path = tmp_path / "export"
    gate_in_this_process(monkeypatch, tmp_path / "modules")
    student.set_ssm_implementation("triton")
    try:
        report = export_checkpoint(student, None, path, plan=plan)
        assert student.ssm_implementation == "triton"
    finally:
        student.set_ssm_implementation("auto")

    assert report.ok
    assert same_model(report.checks).limit == SAME_ARITHMETIC
    prompts = load_prompts(path / "gate", "cpu")
    for ids_L, logits_LC in zip(prompts.ids, prompts.logits, strict=True):
        on_torch = student(input_ids=ids_L[None], use_cache=False).logits[0]
        assert torch.equal(logits_LC, on_torch.detach())

    kernels = read_record(path / "gate")["kernels"]
    assert kernels["implementation"] == "triton"
    assert 0 < kernels["difference"] < TOLERANCE[torch.float32]
    assert f"{kernels['difference']:.1e}" in (path / "README.md").read_text()


def same_model(checks: Sequence[Check]) -> Check:
    """Return the check that compares logits with the record."""
    (same,) = [each for each in checks if each.name == f"{check.RELOADED}, logits"]
    return same


def test_a_student_on_torch_has_no_kernels_to_report(smollm2, tmp_path: Path) -> None:
    student, plan = smollm2
    export_checkpoint(student, None, tmp_path / "export", plan=plan, gate=False)
    assert read_record(tmp_path / "export" / "gate")["kernels"] is None


def attend_wrongly(module, query: Tensor, *_, **__) -> tuple[Tensor, None]:
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

    assert report.ok
    assert student.model.config._attn_implementation == "of_a_gpu"
    assert read_record(tmp_path / "export" / "gate")["kernels"]["difference"] > 1e-3


class OtherOrder(TorchDispatchMode):
    """Another device: each product of matrices sums its terms in another order, in float32."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func not in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            return func(*args, **(kwargs or {}))
        a = args[0].flip(-1)
        b = args[1].flip(-2)
        half = a.shape[-1] // 2
        first = func(a[..., :half].contiguous(), b[..., :half, :].contiguous())
        second = func(a[..., half:].contiguous(), b[..., half:, :].contiguous())
        return first + second


@contextmanager
def elsewhere_now() -> Iterator[None]:
    """Compute as on a GPU."""
    with pytest.MonkeyPatch.context() as patch, OtherOrder():
        patch.setattr(check, "arithmetic", lambda device: "cuda: a GPU")
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_export_made_on_one_device_passes_its_check_on_another(
    dtype, tmp_path: Path, monkeypatch
) -> None:
    """Both ways: the record of the other device checked here, and this record checked there."""
    modules = str(tmp_path / "modules")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules)
    student, plan = tiny_student("llama")
    student = settle(student, dtype)

    there = tmp_path / "there"
    with elsewhere_now():
        export_checkpoint(student, None, there, plan=plan, gate=False)
    checks = run_checks(there, there / "gate")
    assert all(check.ok for check in checks), table(checks)
    assert same_model(checks).measured > 0
    assert same_model(checks).limit == order_limit(torch.float32, read_record(there / "gate"))

    here = tmp_path / "here"
    export_checkpoint(student, None, here, plan=plan, gate=False)
    with elsewhere_now():
        checks = run_checks(here, here / "gate")
    assert all(check.ok for check in checks), table(checks)


def test_a_mistake_is_not_within_rounding(smollm2, tmp_path: Path) -> None:
    """A skip off by a hundredth on the other device is refused."""
    student, plan = smollm2
    export_checkpoint(student, None, tmp_path / "export", plan=plan, gate=False)
    gate = tmp_path / "export" / "gate"
    record = read_record(gate)
    prompts = load_prompts(gate, "cpu")
    limits = limits_of({**record, "arithmetic": "cuda: a GPU"}, "cpu")
    rounding = record["rounding"]["float32"]
    assert limits.forward == max(TOLERANCE[torch.float32], MARGIN * rounding)

    def check_logits() -> Check:
        return next(iter(check_outputs(student, prompts, limits)))

    right = check_logits()
    heads = student.recurrent_heads()[0]
    with torch.no_grad():
        heads.D.mul_(1.01)
        wrong = check_logits()
        # The student is the module's.
        heads.D.div_(1.01)
    assert right.ok
    assert not wrong.ok


class DecodesInOtherOrder(OtherOrder):
    """A machine whose products of one token sum in another order than those of many, in any dtype."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mm.default and args[0].shape[0] == 1:
            return super().__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def sensitive(tmp_path_factory) -> Path:
    """Export in bfloat16 a student in which rounding moves logits far, as if hardly trained."""
    teacher = make_family_model("llama", num_hidden_layers=6)
    with torch.no_grad():
        for name, parameter in teacher.named_parameters():
            if "_proj" in name:
                parameter.mul_(20)
    plan = HeadPlan.random(teacher, 6, seed=0)
    student, _ = build_student(teacher, plan, d_state=4, recurrence="mamba2")
    in_bfloat16 = settle(student.eval(), torch.bfloat16)
    path = tmp_path_factory.mktemp("sensitive") / "export"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export_record, "NEW_TOKENS", 6)
        export_checkpoint(
            in_bfloat16,
            None,
            path,
            plan=plan,
            export_format="safetensors",
            gate=False,
        )
    return path


CACHED = f"{check.CACHED}, logits"
PADDED = f"{check.PADDED}, logits"
IN_BFLOAT16 = f"in bfloat16, {CACHED}"


def test_rounding_to_bfloat16_is_not_a_fault(sensitive: Path) -> None:
    with DecodesInOtherOrder():
        checks = run_checks(sensitive, sensitive / "gate")

    measured = {check.name: check.measured for check in checks}
    assert measured[IN_BFLOAT16] > TOLERANCE[torch.bfloat16], "more than a fixed limit allows"
    assert all(check.ok for check in checks), table(checks)
    # Nearly all tokens are sure in float32; in bfloat16, hardly one would be.
    (cached,) = [name for name in measured if name.startswith("generated tokens, cached")]
    assert int(cached.split()[-1]) >= 10


def forget_state(patch: pytest.MonkeyPatch) -> None:
    step = SSMHeads._step

    def without_state(self, hidden, mask, cache):
        cache.ssm_state = torch.zeros_like(cache.ssm_state)
        return step(self, hidden, mask, cache)

    patch.setattr(SSMHeads, "_step", without_state)


def stop_state(patch: pytest.MonkeyPatch) -> None:
    """Decode each token from the states before the first decoded one."""
    step = SSMHeads._step

    def without_update(self, hidden, mask, cache):
        before = cache.conv_state.clone(), cache.ssm_state.clone()
        y = step(self, hidden, mask, cache)
        cache.conv_state, cache.ssm_state = before
        return y

    patch.setattr(SSMHeads, "_step", without_update)


def shift_values(patch: pytest.MonkeyPatch) -> None:
    """Give each cached key the value of the token before."""
    update = HybridLayerCache.update

    def shifted(self, *args, **kwargs):
        keys, values = update(self, *args, **kwargs)
        is_decoding = args[0].shape[-2] == 1
        if is_decoding:
            values = values.roll(1, dims=-2)
        return keys, values

    patch.setattr(HybridLayerCache, "update", shifted)


def read_padding(patch: pytest.MonkeyPatch) -> None:
    forward = SSMHeads.forward

    def without_mask(self, hidden, mask=None, *args):
        return forward(self, hidden, None, *args)

    patch.setattr(SSMHeads, "forward", without_mask)


FAULTS = {
    forget_state: CACHED,
    stop_state: CACHED,
    shift_values: CACHED,
    read_padding: PADDED,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_bfloat16_export_is_not_taken_for_rounding(
    sensitive: Path, fault, monkeypatch
) -> None:
    fault(monkeypatch)

    checks = run_checks(sensitive, sensitive / "gate")

    (failed,) = [check for check in checks if check.name == FAULTS[fault]]
    assert not failed.ok, table(checks)
    assert failed.measured > 10 * failed.limit


def test_only_a_cpu_with_the_same_instructions_promises_the_same_bits() -> None:
    here = arithmetic("cpu")
    assert torch.__version__ in here
    assert is_same_arithmetic(here, "cpu")
    assert not is_same_arithmetic("cpu: aarch64 DEFAULT, 1 threads, torch 2.9.0", "cpu")
    assert not is_same_arithmetic("cuda: NVIDIA H100, torch 2.9.0", "cuda")


def test_float32_products_of_the_record_are_not_in_tf32() -> None:
    student, _ = tiny_student("llama")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with export_record.computing_as_exported(student):
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
