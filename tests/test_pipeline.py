"""A whole run on the embedded teacher, cut down to seconds: its parts fit."""

import copy
import io
import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers
from damaged import file_of
from head_tables import some_scores
from messages import has_facts, logged_by, naming
from students import gate_in_this_process, lose_caches, only_error
from training import ALIGN, DISTILL, metrics, small_models, small_run

from hybrid_distill.cli.app import main
from hybrid_distill.cli.dry_run import describe
from hybrid_distill.config import (
    PlanConfig,
    RunConfig,
    ScoringConfig,
    StudentConfig,
    TeacherConfig,
    to_json,
)
from hybrid_distill.evaluation import EvalResult
from hybrid_distill.export import ExportError, GateReport, check
from hybrid_distill.export.check import Check
from hybrid_distill.io import Record, write_json
from hybrid_distill.lab.reporting.record import read_run
from hybrid_distill.lab.reporting.run import write_report
from hybrid_distill.model import ssd
from hybrid_distill.pipeline import RunInputs, building, checks, finished_run, last_stage
from hybrid_distill.pipeline import run as steps
from hybrid_distill.pipeline.checks import check_stages, check_teachers
from hybrid_distill.pipeline.finished import trained_student, training_record
from hybrid_distill.pipeline.folder import obsolete_results
from hybrid_distill.pipeline.paths import RunPaths
from hybrid_distill.pipeline.planning import plan_before_ranking
from hybrid_distill.pipeline.run import (
    alignment_of_all_heads,
    build,
    choose_heads,
    evaluate_run,
    prepare,
    restoration_plan,
    run,
)
from hybrid_distill.plan import HeadId, HeadPlan, Shape
from hybrid_distill.probes.checks import CannotAnswer
from hybrid_distill.scoring import HeadScores
from hybrid_distill.scoring.resume_log import ResumeLog
from hybrid_distill.teacher import fingerprint
from hybrid_distill.train.config import AlignMatrix, DistillOnPolicy, StageConfig
from hybrid_distill.train.result import MANIFEST, StageManifest
from hybrid_distill.train.weights import weights_hash


def weights(out: Path) -> dict[str, str]:
    """Return the hash of the weights of each finished stage, by its folder below ``out``."""
    hashes = {}
    for path in sorted(out.rglob("manifest.json")):
        manifest = StageManifest.read(path.parent)
        if manifest:
            hashes[str(path.parent.relative_to(out))] = manifest.weights
    return hashes


def names(out: Path) -> set[str]:
    """Return the names of all files below ``out``."""
    return {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}


def times_of(out: Path, files: Iterable[str]) -> dict[str, int]:
    """Return when these files below ``out`` were written last."""
    return {name: (out / name).stat().st_mtime_ns for name in files}


def assert_same_results(one: Path, other: Path, *files: str) -> None:
    assert weights(one) == weights(other) != {}
    for name in files:
        record = json.loads((one / name).read_text())
        expected = json.loads((other / name).read_text())
        assert {**record, "provenance": 0} == {**expected, "provenance": 0}, name


def test_a_plan_by_restoration_aligns_once_and_plans_then(tmp_path, monkeypatch) -> None:
    config = small_run(tmp_path / "run", plan=PlanConfig(selection="restoration", k=2))
    prepared: list[Path] = []

    def note(inputs: RunInputs) -> None:
        prepared.append(inputs.paths.out)
        prepare(inputs)

    monkeypatch.setattr(steps, "prepare", note)

    out = run(config)

    # Once, under the lock that cells of a sweep take for it: a second start would write its files
    # at any time.
    assert prepared == [out, out / "aligned"]
    assert list(weights(out)) == ["aligned/stages/1-align", "stages/1-distill"]
    plan = HeadPlan.load(out / "plan.json")
    assert plan.k == 2
    assert plan == HeadPlan.load(out / "restoration-2.json")
    assert not RunPaths(out).partial_restoration(2).exists()
    record = training_record(finished_run(out))
    assert [stage["name"] for stage in record] == ["align", "distill"]

    before = weights(out)
    assert weights(run(config)) == before


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(small_run(tmp_path_factory.mktemp("finished") / "run"))


