"""A student outside training has its teacher's dtype, whatever was trained, up to its export."""

import dataclasses
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_family_model
from messages import naming
from safetensors.torch import load_file
from students import gate_in_this_process, tiny_student
from training import SMALL, small_run

from hybrid_distill.config import EvaluationConfig, PlanConfig, RunConfig, TeacherConfig
from hybrid_distill.data import DataConfig
from hybrid_distill.export import GateReport, export_checkpoint
from hybrid_distill.model.layout import rope_frequencies
from hybrid_distill.pipeline import finished_run, last_stage, trained_student
from hybrid_distill.pipeline.run import run
from hybrid_distill.plan import HeadPlan
from hybrid_distill.student.build import build_student, check_plan
from hybrid_distill.student.dtypes import (
    cast_weights,
    default_dtype,
    make_master_weights,
    settle,
)
from hybrid_distill.teacher import DTYPES, load_tokenizer
from hybrid_distill.train.config import (
    Align,
    AlignMatrix,
    Distill,
    DistillOnPolicy,
    StageConfig,
)

STAGES = {
    "align": ("align",),
    "matrix align": ("matrix", "align"),
    "distill": ("distill",),
    "align distill": ("align", "distill"),
    "distill on_policy long post": ("distill", "on_policy", "long", "post"),
}
TRAINED = ("ssm", "mixer", "all")
SELECTIONS = ("random", "restoration", "none", "all")
GATED = ("align distill", "ssm", "random")
"""The combination that goes through the whole gate, once per dtype."""


def is_possible(dtype: str, stages: str, trained: str, selection: str) -> bool:
    """Leave out what a config refuses, or what would run the same code twice."""
    if dtype != "bfloat16":
        # Stages know no dtype but that of their weights.
        is_new = trained == "ssm" or selection == "random"
        return stages == "align distill" and is_new
    if trained == "all" and "distill" not in stages:
        return False
    if "matrix" in stages:
        return trained == "ssm" and selection in ("none", "restoration")
    if selection == "restoration":
        # Heads that any plan can take are aligned alone.
        return "align" in stages and trained != "mixer"
    return selection == "random" or stages == "align distill"


EVERY_CASE = itertools.product(DTYPES, STAGES, TRAINED, SELECTIONS)
CASES = [case for case in EVERY_CASE if is_possible(*case)]


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random teacher of two layers with the embedded tokenizer."""
    folder = tmp_path_factory.mktemp("teacher")
    tokenizer = load_tokenizer("tiny", "--teacher")
    teacher = make_family_model(
        "llama", **SMALL, vocab_size=len(tokenizer), max_position_embeddings=512
    )
    teacher.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    lines = [f"The river is {n} and the lantern is {n * n}." for n in range(400)]
    # The embedded corpus takes longer to read than to train on.
    (folder / "text.txt").write_text("\n\n".join(lines))
    return folder


def two_steps(
    out: Path, teacher: Path, dtype: str, stages: str, trained: str, selection: str
) -> RunConfig:
    """A run of two steps a stage, with evaluation and export."""
    base = small_run(out)
    names = STAGES[stages]
    text = str(teacher / "text.txt")
    data = DataConfig(sources=(text,), seq_len=64)
    # Attention that returns its matrices.
    implementation = "eager" if "matrix" in names else None
    return replace(
        base,
        teacher=TeacherConfig(
            str(teacher),
            dtype=dtype,  # pyright: ignore[reportArgumentType]
            attn_implementation=implementation,
        ),
        data=data,
        plan=PlanConfig(selection, k=1),  # pyright: ignore[reportArgumentType]
        scoring=replace(base.scoring, n_examples=1, restoration_examples=1),
        stages=tuple(stage_config(name, dtype, trained, data) for name in names),
        evaluation=EvaluationConfig(n_pairs=(4,), n_examples=1, n_texts=1, texts=text),
        export=True,
    )


def stage_config(name: str, dtype: str, trained: str, data: DataConfig) -> StageConfig:
    shared: dict[str, Any] = {
        "steps": 2,
        "batch_size": 2,
        "micro_batch_size": 2,
        "precision": "fp32" if dtype == "float32" else "bf16",
    }
    end_to_end = {**shared, "train": trained}
    match name:
        case "matrix":
            return AlignMatrix(**shared)
        case "align" if trained == "mixer":
            return Align(**shared, train="mixer", target="mixer")
        case "align":
            return Align(**shared, train="ssm", target="head")
        case "distill":
            return Distill(**end_to_end)
        case "on_policy":
            return DistillOnPolicy(**end_to_end, prompt_tokens=4, new_tokens=2, share=1.0)
        case "long":
            return Distill(name="long", **end_to_end, seq_len=64, segment_len=32)
        case "post":
            return Distill(name="post", **end_to_end, data=data)
    raise ValueError(name)


@pytest.mark.parametrize(("dtype", "stages", "trained", "selection"), CASES)
def test_a_run_ends_in_an_export_of_the_teachers_dtype(
    dtype: str,
    stages: str,
    trained: str,
    selection: str,
    teacher_folder: Path,
    tmp_path: Path,
    monkeypatch,
) -> None:
    if (stages, trained, selection) == GATED:
        gate_in_this_process(monkeypatch, tmp_path / "modules")
    else:
        skip_gate(monkeypatch)
    config = two_steps(tmp_path / "run", teacher_folder, dtype, stages, trained, selection)

    out = run(config)
    exported = load_file(out / "export" / "model.safetensors")
    assert {tensor.dtype for tensor in exported.values()} == {DTYPES[dtype]}
    evaluation = json.loads((out / "evaluation.json").read_text())
    assert math.isfinite(evaluation["perplexity"])

    finished = finished_run(out)
    student, plan = trained_student(finished)
    if plan.keeps_all:
        return
    if not finished.stages:
        # The alignment that all plans share is a run of its own.
        finished = finished_run(out / "aligned")
    master = load_file(last_stage(finished.paths) / "model.safetensors")
    dtypes = {tensor.dtype for name, tensor in master.items() if ".ssm." in name}
    assert dtypes == {torch.float32}, "nothing of what was trained is lost"
    for name, tensor in student.state_dict().items():
        assert tensor.dtype == DTYPES[dtype], name
        # The command exports what the run exports.
        assert torch.equal(tensor, exported.get(name, tensor)), name


def skip_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Export weights and code alone: no record is computed, and none is checked."""
    export = "hybrid_distill.export"
    no_kernels = {"kernels": None}
    monkeypatch.setattr(f"{export}.gate.run_gate", lambda *_, **__: GateReport())
    monkeypatch.setattr(f"{export}.checkpoint.write_record", lambda *_, **__: no_kernels)
    monkeypatch.setattr(f"{export}.checkpoint.write_json", lambda *_, **__: None)


