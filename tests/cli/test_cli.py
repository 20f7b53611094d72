"""The command line: help, recipes, dry runs, and bad input, which ends in one line and loses nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import transformers
from messages import has_facts, naming
from training import copy_tiny_tokenizer, refusal, small_run

import hybrid_distill
from hybrid_distill import provenance
from hybrid_distill.cli import main, run_recipe
from hybrid_distill.cli.app import IN_ONE_PROCESS, NAMES
from hybrid_distill.cli.dry_run import describe
from hybrid_distill.cli.exits import exit_cleanly
from hybrid_distill.cli.recipes import FIRST, find_recipe
from hybrid_distill.cli.slow_imports import NOTICE
from hybrid_distill.config import StudentConfig, from_json
from hybrid_distill.data import DataConfig
from hybrid_distill.evaluation.evaluate import EvalResult
from hybrid_distill.pipeline import RunInputs
from hybrid_distill.pipeline.run import prepare, run
from hybrid_distill.plan import HeadPlan
from hybrid_distill.teacher import load_config
from hybrid_distill.train.stop import Interrupted

RECIPES = Path(__file__).parents[2] / "recipes"
check_supported = provenance.check_supported.__wrapped__  # without its cache


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished `small_run`; tests copy it."""
    return run(small_run(tmp_path_factory.mktemp("trained") / "run"))


@pytest.fixture
def done(trained: Path, tmp_path: Path) -> Path:
    """A finished run of a test's own."""
    return Path(shutil.copytree(trained, tmp_path / "done"))


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of bad input."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "empty.txt").write_text("")
    lines = [json.dumps({"text": "one two three"})] * 2000
    (folder / "late.jsonl").write_text("\n".join([*lines, "not json"]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYBRID_DISTILL_CACHE", str(folder / "cache"))
        yield folder


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--student.d-state 0", "student.d_state is 0"),
        ("--student.d-state 3.5", "--student.d-state is '3.5'"),
        ("--align.clip much", "--align.clip is 'much'"),
        ("--data.seed=-3", "data.seed is -3"),
        ("--align.loss l3", "'l3' for argument '--align.loss'"),
        ("--student.d-stat 8", "did you mean --student.d-state?"),
        ("--no-data.chat", "did you mean --data.no-chat?"),
        ("--plan.selection top --plan.k 49", "49"),
        ("--plan.selection pairs --plan.pairs 9 0", "L9H0"),
        ("--plan.selection top --scoring.n-pairs 101", "101"),
        ("--teacher /no/such/folder", "/no/such/folder"),
        ("--student.init bogus", "bogus"),
        ("--student.aligned {}/nowhere", "nowhere"),
        ("--trackers mlflow", "mlflow"),
        ("--resume {}/nowhere", "nowhere"),
        ("--evaluation.n-pairs 999", "999"),
        ("--evaluation.texts {}/empty.txt", "empty.txt"),
        ("--data.sources /no/such/text.txt", "/no/such/text.txt"),
        ("--data.sources {}/empty.txt", "empty.txt"),
        ("--data.sources {}/late.jsonl", "late.jsonl"),
    ],
)
def test_bad_input_is_named_and_leaves_nothing_in_the_way_of_the_corrected_command(
    bad: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str, named: str
) -> None:
    assert named in refusal(capsys, small_run(tmp_path / "run"), *flags.format(bad).split())
    assert not (tmp_path / "run").exists()


def times_of_weights(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}