def test_an_export_of_a_finished_run_carries_its_results(finished, tmp_path, capsys) -> None:
    exported = tmp_path / "exported"
    main(["export", "--model", str(finished), "--out", str(exported)])
    assert json.loads((exported / "gate" / "report.json").read_text())["ok"]
    card = (exported / "README.md").read_text()
    assert "license: apache-2.0" in card
    assert "| student |" in card
    weights_mode = (exported / "model.safetensors").stat().st_mode
    assert weights_mode == (exported / "config.json").stat().st_mode


def test_a_resumed_run_builds_and_measures_on_its_device(finished, monkeypatch) -> None:
    """A student that is built elsewhere than the first start built it has other last bits."""
    device_of: dict[int, str] = {}
    built_on = []
    measured_on = []
    build_student = building.build_student

    def move(model: Any, device: str) -> None:
        device_of[id(model)] = device

    def build_and_note(teacher: Any, *args: Any, **options: Any) -> Any:
        built_on.append(device_of[id(teacher)])
        return build_student(teacher, *args, **options)

    def note_evaluation(model: Any, *_: Any, **__: Any) -> Mock:
        measured_on.append(device_of[id(model)])
        return Mock()

    monkeypatch.setattr(steps.nn.Module, "to", move)
    monkeypatch.setattr(steps, "connect", lambda: SimpleNamespace(device="gpu"))
    monkeypatch.setattr(building, "build_student", build_and_note)
    monkeypatch.setattr(steps, "evaluate", note_evaluation)
    inputs = RunInputs(small_run(finished))

    student = build(inputs, choose_heads(inputs))
    evaluate_run(inputs, student, again=True)

    assert built_on == ["gpu"]
    assert measured_on == ["gpu", "gpu"]


def test_a_resumed_restoration_computes_on_its_device(tmp_path, monkeypatch) -> None:
    device_of: dict[int, str] = {}
    computed_on: list[str] = []
    inputs = RunInputs(small_run(tmp_path))
    student, _ = small_models()
    aligned = (student, HeadPlan.none(inputs.teacher))

    def move(model: Any, device: str) -> None:
        device_of[id(model)] = device

    def note_restoration(*models: Any, **_: Any) -> list[HeadId]:
        computed_on.extend(device_of[id(model)] for model in models[:2])
        return [HeadId(0, 0)]

    monkeypatch.setattr(steps.nn.Module, "to", move)
    monkeypatch.setattr(steps, "connect", lambda: SimpleNamespace(device="gpu"))
    monkeypatch.setattr(steps, "align_all_heads", lambda inputs: inputs)
    monkeypatch.setattr(steps, "trained_student", lambda inputs: aligned)
    monkeypatch.setattr(steps, "greedy_restoration", note_restoration)

    assert restoration_plan(inputs, 1).kept == (HeadId(0, 0),)
    assert computed_on == ["gpu", "gpu"]


def test_a_shared_alignment_may_be_named_from_the_folder_it_lies_in(finished, monkeypatch) -> None:
    monkeypatch.chdir(finished / "stages")
    this = RunInputs(small_run(finished, student=StudentConfig(aligned=Path("1-align"))))
    # Not that run's distillation: its heads were taken before.
    assert [stage["name"] for stage in training_record(this)] == ["align", "align", "distill"]


def test_an_alignment_that_began_from_another_one_counts_both(
    finished: Path, tmp_path: Path
) -> None:
    later = tmp_path / "later"
    shutil.copytree(finished, later)
    first = StudentConfig(aligned=finished / "stages" / "1-align")
    write_json(later / "config.json", to_json(small_run(later, student=first)))
    second = StudentConfig(aligned=later / "stages" / "1-align")
    record = training_record(RunInputs(small_run(tmp_path / "last", student=second)))
    assert [stage["name"] for stage in record] == ["align", "align"]


