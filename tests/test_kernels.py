"""The option that selects kernels: what it reaches in every command, what it refuses before anything is computed."""

import importlib
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from students import tiny_student
from training import refusal, small_config, small_models, small_rows, small_run

from hybrid_distill.cli.app import main
from hybrid_distill.config import PlanConfig, StudentConfig
from hybrid_distill.kernels import Kernels, check_kernels, use_kernels
from hybrid_distill.lab.analysis.experiment import Subject
from hybrid_distill.model import kernel_choice
from hybrid_distill.pipeline import RunInputs, trained_student
from hybrid_distill.pipeline.run import build, choose_heads, prepare
from hybrid_distill.train import end_to_end
from hybrid_distill.train.end_to_end import LOSS, loss_implementation
from hybrid_distill.train.stages import make_stage

CPU = torch.device("cpu")


def test_the_option_is_the_implementations_of_students() -> None:
    assert set(get_args(Kernels)) == set(kernel_choice.IMPLEMENTATIONS) - {"reference"}
    assert LOSS.keys() == set(kernel_choice.IMPLEMENTATIONS)


@pytest.mark.parametrize("kernels", ["triton", "mamba_ssm"])
def test_kernels_that_cannot_run_here_are_refused_before_a_teacher_is_loaded(
    kernels: Kernels, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    # All are installed: only a GPU is missing.
    monkeypatch.setattr(kernel_choice, "_import_kernels", lambda impl: None)
    monkeypatch.setattr(
        RunInputs, "teacher", property(lambda self: pytest.fail("the teacher was loaded"))
    )
    config = small_run(tmp_path / "run")
    assert "student.kernels" in refusal(capsys, config, "--student.kernels", kernels)
    assert not (tmp_path / "run" / "config.json").exists()


def test_an_absent_package_is_named(monkeypatch) -> None:
    monkeypatch.setattr(kernel_choice, "_import_kernels", lambda impl: "mamba_ssm is not installed")
    with pytest.raises(ValueError, match="mamba_ssm"):
        check_kernels("mamba_ssm", torch.device("cuda"))


def test_a_recipe_builds_its_student_on_the_kernels_before_the_student_checks_itself(
    tmp_path: Path, monkeypatch
):
    checked_on = []
    build_module = importlib.import_module("hybrid_distill.student.build")
    check_same_logits = build_module.check_same_logits

    def note_and_check(model, fix):
        checked_on.append(getattr(model, "ssm_implementation", None))
        check_same_logits(model, fix)

    monkeypatch.setattr(build_module, "check_same_logits", note_and_check)
    base = small_run(tmp_path / "run", plan=PlanConfig("none", k=0))

    def prepared(**changes) -> RunInputs:
        inputs = RunInputs(replace(base, student=replace(base.student, **changes)))
        prepare(inputs)
        return inputs

    run = prepared(kernels="torch")
    # `prepare` has checked a small student.
    checked_on.clear()

    student = build(run, choose_heads(run))

    # The teacher, which has no kernels to choose, then the student.
    assert student.ssm_implementation == "torch"
    assert checked_on == [None, "torch"]
    assert loss_implementation(student) == "torch"

    # Resumed on other kernels, it is the same run: its student is loaded, not built again.
    built_at = run.paths.build.stat().st_mtime_ns
    again = prepared(kernels="auto")
    loaded = build(again, choose_heads(again))
    assert loaded.ssm_implementation == "auto"
    assert run.paths.build.stat().st_mtime_ns == built_at

    with pytest.raises(ValueError, match=r"student\.d_state"):
        prepared(d_state=5)


def test_a_run_is_opened_where_the_kernels_that_trained_it_are_missing(
    tmp_path: Path, monkeypatch
) -> None:
    config = small_run(tmp_path / "run", plan=PlanConfig("none", k=0), stages=())
    inputs = RunInputs(config)
    prepare(inputs)
    build(inputs, choose_heads(inputs))

    monkeypatch.setattr(
        kernel_choice, "_import_kernels", lambda impl: "missing" * (impl == "mamba_ssm")
    )
    elsewhere = replace(config, student=replace(config.student, kernels="mamba_ssm"))
    student, _ = trained_student(RunInputs(elsewhere))
    assert student.ssm_implementation == "auto"
    with pytest.raises(ValueError, match="mamba_ssm"):
        use_kernels(student, "mamba_ssm", CPU)


def test_the_loss_runs_on_what_the_student_runs_on(monkeypatch) -> None:
    asked = []
    compute = end_to_end.fused_distillation_loss

    def note_and_compute(*args, impl, **options):
        asked.append(impl)
        return compute(*args, impl="torch", **options)

    monkeypatch.setattr(end_to_end, "fused_distillation_loss", note_and_compute)

    for kernels in ("auto", "torch"):
        student, teacher = small_models()
        use_kernels(student, kernels, CPU)
        stage = make_stage(small_config("distill"), student, teacher, vocab_size=99)
        stage(small_rows().batch(0, 2))
    assert asked == ["auto", "torch"]


def test_other_models_have_no_kernels_to_choose() -> None:
    _, teacher = small_models()
    assert use_kernels(teacher, "auto", CPU) is teacher
    with pytest.raises(ValueError, match="LlamaForCausalLM"):
        use_kernels(teacher, "torch", CPU)


@pytest.fixture
def student_folder(tmp_path: Path) -> Path:
    student, _ = tiny_student("llama")
    student.save_pretrained(tmp_path / "student")
    return tmp_path / "student"


def test_experiments_load_a_student_on_the_kernels(student_folder: Path, monkeypatch) -> None:
    student, _ = tiny_student("llama")
    loads = "hybrid_distill.lab.analysis.experiment"
    monkeypatch.setattr(f"{loads}.load_on_own_device", lambda *_, **__: (student, None))
    monkeypatch.setattr(f"{loads}.read_teacher", lambda *_, **__: (student.config, None))
    model, _ = Subject(model=str(student_folder), kernels="torch").load()
    assert model.ssm_implementation == "torch"


def test_the_suite_measures_a_student_on_the_kernels(
    student_folder: Path, tmp_path: Path, monkeypatch
) -> None:
    pytest.importorskip("lm_eval")
    from hybrid_distill.cli import evaluate_suite

    student, _ = tiny_student("llama")
    measured_on = []

    def note_and_stop(model, *_) -> None:
        measured_on.append(model.ssm_implementation)
        raise InterruptedError

    monkeypatch.setattr(evaluate_suite, "load_tasks", lambda job: {})
    monkeypatch.setattr(evaluate_suite, "load_on_own_device", lambda *_, **__: (student, None))
    monkeypatch.setattr(evaluate_suite, "run_suite", note_and_stop)
    words = ["evaluate", "--suite", "kv", "--model", str(student_folder)]
    with pytest.raises((InterruptedError, SystemExit)):
        main([*words, "--kernels", "torch", "--out", str(tmp_path / "out")])
    assert measured_on == ["torch"]


def test_a_run_is_measured_again_on_other_kernels(tmp_path: Path, monkeypatch) -> None:
    config = small_run(tmp_path / "run")
    prepare(RunInputs(config))
    used = []

    def trained(inputs: RunInputs) -> None:
        used.append(inputs.config.student.kernels)
        raise ValueError("far enough")

    monkeypatch.setattr("hybrid_distill.cli.evaluate_run.trained_student", trained)
    with pytest.raises(SystemExit, match="2"):
        main(["evaluate", str(config.out), "--kernels", "torch"])
    assert used == ["torch"]
    assert StudentConfig().kernels == "auto"