def test_a_run_its_config_and_another_config(
    done: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_run(done)
    before = times_of_weights(done)
    run_recipe(config, [])
    assert str(done / "report.html") in capsys.readouterr().out
    assert from_json(done / "config.json") == config
    assert times_of_weights(done) == before, "a finished stage ran again"
    assert "student.d_state" in refusal(capsys, config, "--student.d-state", "8")


def test_evaluate_prints_what_was_measured_before_and_measures_again_when_asked(
    done: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [done / "evaluation.json", done / "teacher" / "evaluation.json"]
    before = [file.stat().st_mtime_ns for file in files]
    main(["evaluate", str(done)])
    printed = capsys.readouterr()
    assert has_facts(printed.err, done / "evaluation.json", "--again")
    measured = Path(printed.out.removeprefix("results: ").strip())
    assert json.loads(measured.read_text())["n_examples"] == 4
    assert before == [file.stat().st_mtime_ns for file in files]
    main(["evaluate", str(done), "--again", "--n-examples", "2"])
    assert "--again" not in capsys.readouterr().err
    assert [json.loads(file.read_text())["n_examples"] for file in files] == [2, 2]


def test_answers_to_other_questions_are_not_kept_as_the_figures_of_a_run(done: Path) -> None:
    files = [done / "evaluation.json", done / "teacher" / "evaluation.json"]

    def asked() -> set[tuple[int, str]]:
        results = map(EvalResult.load, files)
        return {(result.n_examples, result.prompt_format) for result in results}

    def evaluate_otherwise() -> None:
        main(["evaluate", str(done), "--n-examples", "2", "--prompt-format", "shots=1"])
        assert asked() == {(2, "shots=1")}

    evaluate_otherwise()
    main(["evaluate", str(done)])
    assert asked() == {(4, "plain")}

    evaluate_otherwise()
    run_recipe(small_run(done), [])
    assert asked() == {(4, "plain")}


def test_speed_is_measured_in_turns_and_reported(
    done: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["evaluate", str(done), "--speed"])
    assert has_facts(capsys.readouterr().err, "student", 992)
    rows = json.loads((done / "speed.json").read_text())["rows"]
    # The embedded teacher's context has 1,024 tokens, of which 32 are decoded.
    assert [(row["model"], row["length"]) for row in rows] == [("teacher", 992), ("student", 992)]
    main(["report", str(done)])
    text = (done / "report.md").read_text().split("## Speed")[1]
    assert f"| student | 992 | {rows[-1]['prefill']:,.0f} |" in text
    with pytest.raises(SystemExit):
        main(["evaluate", "--speed"])
    assert "RUN_DIR" in capsys.readouterr().err


def test_a_run_without_stages_reads_no_text_and_can_be_measured_again(tmp_path: Path) -> None:
    student = StudentConfig(d_state=0, window=8)
    data = DataConfig(sources=("no/such/text",))
    run = replace(small_run(tmp_path), stages=(), student=student, data=data, export=False)
    run_recipe(run, [])
    figures = EvalResult.load(tmp_path / "evaluation.json").figures()
    main(["evaluate", str(tmp_path), "--again"])
    assert EvalResult.load(tmp_path / "evaluation.json").figures() == figures


def test_a_result_that_was_changed_or_damaged_is_named(
    done: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = done / "stages" / "1-align"
    weights = stage / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    assert weights.name in refusal(capsys, small_run(done))
    manifest = stage / "manifest.json"
    record = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**record, "weights": "0" * 64}))
    assert str(manifest) in refusal(capsys, small_run(done))


def test_a_dry_run_says_what_to_launch_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(RECIPES / "sweep_llama_1b.py")
    words = ["run", recipe, "--teacher", "tiny", "--out", str(tmp_path / "run")]

    main([*words, "--dry-run"])
    printed = capsys.readouterr().out
    _, launch, *_ = printed.splitlines()
    assert launch.endswith(f"hybrid-distill {' '.join(words)}")
    assert '"d_state"' not in printed
    assert re.search(r"\n  align: [\d,]+ steps of \d+\.\d s", printed)

    main([*words, "--dry-run", "--show-config", "--student.d-state", "5"])
    printed = capsys.readouterr().out
    config = json.loads(printed[printed.index("{") :])
    assert config["student"]["d_state"] == 5
    assert not (tmp_path / "run").exists()


