"""What a user sees who asks for something impossible: one line, exit status 2, nothing lost."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from training import small_run

from hybrid_distill.assets import tiny_teacher_path
from hybrid_distill.cli import main, run_recipe
from hybrid_distill.config import RunConfig, from_json
from hybrid_distill.plan import HeadId, HeadPlan

RECIPES = Path(__file__).parents[1] / "recipes"


def refusal(capsys: pytest.CaptureFixture[str], config: RunConfig, *argv: str) -> str:
    """The error that these flags end in."""
    with pytest.raises(SystemExit) as exit_:
        run_recipe(config, list(argv))
    assert exit_.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--student.d-state", "0"], "d_state"),
        (["--student.d-state", "3.5"], "3.5"),
        (["--plan.k", "49"], "49"),
        (["--plan.selection", "pairs", "--plan.pairs", "9", "0"], "L9H0"),
        (["--scoring.n-pairs", "101", "--plan.selection", "top"], "101"),
        (["--teacher", "/no/such/folder"], "/no/such/folder"),
        (["--data.sources", "/no/such/text.txt"], "/no/such/text.txt"),
        (["--align.learning-rate", "-1"], "learning_rate"),
    ],
)
def test_a_value_out_of_range_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], said: str
) -> None:
    assert said in refusal(capsys, small_run(tmp_path / "run"), *argv)


def test_a_misspelt_flag_gets_the_nearest_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--student.d-state" in refusal(capsys, small_run(tmp_path), "--student.d-stat", "8")


def test_a_teacher_folder_without_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "teacher"
    folder.mkdir()
    (folder / "config.json").write_text((tiny_teacher_path() / "config.json").read_text())
    assert "no weights" in refusal(capsys, small_run(tmp_path / "run"), "--teacher", str(folder))


def test_a_plan_for_another_teacher(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = HeadPlan(6, 8, 4, (HeadId(0, 0),))
    replace(shape, teacher="0123456789abcdef").save(tmp_path / "plan.json")
    flags = ["--plan.selection", "file", "--plan.file", str(tmp_path / "plan.json")]
    assert "0123456789abcdef" in refusal(capsys, small_run(tmp_path / "run"), *flags)


def test_a_teacher_that_cannot_be_had_names_both_ways_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, small_run(tmp_path / "run"), "--teacher", "nobody/nothing")
    assert "--teacher.path" in said and "make demo" in said
    assert len(said.strip().splitlines()) == 1


def test_a_run_its_config_and_another_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    config = small_run(out)
    run_recipe(config, [])
    assert "report:" in capsys.readouterr().out
    assert from_json(out / "config.json") == config

    before = {p: p.stat().st_mtime_ns for p in out.rglob("*.safetensors")}
    run_recipe(config, [])
    assert before == {p: p.stat().st_mtime_ns for p in out.rglob("*.safetensors")}, "a finished stage ran again"

    assert "student" in refusal(capsys, config, "--student.d-state", "8")


def test_evaluate_says_what_was_measured_before_and_measures_again_when_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    run_recipe(small_run(out, resume="never"), [])
    files = [out / "evaluation.json", out / "teacher" / "evaluation.json"]
    before = [file.stat().st_mtime_ns for file in files]
    capsys.readouterr()
    main(["evaluate", str(out)])
    printed = capsys.readouterr()
    assert "was measured before (20" in printed.err and json.loads(printed.out)["n_examples"] == 4
    assert before == [file.stat().st_mtime_ns for file in files]

    main(["evaluate", str(out), "--again"])
    printed = capsys.readouterr()
    assert "was measured before" not in printed.err and json.loads(printed.out)["n_examples"] == 4
    assert all(old < file.stat().st_mtime_ns for old, file in zip(before, files))

    main(["evaluate", str(out), "--n-examples", "2"])
    assert [json.loads(file.read_text())["n_examples"] for file in files] == [2, 2]


@pytest.mark.parametrize("command", ["run", "cache-logits"])
def test_the_help_of_a_recipe_calls_the_program_by_its_name(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(RECIPES / "hybrid_tiny.py")
    with pytest.raises(SystemExit):
        main([command, recipe, "--help"])
    assert capsys.readouterr().out.split()[:3] == ["usage:", "hybrid-distill", command]


def test_a_stage_refuses_a_manifest_that_was_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    run_recipe(small_run(out), [])
    manifest = out / "stages" / "1-align" / "manifest.json"
    record = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**record, "weights": "0" * 64}))
    assert f"{manifest} was changed after it was written" in refusal(capsys, small_run(out))


def test_a_damaged_result_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    run_recipe(small_run(out), [])
    weights = out / "stages" / "1-align" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    assert str(weights.name) in refusal(capsys, small_run(out))


@pytest.mark.parametrize("recipe", ["hybrid_tiny", "hybrid_llama_1b", "hybrid_qwen2_1_5b", "sweep_llama_1b"])
def test_a_dry_run_says_what_to_launch_and_starts_nothing(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", str(RECIPES / f"{recipe}.py"), "--teacher", "tiny", "--out", str(tmp_path / "run")]
    main([*words, "--dry-run"])
    printed = capsys.readouterr().out
    assert f"hybrid-distill {' '.join(words)}\n" in printed.partition("\n")[2].partition("\n")[0] + "\n"
    assert "Parameters: teacher" in printed and "Cache of one sequence" in printed and '"d_state"' not in printed
    assert not (tmp_path / "run").exists()


def test_a_dry_run_shows_the_config_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["run", str(RECIPES / "hybrid_tiny.py"), "--dry-run", "--show-config", "--student.d-state", "5"])
    printed = capsys.readouterr().out
    assert json.loads(printed[printed.index("{") :])["student"]["d_state"] == 5


def test_a_dry_run_refuses_what_the_run_would_refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ["--data.sources", "gone", "--evaluation.texts", "lost", "--scoring.file", str(tmp_path / "scores.json")]
    with pytest.raises(SystemExit, match="2"):
        main(["run", str(RECIPES / "hybrid_tiny.py"), "--dry-run", "--out", str(tmp_path / "run"), *wrong])
    said = capsys.readouterr()
    assert "would not start: data source 'gone' does not exist" in said.err and "Parameters: teacher" in said.out
    assert "data source 'lost'" in said.err and f"{tmp_path / 'scores.json'} holds no head scores" in said.err


def test_help_lists_no_field_that_nobody_can_set(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", str(RECIPES / "hybrid_tiny.py"), "--help"])
    flags = re.findall(r"--[a-z][\w.-]*", capsys.readouterr().out)
    assert "--align.steps" in flags and "--distill.teacher-logits" in flags
    assert not {"--align.name", "--distill.name", "--on-policy.name", "--on-policy.teacher-logits"} & set(flags)


def test_a_dry_run_without_the_teacher_says_so_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["run", str(RECIPES / "hybrid_llama_1b.py"), "--dry-run", "--out", str(tmp_path / "run")])
    assert "--teacher tiny" in capsys.readouterr().out.splitlines()[-1]


def test_a_file_that_is_no_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "README.md"])
    assert "README.md is no recipe" in capsys.readouterr().err


def test_an_export_is_not_evaluated_as_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "gate").mkdir()
    with pytest.raises(SystemExit) as exit_:
        main(["evaluate", str(tmp_path)])
    assert exit_.value.code == 2 and f"evaluate it with --model {tmp_path}" in capsys.readouterr().err