def test_settling_rounds_parameters_and_leaves_frequencies_and_ties_alone() -> None:
    student, _ = tiny_student("qwen2")
    frequencies = student.model.rotary_emb.inv_freq.clone()
    make_master_weights(student.parameters())
    exact = {name: parameter.detach().clone() for name, parameter in student.named_parameters()}
    settle(student, torch.bfloat16)
    for name, parameter in student.named_parameters():
        assert torch.equal(parameter, exact[name].bfloat16())
    assert frequencies.dtype == torch.float32
    assert torch.equal(student.model.rotary_emb.inv_freq, frequencies)
    assert student.lm_head.weight is student.model.embed_tokens.weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_casting_a_student_leaves_frequencies_exact(family: str, dtype: torch.dtype) -> None:
    """Also inside another module, as DeepSpeed casts; Gemma 3 has frequencies of two kinds."""
    student, _ = tiny_student(family)
    exact = {name: tensor.clone() for name, tensor in rope_frequencies(student).items()}
    assert exact
    torch.nn.Module.to(torch.nn.ModuleList([student]), dtype)
    assert {parameter.dtype for parameter in student.parameters()} == {dtype}
    for name, frequencies in rope_frequencies(student).items():
        assert frequencies.dtype == torch.float32
        assert torch.equal(frequencies, exact[name])
    on_meta = student.to("meta").to(dtype)
    assert all(frequencies.is_meta for frequencies in rope_frequencies(on_meta).values())


def test_a_teacher_with_rounded_frequencies_is_refused() -> None:
    teacher = make_family_model("llama").to(torch.bfloat16)
    plan = HeadPlan.none(teacher)
    with pytest.raises(ValueError, match=naming("inv_freq", "bfloat16", "from_pretrained")):
        build_student(teacher, plan, d_state=4)


def test_a_teacher_that_overflows_is_not_blamed_on_its_family(family_model: Any) -> None:
    teacher = family_model("llama")
    with torch.no_grad():
        teacher.model.layers[0].mlp.down_proj.weight.fill_(torch.inf)
    plan = HeadPlan.none(teacher)
    with pytest.raises(ValueError, match=naming("LlamaForCausalLM", "float32")) as refused:
        build_student(teacher, plan, d_state=4)
    assert "family" not in str(refused.value)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("init", ["fitted", "random"])
def test_the_callers_default_dtype_changes_no_bit(default: torch.dtype, init: Any) -> None:
    teacher = make_family_model("llama")
    plan = HeadPlan.from_pairs(teacher, [(0, 1)])
    ids = torch.arange(60).view(2, 30)
    options = {"d_state": 4, "init": init}
    if init == "fitted":
        options["calibration"] = {"input_ids": ids}
    expected, _ = build_student(teacher, plan, **options)
    with default_dtype(default):
        student, _ = build_student(teacher, plan, **options)
        assert torch.get_default_dtype() == default
    for name, tensor in student.state_dict().items():
        assert torch.equal(tensor, expected.state_dict()[name]), name


def test_a_plan_of_a_float16_teacher_says_why_it_does_not_fit(family_model: Any) -> None:
    teacher = family_model("llama")
    plan = dataclasses.replace(HeadPlan.none(teacher), teacher="0123")
    with pytest.raises(ValueError, match="0123") as refused:
        check_plan(plan, teacher)
    assert "float16" not in str(refused.value)
    cast_weights(teacher, torch.float16)
    with pytest.raises(ValueError, match=naming("0123", "float16")):
        check_plan(plan, teacher)


def test_a_student_between_two_stages_is_not_exported(tmp_path: Path) -> None:
    student, plan = tiny_student("llama")
    student.bfloat16()
    make_master_weights(student.recurrent_heads()[0].parameters())
    with pytest.raises(ValueError, match=naming("bfloat16", "float32")):
        export_checkpoint(student, None, tmp_path / "export", plan=plan, gate=False)
    assert list(tmp_path.iterdir()) == []