def test_a_dry_run_plans_anew_what_the_run_would_and_counts_the_recurrence(
    done: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed(*argv: str) -> str:
        run_recipe(small_run(done), ["--dry-run", *argv])
        return capsys.readouterr().out

    kept = printed()
    assert str(done / "plan.json") in kept
    anew = printed("--resume", "never", "--student.recurrence", "gdn")
    assert str(done / "plan.json") not in anew
    size = re.compile(r"student ([\d,]+)")
    assert size.findall(kept) != size.findall(anew)


def test_a_dry_run_refuses_what_the_run_would_refuse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = str(tmp_path / "scores.json")
    words = ["run", str(RECIPES / "hybrid_tiny.py"), "--dry-run", "--out", str(tmp_path / "run")]
    wrong = ["--data.sources", "gone", "--evaluation.texts", "lost", "--scoring.file", scores]
    with pytest.raises(SystemExit, match="2"):
        main([*words, *wrong])
    printed = capsys.readouterr()
    assert not printed.out
    for named in ("'gone'", "'lost'", scores):
        assert named in printed.err


RECIPES_THAT_FAIL = {
    "def config():\n    return 1 / 0\n": ["line 2", "ZeroDivisionError"],
    "def config(:\n": ["recipe.py", "SyntaxError"],
    "import no_such_module\n": ["line 1", "ModuleNotFoundError"],
    "config = 3\n": ["config()"],
    "def config(): return {'name': 'x'}\n": ["RunConfig"],
}


FAILING_COMMANDS = [("run {} --out {}", text) for text in RECIPES_THAT_FAIL]
FAILING_COMMANDS.append(("sweep {} --out {}", "config = 3\n"))


@pytest.mark.parametrize(("command", "text"), FAILING_COMMANDS)
def test_a_recipe_that_fails_is_named_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, text: str
) -> None:
    (tmp_path / "recipe.py").write_text(text)
    with pytest.raises(SystemExit) as exit_:
        main(command.format(tmp_path / "recipe.py", tmp_path / "out").split())
    assert exit_.value.code == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ")
    assert has_facts(error, *RECIPES_THAT_FAIL[text])
    assert not (tmp_path / "out").exists()


HEAVY = "raise AssertionError('torch was imported')\n"


