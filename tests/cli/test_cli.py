"""What a user sees who asks for something impossible: one line, exit status 2, nothing lost."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import transformers
from training import refusal, small_run

from hybrid_distill.assets import tiny_teacher_path
from hybrid_distill.cli.app import main, run_recipe
from hybrid_distill.config import from_json
from hybrid_distill.pipeline import Run
from hybrid_distill.plan import HeadId, HeadPlan

RECIPES = Path(__file__).parents[2] / "recipes"


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


RECIPES_THAT_FAIL = {
    "def config():\n    return 1 / 0\n": "recipe.py, line 2: ZeroDivisionError: division by zero",
    "def config(:\n": "recipe.py: SyntaxError: ",
    "import no_such_module\n": "recipe.py, line 1: ModuleNotFoundError: No module named 'no_such_module'",
    "config = 3\n": "recipe.py has no config()",
    "def config(): return None\n": "config() of",
    "def config(): return {'name': 'x'}\n": "return a RunConfig",
    "": "recipe.py has no config()",
}


@pytest.mark.parametrize("command", ["run {} --out {}", "demo --recipe {} --out {}", "sweep --recipe {} --out {}"])
@pytest.mark.parametrize("text", RECIPES_THAT_FAIL, ids=list(RECIPES_THAT_FAIL.values()))
def test_a_recipe_that_fails_is_named_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, command: str
) -> None:
    (tmp_path / "recipe.py").write_text(text)
    with pytest.raises(SystemExit) as exit_:
        main(command.format(tmp_path / "recipe.py", tmp_path / "out").split())
    said = capsys.readouterr().err
    assert exit_.value.code == 2 and said.startswith("error: ") and len(said.splitlines()) == 1
    assert RECIPES_THAT_FAIL[text] in said and not (tmp_path / "out").exists()


def test_ctrl_c_while_the_libraries_are_imported_ends_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)\n")
    path = os.pathsep.join([str(tmp_path), str(RECIPES.parent)])
    command = [sys.executable, "-m", "hybrid_distill", "--help"]
    ended = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=60,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # it may be ignored here
    )  # fmt: skip
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "stopped; nothing was begun.\n")


@pytest.mark.parametrize(
    ("family", "said"),
    [("BitNet", "holds attn_sub_norm.weight [64]"), ("GPT2", "has no linear q_proj")],
)
def test_a_run_and_its_dry_run_refuse_the_same_teachers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str, said: str
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes["num_key_value_heads"] = 4
    config = getattr(transformers, f"{family}Config")(vocab_size=512, **sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "teacher")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_teacher_path() / name, tmp_path / "teacher")
    flags = ["--teacher", str(tmp_path / "teacher"), "--out", str(tmp_path / "run")]
    for more in ([], ["--dry-run"]):
        with pytest.raises(SystemExit, match="2"):
            run_recipe(small_run(), [*flags, *more])
        found = capsys.readouterr()
        assert said in found.err and "Launch" not in found.out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "flags",
    [
        "--plan.selection top --plan.k 49",
        "--student.init bogus",
        "--student.aligned {}/nowhere",
        "--trackers mlflow",
        "--resume {}/nowhere",
        "--evaluation.n-pairs 999",
        "--evaluation.texts {}/empty.txt",
        "--data.sources {}/empty.txt",
        "--data.sources {}/late.jsonl",
    ],
)
def test_bad_input_leaves_nothing_in_the_way_of_the_corrected_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: str
) -> None:
    monkeypatch.setenv("HYBRID_DISTILL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "empty.txt").write_text("")
    lines = [json.dumps({"text": "one two three"})] * 2000
    (tmp_path / "late.jsonl").write_text("\n".join([*lines, "not json"]))
    out = tmp_path / "run"
    said = refusal(capsys, small_run(out), *flags.format(tmp_path).split())
    assert len([line for line in said.splitlines() if line.startswith("error: ")]) == 1
    assert not out.exists()
    if "data" not in flags:  # as fast as can be: the others differ in nothing
        return
    Run(small_run(out)).prepare()
    assert [path.name for path in out.iterdir()] == ["config.json"]


def test_a_folder_without_a_result_is_taken_over(tmp_path: Path) -> None:
    first = small_run(tmp_path / "run")
    other = replace(first, align=replace(first.align, steps=3))
    Run(first).prepare()
    stage = tmp_path / "run" / "stages" / "1-align"
    stage.mkdir(parents=True)
    (stage / "metrics.jsonl").touch()
    (tmp_path / "run" / ".lock").write_text("of a killed process")
    Run(other).prepare()
    assert from_json(tmp_path / "run" / "config.json") == other
    (stage / "metrics.jsonl").write_text('{"step": 1}\n')
    Run(first).prepare()  # of a stage that diverged before its first checkpoint nothing is lost
    with pytest.raises(ValueError, match=r"holds a run with other settings: seed"):
        Run(replace(first, seed=1)).prepare()
    (stage / "checkpoints" / "step-00000002").mkdir(parents=True)
    Run(replace(first, align=replace(first.align, micro_batch_size=1, log_every=7))).prepare()
    with pytest.raises(ValueError, match=r"holds a run with other settings: align\.steps"):
        Run(other).prepare()


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