def test_a_moved_run_finds_the_alignment_that_moved_with_it(finished: Path, tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    (sweep / "cell").mkdir(parents=True)
    shutil.copytree(finished, sweep / "aligned")
    student = StudentConfig(aligned=sweep / "aligned" / "stages" / "1-align")
    write_json(sweep / "cell" / "config.json", to_json(small_run(sweep / "cell", student=student)))
    sweep.rename(tmp_path / "moved")
    record = training_record(finished_run(tmp_path / "moved" / "cell"))
    assert [stage["name"] for stage in record] == ["align"]


def test_a_stage_that_is_trained_again_is_measured_again(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    before = EvalResult.load(RunPaths(out).evaluation)
    shutil.rmtree(out / "stages" / "2-distill")
    again = small_run(out, stages=(ALIGN, replace(DISTILL, steps=DISTILL.steps + 1)), export=False)

    run(again)

    student, _ = trained_student(finished_run(out))
    after = EvalResult.load(RunPaths(out).evaluation)
    assert after.provenance["fingerprint"] == fingerprint(student)
    assert after.provenance["fingerprint"] != before.provenance["fingerprint"]


def test_restoration_aligns_beside_a_control() -> None:
    """The alignment trains no whole model, so it is not a control itself."""
    config = small_run(plan=PlanConfig("restoration", k=2), control=True)
    assert not alignment_of_all_heads(config, config.out).control


def test_resume_never_leaves_nothing_of_the_run_before(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    base = small_run()
    shutil.copytree(finished, out)
    of_others = (
        "notes.txt",
        "stages/notes.txt",
        "teacher/model.safetensors",
        "heads.json",
    )
    of_runs = (
        "scores.json",
        "aligned/stages/1-align/manifest.json",
        "export/config.json",
        "restoration-2.json",
    )
    for name in (*of_others, *of_runs):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("{}")
    settings: dict[str, Any] = {
        "plan": PlanConfig("top", k=2),
        "scoring": replace(base.scoring, n_examples=3),
        "stages": (replace(ALIGN, steps=1), DISTILL),
        "evaluation": replace(base.evaluation, n_examples=6),
    }
    fresh = tmp_path / "fresh"

    run(replace(base, out=out, resume="never", **settings))
    run(replace(base, out=fresh, **settings))

    measured = (
        "scores.json",
        "plan.json",
        "build.json",
        "evaluation.json",
        "teacher/evaluation.json",
    )
    assert_same_results(out, fresh, *measured)
    assert names(out) == names(fresh) | set(of_others)


def test_resume_never_removes_nothing_that_it_is_to_read_or_that_is_not_a_runs(
    tmp_path: Path,
) -> None:
    out = tmp_path / "run"
    base = small_run(out)
    prepare(RunInputs(base))
    (out / "scores.json").write_text("{}")
    (out / "plan.json").write_text("{}")
    reading = replace(base, resume="never", scoring=replace(base.scoring, file=out / "scores.json"))
    with pytest.raises(ValueError, match=naming(out / "scores.json", "--resume never")):
        prepare(RunInputs(reading))
    (out / "export").mkdir()
    teacher = TeacherConfig(path=str(out / "export"))
    with pytest.raises(ValueError, match=naming(out / "export", "--resume never")):
        obsolete_results(replace(base, resume="never", teacher=teacher))
    assert (out / "export").is_dir()
    assert names(out) == {"config.json", "plan.json", "scores.json"}

    # A model's config.json, not a run's.
    (out / "config.json").write_text('{"model_type": "llama"}')
    for resume in ("auto", "never"):
        with pytest.raises(ValueError, match=naming(out, "--out")):
            prepare(RunInputs(replace(base, resume=resume)))
    assert names(out) == {"config.json", "plan.json", "scores.json"}


def test_a_run_with_other_settings_names_them(tmp_path: Path) -> None:
    base = small_run(tmp_path / "run")
    prepare(RunInputs(base))
    choose_heads(RunInputs(base))
    prepare(RunInputs(replace(base, trackers=(), export=True)))
    (tmp_path / "run" / "stages" / "1-align" / "checkpoints" / "step-00000001").mkdir(parents=True)
    with pytest.raises(ValueError, match=naming("align.steps", 2, 3)):
        prepare(RunInputs(base.with_stage("align", steps=3)))


def test_a_run_resumes_in_its_dtypes_on_another_kind_of_machine(tmp_path, set_cpu_bf16) -> None:
    base = small_run(tmp_path / "run").with_stage("distill", precision="auto")
    base = base.with_stage("align", precision="auto")
    base = replace(base, teacher=replace(base.teacher, dtype="auto"))

    def begin(*, is_native: bool) -> tuple[str, str]:
        set_cpu_bf16(is_native)
        inputs = RunInputs(base)
        prepare(inputs)
        choose_heads(inputs)
        return inputs.config.teacher.dtype, inputs.config.stages[-1].precision

    assert begin(is_native=False) == ("float32", "fp32")
    assert begin(is_native=True) == ("float32", "fp32")
    (tmp_path / "run" / "plan.json").unlink()
    assert begin(is_native=True) == ("bfloat16", "bf16"), "nothing is left to resume"


def test_a_run_that_moved_with_the_files_it_names_resumes(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"

    def config(folder: Path) -> RunConfig:
        base = small_run(folder / "cells" / "run")
        return replace(base, scoring=replace(base.scoring, file=folder / "scores.json"))

    old.mkdir()
    scores = some_scores(torch.zeros(6, 8), n_kv_heads=4)
    scores.save(old / "scores.json")
    begun = config(old)
    prepare(RunInputs(begun))
    choose_heads(RunInputs(begun))
    old.rename(new)

    prepare(RunInputs(config(new)))

    scores.save(tmp_path / "others.json")
    elsewhere = replace(begun.scoring, file=tmp_path / "others.json")
    with pytest.raises(ValueError, match=naming("scoring.file")):
        prepare(RunInputs(replace(config(new), scoring=elsewhere)))


def test_what_is_measured_may_change_and_nothing_is_trained_again(finished: Path) -> None:
    out = finished
    base = small_run(finished)
    trained = weights(out)
    (out / "plan.json").touch()
    kept = ("plan.json", "stages/2-distill/model.safetensors")
    before = times_of(out, kept)

    run(replace(base, evaluation=replace(base.evaluation, n_examples=6)))

    for name in ("evaluation.json", "teacher/evaluation.json"):
        assert json.loads((out / name).read_text())["n_examples"] == 6, name
    assert weights(out) == trained
    assert times_of(out, kept) == before


def test_other_stages_in_the_same_folder_make_another_student(tmp_path: Path) -> None:
    """Both are loaded and measured as the last run left them, whatever folders of stages there are."""
    base = small_run(tmp_path / "run")
    align, distill = base.stages
    perplexities = []
    for stages in ((align,), (align, distill), (align,), (align, distill), (distill,)):
        inputs = RunInputs(replace(base, stages=stages))
        run(inputs.config)
        student, _ = trained_student(finished_run(inputs.config.out))
        last = inputs.paths.stage_folders(stages)[-1]
        manifest = StageManifest.read(last)
        assert manifest is not None
        assert weights_hash(student) == manifest.weights
        perplexities.append(EvalResult.load(inputs.paths.evaluation).perplexity)
    assert perplexities[2:4] == perplexities[:2], "the same stages, the same student"
    assert len(set(perplexities)) == 3


def test_the_last_of_many_stages_is_not_the_last_by_name(tmp_path: Path) -> None:
    base = small_run(tmp_path / "run")
    align, distill = base.stages
    stages = [align]
    for number in range(10):
        stages.append(replace(distill, name=f"distill{number}", steps=1))
    config = replace(base, stages=tuple(stages))
    paths = RunInputs(config).paths
    run(config)
    assert last_stage(paths) == paths.stages / "11-distill9"


def test_questions_longer_than_the_context_are_refused_before_training(tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    question = {"prompt": "heart " * 1100, "answer": " a", "choices": [" a", " b"]}
    file.write_text(json.dumps(question))
    evaluation = replace(small_run().evaluation, knowledge=str(file))
    with pytest.raises(CannotAnswer, match="1024"):
        checks.check_evaluation(RunInputs(small_run(evaluation=evaluation)))


def test_dictionaries_beyond_the_context_are_announced(monkeypatch, caplog) -> None:
    evaluation = replace(small_run().evaluation, n_pairs=(4, 32))
    monkeypatch.setattr(checks, "longest_context", lambda config: 100)
    checks.check_evaluation(RunInputs(small_run(evaluation=evaluation)))
    (record,) = logged_by(caplog, checks.check_evaluation)
    assert has_facts(record.getMessage(), 100)


def test_rows_longer_than_the_students_context_are_refused(monkeypatch) -> None:
    """Whatever the context of a stage's own teacher is."""
    config = small_run()
    farther, tokenizer = RunInputs(config).config_and_tokenizer
    short = copy.deepcopy(farther)
    short.max_position_embeddings = 8
    stages = (farther, tokenizer)
    monkeypatch.setattr(RunInputs, "stage_config_and_tokenizer", lambda inputs, stage: stages)
    monkeypatch.setattr(RunInputs, "config_and_tokenizer", (short, tokenizer))
    with pytest.raises(ValueError, match=naming("data.seq_len", 8)):
        checks.check_data(RunInputs(config))


def test_a_run_whose_last_stage_is_not_finished_has_no_student(finished, tmp_path) -> None:
    """The student of an earlier stage would be measured and exported as the run's."""
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    (out / "stages" / "2-distill" / MANIFEST).unlink()
    with pytest.raises(ValueError, match=naming(out, "distill")):
        trained_student(finished_run(out))


def test_a_control_is_the_teacher_through_the_same_distillation(finished, tmp_path) -> None:
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    before = weights(out)
    evaluation = replace(small_run().evaluation, n_pairs=(4, 8))
    controlled = small_run(out, control=True, evaluation=evaluation)

    run(controlled)

    # Every head is attention: there is nothing to align.
    control = "control/stages/1-distill"
    trained = weights(out)
    assert set(trained) - set(before) == {control}
    assert {name: trained[name] for name in before} == before
    assert trained[control] != before["stages/2-distill"]
    assert metrics(out / control)[-1]["step"] == DISTILL.steps

    models = read_run(out).models
    assert list(models.index) == ["teacher", "control", "student", "guessing"]
    assert models.loc["control", "kv_choice_8"] >= 0
    agreement = models["top1_agreement"]
    assert agreement["control"] > agreement["student"]
    write_report(out)
    assert "| control | 48 of 48 |" in (out / "report.md").read_text()
    _, plan = trained_student(finished_run(out / "control"))
    assert plan.keeps_all

    run(controlled)
    assert weights(out) == trained, "nothing is trained again"


@pytest.mark.parametrize(
    ("stages", "facts"),
    [
        ((ALIGN,), ["align", "--control"]),
        (
            (ALIGN, replace(DISTILL, train="mixer")),
            ["distill.train", "'mixer'"],
        ),
    ],
)
def test_a_control_of_nothing_is_refused(stages, facts) -> None:
    with pytest.raises(ValueError, match=naming(*facts)):
        small_run(stages=stages, control=True)


def test_a_batch_that_the_processes_cannot_share_is_refused_before_a_teacher_is_loaded(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(
        "hybrid_distill.pipeline.run.connect", lambda: SimpleNamespace(num_processes=3)
    )
    config = small_run(tmp_path / "run", teacher=TeacherConfig("/no/such/teacher"))
    with pytest.raises(ValueError, match=naming("align.batch_size", 2, 3)):
        run(config)


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flex_attention"])
def test_attention_that_cannot_pack_is_refused_before_anything_is_scored(
    implementation: str, tmp_path: Path
) -> None:
    """Also by a dry run, which checks the same."""
    config = small_run(tmp_path / "run")
    teacher, tokenizer = RunInputs(config).teacher_and_tokenizer
    # A caller's teacher, or a config.json, may name it.
    teacher.config._attn_implementation = implementation
    inputs = RunInputs(config, (teacher, tokenizer))
    with pytest.raises(ValueError, match=implementation):
        prepare(inputs)
    with pytest.raises(ValueError, match=implementation):
        check_teachers(inputs)
    assert not inputs.paths.out.exists()


def test_scores_of_another_shape_are_refused_before_they_are_ranked(tmp_path, caplog) -> None:
    scores = some_scores(torch.zeros(3, 8), n_kv_heads=8)
    scores.save(tmp_path / "scores.json")
    config = replace(
        small_run(tmp_path / "run"),
        scoring=ScoringConfig(file=tmp_path / "scores.json"),
        plan=PlanConfig(selection="top", k=2),
    )
    inputs = RunInputs(config)
    with pytest.raises(ValueError, match=naming(Shape(3, 8, 8))):
        plan_before_ranking(inputs, inputs.teacher)
    # All heads tie, which says nothing about this teacher.
    assert not caplog.records


@pytest.mark.parametrize("words", [["--dry-run"], []])
def test_a_transformers_that_breaks_students_is_refused_before_anything_is_computed(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lose_caches(monkeypatch)
    # A family is checked once in a process, and another test may have done so.
    monkeypatch.setattr(checks, "_checked_families", set())
    monkeypatch.setattr(steps, "score_heads", Mock(side_effect=AssertionError("heads were scored")))
    with pytest.raises(SystemExit, match="2"):
        main(["run", "tiny", "--out", str(tmp_path / "run"), *words])
    assert transformers.__version__ in only_error(capsys.readouterr().err)
    assert not (tmp_path / "run" / "scores.json").exists()


def test_a_failing_gate_loses_nothing_and_the_same_command_repeats_the_export_alone(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    config = replace(finished_run(out).config, export=True)
    results = names(out) - {"config.json", "build.json"}
    before = times_of(out, results)
    failed = GateReport((Check("reloaded = exported model, logits", 2e-5, 1e-5),))
    with (
        monkeypatch.context() as patch,
        pytest.raises(ExportError, match=naming(RunPaths(out).stages)),
    ):
        patch.setattr("hybrid_distill.export.gate.run_gate", lambda *_, **__: failed)
        run(config)
    assert times_of(out, results) == before
    assert not (out / "export").exists()

    gate_in_this_process(monkeypatch, tmp_path / "modules", new_tokens=2)
    monkeypatch.setattr(steps, "evaluate", Mock(side_effect=AssertionError("measured again")))
    monkeypatch.setattr(
        "hybrid_distill.train.loop._Training.run",
        Mock(side_effect=AssertionError("trained again")),
    )
    run(config)
    report = out / "export" / "gate" / "report.json"
    assert report.is_file()

    # A run that is repeated leaves its export alone; one that differs, or has changed, is made again.
    written = report.stat().st_mtime_ns
    run(config)
    assert report.stat().st_mtime_ns == written
    (out / "export" / "evaluation.json").write_text("{}")
    run(config)
    assert report.stat().st_mtime_ns > written
    # One in another format is not the run's.
    main(["export", "--model", str(out), "--out", str(out / "export"), "--format", "safetensors"])
    run(config)
    record = json.loads((out / "export" / "gate" / "reference.json").read_text())
    assert record["export_format"] == "remote-code"
    for file in (file_of(ssd), f"gate/{file_of(check)}", "model.safetensors"):
        written = report.stat().st_mtime_ns
        with (out / "export" / file).open("r+b") as changed:
            changed.seek(0, io.SEEK_END)
            changed.write(b" ")
        run(config)
        assert report.stat().st_mtime_ns > written


def windowed_run(out: Path, **scoring: Any) -> RunConfig:
    """A run of windows alone, whose heads the embedded teacher can rank from 12 words away."""
    base = small_run(out)
    options: dict[str, Any] = {
        "n_pairs": 4,
        "n_examples": 4,
        "n_queries": None,
        "min_accuracy": None,
        **scoring,
    }
    return replace(
        base,
        plan=PlanConfig("top", unit="kv-group", k=2),
        student=replace(base.student, d_state=0, window=12, sinks=2),
        scoring=replace(base.scoring, **options),
        stages=(),
    )


def test_heads_of_a_student_with_windows_are_ranked_by_what_these_take(tmp_path: Path) -> None:
    inputs = RunInputs(windowed_run(tmp_path / "far"))

    plan = choose_heads(inputs)

    scores = HeadScores.load(inputs.paths.scores)
    assert scores.is_additive
    assert scores.provenance["probe"]["distance"] == 12
    assert scores.provenance["student"]["window"] == 12
    assert HeadPlan.top_k(scores, 2, unit="kv-group").kept == plan.kept
    assert not inputs.paths.partial_scores.exists()

    ablated = RunInputs(windowed_run(tmp_path / "ablated", method="ablation"))
    choose_heads(ablated)
    assert not HeadScores.load(ablated.paths.scores).is_additive


def test_a_teacher_that_cannot_answer_from_afar_is_ranked_by_ablation(tmp_path: Path) -> None:
    settings = {"n_pairs": 16, "distance": 300}
    inputs = RunInputs(windowed_run(tmp_path / "auto", **settings))
    choose_heads(inputs)
    assert not HeadScores.load(inputs.paths.scores).is_additive
    assert not inputs.paths.partial_attribution.exists()

    asked_for = RunInputs(windowed_run(tmp_path / "asked", method="attribution", **settings))
    with pytest.raises(CannotAnswer):
        choose_heads(asked_for)
    assert not asked_for.paths.scores.exists()


def test_ablation_after_a_given_up_attribution_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = RunInputs(windowed_run(tmp_path, n_pairs=16, distance=300))
    measured: list[str] = []
    original = ResumeLog.next

    def stopped_from_the_fourth(resume_log: ResumeLog, measure: Callable[[], Record]) -> Record:
        def noted() -> Record:
            if len(measured) == 3:
                raise KeyboardInterrupt
            measured.append(resume_log.path.name)
            return measure()

        return original(resume_log, noted)

    monkeypatch.setattr(ResumeLog, "next", stopped_from_the_fourth)
    with pytest.raises(KeyboardInterrupt):
        choose_heads(inputs)
    partial = inputs.paths.partial_scores
    saved = json.loads(partial.read_text())["steps"]
    assert measured == [inputs.paths.partial_attribution.name, partial.name, partial.name]

    # Nothing is measured again: neither the teacher's answers from afar nor a layer's heads.
    with pytest.raises(KeyboardInterrupt):
        choose_heads(RunInputs(inputs.config))

    assert json.loads(partial.read_text())["steps"] == saved


def test_a_student_with_windows_is_measured_beyond_them(tmp_path: Path) -> None:
    config = windowed_run(tmp_path / "run")
    assert RunInputs(config).evaluation_distance == 12
    # Without windows, nothing is beyond them.
    assert RunInputs(small_run(tmp_path / "states")).evaluation_distance == 0
    off = replace(config, evaluation=replace(config.evaluation, distance=0))
    assert RunInputs(off).evaluation_distance == 0

    run(config)

    paths = RunInputs(config).paths
    for result in map(EvalResult.load, (paths.teacher_evaluation, paths.evaluation)):
        assert result.distance == 12
        assert set(result.far_choice) == {min(config.evaluation.n_pairs)}


def test_questions_longer_than_the_context_are_not_asked_or_refused(tmp_path: Path) -> None:
    config = windowed_run(tmp_path / "run")
    wide = replace(config, student=replace(config.student, window=2000))
    assert RunInputs(wide).evaluation_distance == 0
    asked_for = replace(config, evaluation=replace(config.evaluation, distance=2000))
    with pytest.raises(ValueError, match=naming("--evaluation.distance")):
        run(asked_for)
    assert not asked_for.out.exists()


def test_a_stage_with_cached_logits_trains_the_student_of_a_half_precision_teacher_in_float32(
    tmp_path: Path,
) -> None:
    """No teacher is in memory then, and the trained weights are float32."""
    config = small_run(
        tmp_path / "run",
        teacher=TeacherConfig(dtype="bfloat16"),
        stages=(replace(DISTILL, teacher_logits=tmp_path),),
    )
    check_stages(RunInputs(config))


def test_a_fault_of_the_plan_is_told_once(tmp_path: Path) -> None:
    config = small_run(tmp_path / "run", plan=PlanConfig("random", k=49))
    with pytest.raises(ValueError, match=r"start: [^(]"):
        describe(config)


WINDOWS = StudentConfig(d_state=0, window=8, sinks=2)
STATES = StudentConfig(d_state=4, init="teacher")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"teacher": TeacherConfig(dtype="bfloat16")}, "align.precision"),
        ({"student": WINDOWS, "stages": (replace(DISTILL, train="ssm"),)}, "distill.train"),
        ({"stages": (ALIGN, replace(DISTILL, lr_scale=(0, 0, 0)))}, "distill.lr-scale"),
        ({"stages": (ALIGN, AlignMatrix(), DISTILL)}, "eager"),
        ({"stages": (DISTILL, DistillOnPolicy(new_tokens=5000))}, "on_policy.new-tokens"),
    ],
    ids=["half precision", "windows alone", "frozen", "attention maps", "long texts"],
)
def test_a_stage_that_could_not_be_made_is_refused_before_anything_is_computed(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    """The last stage, too: it would fail after hours of the others."""
    config = small_run(tmp_path / "run", student=STATES)
    with pytest.raises(ValueError, match=naming(named)):
        run(replace(config, **changes))
    assert not config.out.exists()


@pytest.mark.parametrize(
    ("launch", "stage", "named"),
    [
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, replace(DISTILL, on_divergence="skip"), "DeepSpeed"),
        (
            {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
            DistillOnPolicy(),
            "ZeRO-3",
        ),
        ({"ACCELERATE_USE_FSDP": "true", "WORLD_SIZE": "2"}, DistillOnPolicy(), "FSDP2"),
    ],
    ids=["skip", "zero3", "fsdp2"],
)
def test_a_stage_that_cannot_train_as_launched_is_refused_at_the_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    launch: dict[str, str],
    stage: StageConfig,
    named: str,
) -> None:
    inputs = RunInputs(small_run(tmp_path / "run", stages=(ALIGN, stage)))
    check_stages(inputs)
    for variable, value in launch.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=naming(stage.name, named)):
        check_stages(inputs)


def test_attribution_without_a_window_is_refused(tmp_path: Path) -> None:
    base = small_run(tmp_path)
    with pytest.raises(ValueError, match=naming("student.window", 0)):
        replace(base, scoring=replace(base.scoring, method="attribution"))