def program(tmp_path: Path, command: str, torch: str = HEAVY) -> subprocess.CompletedProcess[str]:
    """Run Python with another torch."""
    (tmp_path / "torch.py").write_text(torch)
    path = os.pathsep.join([str(tmp_path), str(RECIPES.parent)])
    return subprocess.run(
        [sys.executable, *command.split()],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        # It may be ignored here.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def test_ctrl_c_while_the_libraries_are_imported_ends_in_one_line(tmp_path: Path) -> None:
    interrupted = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)\n"

    ended = program(tmp_path, "-m hybrid_distill score", interrupted)

    assert ended.returncode == 128 + signal.SIGINT
    assert ended.stdout == ""
    lines = ended.stderr.splitlines()
    assert len([line for line in lines if line != NOTICE]) == 1


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("command", IN_ONE_PROCESS)
def test_commands_of_one_process_refuse_a_launch_of_several(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    rank: int,
) -> None:
    """One line from the main process; before, the launcher ended a process that had begun to write."""
    for name, value in {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "RANK": rank}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(SystemExit, match="2"):
        main([command, "--out", str(tmp_path / "out")])
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == (1 if rank == 0 else 0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", ["--help", "run --help", "recipes"])
def test_a_reader_that_has_read_enough_is_not_an_error(words: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "hybrid_distill", *words.split()]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert ended.returncode == 128 + signal.SIGPIPE
    assert ended.stderr == ""


def test_help_and_version_load_no_library(tmp_path: Path) -> None:
    def ran(words: str) -> subprocess.CompletedProcess[str]:
        return program(tmp_path, f"-m hybrid_distill {words}")

    for words, status in (("--quiet --help", 0), ("--quiet", 2)):
        helped = ran(words)
        assert helped.returncode == status, helped.stderr
        for name in NAMES:
            assert f"\n  {name} " in helped.stdout

    for command in ("evaluate", "verify", "run"):
        assert ran(f"{command} --help").stdout.startswith(f"usage: hybrid-distill {command} ")
    recipes = ran("run --help").stdout
    assert "\nwindowed " in recipes
    assert "\nsweep_tiny " not in recipes
    assert ran("--version").stdout == f"hybrid-distill {hybrid_distill.__version__}\n"
    assert ran("recipes").stdout.startswith("llama_1b ")

    wrong = ran("scores")
    assert wrong.returncode == 2
    assert wrong.stdout == ""
    (error,) = wrong.stderr.splitlines()
    assert "'score'" in error


def test_the_supported_versions_are_those_of_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    project = (RECIPES.parent / "pyproject.toml").read_text()
    requirements = {
        "python": 'requires-python = ">={}"',
        "torch": '"torch>={}"',
        "transformers": '"transformers>={},',
    }
    for name, line in requirements.items():
        oldest, _ = provenance.SUPPORTED[name]
        assert line.format(oldest) in project
    _, newest_python = provenance.SUPPORTED["python"]
    assert f'"Programming Language :: Python :: {newest_python}"' in project
    _, newest_transformers = provenance.SUPPORTED["transformers"]
    major, minor = map(int, newest_transformers.split("."))
    assert f",<{major}.{minor + 1}" in project

    monkeypatch.setattr(provenance.platform, "python_version", lambda: "3.13.9")
    assert check_supported() is None
    monkeypatch.setattr(provenance.platform, "python_version", lambda: "3.14.0")
    assert "python 3.14.0" in str(check_supported())


@pytest.mark.parametrize(
    "command", ["-m hybrid_distill score", f"{RECIPES / 'hybrid_tiny.py'} --dry-run"]
)
def test_a_command_names_an_unsupported_version_before_it_imports_anything(
    tmp_path: Path, command: str
) -> None:
    (tmp_path / "torch-2.8.1.dist-info").mkdir()
    (tmp_path / "torch-2.8.1.dist-info/METADATA").write_text("Name: torch\nVersion: 2.8.1\n")

    ran = program(tmp_path, command)

    assert ran.returncode == 2
    assert ran.stdout == ""
    (error,) = ran.stderr.splitlines()
    assert "torch 2.8.1" in error


@pytest.mark.parametrize("command", ["run", "cache-logits"])
def test_the_help_of_a_recipe_shows_the_flags_that_people_change_first(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(flag: str) -> set[str]:
        with pytest.raises(SystemExit) as exit_:
            main([command, str(RECIPES / "hybrid_tiny.py"), flag])
        assert not exit_.value.code
        text = capsys.readouterr().out
        assert text.split()[:3] == ["usage:", "hybrid-distill", command]
        return set(re.findall(r"(?<=\s)--[a-z][\w.-]*", text)) - {"--help", "--help-all"}

    few = shown("--help")
    every = shown("--help-all")
    assert set(FIRST) <= few <= every
    assert len(few) < 40
    assert len(every) > 100
    hidden = {"--align.name", "--distill.name", "--on-policy.name", "--on-policy.teacher-logits"}
    assert hidden.isdisjoint(every)


@pytest.mark.parametrize(
    ("family", "named"),
    [("BitNet", "attn_sub_norm.weight"), ("GPT2", "q_proj")],
)
def test_a_run_and_its_dry_run_refuse_the_same_teachers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str, named: str
) -> None:
    config = getattr(transformers, f"{family}Config")(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "teacher")
    copy_tiny_tokenizer(tmp_path / "teacher")
    flags = ["--teacher", str(tmp_path / "teacher"), "--out", str(tmp_path / "run")]
    for more in ([], ["--dry-run"]):
        with pytest.raises(SystemExit, match="2"):
            run_recipe(small_run(), [*flags, *more])
        printed = capsys.readouterr()
        assert named in printed.err
        # transformers prints a notice of its own for BitNet.
        assert str(tmp_path / "run") not in printed.out
    assert not (tmp_path / "run").exists()


def test_a_folder_without_a_result_is_taken_over(tmp_path: Path) -> None:
    first = small_run(tmp_path / "run")
    other = first.with_stage("align", steps=3)
    prepare(RunInputs(first))
    stage = tmp_path / "run" / "stages" / "1-align"
    stage.mkdir(parents=True)
    (stage / "metrics.jsonl").touch()
    (tmp_path / "run" / ".lock").write_text("of a killed process")
    prepare(RunInputs(other))
    assert from_json(tmp_path / "run" / "config.json") == other

    # Of a stage that diverged before its first checkpoint, nothing is lost.
    (stage / "metrics.jsonl").write_text('{"step": 1}\n')
    prepare(RunInputs(first))
    with pytest.raises(ValueError, match=naming(first.out, "seed")):
        prepare(RunInputs(replace(first, seed=1)))

    # With a checkpoint, only what does not change the weights may change.
    (stage / "checkpoints" / "step-00000002").mkdir(parents=True)
    prepare(RunInputs(first.with_stage("align", micro_batch_size=1, log_every=7)))
    with pytest.raises(ValueError, match=naming(first.out, "align.steps")):
        prepare(RunInputs(other))


def test_a_folder_of_another_run_is_the_only_reason_that_a_dry_run_gives(tmp_path: Path) -> None:
    """Its plan is the other run's: a student of it might not fit into this one's cache."""
    first = small_run(tmp_path / "run")
    prepare(RunInputs(first))
    HeadPlan.all(load_config("tiny")).save(tmp_path / "run" / "plan.json")
    smaller = replace(first, cache="50%", stages=())
    with pytest.raises(ValueError) as refused:
        prepare(RunInputs(smaller))
    with pytest.raises(ValueError) as described:
        describe(smaller)
    assert str(described.value).endswith(str(refused.value))
    assert "\n" not in str(described.value)


def test_a_dry_run_without_the_teacher_says_so_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["run", str(RECIPES / "hybrid_llama_1b.py"), "--dry-run", "--out", str(tmp_path / "run")])
    assert "--teacher tiny" in capsys.readouterr().out.splitlines()[-1]


