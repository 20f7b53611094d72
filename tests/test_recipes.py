"""Every recipe says what it takes and what to expect, and its first steps run."""

import ast
import csv
import importlib.util
import re
import sys
from pathlib import Path

import pytest
from messages import naming
from train_tiny_teacher import (
    Batches,
    TeacherRun,
    Trainer,
    make_model,
    retrieval_loss,
    write_corpus,
)
from transformers import AutoTokenizer

from hybrid_distill.assets import tiny_teacher_path
from hybrid_distill.cli import main
from hybrid_distill.cli.recipes import load_recipe

RECIPES = Path(__file__).parents[1] / "recipes"
RUNS = sorted(RECIPES.glob("hybrid_*.py"))
SWEEPS = sorted(RECIPES.glob("sweep_*.py"))
TEACHER = RECIPES / "train_tiny_teacher.py"

SETTINGS = """
    --teacher.dtype float32 --data.seq-len 64
    --scoring.n-examples 2 --scoring.n-control-texts 1 --scoring.min-accuracy 0
    --scoring.n-pairs 4 --scoring.n-queries 1
    --evaluation.n-pairs 8 --evaluation.n-examples 2 --evaluation.n-texts 2
""".split()
ALIGN = """
    --align.steps 2 --align.batch-size 2 --align.micro-batch-size 2 --align.precision fp32
""".split()
DISTILL = """
    --distill.steps 2 --distill.batch-size 2 --distill.micro-batch-size 2 --distill.precision fp32
""".split()


@pytest.mark.parametrize("recipe", [*RUNS, *SWEEPS, TEACHER], ids=lambda path: path.stem)
def test_a_recipe_begins_with_its_command_its_time_and_its_result(recipe: Path) -> None:
    text = ast.get_docstring(ast.parse(recipe.read_text())) or ""
    start = "python|accelerate launch|hybrid-distill sweep"
    commands = re.findall(rf"^(?:{start}) recipes/{recipe.name}", text, re.MULTILINE)
    time = text.find("\nTime: ")
    result = text.find("\nExpected result: ")
    assert commands
    assert 0 < text.find(commands[0]) < time < result
    assert re.search(r"hour|minutes", text[time:result])


@pytest.mark.parametrize("recipe", RUNS, ids=lambda path: path.stem)
def test_the_first_steps_of_a_recipe(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYBRID_DISTILL_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "run"
    flags = ["--teacher", "tiny", "--trackers", "--out", str(out), *SETTINGS, "--no-export"]
    # Windows alone have nothing to align.
    is_windowed = recipe.stem in ("hybrid_smollm2_135m", "hybrid_windowed")
    flags += DISTILL if is_windowed else [*ALIGN, *DISTILL]
    if recipe.stem != "hybrid_tiny":
        # All of them score and fit alike: most of the time for nothing new.
        flags += ["--plan.selection", "random", "--student.init", "random"]

    main(["run", str(recipe), *flags])

    stages = [path.parent.name for path in sorted(out.glob("stages/*/metrics.jsonl"))]
    assert stages == (["1-distill"] if is_windowed else ["1-align", "2-distill"])
    assert (out / "evaluation.json").is_file()
    assert (out / "report.html").is_file()


def test_a_tracker_that_is_not_installed_is_missed_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec

    def find_all_but_wandb(name: str) -> object:
        if name == "wandb":
            return None
        return find_spec(name)

    monkeypatch.setattr(importlib.util, "find_spec", find_all_but_wandb)
    recipe = str(RECIPES / "hybrid_llama_1b.py")
    with pytest.raises(SystemExit, match="2"):
        main(["run", recipe, "--teacher", "tiny", "--out", str(tmp_path / "run")])
    assert "pip install wandb" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("recipe", SWEEPS, ids=lambda path: path.stem)
def test_the_first_cells_of_a_sweep(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYBRID_DISTILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_MODE", "disabled")
    settings = ["teacher=tiny"]
    flags = [*SETTINGS, *ALIGN, *DISTILL]
    for flag, value in zip(flags[::2], flags[1::2]):
        settings.append(f"{flag.removeprefix('--')}={value}")
    grid = ["--heads", "2", "--d-state", "4", "--seeds", "1", "--selection", "random"]
    out = ["--out", str(tmp_path / "sweep")]

    main(["sweep", str(recipe), *out, *grid, "--set", *settings, "export=false"])

    with (tmp_path / "sweep" / "results.csv").open() as file:
        states = {row["selection"]: row["state"] for row in csv.DictReader(file)}
    assert states["random"] == "done"


def test_the_first_step_of_the_embedded_teacher(tmp_path: Path) -> None:
    shape = {"width": 16, "mlp_width": 16, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1}
    run = TeacherRun(out=tmp_path, corpus_documents=5, held_out_documents=5, batch_size=4, **shape)
    write_corpus(run)
    tokenizer = AutoTokenizer.from_pretrained(tiny_teacher_path())
    model = make_model(run, tokenizer)
    before = model.lm_head.weight.clone()
    batches = Batches(run, tokenizer)

    loss, _ = retrieval_loss(model, *batches.copying())
    Trainer(run, model).step(loss)

    assert (model.lm_head.weight != before).any()


@pytest.mark.parametrize("recipe", [*RUNS, *SWEEPS], ids=lambda path: path.stem)
def test_a_copy_of_a_recipe_elsewhere_loads(
    tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``hybrid-distill recipes NAME > mine.py`` is how a recipe of one's own begins."""
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder != str(RECIPES)])
    for imported in RUNS:
        monkeypatch.delitem(sys.modules, imported.stem, raising=False)
    mine = tmp_path / "mine.py"
    mine.write_text(recipe.read_text())
    assert callable(load_recipe(mine).config)


def test_an_error_in_a_recipe_names_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("import math\nimport no_such_module\n")
    with pytest.raises(ValueError, match=naming("mine.py", "line 2")):
        load_recipe(Path("mine.py"))