def test_recipes_are_listed_printed_and_found_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["recipes"])
    listed = {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    assert listed == {
        "llama_1b",
        "qwen2_1_5b",
        "smollm2_135m",
        "tiny",
        "windowed",
        "sweep_llama_1b",
        "sweep_tiny",
        "sweep_demo",
    }
    main(["recipes", "tiny"])
    assert capsys.readouterr().out == (RECIPES / "hybrid_tiny.py").read_text()
    monkeypatch.chdir(tmp_path)
    for name in ("tiny", "hybrid_tiny", "recipes/hybrid_tiny.py"):
        assert find_recipe(Path(name)) == RECIPES / "hybrid_tiny.py"
    (tmp_path / "tiny.py").touch()
    assert find_recipe(Path("tiny.py")) == Path("tiny.py"), "a file of the user's comes first"


@pytest.mark.parametrize(
    ("number", "world", "status"),
    [
        (signal.SIGINT, 1, 130),
        (signal.SIGTERM, 1, 0),
        (None, 1, 0),
        # A launcher would end the others, and report a failure.
        (signal.SIGINT, 2, 0),
    ],
)
def test_ctrl_c_that_was_saved_does_not_end_like_a_finished_run(
    number: int | None, world: int, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world))

    def stopped() -> None:
        raise Interrupted("saved", number=number)

    actual = 0
    try:
        exit_cleanly(stopped)
    except SystemExit as end:
        actual = end.code
    assert actual == status


def test_a_late_signal_does_not_change_how_a_finished_command_ends() -> None:
    """A launcher stops what it takes for running; an ending interpreter has no handlers of its own."""
    program = """
        import atexit, os, signal
        from hybrid_distill.cli.exits import exit_cleanly

        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            atexit.register(os.kill, os.getpid(), number)
        exit_cleanly(lambda: print("finished"))
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]

    done = subprocess.run(command, capture_output=True, text=True)

    assert done.returncode == 0
    assert done.stdout == "finished\n"
    assert done.stderr == ""


@pytest.mark.parametrize("closed", [1, 2])
def test_a_command_without_an_output_ends_like_any_other(closed: int) -> None:
    """As a service or a scheduler may start it, or a shell after ``>&-``."""
    program = """
        import sys
        from hybrid_distill.cli.exits import exit_cleanly

        def work() -> None:
            print("result")
            print("progress", file=sys.stderr)

        exit_cleanly(work)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(
        command,
        check=False,
        stdout=subprocess.PIPE if closed == 2 else None,
        stderr=subprocess.PIPE if closed == 1 else None,
        text=True,
        preexec_fn=lambda: os.close(closed),
    )
    assert done.returncode == 0
    if closed == 2:
        assert done.stdout == "result\n"
    else:
        assert done.stderr == "progress\n"


@pytest.mark.parametrize(
    ("before", "status"),
    [(signal.SIG_DFL, 130), (signal.SIG_IGN, 0)],
    ids=["terminal", "nohup"],
)
def test_the_end_of_a_session_ends_a_command_in_order(
    before: signal.Handlers, status: int, tmp_path: Path
) -> None:
    """As SIGTERM does: what runs is saved first. The second signal is the kernel's, when the shell ends."""
    program = """
        import os, pathlib, signal, sys
        from hybrid_distill.cli.exits import exit_cleanly

        def work() -> None:
            try:
                os.kill(os.getpid(), signal.SIGHUP)
            except KeyboardInterrupt:
                os.kill(os.getpid(), signal.SIGHUP)
                pathlib.Path(sys.argv[1]).touch()
                raise

        exit_cleanly(work)
    """
    saved = tmp_path / "saved"
    command = [sys.executable, "-c", textwrap.dedent(program), str(saved)]

    done = subprocess.run(
        command, check=False, preexec_fn=lambda: signal.signal(signal.SIGHUP, before)
    )

    assert done.returncode == status
    assert saved.exists() == (before == signal.SIG_DFL)
